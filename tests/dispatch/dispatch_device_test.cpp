// Dispatch on a device: architecture, scratch, capture, synchronisation, device loss. The device is
// host memory under another name.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "core/device/device_list.hpp"
#include "registry/plan_cache.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/environment.hpp"

namespace {

// Called once, after this thread's next unlock of a mutex.
thread_local std::function<void()> t_after_unlock;

}  // namespace

// The linker's --wrap option replaces pthread_mutex_unlock by these functions in this program.
extern "C" int __real_pthread_mutex_unlock(pthread_mutex_t* mutex);
extern "C" int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  const int result = __real_pthread_mutex_unlock(mutex);
  if (t_after_unlock) std::exchange(t_after_unlock, nullptr)();
  return result;
}

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveCall;

struct FakeDevice {
  uint32_t arch = 80;
  bool capturing = false;
  int synchronised = 0;
  te_fl_status sync_status = TE_FL_OK;
  std::map<void*, size_t> blocks;
  te_fl_device_api api{};
  te_fl_device_desc desc{};

  FakeDevice() {
    api.struct_size = sizeof api;
    api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink*) -> te_fl_status {
      if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
      const size_t bytes = memory->bytes;
      *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
      static_cast<FakeDevice*>(self)->blocks[*out] = bytes;
      return TE_FL_OK;
    };
    api.free = [](void* self, void* data, uint32_t, void*,
                  const te_fl_error_sink*) -> te_fl_status {
      EXPECT_EQ(static_cast<FakeDevice*>(self)->blocks.erase(data), 1u);
      std::free(data);
      return TE_FL_OK;
    };
    api.copy = [](void*, void* dst, const void* src, size_t bytes, uint32_t, void*,
                  const te_fl_error_sink*) -> te_fl_status {
      std::memcpy(dst, src, bytes);
      return TE_FL_OK;
    };
    api.fill = [](void*, void* dst, uint8_t value, size_t bytes, void*,
                  const te_fl_error_sink*) -> te_fl_status {
      std::memset(dst, value, bytes);
      return TE_FL_OK;
    };
    api.synchronize = [](void* self, void*, const te_fl_error_sink* errors) -> te_fl_status {
      auto* d = static_cast<FakeDevice*>(self);
      ++d->synchronised;
      if (d->sync_status != TE_FL_OK) errors->write(errors->host, "illegal address");
      return d->sync_status;
    };
    api.is_capturing = [](void* self, void*, int32_t* capturing,
                          const te_fl_error_sink*) -> te_fl_status {
      *capturing = static_cast<FakeDevice*>(self)->capturing ? 1 : 0;
      return TE_FL_OK;
    };
    api.properties = [](void* self, te_fl_device_props* props,
                        const te_fl_error_sink*) -> te_fl_status {
      props->arch = static_cast<FakeDevice*>(self)->arch;
      return TE_FL_OK;
    };
    desc.struct_size = sizeof desc;
    desc.device = {TE_FL_DEVICE_CUDA, 0};
    desc.provider = "fake";
    desc.self = this;
    desc.api = &api;
  }
};

class OnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto added = devices::add(&fake.desc);
    ASSERT_OK(added);
    device = *added;
    for (Fake* f : {&native, &host}) f->desc.priority = 100;
    native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_CUDA;
    native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
    for (Tensor& t : tensors) t = Tensor::empty({2, 3}, DType::kF32, device).value();
    args.a = tensors[0];
    args.b = tensors[1];
    args.c = tensors[2];
    args.d = tensors[3];
    args.out = tensors[4];
  }
  void TearDown() override {
    for (Tensor& t : tensors) t = Tensor();
    ASSERT_OK(devices::remove(device));
    EXPECT_TRUE(fake.blocks.empty());
  }
  void add(Fake& f) {
    ASSERT_OK(registry.register_op(f.desc));
    op = *registry.find("test::five");
  }
  Status call(void* stream = nullptr) {
    CallOptions options;
    options.stream = stream;
    return manager.call(op, &args, options);
  }

  FakeDevice fake;
  Device device;
  OpRegistry registry;
  OpManager manager{registry};
  Fake native{"vendor.native"}, host{"default.host"};
  Tensor tensors[5];
  testing::FiveArgs args;
  OpId op;
};

