// Ops that run inside other ops: a thread that holds the lock of a non-thread-safe implementation
// and a stream's scratch must not deadlock with another thread.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <future>
#include <thread>

#include "dispatch/device_state_fixture.hpp"

namespace te_fl {
namespace {

using testing::DeviceState;
using testing::Fake;
using testing::FiveArgs;

// Called when the inner implementation is asked for its workspace size.
std::function<void()> g_on_workspace;

// `native` is the inner implementation, which is not thread-safe; `outer` calls it.
class NestedOps : public DeviceState {
 protected:
  void SetUp() override {
    DeviceState::SetUp();
    g_on_workspace = nullptr;
    outer.desc.device_types = native.desc.device_types;
    outer.desc.provider = native.desc.provider;
    outer.desc.op_name = "test::outer";
    schema = testing::five_schema();
    schema.name = outer.desc.op_name;
    outer.desc.schema = &schema;
    native.desc.flags &= ~uint32_t{TE_FL_OP_THREAD_SAFE};
    native.desc.workspace = [](void*, const te_fl_context*, const void*,
                               size_t* bytes) -> te_fl_status {
      if (g_on_workspace) g_on_workspace();
      *bytes = 512;
      return TE_FL_OK;
    };
    outer.desc.workspace = [](void*, const te_fl_context*, const void*,
                              size_t* bytes) -> te_fl_status {
      *bytes = 512;
      return TE_FL_OK;
    };
    ASSERT_OK(registry.register_op(outer.desc, "test", "far"));
    add();
    outer_op = *registry.find("test::outer");
    x = Tensor::zeros({4}, DType::kF32, device).value();
    y = Tensor::zeros({4}, DType::kF32, device).value();
  }
  void TearDown() override {
    g_on_workspace = nullptr;
    x = y = Tensor();
    DeviceState::TearDown();
  }
  Status run(OpId which, void* stream) {
    FiveArgs args;
    args.a = args.b = args.c = args.d = x.c();
    args.out = y.c();
    CallOptions options;
    options.stream = stream;
    return manager.call(which, &args, options);
  }

  Fake outer{"vendor.outer"};
  te_fl_op_schema schema{};
  OpId outer_op{};
  Tensor x, y;
};

void wait_for(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::yield();
}

// One thread holds the inner implementation's lock and needs the stream's scratch; the other holds
// the scratch and needs that lock. The test makes each thread wait until the other holds its
// resource.
TEST_F(NestedOps, ScratchAndAnImplementationAreNotWaitedForCrosswise) {
  std::atomic<bool> has_inner{false}, has_scratch{false};
  std::thread::id holder;
  g_on_workspace = [&] {
    if (std::this_thread::get_id() != holder) return;
    has_inner = true;
    wait_for(has_scratch);
  };
  std::atomic<const void*> inner_scratch{nullptr}, outer_scratch{nullptr};
  native.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    if (std::this_thread::get_id() == holder) inner_scratch = ctx.workspace;
    return ctx.workspace_bytes == 512 ? TE_FL_OK : TE_FL_INTERNAL;
  };
  outer.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    outer_scratch = ctx.workspace;
    has_scratch = true;
    wait_for(has_inner);
    return run(op, ctx.stream).to_c();
  };
  std::atomic<bool> go{false};
  Status inner_status, outer_status;
  std::thread inner([&] {
    wait_for(go);
    inner_status = run(op, nullptr);
  });
  holder = inner.get_id();
  go = true;
  std::thread outside([&] { outer_status = run(outer_op, nullptr); });
  inner.join();
  outside.join();
  EXPECT_OK(inner_status);
  EXPECT_OK(outer_status);
  EXPECT_EQ(native.runs.load(), 2);
  EXPECT_NE(inner_scratch.load(), outer_scratch.load())
      << "both ops were enqueueing with it at once";
}

// Two implementations that are not thread-safe call each other on two threads. The thread that
// would complete the deadlock gets an error; the other call completes.
TEST(SerialOps, ThatRunEachOthersAreAnErrorAndNoDeadlock) {
  OpRegistry registry;
  OpManager manager(registry);
  te_fl_op_schema schema = testing::five_schema();
  schema.name = "test::other";
  Fake first("vendor.first"), second("vendor.second", schema);
  std::atomic<int> inside{0};
  const auto both = [&](const char* other) {
    return [&, other](const te_fl_context& ctx, const void*) -> te_fl_status {
      thread_local bool nested = false;
      if (nested) return TE_FL_OK;
      ++inside;
      while (inside < 2) std::this_thread::yield();
      nested = true;
      testing::FiveCall call;
      const Status status = manager.call(other, &call.args);
      nested = false;
      if (!status.ok()) ctx.errors->write(ctx.errors->host, status.to_string().c_str());
      return status.to_c();
    };
  };
  first.run_body = both("test::other");
  second.run_body = both("test::five");
  for (Fake* fake : {&first, &second}) {
    fake->desc.flags &= ~uint32_t{TE_FL_OP_THREAD_SAFE};
    ASSERT_OK(registry.register_op(fake->desc, "test", "acme"));
  }
  for (int round = 0; round < 20; ++round) {
    inside = 0;
    Status status[2];
    std::thread threads[2];
    for (int t = 0; t < 2; ++t) {
      threads[t] = std::thread([&, t] {
        testing::FiveCall call;
        status[t] = manager.call(t == 0 ? "test::five" : "test::other", &call.args);
      });
    }
    for (std::thread& t : threads) t.join();
    ASSERT_NE(status[0].ok(), status[1].ok()) << "one goes on, and one is refused";
    EXPECT_FAILS(status[status[0].ok() ? 1 : 0], kBusy, "rule R13");
  }
}

// A second scratch is allocated only for a thread that would otherwise wait; consecutive ops share
// one scratch.
TEST_F(NestedOps, OpsOneAfterTheOtherHaveOneScratch) {
  std::atomic<const void*> seen{nullptr};
  native.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    const void* before = seen.exchange(ctx.workspace);
    return before == nullptr || before == ctx.workspace ? TE_FL_OK : TE_FL_INTERNAL;
  };
  for (int i = 0; i < 3; ++i) ASSERT_OK(run(op, nullptr));
  ASSERT_OK(std::async(std::launch::async, [&] { return run(op, nullptr); }).get());
}

}  // namespace
}  // namespace te_fl
