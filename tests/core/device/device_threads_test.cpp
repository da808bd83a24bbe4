// Threads that use devices together: the device list, streams, events, memory and allocators.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "core/device/allocations.hpp"
#include "core/device/current_stream.hpp"
#include "core/device/device_list.hpp"
#include "core/device/installed_allocators.hpp"
#include "support/expect.hpp"
#include "support/plain_device.hpp"
#include "support/threads.hpp"
#include "te_fl/log.hpp"
#include "te_fl/memory.hpp"

namespace te_fl {
namespace {

using testing::PlainDevice;
using testing::together;

constexpr int kRounds = 100;

TEST(DeviceThreads, AddAndRemoveDevicesOfTheirOwn) {
  const auto come_and_go = [](int32_t index) {
    return [index](int round) {
      PlainDevice plain("relay", index);
      const Result<Device> device = devices::add(&plain.desc);
      ASSERT_OK(device);
      EXPECT_OK(devices::find(*device));
      if (round % 2 == 0) {
        EXPECT_OK(devices::remove(*device));
      } else {
        core::bar_device(*device);
        EXPECT_OK(core::retire_device(*device, nullptr));
      }
      EXPECT_FALSE(devices::find(*device).ok());
    };
  };
  together(kRounds, {come_and_go(0), come_and_go(1), come_and_go(2)});
}

void refuse_index_9(const Device& device) {
  if (device.index == 9) throw std::bad_alloc();
}

// If the on_added hook throws, the new device is not registered, even while other threads add and
// remove devices.
TEST(DeviceThreads, ADeviceThatCannotBeReportedIsAbsent) {
  auto& added = core::g_device_hooks.on_added;
  const auto before = added.exchange(&refuse_index_9);
  PlainDevice refused("relay", 9);
  const auto come_and_go = [](int32_t index) {
    return [index](int) {
      PlainDevice plain("relay", index);
      const Result<Device> device = devices::add(&plain.desc);
      ASSERT_OK(device);
      EXPECT_OK(devices::remove(*device));
    };
  };
  together(2 * kRounds,
           {[&](int) { EXPECT_THROW((void)devices::add(&refused.desc), std::bad_alloc); },
            come_and_go(1), come_and_go(2), come_and_go(3)});
  added.store(before);
  EXPECT_FALSE(devices::find({TE_FL_DEVICE_EXT, 9, devices::intern_provider("relay")}).ok());
}

TEST(DeviceThreads, NameProviders) {
  const uint32_t known = devices::intern_provider("relay");
  const auto name = [](int round) {
    const std::string name = "relay" + std::to_string(round);
    EXPECT_EQ(devices::intern_provider(name), devices::intern_provider(name));
  };
  together(kRounds, {name, name, [&](int) { EXPECT_EQ(devices::provider_name(known), "relay"); }});
}

// Runs each function on a thread of its own, on objects created before.
TEST(DeviceThreads, MakeAndUseStreamsAndEvents) {
  PlainDevice plain("relay");
  const Device device = devices::add(&plain.desc).value();
  const log::Level level = log::level();
  log::set_level(log::Level::kOff);  // for what is no stream
  std::vector<void*> made(kRounds), events(kRounds), ended(kRounds);
  for (void*& event : ended) event = devices::create_event(device, true).value();
  std::array<char, 2 * kRounds> others{};  // addresses that serve as handles of a framework's
                                           // streams
  char known_one = 0, no_stream = 0;
  void* const stream = devices::create_stream(device).value();
  void* const recorded = devices::create_event(device, true).value();
  void* const unrecorded = devices::create_event(device, true).value();
  EXPECT_OK(devices::record_event(device, recorded));
  const core::StreamRef known = core::stream_record(device, &known_one);
  const auto come_and_go = [&](int) {
    devices::destroy_stream(device, devices::create_stream(device).value());
  };
  together(
      kRounds,
      {come_and_go, come_and_go,
       [&](int i) { made[static_cast<size_t>(i)] = devices::create_stream(device).value(); },
       [&](int) { devices::destroy_stream(device, &no_stream); },
       [&](int) { EXPECT_EQ(core::StreamUse(device, stream).get(), stream); },
       [&](int) { EXPECT_TRUE(core::is_own_stream(device, stream)); },
       [&](int) { EXPECT_EQ(core::stream_record(device, &known_one), known); },
       [&](int i) {
         EXPECT_NE(core::stream_record(device, &others[static_cast<size_t>(i)]), nullptr);
       },
       [&](int i) {
         char& other = others[static_cast<size_t>(kRounds + i)];
         EXPECT_OK(devices::retire_stream(device, &other));
       },
       [&](int i) { events[static_cast<size_t>(i)] = devices::create_event(device, true).value(); },
       [&](int i) { devices::destroy_event(device, ended[static_cast<size_t>(i)]); },
       [&](int) { EXPECT_OK(devices::record_event(device, recorded)); },
       [&](int) { EXPECT_OK(devices::elapsed_time(device, recorded, recorded)); },
       [&](int) { EXPECT_FALSE(devices::elapsed_time(device, recorded, unrecorded).ok()); }});
  for (void* one : made) devices::destroy_stream(device, one);
  for (void* one : events) devices::destroy_event(device, one);
  for (void* one : {recorded, unrecorded}) devices::destroy_event(device, one);
  devices::destroy_stream(device, stream);
  log::set_level(level);
  EXPECT_OK(devices::remove(device));
}

// Runs each function on a thread of its own. The addresses have no memory behind them, because the
// memory account never dereferences them.
TEST(DeviceThreads, ShareTheAccountOfMemory) {
  PlainDevice plain("relay");
  const Device device = devices::add(&plain.desc).value();
  const auto address = [](int i) {
    return reinterpret_cast<void*>(uintptr_t{4096} * static_cast<uintptr_t>(1 + i));
  };
  together(kRounds,
           {[&](int i) { core::note_allocation(device, address(i), 256); },
            [&](int i) { core::forget_allocation(device, address(i)); },
            [&](int) { EXPECT_OK(devices::memory_account(device)); },
            [&](int) { core::largest_allocations(device); },
            [&](int i) { EXPECT_OK(devices::watch_memory(device, i % 2 == 0 ? 256 : 1024)); }});
  for (int i = 0; i < kRounds; ++i) core::forget_allocation(device, address(i));
  EXPECT_EQ(devices::memory_account(device)->bytes, 0u);
  EXPECT_OK(devices::remove(device));
}

TEST(DeviceThreads, AllocateWhileAllocatorsComeAndGo) {
  PlainDevice plain("relay");
  plain.api.check_pointer = [](void*, const void*, size_t, const te_fl_error_sink*) {
    return te_fl_status{TE_FL_OK};
  };
  const Device device = devices::add(&plain.desc).value();
  te_fl_allocator api;
  api.name = "framework";
  api.self = &plain;
  api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                    const te_fl_error_sink* errors) {
    return static_cast<PlainDevice*>(self)->api.allocate(self, memory, out, errors);
  };
  api.free = [](void* self, void* data, const te_fl_error_sink* errors) {
    return static_cast<PlainDevice*>(self)->api.free(self, data, 0, nullptr, errors);
  };
  api.record_stream = [](void*, void*, void*, const te_fl_error_sink*) {
    return te_fl_status{TE_FL_OK};
  };
  const auto use_memory = [device](int) {
    const Result<void*> data = devices::allocate(device, 256);
    ASSERT_OK(data);
    devices::free(device, *data);
  };
  EXPECT_OK(devices::install_allocator(device, &api));
  together(kRounds, {use_memory, use_memory,
                     [&](int) { EXPECT_OK(devices::install_allocator(device, &api)); },
                     [&](int) { EXPECT_NE(core::find_allocator(device), nullptr); }});
  EXPECT_OK(devices::install_allocator(device, nullptr));
  EXPECT_EQ(devices::live_objects(device), 0);
  EXPECT_OK(devices::remove(device));
}

}  // namespace
}  // namespace te_fl
