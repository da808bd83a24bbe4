#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "te_fl/device.hpp"

namespace te_fl::core {

// One device that is there. Lives for ever, so that its address can be kept; `desc` is valid until
// the device has been removed.
struct DeviceEntry {
  Device device;
  const te_fl_device_desc* desc;
  std::string provider;

  DeviceEntry(Device d, const te_fl_device_desc* c, std::string p)
      : device(d), desc(c), provider(std::move(p)) {}

  int64_t live() const noexcept {
    const int64_t count = count_.load(std::memory_order_relaxed);
    return count < 0 ? 0 : count;
  }
  // Counts an object in. False if the device is being removed.
  bool acquire() noexcept {
    if (count_.fetch_add(1, std::memory_order_acq_rel) >= 0) return true;
    release();
    return false;
  }
  void release() noexcept { count_.fetch_sub(1, std::memory_order_acq_rel); }
  // Refuses objects from now on; false if there are some.
  bool close() noexcept {
    int64_t none = 0;
    return count_.compare_exchange_strong(none, INT64_MIN / 2, std::memory_order_acq_rel);
  }

 private:
  std::atomic<int64_t> count_{0};
};

// Lock-free. Null if there is no such device.
DeviceEntry* find_device(const Device& device) noexcept;

}  // namespace te_fl::core
