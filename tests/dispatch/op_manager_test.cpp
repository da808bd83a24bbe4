#include "te_fl/op_manager.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <thread>

#include "op_manager_fixture.hpp"

namespace te_fl {
namespace {

using testing::Dispatch;
using testing::Fake;
using testing::FiveArgs;
using testing::FiveCall;
using testing::impl;
using testing::list;
using testing::prefer;

TEST_F(Dispatch, TakesTheHighestPriority) {
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
  ASSERT_OK(registry.set_priority("test::five", "reference.r", 500));
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "reference.r");
  ASSERT_OK(registry.unregister_op("test::five", "reference.r"));
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, ACleanFailureMovesOn) {
  portable.run_status = TE_FL_UNSUPPORTED;
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p vendor.v");
  portable.run_status = TE_FL_OUT_OF_MEMORY | TE_FL_CLEAN;
  vendor.run_status = TE_FL_INTERNAL | TE_FL_CLEAN;
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p vendor.v reference.r");
}

TEST_F(Dispatch, ACallGoesOnAlongTheRouteThatItBeganWith) {
  portable.run_body = [this](const te_fl_context&, const void*) {
    EXPECT_OK(registry.set_priority("test::five", "reference.r", 500));
    return te_fl_status{TE_FL_UNSUPPORTED};
  };
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p vendor.v");
  portable.run_body = nullptr;
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "reference.r");
}

TEST_F(Dispatch, AnUncleanFailureIsNotFollowed) {
  auto* out = five.tensors[4].data<float>();
  portable.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    for (int i = 0; i < 3; ++i) out[i] = 7;  // writes half of the output
    ctx.errors->write(ctx.errors->host, "the device stumbled");
    return TE_FL_INTERNAL;
  };
  const Status s = call();
  EXPECT_EQ(ran(), "default.p");
  EXPECT_FAILS(s, kInternal, "the device stumbled");
  EXPECT_FAILS(s, kInternal, "'test::five'");
  EXPECT_FAILS(s, kInternal, "'default.p'");
  EXPECT_FAILS(s, kInternal, "a f32[2,3] cpu");
  EXPECT_EQ(out[2], 7);
}

TEST_F(Dispatch, ACallersMistakeReturnsAtOnce) {
  portable.run_status = TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN;
  portable.run_text = "gain is 3, must be 1 or 2";
  EXPECT_FAILS(call(), kInvalidArgument, "gain is 3");
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, AnExceptionIsAStatus) {
  portable.run_body = [](const te_fl_context&, const void*) -> te_fl_status {
    throw std::runtime_error("boom");
  };
  EXPECT_FAILS(call(), kInternal, "boom");
  EXPECT_FAILS(call(), kInternal, "R5");
  portable.run_body = [](const te_fl_context&, const void*) -> te_fl_status { throw 1; };
  EXPECT_FAILS(call(), kInternal, "R5");
}

TEST_F(Dispatch, UnknownCodesAreInternal) {
  portable.run_status = 999;
  EXPECT_FAILS(call(), kInternal, "999");
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, CauseLinesAreKept) {
  portable.run_body = [](const te_fl_context& ctx, const void*) -> te_fl_status {
    ctx.errors->write(ctx.errors->host, "outer");
    ctx.errors->write(ctx.errors->host, "inner");
    ctx.errors->write(ctx.errors->host, nullptr);
    return TE_FL_DATA_LOSS;
  };
  EXPECT_FAILS(call(), kDataLoss, "outer\n  caused by: inner");
}

TEST_F(Dispatch, AnOlderCallersShorterStructIsPassedAsItIs) {
  uint32_t seen = 0;
  portable.run_body = [&](const te_fl_context&, const void* args) -> te_fl_status {
    std::memcpy(&seen, args, sizeof seen);
    return TE_FL_OK;
  };
  five.args.struct_size = offsetof(FiveArgs, out) + sizeof(void*);
  ASSERT_OK(call());
  EXPECT_EQ(seen, five.args.struct_size);
}

