#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "core/device/installed_allocators.hpp"
#include "te_fl/device.hpp"

namespace te_fl::core {

// An allocator that a program installed for a device (R25). It is kept by the list of those that
// are installed and by every block of its memory, and destroyed with the last of them. Its
// functions take no lock and may be called from any thread that is inside the device.
class Allocator {
 public:
  // A block that takes longer than `slow` is worth a warning.
  Allocator(const Device& device, const te_fl_allocator& api,
            std::chrono::nanoseconds slow = std::chrono::seconds(1));
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // Memory that is aligned as asked and of this device, or an error that names the allocator.
  Result<void*> allocate(const te_fl_memory_desc& memory) const;
  // Work on `stream` may still use the memory, and so may work on the stream that it was allocated
  // for.
  void free(void* data, void* allocated_on, void* stream) const noexcept;
  // False if it has nothing to give back. A failure is logged once: the allocation that follows
  // tells the rest.
  bool trim(uint64_t bytes) const noexcept;
  void retire_stream(void* stream) const noexcept;
  // "allocator 'torch' of cuda:0"
  const std::string& text() const noexcept { return text_; }

 private:
  Status check_given(const te_fl_memory_desc& memory, const void* data) const;
  void give_back(void* data) const noexcept;

  const Device device_;
  const te_fl_allocator api_;  // whose name is not kept
  const std::string text_;
  const std::chrono::nanoseconds slow_;
  mutable std::atomic<int> checked_{0};  // blocks that check_pointer found right
};

}  // namespace te_fl::core
