// A program's own allocator for a device (R25): te-fl's use of its memory, and errors of the
// allocator.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/settings.hpp"
#include "core/device/allocator.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "te_fl/memory.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

using testing::FarDevice;

// Simulates a framework's caching allocator: gets memory from the device and keeps freed blocks for
// reuse.
struct Framework {
  explicit Framework(FarDevice& far) : device(&far) {
    api.name = "framework";
    api.self = this;
    api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* errors) {
      return static_cast<Framework*>(self)->allocate(*memory, out, errors);
    };
    api.free = [](void* self, void* data, const te_fl_error_sink*) -> te_fl_status {
      auto& f = *static_cast<Framework*>(self);
      const std::lock_guard lock(f.mutex);
      f.kept.insert(*f.live.find(data));
      f.live.erase(data);
      return TE_FL_OK;
    };
    api.record_stream = [](void* self, void* data, void* stream,
                           const te_fl_error_sink*) -> te_fl_status {
      static_cast<Framework*>(self)->recorded.emplace_back(data, stream);
      return TE_FL_OK;
    };
    api.trim = [](void* self, uint64_t bytes, const te_fl_error_sink*) -> te_fl_status {
      auto& f = *static_cast<Framework*>(self);
      f.trimmed.push_back(bytes);
      f.give_back();
      return TE_FL_OK;
    };
    api.retire_stream = [](void* self, void* stream, const te_fl_error_sink*) -> te_fl_status {
      static_cast<Framework*>(self)->retired.push_back(stream);
      return TE_FL_OK;
    };
    api.destroy = [](void* self) { ++static_cast<Framework*>(self)->destroyed; };
  }
  ~Framework() { give_back(); }

  te_fl_status allocate(const te_fl_memory_desc& memory, void** out,
                        const te_fl_error_sink* errors) {
    if (on_allocate) on_allocate();
    if (gives != nullptr) {
      *out = gives;
      return TE_FL_OK;
    }
    const te_fl_status status = device->api.allocate(device, &memory, out, errors);
    if (status != TE_FL_OK) return status;
    const std::lock_guard lock(mutex);
    live[*out] = memory.bytes;
    *out = static_cast<char*>(*out) + shift;
    return TE_FL_OK;
  }
  void give_back() {
    for (const auto& [data, bytes] : kept) {
      device->api.free(device, data, TE_FL_MEMORY_DEVICE, nullptr, nullptr);
    }
    kept.clear();
    device->queues.drain();
  }

  FarDevice* device;
  te_fl_allocator api;
  std::mutex mutex;
  std::map<void*, size_t> live, kept;  // address -> size of blocks: live: in use; kept: freed into
                                       // the cache
  std::vector<std::pair<void*, void*>> recorded;
  std::vector<uint64_t> trimmed;
  std::vector<void*> retired;
  int destroyed = 0;
  void* gives = nullptr;  // allocate() returns this address
  std::ptrdiff_t shift = 0;
  std::function<void()> on_allocate;
};

class Allocators : public ::testing::Test {
 protected:
  static constexpr size_t kCapacity = size_t{1} << 20;

  Allocators() {
    for (FarDevice* d : {&far, &other}) {
      d->api.check_pointer = [](void* self, const void* data, size_t,
                                const te_fl_error_sink* errors) -> te_fl_status {
        if (static_cast<FarDevice*>(self)->owns(data)) return TE_FL_OK;
        errors->write(errors->host, "it is somebody else's");
        return TE_FL_INVALID_ARGUMENT;
      };
    }
    device = devices::add(&far.desc).value();
    other_device = devices::add(&other.desc).value();
    EXPECT_OK(devices::install_allocator(device, &framework.api));
  }
  ~Allocators() override {
    EXPECT_EQ(devices::live_objects(device), 0);
    EXPECT_EQ(framework.live.size(), 0u);
    EXPECT_OK(devices::remove(device));
    EXPECT_EQ(framework.destroyed, 1);  // the allocator is destroyed by now at the latest
    EXPECT_OK(devices::remove(other_device));
  }
  Status fails() { return devices::allocate(device, 4096).status(); }

  FarDevice far{0, kCapacity}, other{1, kCapacity};
  Framework framework{far};
  Device device, other_device;
};