TEST_F(Dispatch, DeterminismIsRequested) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_DETERMINISTIC};
  reregister(portable);
  uint32_t flags = 0;
  vendor.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    flags = ctx.flags;
    return TE_FL_OK;
  };
  PolicySettings s;
  s.deterministic = true;
  const PolicyScope scope(s);
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "vendor.v");
  EXPECT_EQ(flags & TE_FL_CALL_DETERMINISTIC, uint32_t{TE_FL_CALL_DETERMINISTIC});
}

TEST_F(Dispatch, TheContextCarriesTheCall) {
  te_fl_context seen{};
  te_fl_rng seen_rng;
  portable.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    seen = ctx, seen_rng = *ctx.rng;
    return TE_FL_OK;
  };
  int stream = 0;
  CallOptions options;
  options.stream = &stream;
  options.rng = {.seed = 5, .offset = 6};
  ASSERT_OK(manager.call(op, &five.args, options));
  EXPECT_EQ(seen.struct_size, sizeof(te_fl_context));
  EXPECT_EQ(seen.stream, &stream);
  EXPECT_EQ(seen_rng.seed, 5u);
  EXPECT_EQ(seen_rng.offset, 6u);
  EXPECT_EQ(seen.device.type, TE_FL_DEVICE_CPU);
  EXPECT_EQ(seen.workspace, nullptr);
  EXPECT_EQ(seen.plan, nullptr);
}

TEST_F(Dispatch, WrongArgumentsNeverReachAnImplementation) {
  EXPECT_FAILS(manager.call(op, nullptr), kInvalidArgument, "null");
  five.args.b = nullptr;
  EXPECT_FAILS(call(), kInvalidArgument, "b");
  EXPECT_FAILS(call(), kInvalidArgument, "test::five");
  EXPECT_FAILS(manager.call(OpId{4000000}, &five.args), kNotFound, "4000000");
  EXPECT_FAILS(manager.call("test::fife", &five.args), kNotFound, "'test::five'");
  EXPECT_EQ(ran(), "");
}

TEST_F(Dispatch, AHandleFollowsPolicyAndRegistrations) {
  const auto handle = manager.prepare(op, &five.args);
  ASSERT_OK(handle);
  ASSERT_OK(handle->call(&five.args));
  ASSERT_OK(handle->call(&five.args));
  EXPECT_EQ(ran(), "default.p default.p");
  {
    const PolicyScope scope(prefer(Kind::kReference));
    ASSERT_OK(handle->call(&five.args));
    EXPECT_EQ(ran(), "reference.r");
  }
  ASSERT_OK(registry.unregister_op("test::five", "default.p"));
  ASSERT_OK(handle->call(&five.args));
  EXPECT_EQ(ran(), "vendor.v");
  FiveCall half(DType::kF16);
  EXPECT_FAILS(handle->call(&half.args), kInvalidArgument, "prepare another handle");
  five.args.a = nullptr;
  EXPECT_FAILS(handle->call(&five.args), kInvalidArgument, "a");
  EXPECT_FAILS(PreparedOp().call(&five.args), kFailedPrecondition, "empty");
}

TEST_F(Dispatch, AHandleOfAnUnsupportedCallIsNotCreated) {
  for (Fake* f : {&portable, &vendor, &reference}) {
    f->desc.dtypes = TE_FL_BIT(TE_FL_F16);
    reregister(*f);
  }
  EXPECT_FAILS(manager.prepare(op, &five.args).status(), kUnsupported, "way out");
}

