// Fixture for the tests of faulty plugins: paths, events, and a call that shows that the host still
// works.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "support/expect.hpp"
#include "support/temp_folder.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::test {

inline std::string fault_path(const std::string& name) {
  return std::string(FAULT_FOLDER) + "/" + name + ".so";
}

// Returns true if any part of the file is mapped, according to /proc/self/maps.
inline bool in_maps(const std::string& path) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (testing::contains(line, path)) return true;
  }
  return false;
}

// Records the plugin functions that were called, as the fault plugins report them.
class Events {
 public:
  static void install() {
    char address[32];
    std::snprintf(address, sizeof address, "%llx",
                  static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(&record)));
    setenv("FAULT_EVENTS", address, 1);
    clear();
  }
  static void clear() {
    const std::lock_guard lock(mutex());
    list().clear();
  }
  static std::vector<std::string> take() {
    const std::lock_guard lock(mutex());
    return std::exchange(list(), {});
  }
  static int count(const std::string& event) {
    const std::lock_guard lock(mutex());
    return static_cast<int>(std::count(list().begin(), list().end(), event));
  }

 private:
  static void record(const char* text) {
    const std::lock_guard lock(mutex());
    list().emplace_back(text);
  }
  static std::mutex& mutex() {
    static auto* const m = new std::mutex;
    return *m;
  }
  static std::vector<std::string>& list() {
    static auto* const l = new std::vector<std::string>;
    return *l;
  }
};

inline Tensor floats(std::initializer_list<float> values, Device device = {}) {
  const std::vector<float> copy(values);
  auto t = Tensor::from_values({static_cast<int64_t>(copy.size())}, copy);
  EXPECT_OK(t);
  if (device == Device{}) return *t;
  auto moved = t->to(device);
  EXPECT_OK(moved);
  return *moved;
}

inline std::vector<float> values_of(const Tensor& t) {
  const Tensor host = t.device() == Device{} ? t : t.to(Device{}).value();
  return {host.data<float>(), host.data<float>() + host.numel()};
}

inline Status call_relu(const Tensor& in, const Tensor& out) {
  te_fl_relu_args args;
  args.input = in;
  args.output = out;
  return OpManager::instance().call(op::relu, &args);
}

// Returns the policy "op=impl:id".
inline PolicySettings only(const std::string& op, const std::string& impl_id) {
  PolicySettings settings;
  settings.per_op[op] = {{PolicyToken::Type::kImpl, Kind::kVendor, impl_id}};
  return settings;
}

class FaultTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Events::install();
    OpManager::instance();
  }
  // Unloads the plugins that a test left active.
  void TearDown() override {
    for (const plugins::PluginInfo& p : plugins::list()) {
      if (p.origin != "built-in" && p.state == plugins::State::kActive) {
        const Status status = plugins::deactivate(p.name, true);
        EXPECT_TRUE(status.ok() || p.name == "throw_quiesce" || p.name == "quiesce_fails")
            << status.to_string();
      }
    }
    for (const char* name : {"TE_FL_PLUGIN_TIMEOUT_MS"}) EXPECT_OK(environment::unset(name));
  }

  static plugins::PluginInfo info(const std::string& name) {
    for (const plugins::PluginInfo& p : plugins::list()) {
      if (p.name == name) return p;
    }
    ADD_FAILURE() << "no plugin '" << name << "' in the list";
    return {};
  }

  static void expect_host_works() {
    const Tensor in = floats({-1, 2, -3, 4}), out = floats({9, 9, 9, 9});
    const Status status = call_relu(in, out);
    EXPECT_OK(status);
    EXPECT_EQ(values_of(out), (std::vector<float>{0, 2, 0, 4}));
  }

  static plugins::PluginInfo load(const std::string& name) {
    auto loaded = plugins::load(fault_path(name));
    EXPECT_OK(loaded);
    return loaded.ok() ? *loaded : plugins::PluginInfo{};
  }

  static std::vector<std::string> owned_by(const std::string& owner) {
    std::vector<std::string> ids;
    for (const OpImplInfo& i : OpRegistry::instance().snapshot()) {
      if (i.owner == owner) ids.push_back(i.op + ": " + i.impl_id);
    }
    return ids;
  }
};

}  // namespace te_fl::test
