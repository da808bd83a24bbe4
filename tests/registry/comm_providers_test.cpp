// The registry of collectives providers: invalid providers are refused, and a provider that is in
// use cannot be removed.
#include "registry/comm_providers.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "support/expect.hpp"

namespace te_fl::registry {
namespace {

te_fl_comm_api good_api() {
  te_fl_comm_api api;
  api.create = [](void*, const te_fl_comm_config*, void**, const te_fl_error_sink*) {
    return te_fl_status{TE_FL_OK};
  };
  api.destroy = [](void*) {};
  api.abort = [](void*) {};
  return api;
}

class CommProviders : public ::testing::Test {
 protected:
  CommProviders() {
    desc.name = "telegraph";
    desc.kind = TE_FL_KIND_VENDOR;
    desc.device_types = 1u << TE_FL_DEVICE_CPU;
    desc.api = &api;
  }
  ~CommProviders() override { EXPECT_OK(remove_comm_providers("wires")); }
  Status add(const std::string& plugin = "wires") {
    const te_fl_comm_desc* const list[] = {&desc};
    return add_comm_providers(list, plugin, "acme", "1.2", nullptr);
  }
  te_fl_comm_api api = good_api();
  te_fl_comm_desc desc;
};

std::shared_ptr<CommProvider> find(const std::string& name) {
  for (const auto& p : comm_providers()) {
    if (p->name == name) return p;
  }
  return nullptr;
}

TEST_F(CommProviders, HaveTheKindsPriority) {
  ASSERT_OK(add());
  const auto found = find("telegraph");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->desc.priority, TE_FL_PRIORITY_VENDOR);
  EXPECT_EQ(found->plugin, "wires");
  EXPECT_FAILS(add("others"), kAlreadyExists, "'telegraph' is there already, of plugin 'wires'");
  ASSERT_OK(remove_comm_providers("wires"));
  EXPECT_EQ(find("telegraph"), nullptr);
}

TEST_F(CommProviders, StayWhileACommunicatorLives) {
  ASSERT_OK(add());
  find("telegraph")->live = 2;
  EXPECT_FAILS(remove_comm_providers("wires"), kBusy,
               "2 communicators of its provider 'telegraph' are alive");
  EXPECT_NE(find("telegraph"), nullptr);
  find("telegraph")->live = 0;
}

TEST_F(CommProviders, ThreadsAddAndRemoveThem) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string name = "wire" + std::to_string(t);
      te_fl_comm_desc own = desc;
      own.name = name.c_str();
      const te_fl_comm_desc* const list[] = {&own};
      for (int i = 0; i < 200; ++i) {
        bool right = add_comm_providers(list, name, "acme", "1.2", nullptr).ok();
        right = right && find(name) != nullptr && remove_comm_providers(name).ok();
        wrong.fetch_add(right && find(name) == nullptr ? 0 : 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(CommProviders, BrokenOnesAreRefused) {
  desc.name = "Morse!";
  EXPECT_FAILS(add(), kInvalidArgument, "its name is 'Morse!', must be of a to z, 0 to 9 and _");
  desc.name = "telegraph";
  desc.device_types = 0;
  EXPECT_FAILS(add(), kInvalidArgument, "it supports no device type");
  desc.device_types = 1u << TE_FL_DEVICE_CPU;
  api.abort = nullptr;
  EXPECT_FAILS(add(), kInvalidArgument, "its table has no abort() (rule R4)");
  api = good_api();
  api.group_start = [](void*, const te_fl_error_sink*) { return te_fl_status{TE_FL_OK}; };
  EXPECT_FAILS(add(), kInvalidArgument, "needs both or neither");
  api = good_api();
  desc.struct_size = 12;
  EXPECT_FAILS(add(), kInvalidArgument, "struct_size 12");
  desc.struct_size = sizeof desc;
  desc.api = nullptr;
  EXPECT_FAILS(add(), kInvalidArgument, "has no table of functions");
  EXPECT_EQ(find("telegraph"), nullptr);
}

}  // namespace
}  // namespace te_fl::registry