TEST_F(OnDevice, ImplementationsOfOtherDevicesAreRefused) {
  host.desc.device_types = uint64_t{1} << TE_FL_DEVICE_OPENCL;
  add(host);
  EXPECT_FAILS(call(), kUnsupported, "the tensors are on cuda:0, it supports opencl");
  add(native);
  ASSERT_OK(call());
  EXPECT_EQ(native.runs.load(), 1);
  EXPECT_EQ(host.runs.load(), 0);
}

TEST_F(OnDevice, OlderArchitecturesAreRefused) {
  native.desc.min_arch = 90;
  add(native);
  EXPECT_FAILS(call(), kUnsupported, "it needs architecture 90 or newer, cuda:0 is 80");
  // The device is replaced by a newer one. Its provider announces the replacement, and the next
  // call must use the new architecture.
  fake.arch = 90;
  core::g_device_hooks.on_added.load()(device);
  ASSERT_OK(call());
}

TEST_F(OnDevice, TheContextNamesDeviceAndStream) {
  add(native);
  te_fl_context seen{};
  native.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    seen = ctx;
    return TE_FL_OK;
  };
  int stream = 0;
  ASSERT_OK(call(&stream));
  EXPECT_EQ(seen.device.type, TE_FL_DEVICE_CUDA);
  EXPECT_EQ(seen.stream, &stream);
  EXPECT_EQ(seen.flags, 0u);
}

// Scratch belongs to te-fl: it does not block the removal of a device, and a refused removal does
// not free it.
TEST_F(OnDevice, ARemovalThatIsRefusedCountsOnlyWhatIsTheUsersAndFreesNothing) {
  native.desc.workspace = [](void*, const te_fl_context*, const void*,
                             size_t* bytes) -> te_fl_status {
    *bytes = 512;
    return TE_FL_OK;
  };
  add(native);
  ASSERT_OK(call());
  ASSERT_EQ(fake.blocks.size(), 6u);
  EXPECT_FAILS(devices::remove(device), kBusy, "has 5 live allocations, streams or events");
  EXPECT_EQ(fake.blocks.size(), 6u);
  EXPECT_OK(call());
}

TEST_F(OnDevice, ScratchIsOnePerStream) {
  static size_t wanted;
  wanted = 1000;
  native.desc.workspace = [](void*, const te_fl_context*, const void*,
                             size_t* bytes) -> te_fl_status {
    *bytes = wanted;
    return TE_FL_OK;
  };
  std::vector<void*> blocks;
  native.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    EXPECT_EQ(ctx.workspace_bytes, wanted);
    EXPECT_TRUE(fake.blocks.contains(ctx.workspace));
    EXPECT_GE(fake.blocks[ctx.workspace], wanted);
    blocks.push_back(ctx.workspace);
    return TE_FL_OK;
  };
  add(native);
  int one = 0, two = 0;
  ASSERT_OK(call(&one));
  ASSERT_OK(call(&two));
  ASSERT_OK(call(&one));
  EXPECT_NE(blocks[0], blocks[1]);
  EXPECT_EQ(blocks[0], blocks[2]);
  wanted = 5000;
  ASSERT_OK(call(&one));  // the scratch has grown, and the old block is freed
  EXPECT_FALSE(fake.blocks.contains(blocks[0]) && blocks[3] != blocks[0]);
}

TEST_F(OnDevice, ValuesAreToBeLookedAtUnderValidate) {
  static int made;
  made = 0;
  native.desc.prepare = [](void*, const te_fl_context*, const void*, void** plan) -> te_fl_status {
    *plan = &++made;
    return TE_FL_OK;
  };
  native.desc.destroy_plan = [](void*, void*) {};
  uint32_t flags = 0;
  native.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    flags = ctx.flags;
    return TE_FL_OK;
  };
  add(native);
  ASSERT_OK(call());
  EXPECT_EQ(flags, 0u);
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  ASSERT_OK(call());
  EXPECT_EQ(flags, uint32_t{TE_FL_CALL_VALIDATE});
  fake.capturing = true;
  ASSERT_OK(call());
  EXPECT_EQ(flags, uint32_t{TE_FL_CALL_CAPTURING}) << "nothing can be waited for in a capture";
  fake.capturing = false;
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
  ASSERT_OK(call());
  EXPECT_EQ(flags, 0u);
  EXPECT_EQ(made, 1) << "one plan serves with and without";
}