TEST_F(Allocators, MemoryComesFromTheOneThatIsInstalled) {
  {
    const Tensor t = Tensor::zeros({4, 8}, DType::kF32, device).value();
    EXPECT_EQ(framework.live.count(t.raw_data()), 1u);
    EXPECT_EQ(devices::memory_account(device)->holders.at(0).use, "f32[4, 8]");
  }
  EXPECT_EQ(framework.live.size(), 0u);
  EXPECT_EQ(framework.kept.size(), 1u);
  EXPECT_EQ(framework.recorded.size(), 0u);
  // The other device has no allocator, and pinned memory does not come from the device's allocator.
  devices::free(other_device, devices::allocate(other_device, 64).value());
  devices::free_pinned(device, devices::allocate_pinned(device, 64).value());
  EXPECT_EQ(framework.kept.size(), 1u);
}

// A framework's allocator returns null, or one shared address, for 0 bytes; te-fl does not call it
// for them.
TEST_F(Allocators, NoAllocatorIsCalledForZeroBytes) {
  const Tensor first = Tensor::empty({0, 4}, DType::kF32, device).value();
  const Tensor second = Tensor::empty({0, 4}, DType::kF32, device).value();
  ASSERT_EQ(framework.live.size(), 2u);
  for (const auto& [data, bytes] : framework.live) EXPECT_EQ(bytes, 1u);
}

TEST_F(Allocators, MemoryIsFreedByWhoeverGaveIt) {
  void* const block = devices::allocate(device, 64).value();
  Framework second{far};
  ASSERT_OK(devices::install_allocator(device, &second.api));
  EXPECT_EQ(framework.destroyed, 0);  // the allocator's memory is still in use
  void* const by_second = devices::allocate(device, 64).value();
  ASSERT_OK(devices::install_allocator(device, nullptr));
  void* const own = devices::allocate(device, 64).value();
  EXPECT_EQ(framework.live.size() + second.live.size(), 2u);
  devices::free(device, own);
  devices::free(device, by_second);
  EXPECT_EQ(second.destroyed, 1);
  devices::free(device, block);
  EXPECT_EQ(framework.destroyed, 1);
  EXPECT_EQ(framework.live.size() + second.live.size(), 0u);
}

TEST_F(Allocators, AnotherStreamIsRecordedBeforeTheMemoryIsFreed) {
  void* const a = far.queues.make_stream();
  void* const b = far.queues.make_stream();
  devices::free(device, devices::allocate(device, 64, a).value(), a);
  EXPECT_EQ(framework.recorded.size(), 0u);
  void* const data = devices::allocate(device, 64, a).value();
  devices::free(device, data, b);
  ASSERT_EQ(framework.recorded.size(), 1u);
  EXPECT_EQ(framework.recorded[0], std::pair(data, b));
  ASSERT_OK(devices::retire_stream(device, a));
  EXPECT_EQ(framework.retired, std::vector<void*>{a});
  void* const own = devices::create_stream(device).value();
  devices::destroy_stream(device, own);
  EXPECT_EQ(framework.retired, (std::vector<void*>{a, own}));
}

TEST_F(Allocators, IsCalledToTrimBeforeAnAllocationFails) {
  const size_t most = kCapacity - 4096;
  devices::free(device, devices::allocate(device, most).value());
  ASSERT_EQ(framework.kept.size(), 1u);  // the cached block fills the device
  te_fl_memory_desc peer;
  peer.kind = TE_FL_MEMORY_PEER;
  peer.bytes = most;
  // Peer memory does not come from the allocator.
  void* const data = devices::allocate(device, peer).value();
  EXPECT_EQ(framework.trimmed, std::vector<uint64_t>{most});
  EXPECT_EQ(framework.live.size(), 0u);
  // Nothing is left to trim.
  const Status full = devices::allocate(device, most).status();
  EXPECT_FAILS(full, kOutOfMemory, "by allocator 'framework' of ext:far:0: the far device is full");
  EXPECT_HAS(full.message(), "te-fl holds 1 allocations");
  EXPECT_EQ(framework.trimmed.size(), 2u);
  devices::free(device, data, TE_FL_MEMORY_PEER);
  devices::free(device, devices::allocate(device, most).value());  // allocation works again
}

TEST_F(Allocators, WithoutTrimAnAllocationFailsAtOnce) {
  Framework plain{far};
  plain.api.trim = nullptr;
  ASSERT_OK(devices::install_allocator(device, &plain.api));
  EXPECT_FAILS(devices::allocate(device, 2 * kCapacity).status(), kOutOfMemory, "'framework'");
  ASSERT_OK(devices::install_allocator(device, nullptr));
}

