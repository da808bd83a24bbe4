#pragma once

#include <cstdint>
#include <memory>

#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

namespace te_fl::core {

// The use of memory in a quantised tensor. Row-wise data may be freed earlier than the rest.
enum class MemoryPart { kRows, kOther };

// While this object lives, the memory of quantised tensors that the calling thread creates on
// `device` is cut from a few larger blocks instead of allocated for each, which saves host time. A
// block is freed once no tensor uses it. Objects of one thread do not nest.
class SharedBlocks {
 public:
  // `bytes`: about what the row-wise data of all tensors take together, and their other parts.
  SharedBlocks(const Device& device, int64_t row_bytes, int64_t other_bytes) noexcept;
  ~SharedBlocks();
  SharedBlocks(const SharedBlocks&) = delete;
  SharedBlocks& operator=(const SharedBlocks&) = delete;

  // Memory of `part`, aligned to 256 bytes: cut from the thread's blocks, or allocated if the
  // thread has no SharedBlocks of the device.
  static Result<std::shared_ptr<void>> memory(const Device& device, int64_t bytes, MemoryPart part);

 private:
  struct Block {
    std::shared_ptr<void> memory;
    int64_t size = 0;  // bytes of this block, or of the next one if there is none yet
    int64_t used = 0;
  };
  Result<std::shared_ptr<void>> cut(int64_t bytes, MemoryPart part);
  Device device_;
  Block blocks_[2];
};

}  // namespace te_fl::core
