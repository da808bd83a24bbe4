#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/device/installed_allocators.hpp"
#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"

// Accounts for the memory that te-fl holds on each device except the host, so that an out-of-memory
// error can list what holds it.
namespace te_fl::core {

struct AllocationRecord;

// While this object lives, allocations of the calling thread are recorded with its purpose: a
// tensor's dtype and shape, or a name.
class AllocationUse {
 public:
  static constexpr size_t kMaxRank = 8;  // further extents of a shape are left out
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

// The installed allocator that a block came from, and the stream it was allocated for. A null
// allocator means the device's own function.
struct Giver {
  AllocatorRef allocator;
  void* stream = nullptr;
};

void note_allocation(const Device& device, void* data, size_t bytes) noexcept;
// Like note_allocation(), for memory of an installed allocator. Returns an error and records
// nothing if the memory overlaps a live block, or if the host has no memory for the record.
Status note_given(const Device& device, void* data, size_t bytes, Giver giver);
Giver forget_allocation(const Device& device, void* data) noexcept;

// A summary for an out-of-memory error, with the `count` largest purposes: "te-fl holds 12
// allocations of 3.2 GiB on cuda:0, the largest: 4 x 512 MiB for bf16[8192,32768], ...". Empty if
// te-fl holds nothing there.
std::string largest_allocations(const Device& device, int count = 5);

}  // namespace te_fl::core