// Rule R12: an invalid value in device memory is reported by the next synchronisation, and the
// device stays usable.
TEST_F(OnDevice, AMistakeInValuesIsReportedByTheWait) {
  add(native);
  ASSERT_OK(call());
  fake.sync_status = TE_FL_INVALID_ARGUMENT;
  const Status told = devices::synchronize(device);
  EXPECT_FAILS(told, kInvalidArgument, "synchronisation of cuda:0");
  EXPECT_LACKS(told.to_string(), "enqueued last") << "the device names the op itself";
  ASSERT_OK(environment::set("TE_FL_SYNC", "1"));
  EXPECT_FAILS(call(), kInvalidArgument,
               "op 'test::five' in 'vendor.native' failed after it was enqueued");
  ASSERT_OK(environment::unset("TE_FL_SYNC"));
  fake.sync_status = TE_FL_OK;
  ASSERT_OK(call());
  ASSERT_OK(devices::synchronize(device));
}

TEST_F(OnDevice, ACapturedCallFindsThePlanOfTheCallBefore) {
  static int made;
  made = 0;
  native.desc.prepare = [](void*, const te_fl_context*, const void*, void** plan) -> te_fl_status {
    *plan = &++made;
    return TE_FL_OK;
  };
  native.desc.destroy_plan = [](void*, void*) {};
  add(native);
  ASSERT_OK(call());
  fake.capturing = true;
  ASSERT_OK(call());
  EXPECT_EQ(made, 1);
}

TEST_F(OnDevice, WhatIsMissingInACaptureIsNotReplacedByAnotherImplementation) {
  Fake second{"vendor.second"};
  second.desc.device_types = uint64_t{1} << TE_FL_DEVICE_CUDA;
  second.desc.priority = 90;
  second.desc.flags |= TE_FL_OP_GRAPH_SAFE;
  native.desc.prepare = [](void*, const te_fl_context*, const void*, void** plan) -> te_fl_status {
    *plan = plan;
    return TE_FL_OK;
  };
  native.desc.destroy_plan = [](void*, void*) {};
  add(native);
  add(second);
  fake.capturing = true;
  const Status refused = call();
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  for (const char* part : {"test::five", "vendor.native", "its plan for these shapes",
                           "run the op once with the same shapes before capturing"}) {
    EXPECT_HAS(refused.to_string(), part);
  }
  EXPECT_EQ(second.runs.load(), 0);
  fake.capturing = false;
  ASSERT_OK(call());
  fake.capturing = true;
  ASSERT_OK(call());
  EXPECT_EQ(native.runs.load(), 2);
}

// An implementation that makes one plan for each number of rows.
class PlansOnDevice : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    destroyed.clear();
    native.desc.prepare = [](void*, const te_fl_context*, const void* args,
                             void** plan) -> te_fl_status {
      *plan = new int64_t(static_cast<const testing::FiveArgs*>(args)->a->dl.shape[0]);
      return TE_FL_OK;
    };
    native.desc.destroy_plan = [](void*, void* plan) {
      destroyed.push_back(*static_cast<int64_t*>(plan));
      delete static_cast<int64_t*>(plan);
    };
  }
  Status call_with(int64_t rows) {
    Tensor in = Tensor::empty({rows, 3}, DType::kF32, device).value();
    Tensor out = Tensor::empty({rows, 3}, DType::kF32, device).value();
    testing::FiveArgs other;
    other.a = other.b = other.c = other.d = in;
    other.out = out;
    return manager.call(op, &other);
  }
  // Makes more plans than the cache keeps, each for a new call.
  void make_others() {
    for (int64_t rows = 3; rows < kMany; ++rows) ASSERT_OK(call_with(rows));
  }
  static bool is_destroyed(int64_t rows) {
    return std::find(destroyed.begin(), destroyed.end(), rows) != destroyed.end();
  }

  static constexpr int64_t kMany = registry::PlanCache::kMaxPlans + 340;
  inline static std::vector<int64_t> destroyed;
};