TEST_F(Dispatch, CountsTheImplementationThatRan) {
  for (int i = 0; i < 3; ++i) ASSERT_OK(call());
  std::thread([&] {
    const PolicyScope scope(prefer(Kind::kVendor));
    for (int i = 0; i < 5; ++i) ASSERT_OK(call());
  }).join();
  const auto usage = manager.usage();
  ASSERT_EQ(usage.size(), 2u);
  EXPECT_EQ(usage[0].impl_id, "vendor.v");
  EXPECT_EQ(usage[0].calls, 5u);
  EXPECT_EQ(usage[1].op, "test::five");
  EXPECT_EQ(usage[1].calls, 3u);
  manager.reset_usage();
  EXPECT_TRUE(manager.usage().empty());
  ASSERT_OK(call());
  EXPECT_EQ(manager.usage()[0].calls, 1u);
}

TEST_F(Dispatch, AFailureIsNotCounted) {
  portable.run_status = TE_FL_UNSUPPORTED;
  ASSERT_OK(call());
  ASSERT_EQ(manager.usage().size(), 1u);
  EXPECT_EQ(manager.usage()[0].impl_id, "vendor.v");
}

TEST_F(Dispatch, OpsCallOps) {
  int depth = 0;
  portable.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    if (++depth > 3) return TE_FL_OK;
    const PolicyScope scope(prefer(depth % 2 == 0 ? Kind::kDefault : Kind::kVendor));
    const Status s = call();
    return s.to_c();
  };
  vendor.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    const PolicyScope scope(prefer(Kind::kDefault));
    return call().to_c();
  };
  ASSERT_OK(call());
  EXPECT_EQ(depth, 4);
}

TEST_F(Dispatch, NotThreadSafeImplementationsAreSerialised) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_THREAD_SAFE};
  reregister(portable);
  std::atomic<int> inside{0};
  int plain = 0;  // not atomic: the thread sanitizer sees a missing lock
  portable.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    EXPECT_EQ(inside.fetch_add(1), 0);
    ++plain;
    inside.fetch_sub(1);
    return TE_FL_OK;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      FiveCall own;
      for (int i = 0; i < 500; ++i) EXPECT_OK(manager.call(op, &own.args));
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(plain, 2000);
}

TEST_F(Dispatch, RecursionIntoANotThreadSafeImplementationIsNoDeadlock) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_THREAD_SAFE};
  reregister(portable);
  Status inner;
  portable.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    const PolicyScope scope(list({impl("default.p")}));
    inner = call();
    return TE_FL_OK;
  };
  ASSERT_OK(call());
  EXPECT_FAILS(inner, kBusy, "inside it already");
}

TEST_F(Dispatch, WorkspaceIsAlignedAndNested) {
  static size_t wanted;
  wanted = 1000;
  portable.desc.workspace = [](void*, const te_fl_context*, const void*,
                               size_t* bytes) -> te_fl_status {
    *bytes = wanted;
    return TE_FL_OK;
  };
  reregister(portable);
  std::vector<void*> blocks;
  int depth = 0;
  portable.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    EXPECT_EQ(ctx.workspace_bytes, wanted);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(ctx.workspace) % 256, 0u);
    std::memset(ctx.workspace, ++depth, ctx.workspace_bytes);
    blocks.push_back(ctx.workspace);
    const int mine = depth;
    if (depth == 1) {
      if (const Status s = call(); !s.ok()) return s.to_c();
    }
    // The inner call had its own scratch, so the outer call's contents are unchanged.
    EXPECT_EQ(*static_cast<const char*>(ctx.workspace), mine);
    return TE_FL_OK;
  };
  ASSERT_OK(call());
  ASSERT_EQ(blocks.size(), 2u);
  EXPECT_NE(blocks[0], blocks[1]);
  wanted = 100;
  ASSERT_OK(call());
  EXPECT_EQ(blocks[2], blocks[0]);  // the scratch is kept and not allocated again
  wanted = SIZE_MAX - 10;
  // The call does not fall back to another implementation.
  EXPECT_FAILS(call(), kOutOfMemory, "a workspace of");
  EXPECT_EQ(vendor.runs.load(), 0);
}

}  // namespace
}  // namespace te_fl
