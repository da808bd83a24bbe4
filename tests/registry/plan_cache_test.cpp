#include "registry/plan_cache.hpp"

#include <gtest/gtest.h>

#include <malloc.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "registry/implementation.hpp"
#include "registry/registration.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "support/sanitizers.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::five_schema;
using testing::FiveArgs;
using testing::FiveCall;

std::atomic<int> g_made{0};
std::atomic<int> g_destroyed{0};

// An implementation whose plan stores the first extent of `a`; run() checks that it gets the right
// plan.
struct Planner {
  explicit Planner(std::string id = "default.planner") : fake(std::move(id)) {
    g_made = g_destroyed = 0;
    fake.desc.prepare = [](void*, const te_fl_context*, const void* args,
                           void** plan) -> te_fl_status {
      g_made.fetch_add(1);
      *plan = new int64_t(static_cast<const FiveArgs*>(args)->a->dl.shape[0]);
      return TE_FL_OK;
    };
    fake.desc.destroy_plan = [](void*, void* plan) {
      g_destroyed.fetch_add(1);
      delete static_cast<int64_t*>(plan);
    };
    fake.run_body = [](const te_fl_context& ctx, const void* args) -> te_fl_status {
      const bool right =
          *static_cast<int64_t*>(ctx.plan) == static_cast<const FiveArgs*>(args)->a->dl.shape[0];
      return right ? TE_FL_OK : TE_FL_INTERNAL;
    };
  }
  Fake fake;
};

// Arguments of a call with tensors of shape [n] and NULL strides, on one static buffer.
struct Cheap {
  explicit Cheap(int64_t n) : extent(n) {
    for (te_fl_tensor* t : {&in, &out}) {
      t->dl.data = storage;
      t->dl.device = {TE_FL_DEVICE_CPU, 0};
      t->dl.ndim = 1;
      t->dl.dtype = {TE_FL_CODE_FLOAT, 32, 1};
      t->dl.shape = &extent;
    }
    args.a = args.b = args.c = args.d = &in;
    // The output's address is never accessed; it must only differ from the inputs' memory.
    out.dl.data = reinterpret_cast<float*>(uintptr_t{1} << 40);
    args.out = &out;
  }
  // Static memory, because a plan depends on the tensors' alignment, which would differ between
  // stack frames.
  alignas(256) inline static float storage[64];
  int64_t extent;
  te_fl_tensor in{}, out{};
  FiveArgs args;
};

TEST(Plans, AreMadeOncePerSignature) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  ASSERT_OK(registry.register_op(planner.fake.desc));
  const OpId op = *registry.find("test::five");
  for (int round = 0; round < 3; ++round) {
    for (int64_t n : {4, 5, 6}) {
      FiveCall call(DType::kF32, {n, 2});
      ASSERT_OK(manager.call(op, &call.args));
    }
  }
  EXPECT_EQ(g_made.load(), 3);
  FiveCall call(DType::kF32, {4, 2});
  call.args.gain = 2;  // a scalar that prepare() may read
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(g_made.load(), 4);
  FiveCall half(DType::kF16, {4, 2});
  ASSERT_OK(manager.call(op, &half.args));
  EXPECT_EQ(g_made.load(), 5);
  std::thread([&] { ASSERT_OK(manager.call(op, &half.args)); }).join();  // threads share plans
  EXPECT_EQ(g_made.load(), 5);
  EXPECT_EQ(g_destroyed.load(), 0);
  ASSERT_OK(registry.unregister_op("test::five", "default.planner"));
  EXPECT_EQ(g_destroyed.load(), 5);
}

TEST(Plans, InPlaceAreNotThoseBeside) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  ASSERT_OK(registry.register_op(planner.fake.desc));
  const OpId op = *registry.find("test::five");
  te_fl_context context{};
  const auto make_key = [&](const FiveCall& call) {
    const auto compiled = core::CompiledOp::compile(*registry.schema(op)).value();
    registry::PlanKey key;
    key.set(*compiled, &call.args, context);
    return std::string(key.text());
  };
  FiveCall beside, in_place, elsewhere;
  const std::string key = make_key(beside);
  te_fl_tensor out = *in_place.args.out;
  out.dl.data = in_place.args.b->dl.data;
  in_place.args.out = &out;
  const std::string with_b = make_key(in_place);
  EXPECT_NE(with_b, key);
  out.dl.data = in_place.args.c->dl.data;
  EXPECT_NE(make_key(in_place), key);
  EXPECT_NE(make_key(in_place), with_b);
  EXPECT_EQ(make_key(elsewhere), key) << "addresses as such are none of a plan's business";
}

