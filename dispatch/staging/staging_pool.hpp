#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

namespace te_fl::dispatch {

// Host buffers for the copies of staged calls: pinned memory of the device, or ordinary host memory
// if the device has none. Keeps a few idle buffers per device for later calls. Thread-safe.
class StagingPool {
 public:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kKept = 8;  // idle buffers per device

  // A buffer for one call. Its destructor returns the memory to the pool.
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(memory_, other.memory_);
      return *this;
    }
    ~Block();
    void* data() const noexcept;  // aligned to kAlignment

   private:
    friend class StagingPool;
    struct Memory {
      Device device;
      void* data = nullptr;
      size_t bytes = 0;
      bool pinned = false;
    };
    StagingPool* pool_ = nullptr;
    Memory memory_;
  };

  StagingPool() = default;
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool();
  // Takes or allocates a buffer. Errors: out of memory (clean).
  Result<Block> acquire(const Device& device, size_t bytes);
  // The number of idle buffers that use memory of a device.
  int64_t held(const Device& device) const;
  // Frees the idle buffers of a device before it is removed.
  void release(const Device& device);
  // In a forked child: forgets all buffers, since the child cannot use the parent's pinned memory.
  void forget_after_fork();

 private:
  using Memory = Block::Memory;
  static void free(const Memory& memory) noexcept;
  void give_back(const Memory& memory) noexcept;

  std::vector<Memory> idle_;
};

}  // namespace te_fl::dispatch
