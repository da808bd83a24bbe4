#pragma once

#include <cstddef>
#include <cstdint>

#include "te_fl/status.hpp"

namespace te_fl::conformance {

// Host memory that ends where a page begins which nobody may read or write, or begins where one
// ends, so that whoever goes past that side is stopped at once.
class GuardedMemory {
 public:
  // The last byte of `bytes` lies just before the guard page if `alignment` is 1; else the first
  // one lies at that alignment, and less than it is left between. `name` and the last
  // `tensor_bytes` of the memory are what explain_fault() speaks of.
  static te_fl::Result<GuardedMemory> make(size_t bytes, size_t alignment, const char* name,
                                           size_t tensor_bytes);
  // The first byte lies just behind the guard page, so that it has any alignment. `bytes` may be
  // more than the first `tensor_bytes`, of which explain_fault() speaks.
  static te_fl::Result<GuardedMemory> behind_guard(size_t bytes, const char* name,
                                                   size_t tensor_bytes);
  GuardedMemory(GuardedMemory&& other) noexcept;
  GuardedMemory& operator=(GuardedMemory&&) = delete;
  ~GuardedMemory();
  uint8_t* data() const { return data_; }

 private:
  GuardedMemory() = default;
  te_fl::Status map(size_t bytes);
  static te_fl::Status protect(uint8_t* guard);
  void remember(uint8_t* guard, const uint8_t* edge, bool before, const char* name, size_t bytes);
  uint8_t* mapping_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* guard_ = nullptr;
  uint8_t* data_ = nullptr;
};

// If a guard page has this address: "4 bytes behind the end of input, which has 68 bytes", or
// "before the start of", written into `text`. Async-signal-safe.
bool explain_fault(const void* address, char* text, size_t capacity) noexcept;

}  // namespace te_fl::conformance
