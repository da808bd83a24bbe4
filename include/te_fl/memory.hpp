#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

// Accounts for the memory that te-fl holds on a device. Memory held by others (framework tensors
// that te-fl wraps, a library's own memory) is not counted, nor is memory that the device's
// provider caches for reuse.
namespace te_fl::devices {

// Allocations of one size with one use.
struct MemoryHolder {
  // The tensor's dtype and shape, "bf16[8192,4096]", or a name such as "workspace".
  std::string use;
  size_t count = 0;
  size_t bytes = 0;  // total of all these allocations
};

struct MemoryAccount {
  size_t bytes = 0;       // held now
  size_t peak_bytes = 0;  // maximum held since the start, or since watch_memory()
  // The current holders of memory, the largest first.
  std::vector<MemoryHolder> holders;
  // The holders at the moment when the held bytes first reached `record_at` of watch_memory().
  // Empty if they have not.
  std::vector<MemoryHolder> recorded;
};

// The account of a device. Thread-safe. NOT_FOUND names the devices that exist; UNSUPPORTED on the
// host, whose allocations are not counted.
TE_FL_API Result<MemoryAccount> memory_account(const Device& device);

// Restarts the peak from the memory held now, and records the holders when the held bytes reach
// `record_at`. To learn who holds the peak of a training step, watch one step, read its peak_bytes,
// and watch the next step with record_at = peak_bytes. Errors as for memory_account().
TE_FL_API Status watch_memory(const Device& device, size_t record_at = SIZE_MAX);

// From now on te-fl allocates its memory on the device, for tensors and scratch, from this
// allocator. The struct is copied. Null: allocate from the device itself again. Existing memory is
// freed by the allocator that returned it. te_fl_allocator and rule R25 in plugin.h state the rules
// for the functions. Thread-safe; no lock is held while the functions run. INVALID_ARGUMENT names
// what the allocator lacks; UNSUPPORTED on the host. If the allocator fails or te-fl refuses its
// memory, the allocation fails with an error that names the allocator; there is no fallback.
TE_FL_API Status install_allocator(const Device& device, const te_fl_allocator* allocator);

}  // namespace te_fl::devices
