// Device memory that outlives a call: of plans (R26) and of implementations, by stream (R27); on a
// device that runs its work when it is waited for.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "plugins/hooks.hpp"
#include "registry/plan_cache.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "te_fl/memory.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FarDevice;
using testing::FiveArgs;

class DeviceState : public ::testing::Test {
 protected:
  void SetUp() override {
    OpManager::instance();  // from then on devices can be released
    device = devices::add(&far.desc).value();
    native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    native.desc.provider = "far";
    native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
  }
  void TearDown() override {
    tensor = out = Tensor();
    plugins::g_hooks.release_device.load()(device);
    EXPECT_EQ(devices::live_objects(device), 0);
    ASSERT_OK(devices::remove(device));
  }
  void add() {
    ASSERT_OK(registry.register_op(native.desc, "test", "far"));
    op = *registry.find(native.desc.op_name);
  }
  Status remove() { return registry.unregister_op(native.desc.op_name, native.desc.impl_id); }
  Status call(void* stream, int64_t n = 1) {
    if (!tensor.defined() || tensor.numel() != n) {
      tensor = Tensor::zeros({n}, DType::kF32, device).value();
      out = Tensor::zeros({n}, DType::kF32, device).value();
    }
    FiveArgs args;
    args.a = args.b = args.c = args.d = tensor.c();
    args.out = out.c();
    CallOptions options;
    options.stream = stream;
    return manager.call(op, &args, options);
  }

  FarDevice far;
  Device device;
  OpRegistry registry;
  OpManager manager{registry};
  Fake native{"vendor.far"};
  OpId op{};
  Tensor tensor, out;
};

// ---- plans

struct TestPlan {
  int pending = 0;  // pieces of work on the device that use it
};
std::deque<TestPlan> g_plans;  // kept, so that work which comes too late is harmless
int g_destroyed = 0, g_early = 0;

class PlanMemory : public DeviceState {
 protected:
  void SetUp() override {
    DeviceState::SetUp();
    g_plans.clear();
    g_destroyed = g_early = 0;
    native.desc.flags |= TE_FL_OP_PLAN_MEMORY;
    native.desc.prepare = [](void*, const te_fl_context*, const void*,
                             void** plan) -> te_fl_status {
      *plan = &g_plans.emplace_back();
      return TE_FL_OK;
    };
    native.desc.destroy_plan = [](void*, void* plan) {
      ++g_destroyed;
      if (static_cast<TestPlan*>(plan)->pending != 0) ++g_early;
    };
    native.run_body = [this](const te_fl_context& ctx, const void*) -> te_fl_status {
      auto* const plan = static_cast<TestPlan*>(ctx.plan);
      ++plan->pending;
      far.enqueue(ctx.stream, [plan] { --plan->pending; });
      return TE_FL_OK;
    };
  }
  // One plan each, until the oldest are dropped.
  void make_many(void* stream) {
    for (int64_t n = 2; n < static_cast<int64_t>(registry::PlanCache::kMaxPlans) + 40; ++n) {
      ASSERT_OK(call(stream, n));
    }
  }
};

TEST_F(PlanMemory, ADroppedPlanGoesBehindItsWork) {
  add();
  void* const stream = devices::create_stream(device).value();
  for (int i = 0; i < 3; ++i) ASSERT_OK(call(stream));
  make_many(nullptr);
  EXPECT_GT(g_destroyed, 0);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(remove());
  EXPECT_EQ(static_cast<size_t>(g_destroyed), g_plans.size());
  EXPECT_EQ(g_early, 0);
  devices::destroy_stream(device, stream);
}

// What the tests above and below would find without the flag.
TEST_F(PlanMemory, APlanThatOwnsNoneDoesNotWait) {
  native.desc.flags &= ~uint32_t{TE_FL_OP_PLAN_MEMORY};
  add();
  ASSERT_OK(call(nullptr));
  ASSERT_OK(remove());
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 1);
}

TEST_F(PlanMemory, ItsWorkIsWaitedForOnEveryStream) {
  add();
  std::vector<void*> streams{nullptr};
  for (int i = 0; i < 6; ++i) streams.push_back(devices::create_stream(device).value());
  for (int round = 0; round < 2; ++round) {
    for (void* stream : streams) ASSERT_OK(call(stream));
  }
  EXPECT_EQ(g_plans.at(0).pending, 14);
  ASSERT_OK(remove());
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 0);
  for (void* stream : streams) devices::destroy_stream(device, stream);
}

TEST_F(PlanMemory, AStreamThatGoesIsWaitedFor) {
  add();
  void* const others = far.queues.make_stream();
  ASSERT_OK(call(others));
  ASSERT_OK(devices::retire_stream(device, others));
  EXPECT_EQ(g_plans.at(0).pending, 0);
  far.queues.destroy(others);
  void* const own = devices::create_stream(device).value();
  EXPECT_EQ(own, others) << "the handle comes again";
  ASSERT_OK(call(own));
  EXPECT_EQ(g_plans.size(), 1u);
  devices::destroy_stream(device, own);
  EXPECT_EQ(g_plans.at(0).pending, 0);
  ASSERT_OK(remove());
  EXPECT_FALSE(far.queues.exists(own)) << "nothing is asked of streams that are gone";
}

TEST_F(PlanMemory, ADeviceWithoutEventsIsWaitedFor) {
  far.api.create_event = nullptr;
  add();
  make_many(nullptr);
  EXPECT_GT(g_destroyed, 0);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(remove());
  EXPECT_EQ(g_early, 0);
}

