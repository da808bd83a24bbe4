#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/ctx.hpp"

namespace te_fl::nn {

// Bytes that a forward keeps for its backward, of one or more tensors.
struct SavedMemory {
  void* data = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<void> owner;  // keeps the memory
};

// The memory of the activations in `ctx` that lie on `device`, FP8 ones as codes and scales; no two
// overlap. For programs that move it elsewhere until the backward. Not beside a backward of `ctx`.
TE_FL_API std::vector<SavedMemory> saved_memory(Ctx& ctx, const Device& device);

// Memory `to` of the same contents as `bytes` from `from` on, which `owner` keeps.
struct MovedMemory {
  const void* from = nullptr;
  int64_t bytes = 0;
  void* to = nullptr;
  std::shared_ptr<void> owner;
  // Owns the old memory. Tensors of other owners stay: they may lie there since it was freed. An
  // empty one stands for every owner.
  std::weak_ptr<void> old_owner = {};
};

// Has the tensors whose memory lies in `moved` use the new memory, and lets the old go, but for
// that which also holds a part that is not moved. The new memory may be another device's while
// nothing reads it: a backward must find it on the tensors' device again. Not beside a backward of
// `ctx`.
TE_FL_API void move_saved_memory(Ctx& ctx, std::span<const MovedMemory> moved);

}  // namespace te_fl::nn
