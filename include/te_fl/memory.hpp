#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

// The memory that te-fl holds on a device. Memory that others hold (a framework's tensors that
// te-fl wraps, a library's own) is not counted; neither is what the device's provider keeps for
// reuse.
namespace te_fl::devices {

// Allocations of one size and for one thing: "bf16[8192,4096]" for a tensor's, or a name such as
// "workspace".
struct MemoryHolder {
  std::string use;
  size_t count = 0;
  size_t bytes = 0;  // of all of them together
};

struct MemoryAccount {
  size_t bytes = 0;       // held now
  size_t peak_bytes = 0;  // most held at once since the start, or since watch_memory()
  // The holders of the memory now, the largest first.
  std::vector<MemoryHolder> holders;
  // The holders at the moment when the bytes held first reached watch_memory()'s `record_at`; empty
  // if they have not.
  std::vector<MemoryHolder> recorded;
};

// Thread-safe. NOT_FOUND names the devices that exist; UNSUPPORTED on the host, whose allocations
// are not counted.
TE_FL_API Result<MemoryAccount> memory_account(const Device& device);

// The peak starts anew from what is held now, and the holders are recorded when that reaches
// `record_at` bytes. To learn who holds the peak of a training step: watch one step, read its
// peak_bytes, and watch the next with record_at = peak_bytes. Errors as above.
TE_FL_API Status watch_memory(const Device& device, size_t record_at = SIZE_MAX);

// From now on te-fl's memory of the device, of tensors and scratch, comes from this allocator,
// which is copied; null: from the device itself again. Memory that exists is freed by whoever gave
// it. Rules for the allocator's functions stand at te_fl_allocator (plugin.h, rule R25).
// Thread-safe; no lock is held while they run. INVALID_ARGUMENT names what the allocator lacks;
// UNSUPPORTED on the host. An allocator that fails, or whose memory is refused, makes the
// allocation an error that names it; nothing else is tried.
TE_FL_API Status install_allocator(const Device& device, const te_fl_allocator* allocator);

}  // namespace te_fl::devices