TEST_F(PlanMemory, WorkThatIsBeingCapturedIsNotWaitedFor) {
  add();
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  auto capture = Capture::begin(device, stream);
  ASSERT_OK(capture);
  make_many(nullptr);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(capture->end());
  ASSERT_OK(remove());
  EXPECT_EQ(static_cast<size_t>(g_destroyed), g_plans.size());
  EXPECT_EQ(g_early, 0);
  devices::destroy_stream(device, stream);
}

// ---- state by stream

class StreamState : public DeviceState {
 protected:
  // Each op notes what it finds, and adds one.
  void SetUp() override {
    DeviceState::SetUp();
    native.desc.stream_state_bytes = 4000;
    native.run_body = [this](const te_fl_context& ctx, const void*) -> te_fl_status {
      places.push_back(ctx.stream_state);
      char* const at = far.real(ctx.stream_state);
      far.enqueue(ctx.stream, [this, at] {
        int32_t value = 0;
        std::memcpy(&value, at, sizeof value);
        found.push_back(value);
        bool zero = true;  // the rest
        for (int i = 4; i < 4000; ++i) zero &= at[i] == 0;
        clean &= zero;
        ++value;
        std::memcpy(at, &value, sizeof value);
      });
      return TE_FL_OK;
    };
  }
  // Bytes of states that te-fl holds.
  size_t held() const {
    const auto account = devices::memory_account(device).value();
    for (const auto& holder : account.holders) {
      if (holder.use == "stream state") return holder.bytes;
    }
    return 0;
  }

  std::vector<void*> places;
  std::vector<int32_t> found;
  bool clean = true;
};

TEST_F(StreamState, IsZeroAtFirstAndThenAsTheLastOpLeftIt) {
  add();
  void* const stream = devices::create_stream(device).value();
  for (int i = 0; i < 3; ++i) ASSERT_OK(call(stream));
  ASSERT_OK(devices::synchronize(device, stream));
  EXPECT_EQ(found, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(places[0], places[2]);
  ASSERT_OK(call(nullptr));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(found.back(), 0) << "another stream has its own";
  EXPECT_NE(places.back(), places[0]);
  EXPECT_TRUE(clean);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(places[0]) % 256, 0u);
  ASSERT_OK(remove());
  EXPECT_EQ(held(), 0u);
  devices::destroy_stream(device, stream);
}

TEST_F(StreamState, GoesWithItsStream) {
  add();
  void* const stream = far.queues.make_stream();
  ASSERT_OK(call(stream));
  EXPECT_EQ(held(), 4096u);
  ASSERT_OK(devices::retire_stream(device, stream));
  EXPECT_EQ(held(), 0u);
  far.queues.finish();
  far.queues.destroy(stream);
  ASSERT_EQ(far.queues.make_stream(), stream) << "the handle comes again";
  ASSERT_OK(call(stream));
  ASSERT_OK(devices::synchronize(device, stream));
  EXPECT_EQ(found, (std::vector<int32_t>{0, 0}));
}

TEST_F(StreamState, IsOneImplementationsOwn) {
  Fake second("vendor.second");
  second.desc.device_types = native.desc.device_types;
  second.desc.provider = "far";
  second.desc.stream_state_bytes = 4000;
  second.run_body = native.run_body;
  add();
  ASSERT_OK(registry.register_op(second.desc, "test", "far"));
  ASSERT_OK(call(nullptr));
  ASSERT_OK(registry.set_priority("test::five", "vendor.second", 500));
  ASSERT_OK(call(nullptr));
  ASSERT_OK(registry.set_priority("test::five", "vendor.second", 1));
  ASSERT_OK(call(nullptr));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(found, (std::vector<int32_t>{0, 0, 1}));
  ASSERT_OK(remove());
  EXPECT_EQ(held(), 4096u) << "the other's";
  add();  // again, as another one
  ASSERT_OK(call(nullptr));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(found.back(), 0);
}

TEST_F(StreamState, OfACapturedOpIsZeroAtEveryLaunch) {
  add();
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  {
    auto capture = Capture::begin(device, stream);
    ASSERT_OK(capture);
    ASSERT_OK(call(stream));
    const Result<Graph> graph = capture->end();
    ASSERT_OK(graph);
    for (int i = 0; i < 2; ++i) ASSERT_OK(graph->launch());
    ASSERT_OK(call(stream));
    ASSERT_OK(devices::synchronize(device, stream));
    EXPECT_EQ(found, (std::vector<int32_t>{0, 0, 0, 1}));
  }
  EXPECT_NE(places[0], places[1]);
  EXPECT_EQ(places[0], places[2]);
  devices::destroy_stream(device, stream);
}

TEST_F(StreamState, StandsBesideScratch) {
  native.desc.workspace = [](void*, const te_fl_context* ctx, const void*, size_t* bytes) {
    *bytes = 64;
    return te_fl_status{ctx->workspace == nullptr ? TE_FL_OK : TE_FL_INTERNAL};
  };
  add();
  for (int i = 0; i < 2; ++i) ASSERT_OK(call(nullptr));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(found, (std::vector<int32_t>{0, 1}));
}

TEST_F(StreamState, IsRefusedToWhoServesTheHost) {
  native.desc.device_types |= uint64_t{1} << TE_FL_DEVICE_CPU;
  EXPECT_FAILS(registry.register_op(native.desc, "test", "far"), kInvalidArgument,
               "whose work has no stream (rule R27)");
}

}  // namespace
}  // namespace te_fl
