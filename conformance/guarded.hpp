#pragma once

#include <cstddef>
#include <cstdint>

#include "te_fl/status.hpp"

namespace te_fl::conformance {

// Host memory next to an inaccessible page, either before or after it, so that an access beyond
// that side faults immediately.
class GuardedMemory {
 public:
  // Memory before a guard page. With `alignment` 1 the last of the `bytes` is directly before the
  // page. With another alignment the first byte is aligned, and the gap before the page is smaller
  // than `alignment`. explain_fault() uses `name` and the last `tensor_bytes` of the memory.
  static te_fl::Result<GuardedMemory> make(size_t bytes, size_t alignment, const char* name,
                                           size_t tensor_bytes);
  // Memory whose first byte is directly after the guard page; it therefore has any alignment.
  // `bytes` may exceed `tensor_bytes`, the size that explain_fault() describes.
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

// If the address is in a guard page, writes a description of the access into `text`, such as "4
// bytes behind the end of input, which has 68 bytes" or "... before the start of ...".
// Async-signal-safe.
bool explain_fault(const void* address, char* text, size_t capacity) noexcept;

}  // namespace te_fl::conformance
