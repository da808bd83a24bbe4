// Threads use plugins concurrently: the plugins' records, plugins whose loading is deferred, and
// plugins' settings.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "plugins/activate.hpp"
#include "plugins/on_demand.hpp"
#include "plugins/records.hpp"
#include "support/expect.hpp"
#include "support/threads.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::plugins {
namespace {

using testing::together;

Record make_record(const std::string& name, State state, const std::string& reason) {
  Record record;
  record.info.name = name;
  record.info.path = "/none/" + name + ".so";
  record.info.origin = "plugin_threads_test";
  record.info.state = state;
  record.info.reason = reason;
  record.is_module = true;
  return record;
}

// Two plugins are loaded and unloaded repeatedly, while each query function about plugins runs on a
// thread of its own.
TEST(PluginThreads, ReadAndChangeTheRecords) {
  const auto change = [](const std::string& name) {
    return [name](int round) {
      const std::string reason = "reason number " + std::to_string(round) + " of " + name;
      records::put(make_record(name, State::kFailed, reason));
      records::put(make_record(name, State::kActive, reason));
      records::deactivated(name, reason, nullptr);
    };
  };
  together(100, {change("relay0"), change("relay1"),
                 [](int) {
                   for (const PluginInfo& info : records::list()) EXPECT_FALSE(info.name.empty());
                 },
                 [](int) {
                   for (const std::string& text : records::failures_from("plugin_threads_test"))
                     EXPECT_HAS(text, "/none/relay");
                 },
                 [](int) { EXPECT_FALSE(records::has_builtin("relay0")); },
                 [](int) { EXPECT_EQ(records::active("relay0").instance, nullptr); },
                 [](int) { EXPECT_EQ(records::why_kept("relay0"), ""); },
                 [](int) { EXPECT_EQ(records::retired_objects("relay0"), -1); },
                 [](int) { EXPECT_FALSE(records::is_abandoned("/none/relay0.so")); },
                 [](int) { records::deactivated("relay0", "another reason", nullptr); }});
  records::put(make_record("relay0", State::kSkipped, ""));
  records::put(make_record("relay1", State::kSkipped, ""));
}

// A plugin whose loading is deferred until its device is used is loaded once, by the first thread
// that looks up the device. In this test the plugin's file is missing, so the load fails.
TEST(PluginThreads, WaitForDevicesAndAreLoaded) {
  const log::Level level = log::level();
  log::set_level(log::Level::kOff);
  OpRegistry registry;
  Manifest manifest;
  manifest.path = "/none/waiting.json";
  manifest.vendor = "acme";
  manifest.library_path = "/none/waiting.so";
  manifest.load_for = {Device{TE_FL_DEVICE_EXT, 0, devices::intern_provider("waiting")}};
  const Device wanted = manifest.load_for[0];
  constexpr int kRounds = 50;
  const auto named = [&](const std::string& name) {
    Manifest one = manifest;
    one.name = name;
    return one;
  };
  for (int i = 0; i < kRounds; ++i) on_demand::wait(named("first" + std::to_string(i)));
  const auto look = [&](int) { on_demand::load(&wanted, registry); };
  together(kRounds,
           {look, look, [&](int i) { on_demand::wait(named("later" + std::to_string(i))); },
            [&](int i) { on_demand::forget("later" + std::to_string(i)); }});
  on_demand::load(&wanted, registry);
  EXPECT_FALSE(on_demand::any());
  log::set_level(level);
}

const te_fl_host_api* g_host_of_threads = nullptr;

const te_fl_plugin_header* query_asking(const te_fl_host_info*) {
  static te_fl_plugin_api api;
  api.create = [](const te_fl_host_api* host, void** instance, const te_fl_error_sink*) {
    g_host_of_threads = host;
    *instance = &api;
    return te_fl_status{TE_FL_OK};
  };
  api.destroy = [](void*) {};
  static te_fl_plugin_header header;
  header.name = "asking";
  header.vendor = "acme";
  header.api = &api;
  return &header;
}

TEST(PluginThreads, AskForSettings) {
  OpRegistry registry;
  const std::shared_ptr<Instance> instance = activate(query_asking, registry).value();
  const auto ask = [](int round) {
    const std::string value = std::to_string(1000 + round);
    EXPECT_OK(environment::set("TE_FL_COMM_TIMEOUT_MS", value));
    const char* timeout =
        g_host_of_threads->setting(g_host_of_threads->host, "TE_FL_COMM_TIMEOUT_MS");
    ASSERT_NE(timeout, nullptr);
    EXPECT_GE(std::stoi(timeout), 1000);
  };
  together(100, {ask, ask, ask});
  EXPECT_OK(environment::unset("TE_FL_COMM_TIMEOUT_MS"));
  EXPECT_OK(withdraw(instance, registry));
}

}  // namespace
}  // namespace te_fl::plugins
