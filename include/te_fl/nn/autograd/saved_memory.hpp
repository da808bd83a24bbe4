#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/ctx.hpp"

namespace te_fl::nn {

// A range of memory that a forward saves for its backward. It holds one or more tensors.
struct SavedMemory {
  void* data = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<void> owner;  // keeps the memory alive
};

// The memory of the activations in `ctx` that are on `device`, including data and scales of FP8
// activations. The ranges do not overlap. For programs that offload activations until the backward.
// Must not run concurrently with a backward of `ctx`.
TE_FL_API std::vector<SavedMemory> saved_memory(Ctx& ctx, const Device& device);

// Describes a move: `to` holds a copy of the `bytes` bytes at `from`. `owner` keeps the new memory
// alive.
struct MovedMemory {
  const void* from = nullptr;
  int64_t bytes = 0;
  void* to = nullptr;
  std::shared_ptr<void> owner;
  // The owner of the old memory. Only tensors of this owner are moved: if the old memory was freed,
  // tensors of another owner may have been allocated at the same address. Empty: tensors of every
  // owner are moved.
  std::weak_ptr<void> old_owner = {};
};

// Makes the tensors whose memory lies in `moved` use the new memory, and releases the old memory.
// An old allocation stays alive if it also holds a tensor that is not moved. The new memory may be
// on another device as long as nothing reads it; before the backward it must be on the tensors'
// device again. Must not run concurrently with a backward of `ctx`.
TE_FL_API void move_saved_memory(Ctx& ctx, std::span<const MovedMemory> moved);

}  // namespace te_fl::nn
