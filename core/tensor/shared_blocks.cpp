#include "core/tensor/shared_blocks.hpp"

#include <algorithm>

#include "core/tensor/tensor_access.hpp"

namespace te_fl::core {
namespace {

constexpr int64_t kAlignment = 256;
constinit thread_local SharedBlocks* t_blocks = nullptr;

}  // namespace

SharedBlocks::SharedBlocks(const Device& device, int64_t row_bytes, int64_t other_bytes) noexcept
    : device_(device) {
  blocks_[0].size = row_bytes;
  blocks_[1].size = other_bytes;
  t_blocks = this;
}

SharedBlocks::~SharedBlocks() { t_blocks = nullptr; }

Result<std::shared_ptr<void>> SharedBlocks::memory(const Device& device, int64_t bytes,
                                                   MemoryPart part) {
  if (t_blocks == nullptr || t_blocks->device_ != device) return shared_memory(device, bytes);
  return t_blocks->cut(bytes, part);
}

Result<std::shared_ptr<void>> SharedBlocks::cut(int64_t bytes, MemoryPart part) {
  Block& block = blocks_[static_cast<int>(part)];
  const int64_t taken = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  if (block.memory == nullptr || taken > block.size - block.used) {
    // A block after the first holds what the caller's number left out.
    const int64_t size = std::max(taken, block.memory == nullptr ? block.size : block.size / 8);
    TE_FL_ASSIGN_OR_RETURN(block.memory, shared_memory(device_, size));
    block.size = size;
    block.used = 0;
  }
  char* const at = static_cast<char*>(block.memory.get()) + block.used;
  block.used += taken;
  return std::shared_ptr<void>(block.memory, at);
}

}  // namespace te_fl::core
