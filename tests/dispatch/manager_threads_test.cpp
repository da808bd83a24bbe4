// Threads use OpManagers and staging buffers while other threads create and destroy devices,
// streams and OpManagers.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "core/device/current_stream.hpp"
#include "core/device/device_list.hpp"
#include "dispatch/staging/staging_pool.hpp"
#include "registry/implementation.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/plain_device.hpp"
#include "support/threads.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveArgs;
using testing::FiveCall;
using testing::PlainDevice;
using testing::together;

// The destructor of an OpManager waits while another thread notifies all OpManagers of a device's
// removal. Each OpManager has scratch memory on a device of its own.
TEST(ManagerThreads, ManagersComeAndGoWhileAllAreNotifiedOfAChange) {
  OpRegistry first;
  const OpManager stays(first);  // installs the hooks that notify OpManagers
  std::atomic<bool> done{false};
  std::thread telling([&] {
    const Device absent{TE_FL_DEVICE_EXT, 77, devices::intern_provider("relay")};
    char stream = 0;
    while (!done.load(std::memory_order_relaxed)) {
      EXPECT_EQ(core::held_on(absent), 0);
      core::leave_device(absent);
      core::g_stream_goes.load()(absent, &stream);
      registry::g_stream_state_goes.load()(UINT64_MAX);
    }
  });
  const auto use_one = [](int32_t index) {
    return [index](int) {
      PlainDevice plain("relay", index);
      const Result<Device> device = devices::add(&plain.desc);
      ASSERT_OK(device);
      {
        OpRegistry registry;
        OpManager manager(registry);
        Fake fake("vendor.relay");
        fake.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
        fake.desc.provider = "relay";
        fake.desc.workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
          *bytes = 512;
          return te_fl_status{TE_FL_OK};
        };
        ASSERT_OK(registry.register_op(fake.desc, "test", "relay"));
        const Tensor in = Tensor::zeros({4}, DType::kF32, *device).value();
        const Tensor out = Tensor::zeros({4}, DType::kF32, *device).value();
        FiveArgs args;
        args.a = args.b = args.c = args.d = in.c();
        args.out = out.c();
        EXPECT_OK(manager.call("test::five", &args));
      }
      EXPECT_OK(devices::remove(*device));
    };
  };
  together(100, {use_one(0), use_one(1)});
  done = true;
  telling.join();
}

// Two threads make calls while a third resets and reads the usage counters.
TEST(ManagerThreads, CountCallsWhileTheCountsAreReset) {
  OpRegistry registry;
  OpManager manager(registry);
  Fake fake("default.counted");
  ASSERT_OK(registry.register_op(fake.desc));
  const OpId op = *registry.find("test::five");
  constexpr int kCalls = 200;
  const auto call = [&](int) {
    FiveCall five;
    EXPECT_OK(manager.call(op, &five.args));
  };
  const auto read = [&](int) {
    for (const OpUsage& use : manager.usage()) EXPECT_LE(use.calls, 2u * kCalls);
    manager.reset_usage();
  };
  together(kCalls, {call, call, read, read});
  manager.reset_usage();
  FiveCall five;
  EXPECT_OK(manager.call(op, &five.args));
  ASSERT_EQ(manager.usage().size(), 1u);
  EXPECT_EQ(manager.usage()[0].calls, 1u);
}

TEST(ManagerThreads, ShareStagingBuffers) {
  dispatch::StagingPool pool;
  const Device host;
  const auto use_one = [&](int round) {
    Result<dispatch::StagingPool::Block> block = pool.acquire(host, 1000 + 70000u * (round % 5));
    ASSERT_OK(block);
    std::memset(block->data(), round, 1000);
  };
  together(200, {use_one, use_one, [&](int) { EXPECT_GE(pool.held(host), 0); },
                 [&](int) { pool.release(host); }});
  pool.release(host);
  EXPECT_EQ(pool.held(host), 0);
}

}  // namespace
}  // namespace te_fl
