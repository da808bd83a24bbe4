#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "core/device/installed_allocators.hpp"
#include "te_fl/device.hpp"

namespace te_fl::core {

// An allocator that a program installed for a device (R25). The list of installed allocators and
// every block of its memory share ownership; the last of them destroys it. Its functions take no
// lock. They may be called from any thread that is inside the device.
class Allocator {
 public:
  // `slow`: an allocation that takes longer is logged as a warning.
  Allocator(const Device& device, const te_fl_allocator& api,
            std::chrono::nanoseconds slow = std::chrono::seconds(1));
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // Returns memory of this device with the requested alignment, or an error that names the
  // allocator.
  Result<void*> allocate(const te_fl_memory_desc& memory) const;
  // Frees memory while work on `stream` and on the stream it was allocated for may still use it.
  void free(void* data, void* allocated_on, void* stream) const noexcept;
  // Asks the allocator to return cached memory; false if it has none. A failure is logged once; the
  // allocation that is tried next reports an error of its own.
  bool trim(uint64_t bytes) const noexcept;
  void retire_stream(void* stream) const noexcept;
  // For messages: "allocator 'torch' of cuda:0".
  const std::string& text() const noexcept { return text_; }

 private:
  Status check_given(const te_fl_memory_desc& memory, const void* data) const;
  void give_back(void* data) const noexcept;

  const Device device_;
  const te_fl_allocator api_;  // its `name` pointer is not kept; text_ holds a copy
  const std::string text_;
  const std::chrono::nanoseconds slow_;
  mutable std::atomic<int> checked_{0};  // number of blocks that check_pointer has confirmed
};

}  // namespace te_fl::core