TEST_F(PlansOnDevice, OfGraphsAreKept) {
  add(native);
  ASSERT_OK(call_with(1));
  ASSERT_OK(call_with(2));
  fake.capturing = true;
  ASSERT_OK(call_with(1));
  fake.capturing = false;
  make_others();
  EXPECT_TRUE(is_destroyed(2));
  EXPECT_FALSE(is_destroyed(1));
  ASSERT_OK(registry.unregister_op("test::five", "vendor.native"));
  EXPECT_TRUE(is_destroyed(1));
}

TEST_F(PlansOnDevice, OfGraphsAreKeptFromTheMomentThatTheyAreFound) {
  bool armed = false, between = false;
  const auto drop_plans = [&] {
    fake.capturing = false;
    std::thread([&] { make_others(); }).join();
    fake.capturing = true;
    between = true;
  };
  // supports() runs after dispatch has chosen the implementation; the next lock taken is the plan
  // cache's.
  native.with_supports().supports_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    if (std::exchange(armed, false)) t_after_unlock = drop_plans;
    return TE_FL_OK;
  };
  add(native);
  ASSERT_OK(call_with(1));
  fake.capturing = true;
  armed = true;
  ASSERT_OK(call_with(1));
  fake.capturing = false;
  ASSERT_TRUE(between);
  ASSERT_OK(call_with(kMany));  // this call destroys the plans that were evicted during the capture
  EXPECT_TRUE(is_destroyed(3));
  EXPECT_FALSE(is_destroyed(1)) << "the graph holds it";
}

TEST_F(OnDevice, CapturingNeedsAGraphSafeImplementation) {
  native.desc.flags &= ~uint32_t{TE_FL_OP_GRAPH_SAFE};
  add(native);
  ASSERT_OK(call());
  fake.capturing = true;
  EXPECT_FAILS(call(), kUnsupported, "being captured into a graph");
  const auto handle = [&] {
    fake.capturing = false;
    auto h = manager.prepare(op, &args);
    EXPECT_OK(h);
    return *h;
  }();
  ASSERT_OK(handle.call(&args));
  ASSERT_OK(handle.call(&args));
  fake.capturing = true;
  EXPECT_FAILS(handle.call(&args), kUnsupported, "being captured into a graph");
}

TEST_F(OnDevice, ALostDeviceIsRetired) {
  add(native);
  ASSERT_OK(call());
  native.run_status = TE_FL_DEVICE_LOST;
  native.run_text = "the device fell off the bus";
  EXPECT_FAILS(call(), kDeviceLost, "fell off the bus");
  native.run_status = TE_FL_OK;
  const int before = native.runs;
  EXPECT_FAILS(call(), kDeviceLost, "device cuda:0 is lost since implementation 'vendor.native'");
  EXPECT_FAILS(call(), kDeviceLost, "fell off the bus");
  EXPECT_EQ(native.runs.load(), before);
  add(host);
  FiveCall on_host;
  ASSERT_OK(manager.call(op, &on_host.args));  // other devices are not affected
  core::g_device_hooks.on_added.load()(device);
  ASSERT_OK(call());
}

TEST_F(OnDevice, TheHostIsNeverLost) {
  host.run_status = TE_FL_DEVICE_LOST;
  add(host);
  FiveCall on_host;
  EXPECT_FAILS(manager.call(op, &on_host.args), kDeviceLost, "default.host");
  host.run_status = TE_FL_OK;
  ASSERT_OK(manager.call(op, &on_host.args));
}

TEST_F(OnDevice, SyncNamesTheOpThatFailed) {
  add(native);
  ASSERT_OK(call());
  EXPECT_EQ(fake.synchronised, 0);
  ASSERT_OK(environment::set("TE_FL_SYNC", "1"));
  ASSERT_OK(call());
  EXPECT_EQ(fake.synchronised, 1);
  fake.sync_status = TE_FL_INTERNAL;
  EXPECT_FAILS(call(), kInternal,
               "op 'test::five' in 'vendor.native' failed after it was enqueued");
  EXPECT_FAILS(call(), kInternal, "illegal address");
  fake.sync_status = TE_FL_OK;
  ASSERT_OK(environment::unset("TE_FL_SYNC"));
  const int before = fake.synchronised;
  ASSERT_OK(call());
  EXPECT_EQ(fake.synchronised, before);
}

}  // namespace
}  // namespace te_fl