TEST_F(Allocators, AFailureIsTheAllocationsOwn) {
  framework.on_allocate = [] { throw std::runtime_error("no more blocks"); };
  EXPECT_FAILS(fails(), kInternal, "an exception escaped (rule R5)");
  EXPECT_HAS(fails().message(), "allocator 'framework' of ext:far:0");
  EXPECT_HAS(fails().message(), "no more blocks");
  framework.on_allocate = nullptr;
  framework.api.allocate = [](void*, const te_fl_memory_desc*, void**,
                              const te_fl_error_sink* errors) -> te_fl_status {
    errors->write(errors->host, "the pool is closed");
    return TE_FL_FAILED_PRECONDITION;
  };
  ASSERT_OK(devices::install_allocator(device, &framework.api));
  EXPECT_FAILS(fails(), kFailedPrecondition, "the pool is closed");
  EXPECT_EQ(framework.trimmed.size(), 0u);
  framework.destroyed = 0;  // resets the counter, as the allocator was installed twice
}

TEST_F(Allocators, MemoryOfAnotherDeviceIsRefusedAndGivenBack) {
  framework.device = &other;
  EXPECT_FAILS(fails(), kInternal,
               "returned memory that is not ext:far:0's: it is somebody else's (rule R25)");
  EXPECT_EQ(framework.live.size(), 0u);
  framework.give_back();
  framework.device = &far;
}

TEST_F(Allocators, ALostDeviceSaysNothingOfItsMemory) {
  far.api.check_pointer = [](void*, const void*, size_t,
                             const te_fl_error_sink* errors) -> te_fl_status {
    errors->write(errors->host, "it fell off the bus");
    return TE_FL_DEVICE_LOST;
  };
  EXPECT_FAILS(fails(), kDeviceLost, "returned memory of its device cannot be checked");
  EXPECT_EQ(framework.live.size(), 0u);
  framework.give_back();
}

TEST_F(Allocators, AnAllocatorThatPassed256ChecksIsCheckedOnlyUnderValidate) {
  for (int i = 0; i < 255; ++i) devices::free(device, devices::allocate(device, 64).value());
  framework.give_back();
  framework.device = &other;
  EXPECT_FAILS(fails(), kInternal, "returned memory that is not ext:far:0's");
  framework.give_back();
  framework.device = &far;
  devices::free(device, devices::allocate(device, 64).value());
  framework.give_back();
  framework.device = &other;
  core::g_validate = true;
  EXPECT_FAILS(fails(), kInternal, "returned memory that is not ext:far:0's");
  core::g_validate = false;
  void* const unasked = devices::allocate(device, 64).value();
  devices::free(device, unasked);
  framework.give_back();
  framework.device = &far;
}

TEST_F(Allocators, WhatIsNoMemoryOfItsOwnIsRefused) {
  framework.api.allocate = [](void*, const te_fl_memory_desc*, void**,
                              const te_fl_error_sink*) -> te_fl_status { return TE_FL_OK; };
  Framework empty{far};
  empty.api.allocate = framework.api.allocate;
  ASSERT_OK(devices::install_allocator(device, &empty.api));
  EXPECT_FAILS(fails(), kInternal, "returned a null pointer without an error (rule R25)");
  Framework shifted{far};
  shifted.shift = 64;
  shifted.api.free = [](void* self, void* data, const te_fl_error_sink*) -> te_fl_status {
    auto& f = *static_cast<Framework*>(self);
    f.kept.insert(*f.live.find(static_cast<char*>(data) - f.shift));
    f.live.clear();
    return TE_FL_OK;
  };
  ASSERT_OK(devices::install_allocator(device, &shifted.api));
  EXPECT_FAILS(fails(), kInternal, "returned memory that is not aligned to 256 bytes");
  EXPECT_EQ(shifted.kept.size(), 1u);
  ASSERT_OK(devices::install_allocator(device, nullptr));
}

TEST_F(Allocators, MemoryInUseIsRefusedAndStaysItsOwners) {
  void* const data = devices::allocate(device, 64).value();
  framework.gives = data;
  EXPECT_FAILS(fails(), kInternal, "returned memory that is in use already (rule R25)");
  EXPECT_EQ(framework.live.count(data), 1u);
  devices::free(device, data);
}

