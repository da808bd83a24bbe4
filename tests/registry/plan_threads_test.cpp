// Threads create, drop and query plans that own device memory, while other threads create and
// destroy streams.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "registry/implementation.hpp"
#include "registry/plan_cache.hpp"
#include "registry/registration.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/plain_device.hpp"
#include "support/threads.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::together;

// A device whose streams are never captured, and one implementation whose plans the tests insert.
struct PlansOfOne {
  explicit PlansOfOne(const Device& on) : device(on) {
    fake.desc.flags |= TE_FL_OP_PLAN_MEMORY;
    fake.desc.prepare = [](void*, const te_fl_context*, const void*, void**) {
      return te_fl_status{TE_FL_INTERNAL};  // never called: the test inserts plans itself
    };
    fake.desc.destroy_plan = [](void*, void* plan) { delete static_cast<int*>(plan); };
    impl = registry::make_implementation(&fake.desc, "test", "relay", nullptr).value();
    te_fl_context context{};
    context.device = device.to_c();
    context.provider = device.provider;
    testing::FiveCall call;
    registry::PlanKey key;
    key.set(*core::CompiledOp::compile(testing::five_schema()).value(), &call.args, context);
    begin_of_keys = key.text();
  }
  std::string key(int n) const { return begin_of_keys + std::to_string(n); }

  Device device;
  Fake fake{"default.planner"};
  std::shared_ptr<registry::Implementation> impl;
  std::string begin_of_keys;
};

// For the thread sanitizer: several threads use the lists of streams on which plans were used.
TEST(PlanThreads, MakeDropAndAskAboutPlans) {
  testing::PlainDevice plain("relay");
  const Device device = devices::add(&plain.desc).value();
  PlansOfOne all(device);
  registry::PlanCache& cache = *all.impl->plans;
  char streams[4] = {};  // whose addresses are handles
  const auto use_plans = [&](char* stream) {
    return [&, stream](int round) {
      const registry::Plan* plan = cache.insert(all.key(round % 3), device, new int(round));
      plan->used_on(stream);
      const bool capturing = round % 4 == 0;
      if (const registry::Plan* found = cache.find(all.key(round % 3), capturing))
        found->used_on(&streams[3]);
    };
  };
  const auto picks = [&](const registry::Plan& plan) { return plan.device == device; };
  together(200, {use_plans(&streams[0]), use_plans(&streams[1]),
                 [&](int) { EXPECT_OK(registry::check_captures(picks)); },
                 [&](int round) { registry::note_launch(device, &streams[round % 4]); },
                 [&](int round) { registry::leave_stream(device, &streams[round % 2]); },
                 [&](int) { EXPECT_LE(cache.size(), 3u); }});
  cache.take(device).clear();
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_OK(devices::remove(device));
}

// For the thread sanitizer: two threads drop plans at the same time, each those of its own
// implementation.
TEST(PlanThreads, LetPlansGoTogether) {
  testing::PlainDevice plain("relay");
  const Device device = devices::add(&plain.desc).value();
  PlansOfOne of_one(device), of_other(device);
  char streams[2] = {};
  const auto come_and_go = [&](PlansOfOne& mine) {
    return [&](int round) {
      mine.impl->plans->insert(mine.key(0), device, new int(0))->used_on(&streams[round % 2]);
      mine.impl->plans->take(device).clear();
    };
  };
  const auto ask = [&](int round) {
    EXPECT_OK(registry::check_captures([](const registry::Plan&) { return true; }));
    registry::note_launch(device, &streams[round % 2]);
    registry::leave_stream(device, &streams[round % 2]);
  };
  together(200, {come_and_go(of_one), come_and_go(of_other), ask});
  EXPECT_OK(devices::remove(device));
}

}  // namespace
}  // namespace te_fl
