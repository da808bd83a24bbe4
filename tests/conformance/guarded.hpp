#pragma once

#include <cstddef>
#include <cstdint>

#include "te_fl/status.hpp"

namespace te_fl::conformance {

// Host memory that ends where a page begins which nobody may read or write, so that whoever goes
// past its end is stopped at once.
class GuardedMemory {
 public:
  // The last byte of `bytes` lies just before the guard page if `alignment` is 1; else the first
  // one lies at that alignment, and less than it is left between. `name` and the last
  // `tensor_bytes` of the memory are what explain_fault() speaks of.
  static te_fl::Result<GuardedMemory> make(size_t bytes, size_t alignment, const char* name,
                                           size_t tensor_bytes);
  GuardedMemory(GuardedMemory&& other) noexcept;
  GuardedMemory& operator=(GuardedMemory&&) = delete;
  ~GuardedMemory();
  uint8_t* data() const { return data_; }

 private:
  GuardedMemory() = default;
  uint8_t* mapping_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* data_ = nullptr;
};

// If a guard page has this address: "4 bytes behind the end of input, which has 68 bytes", written
// into `text`. Async-signal-safe.
bool explain_fault(const void* address, char* text, size_t capacity) noexcept;

}  // namespace te_fl::conformance