TEST_F(Allocators, MemoryInsideABlockIsRefused) {
  auto* const data = static_cast<char*>(devices::allocate(device, 1024).value());
  framework.gives = data + 512;
  EXPECT_FAILS(fails(), kInternal, "returned memory that is in use already (rule R25)");
  devices::free(device, data);
}

// Another thread stays inside the allocator until this thread's call has completed.
TEST_F(Allocators, AThreadThatWaitsForASlowAllocatorBlocksNoOther) {
  std::mutex mutex;
  std::condition_variable changed;
  bool inside = false, done = false;
  framework.on_allocate = [&] {
    std::unique_lock lock(mutex);
    if (std::exchange(inside, true)) return;  // this is the second thread
    changed.notify_all();
    changed.wait(lock, [&] { return done; });
  };
  std::thread slow([&] { devices::free(device, devices::allocate(device, 64).value()); });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return inside; });
  }
  devices::free(device, devices::allocate(device, 64).value());
  devices::free(other_device, devices::allocate(other_device, 64).value());
  void* const stream = devices::create_stream(device).value();
  EXPECT_OK(devices::synchronize(device, stream));
  devices::destroy_stream(device, stream);
  EXPECT_EQ(devices::list().size(), 3u);
  {
    const std::lock_guard lock(mutex);
    done = true;
  }
  changed.notify_all();
  slow.join();
}

// A threshold below 0 makes every call slow, a huge one makes none slow, so the test needs no long
// wait.
TEST_F(Allocators, ASlowOneIsNamedOnce) {
  te_fl_allocator api = framework.api;
  api.destroy = nullptr;
  te_fl_memory_desc memory;
  memory.bytes = 4096;
  const auto log_text = [&](const char* name, std::chrono::nanoseconds slow) {
    api.name = name;
    const core::Allocator allocator(device, api, slow);
    ::testing::internal::CaptureStderr();
    const Result<void*> data = allocator.allocate(memory);
    EXPECT_OK(data);
    if (data.ok()) allocator.free(*data, nullptr, nullptr);
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string message = log_text("sleepy", std::chrono::nanoseconds(-1));
  EXPECT_HAS(message, "allocator 'sleepy' of ext:far:0 took more than");
  EXPECT_HAS(message, "4.0 KiB");
  EXPECT_EQ(log_text("sleepy", std::chrono::nanoseconds(-1)), "");
  EXPECT_EQ(log_text("brisk", std::chrono::hours(10000)), "");
}

TEST_F(Allocators, WhatCannotBeInstalledIsNamed) {
  const auto refused = [&](auto spoil) {
    te_fl_allocator api = framework.api;
    spoil(api);
    return devices::install_allocator(device, &api);
  };
  EXPECT_FAILS(refused([](auto& a) { a.struct_size = 8; }), kInvalidArgument, "struct_size 8");
  EXPECT_FAILS(refused([](auto& a) { a.struct_size = offsetof(te_fl_allocator, trim) + 4; }),
               kInvalidArgument, "a multiple of 8");
  EXPECT_FAILS(refused([](auto& a) { a.name = ""; }), kInvalidArgument, "has no name");
  EXPECT_FAILS(refused([](auto& a) { a.record_stream = nullptr; }), kInvalidArgument,
               "allocate, free and record_stream may not be NULL (rule R4)");
  EXPECT_FAILS(devices::install_allocator(Device{}, &framework.api), kUnsupported,
               "memory of cpu is the process's own");
  EXPECT_FAILS(devices::install_allocator(Device{TE_FL_DEVICE_EXT, 9, device.provider}, nullptr),
               kNotFound, "ext:far:9");
  EXPECT_EQ(framework.destroyed, 0);  // the working allocator is still installed
}

// The struct of an allocator built with the first header version ends after record_stream.
TEST_F(Allocators, AShorterStructIsTaken) {
  Framework first{far};
  first.api.struct_size = offsetof(te_fl_allocator, trim);
  ASSERT_OK(devices::install_allocator(device, &first.api));
  EXPECT_FAILS(devices::allocate(device, 2 * kCapacity).status(), kOutOfMemory, "'framework'");
  EXPECT_EQ(first.trimmed.size(), 0u);
  ASSERT_OK(devices::install_allocator(device, nullptr));
  EXPECT_EQ(first.destroyed, 0);
}

}  // namespace
}  // namespace te_fl
