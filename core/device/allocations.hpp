#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/device/installed_allocators.hpp"
#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"

// Keeps account of the memory that te-fl holds on each device (not on the host), so that an
// allocation that fails can say who has it.
namespace te_fl::core {

struct AllocationRecord;

// Says, until it is destroyed, what the calling thread allocates for: a tensor, or something with a
// name.
class AllocationUse {
 public:
  static constexpr size_t kMaxRank = 8;  // extents of a shape beyond it are left out
  explicit AllocationUse(const char* name) noexcept : AllocationUse(name, DType::kU8, {}) {}
  AllocationUse(DType dtype, std::span<const int64_t> shape) noexcept
      : AllocationUse(nullptr, dtype, shape) {}
  ~AllocationUse();
  AllocationUse(const AllocationUse&) = delete;
  AllocationUse& operator=(const AllocationUse&) = delete;

 private:
  friend struct AllocationRecord;
  AllocationUse(const char* name, DType dtype, std::span<const int64_t> shape) noexcept;
  const char* name_;  // null: a tensor
  DType dtype_;
  std::span<const int64_t> shape_;
  const AllocationUse* outer_;
};

// The allocator that gave a block of memory, and the stream it gave it for; a null allocator stands
// for the device itself.
struct Giver {
  AllocatorRef allocator;
  void* stream = nullptr;
};

void note_allocation(const Device& device, void* data, size_t bytes) noexcept;
// As note_allocation(), for memory that goes back to an allocator: an error, and nothing is noted,
// if the memory is in use already or the host has none left for the note.
Status note_given(const Device& device, void* data, size_t bytes, Giver giver);
Giver forget_allocation(const Device& device, void* data) noexcept;

// "te-fl holds 12 allocations of 3.2 GiB on cuda:0, the largest: 4 x 512 MiB for bf16[8192,32768],
// ..."; empty if it holds none.
std::string largest_allocations(const Device& device, int count = 5);

}  // namespace te_fl::core
