// TE_FL_TRACE writes a file that Perfetto can open.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/rounds.hpp"
#include "support/temp_folder.hpp"
#include "support/threads.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

using nlohmann::json;
using testing::Fake;
using testing::FiveCall;

TEST(Trace, HoldsCallsWithThreadsFallbacksAndErrors) {
  test::TempFolder folder;
  ASSERT_OK(environment::set("TE_FL_TRACE", folder / "trace-%p.json"));
  ASSERT_OK(environment::set("TE_FL_TRACE_EVENTS", "6"));
  OpRegistry registry;
  OpManager manager(registry);
  Fake first{"default.first"}, second{"reference.second"};
  first.that_says("a loop, as there are \"few\" elements");
  ASSERT_OK(registry.register_op(first.desc, "test", "acme"));
  ASSERT_OK(registry.register_op(second.desc, "test", "acme"));
  const OpId op = *registry.find("test::five");
  FiveCall call, other(DType::kF32, {5});
  ASSERT_OK(manager.call(op, &call.args));
  ASSERT_OK(manager.call(op, &call.args));
  std::thread([&] { EXPECT_OK(manager.call(op, &other.args)); }).join();
  first.run_status = TE_FL_UNSUPPORTED;
  first.run_text = "not \"today\"\n";
  ASSERT_OK(manager.call(op, &call.args));
  first.run_status = TE_FL_INTERNAL;
  EXPECT_FALSE(manager.call(op, &call.args).ok());
  first.run_status = TE_FL_OK;
  for (int i = 0; i < 3; ++i) ASSERT_OK(manager.call(op, &call.args));
  ASSERT_OK(write_trace());

  const std::string path = folder / ("trace-" + std::to_string(getpid()) + ".json");
  const json trace = json::parse(test::read_file(path));
  std::vector<json> calls;
  for (const json& e : trace.at("traceEvents")) {
    if (e.at("ph") == "X") calls.push_back(e);
  }
  ASSERT_EQ(calls.size(), 6u) << "no more than TE_FL_TRACE_EVENTS";
  EXPECT_EQ(trace.at("otherData").at("events_dropped"), 2);
  EXPECT_EQ(calls[0].at("name"), "test::five");
  EXPECT_EQ(calls[0].at("args").at("impl"), "default.first");
  EXPECT_EQ(calls[0].at("args").at("call"), calls[1].at("args").at("call"));
  EXPECT_NE(calls[0].at("args").at("call"), calls[2].at("args").at("call"));
  EXPECT_NE(calls[0].at("tid"), calls[2].at("tid"));
  EXPECT_LE(calls[0].at("ts").get<double>() + calls[0].at("dur").get<double>(),
            calls[1].at("ts").get<double>());
  EXPECT_EQ(calls[0].at("args").at("kernel"), "a loop, as there are \"few\" elements");
  EXPECT_EQ(calls[2].at("args").at("kernel"), calls[1].at("args").at("kernel"));
  EXPECT_EQ(first.described, 2) << "once for each of the two descriptions";
  EXPECT_FALSE(calls[3].at("args").contains("kernel")) << "the implementation does not describe it";
  EXPECT_FALSE(calls[4].at("args").contains("kernel"));
  EXPECT_EQ(calls[3].at("cat"), "fallback");
  EXPECT_EQ(calls[3].at("args").at("impl"), "reference.second");
  EXPECT_HAS(calls[3].at("args").at("fallback").get<std::string>(), "not \"today\"");
  EXPECT_EQ(calls[0].at("args").at("why"), "chosen: priority 150");
  EXPECT_EQ(calls[3].at("args").at("why"), "chosen: priority 50") << "after the first refused";
  EXPECT_FALSE(calls[4].at("args").contains("why")) << "none ran";
  EXPECT_EQ(calls[4].at("cat"), "failed");
  // Returns the shape of argument `a`. A call in the trace refers to its description by number.
  const auto shape = [&](const json& c) {
    const size_t number = c.at("args").at("call").get<size_t>();
    return trace.at("te_fl_calls").at(number).at("args").at("a").at("shape");
  };
  EXPECT_EQ(shape(calls[0]), json({2, 3}));
  EXPECT_EQ(shape(calls[2]), json({5}));
  ASSERT_OK(environment::unset("TE_FL_TRACE"));
  ASSERT_OK(environment::unset("TE_FL_TRACE_EVENTS"));
}