TEST(Plans, AreDestroyedBeforeWhatKeepsThePluginAlive) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  int destroyed_first = -1;
  std::shared_ptr<void> alive(&destroyed_first,
                              [](void* p) { *static_cast<int*>(p) = g_destroyed.load(); });
  ASSERT_OK(registry.register_op(planner.fake.desc, "p", "v", std::move(alive)));
  FiveCall call;
  ASSERT_OK(manager.call("test::five", &call.args));
  ASSERT_OK(registry.unregister_owner("p"));
  EXPECT_EQ(destroyed_first, 1);
}

TEST(Plans, WorkspaceSeesThePlan) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  planner.fake.desc.workspace = [](void*, const te_fl_context* ctx, const void*,
                                   size_t* bytes) -> te_fl_status {
    if (ctx->plan == nullptr) return TE_FL_INTERNAL;
    *bytes = static_cast<size_t>(*static_cast<int64_t*>(ctx->plan)) * 1000;
    return TE_FL_OK;
  };
  size_t bytes = 0;
  planner.fake.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    bytes = ctx.workspace_bytes;
    return ctx.workspace != nullptr ? TE_FL_OK : TE_FL_INTERNAL;
  };
  ASSERT_OK(registry.register_op(planner.fake.desc));
  FiveCall call(DType::kF32, {7, 2});
  ASSERT_OK(manager.call("test::five", &call.args));
  EXPECT_EQ(bytes, 7000u);
}

TEST(Plans, ARefusedPrepareMovesOn) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  planner.fake.desc.prepare = [](void*, const te_fl_context*, const void*, void**) -> te_fl_status {
    return TE_FL_UNSUPPORTED;
  };
  Fake other("reference.other");
  ASSERT_OK(registry.register_op(planner.fake.desc));
  ASSERT_OK(registry.register_op(other.desc));
  FiveCall call;
  ASSERT_OK(manager.call("test::five", &call.args));
  EXPECT_EQ(other.runs.load(), 1);
  EXPECT_EQ(planner.fake.runs.load(), 0);
}

// prepare() may run ops. Here it calls the same op with another value of the scalar `gain`; the
// nested call replaces the outer call in the thread's memo.
TEST(Plans, OfACallAroundAnotherAreNotTheOthers) {
  struct Nesting {
    OpRegistry registry;
    OpManager manager{registry};
    OpId op;
    FiveCall call;
    int depth = 0;
  };
  static Nesting* nesting = nullptr;
  Nesting here;
  nesting = &here;
  Fake fake("default.nesting");
  fake.desc.prepare = [](void*, const te_fl_context*, const void* args, void** plan) {
    const float gain = static_cast<const FiveArgs*>(args)->gain;
    if (nesting->depth++ == 0) {
      FiveArgs inner = *static_cast<const FiveArgs*>(args);
      inner.gain = gain + 1;
      EXPECT_OK(nesting->manager.call(nesting->op, &inner));
    }
    *plan = new float(gain);
    return te_fl_status{TE_FL_OK};
  };
  fake.desc.destroy_plan = [](void*, void* plan) { delete static_cast<float*>(plan); };
  fake.run_body = [](const te_fl_context& ctx, const void* args) -> te_fl_status {
    const bool right = *static_cast<float*>(ctx.plan) == static_cast<const FiveArgs*>(args)->gain;
    return right ? TE_FL_OK : TE_FL_INTERNAL;
  };
  ASSERT_OK(here.registry.register_op(fake.desc));
  here.op = *here.registry.find("test::five");
  here.call.args.gain = 2;
  ASSERT_OK(here.manager.call(here.op, &here.call.args));
  for (const float gain : {3.0f, 2.0f, 3.0f}) {
    here.call.args.gain = gain;
    EXPECT_OK(here.manager.call(here.op, &here.call.args)) << gain;
  }
}

// Empty tensors do not overlap, so they may have equal addresses where other tensors may not. A
// plan may still depend on equal addresses.
TEST(Plans, OfEmptyTensorsThatShareAreNotThoseOfOthers) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  ASSERT_OK(registry.register_op(planner.fake.desc));
  const OpId op = *registry.find("test::five");
  const auto address = [](int bit) { return reinterpret_cast<void*>(uintptr_t{1} << bit); };
  Cheap call(0);
  te_fl_tensor c = call.in;
  c.dl.data = call.out.dl.data = address(41);  // `out` may alias a or b, but not c
  call.args.c = &c;
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(g_made.load(), 1);
  call.out.dl.data = address(42);
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(g_made.load(), 2);
}