// A verification is an event of its own, with its outcome, and does not count as a call.
TEST(Trace, HoldsVerifications) {
  test::TempFolder folder;
  const std::string path = folder / "trace.json";
  ASSERT_OK(environment::set("TE_FL_TRACE", path));
  ASSERT_OK(environment::set("TE_FL_VERIFY", "1"));
  ASSERT_OK(environment::set("TE_FL_VERIFY_DIR", ""));
  OpRegistry registry;
  OpManager manager(registry);
  float written = 5;
  const auto fill = [](float value, const void* args) {
    const te_fl_tensor& out = *static_cast<const testing::FiveArgs*>(args)->out;
    for (int i = 0; i < 6; ++i) static_cast<float*>(out.dl.data)[i] = value;
    return te_fl_status{TE_FL_OK};
  };
  Fake first{"default.first"}, reference{"reference.second"};
  first.run_body = [&](const te_fl_context&, const void* args) { return fill(written, args); };
  reference.run_body = [&](const te_fl_context&, const void* args) { return fill(5, args); };
  ASSERT_OK(registry.register_op(first.desc, "test", "acme"));
  ASSERT_OK(registry.register_op(reference.desc, "test", "acme"));
  const OpId op = *registry.find("test::five");
  FiveCall call;
  ASSERT_OK(manager.call(op, &call.args));
  written = 7;
  ASSERT_OK(manager.call(op, &call.args));
  ASSERT_OK(write_trace());
  for (const char* name : {"TE_FL_TRACE", "TE_FL_VERIFY", "TE_FL_VERIFY_DIR"})
    ASSERT_OK(environment::unset(name));
  std::vector<json> events;
  const json trace = json::parse(test::read_file(path));
  for (const json& e : trace.at("traceEvents")) {
    if (e.at("ph") == "X") events.push_back(e);
  }
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].at("cat"), "call");
  for (const size_t i : {1, 3}) {
    EXPECT_EQ(events[i].at("name"), "verify test::five");
    EXPECT_EQ(events[i].at("cat"), "verify");
    EXPECT_EQ(events[i].at("args").at("impl"), "default.first");
    EXPECT_FALSE(events[i].at("args").contains("call"));
  }
  EXPECT_EQ(events[1].at("args").at("result"), "agreed with 'reference.second'");
  EXPECT_HAS(events[3].at("args").at("result").get<std::string>(),
             "differs from 'reference.second': ");
}

size_t calls_in(const std::string& path) {
  size_t calls = 0;
  const json trace = json::parse(test::read_file(path));
  for (const json& e : trace.at("traceEvents"))
    calls += e.at("ph") == "X" && e.at("pid") == 1 ? 1 : 0;
  return calls;
}

// Changing TE_FL_TRACE begins a new file at the next call, on whichever thread. Each file holds all
// calls after the change, while another thread calls write_trace(). Before the first call
// write_trace() still writes the previous file.
TEST(Trace, HoldsTheCallsOfAllThreads) {
  test::TempFolder folder;
  OpRegistry registry;
  OpManager manager(registry);
  Fake fake{"default.traced"};
  fake.that_says("one of two kernels");
  ASSERT_OK(registry.register_op(fake.desc, "test", "acme"));
  const OpId op = *registry.find("test::five");
  constexpr int kCalls = 4;
  for (int file = 0; file < testing::rounds(80); ++file) {
    const std::string path = folder / ("trace" + std::to_string(file) + ".json");
    ASSERT_OK(environment::set("TE_FL_TRACE", path));
    const auto calls_with = [&](int64_t extent) {
      return [&, extent](int round) {
        const FiveCall five(DType::kF32, {1 + file, 1 + round, extent});
        EXPECT_OK(manager.call(op, &five.args));
      };
    };
    testing::together(
        kCalls, {calls_with(1), calls_with(2), calls_with(2), [](int) { (void)write_trace(); }});
    ASSERT_OK(write_trace());
    EXPECT_EQ(calls_in(path), 3u * kCalls) << path;
  }
  ASSERT_OK(environment::unset("TE_FL_TRACE"));
}

}  // namespace
}  // namespace te_fl