// One thread makes a plan, and thereby queries the device whether a dropped plan's work is done,
// while another thread removes all plans of the device.
TEST(Plans, AreNotTakenWhileTheyAreLookedAt) {
  static std::atomic<bool> looking, taking, taken;
  looking = taking = taken = false;
  testing::FarDevice far;
  const Device device = devices::add(&far.desc).value();
  Planner planner;
  planner.fake.desc.flags |= TE_FL_OP_PLAN_MEMORY;
  const auto impl =
      registry::make_implementation(&planner.fake.desc, "test", "far", nullptr).value();
  const auto compiled = core::CompiledOp::compile(five_schema()).value();
  te_fl_context context{};
  context.device = device.to_c();
  context.provider = device.provider;
  const auto insert = [&](int64_t n) {
    Cheap call(n);
    registry::PlanKey key;
    key.set(*compiled, &call.args, context);
    return impl->plans->insert(std::string(key.text()), device, new int64_t(n));
  };
  insert(1)->used_on(nullptr);
  const int64_t most = static_cast<int64_t>(registry::PlanCache::kMaxMemoryPlans);
  for (int64_t n = 2; n <= most + 1; ++n) insert(n);  // the cache drops the first plan
  far.api.is_capturing = [](void*, void*, int32_t* capturing,
                            const te_fl_error_sink*) -> te_fl_status {
    *capturing = 0;
    if (taking.load()) return TE_FL_OK;
    looking = true;
    while (!taking.load()) std::this_thread::yield();
    for (int i = 0; i < 20000 && !taken.load(); ++i) std::this_thread::yield();
    looking = false;
    return TE_FL_OK;
  };
  std::vector<std::unique_ptr<registry::Plan>> plans;
  bool was_looking = true;
  std::thread other([&] {
    while (!looking.load()) std::this_thread::yield();
    taking = true;
    plans = impl->plans->take(device);
    was_looking = looking.load();
    taken = true;
  });
  insert(most + 2);
  other.join();
  EXPECT_FALSE(was_looking);
  plans.clear();
  impl->plans.reset();
  EXPECT_EQ(g_destroyed.load(), most + 2);
  ASSERT_OK(devices::remove(device));
}

TEST(Plans, OfManyShapesInTurnAreMadeOnce) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  ASSERT_OK(registry.register_op(planner.fake.desc));
  const OpId op = *registry.find("test::five");
  for (int round = 0; round < 2; ++round) {
    for (int n = 1; n <= 1500; ++n) {
      Cheap call(n);
      ASSERT_OK(manager.call(op, &call.args));
    }
  }
  EXPECT_EQ(g_made.load(), 1500);
}

TEST(Plans, AreBounded) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  ASSERT_OK(registry.register_op(planner.fake.desc));
  const OpId op = *registry.find("test::five");
  constexpr int kShapes = 5000;
  for (int n = 1; n <= kShapes; ++n) {
    Cheap call(n);
    ASSERT_OK(manager.call(op, &call.args));
    if (n > 1) {
      Cheap hot(1);  // used continuously, so never dropped
      ASSERT_OK(manager.call(op, &hot.args));
    }
  }
  EXPECT_EQ(g_made.load(), kShapes);
  EXPECT_LE(g_made.load() - g_destroyed.load(),
            static_cast<int>(registry::PlanCache::kMaxPlans) + 2);
}

TEST(Plans, ManyThreadsShareAndDropThem) {
  OpRegistry registry;
  OpManager manager(registry);
  Planner planner;
  planner.fake.desc.flags |= TE_FL_OP_PLAN_MEMORY;
  ASSERT_OK(registry.register_op(planner.fake.desc));
  const OpId op = *registry.find("test::five");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        Cheap call(1 + (i * 7 + t) % 400);  // more than the cache keeps
        const Status s = manager.call(op, &call.args);
        ASSERT_OK(s);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  ASSERT_OK(registry.unregister_op("test::five", "default.planner"));
  EXPECT_EQ(g_made.load(), g_destroyed.load());
}

TEST(Memory, IsBoundedOverManyShapes) {
  OpRegistry registry;
  OpManager manager(registry);
  Fake fake("default.x");
  Planner planner("reference.planner");
  ASSERT_OK(registry.register_op(fake.desc));
  ASSERT_OK(registry.register_op(planner.fake.desc));
  const OpId op = *registry.find("test::five");
  PolicySettings reference;
  reference.prefer = Kind::kReference;
  const auto some = [&](int from, int to) {
    for (int n = from; n < to; ++n) {
      Cheap call(n);
      ASSERT_OK(manager.call(op, &call.args));
      const PolicyScope scope(SelectionPolicy::intern(reference));
      ASSERT_OK(manager.call(op, &call.args));
    }
  };
  some(1, 2000);
  const struct mallinfo2 before = mallinfo2();
  some(2000, TE_FL_ASAN || TE_FL_TSAN ? 4000 : 102000);  // under a sanitizer the allocations are
                                                         // not counted
  const struct mallinfo2 after = mallinfo2();
  EXPECT_LT(after.uordblks, before.uordblks + (64u << 10));
}

}  // namespace
}  // namespace te_fl
