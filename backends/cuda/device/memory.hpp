// Memory of one CUDA device: cudaMallocAsync's pool, a cache of freed blocks in front of it, and
// memory that captured graphs own.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace te_fl::cuda {

// All functions require that the device is current, and are thread-safe.
//
// A block that is freed on a stream is reused only on this stream, so no events are needed. During
// a capture, blocks come from memory that the graph owns. These blocks are reused within the
// capture, and return to the pool when the graph and all its executables are destroyed and no block
// is in use. A block that was allocated before the capture and is freed during it is also kept
// until then, because the graph's launches may read it.
class Memory {
 public:
  explicit Memory(size_t cache_bytes) : cache_limit_(cache_bytes) {}
  // Frees everything, as far as CUDA still works.
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Allocates at least one byte, 256-byte aligned. Throws backend::Error, also if the stream
  // belongs to another device.
  void* allocate(size_t bytes, cudaStream_t stream);
  void free(void* data, cudaStream_t stream);
  // Must be called before a stream is destroyed, even if the plugin did not create it. Frees the
  // blocks cached for the stream, in stream order.
  void forget(cudaStream_t stream);
  // open_capture() is called before the plugin begins a capture, and close_capture() after it has
  // ended the capture on `stream`. In between, this object does not synchronise with the device;
  // after close_capture(), the graph receives no more blocks.
  void open_capture();
  void abandon_capture();  // the capture could not begin
  void close_capture(cudaStream_t stream);

 private:
  struct GraphMemory;
  struct Block {
    size_t bytes = 0;
    std::shared_ptr<GraphMemory> graph;  // NULL: the block is from the pool
  };
  // The memory of one captured graph.
  struct GraphMemory {
    std::atomic<bool> gone{false};  // the graph and its executables have been destroyed
    bool open = true;               // this stream is still capturing
    cudaStream_t stream = nullptr;
    size_t live = 0;  // blocks in use by callers
    // Freed blocks that this capture may reuse.
    std::map<std::pair<cudaStream_t, size_t>, std::vector<void*>> idle;
    std::vector<void*> all;                     // all blocks that were allocated for the graph
    std::vector<std::pair<void*, Block>> kept;  // blocks from outside the capture that were freed
                                                // in the capture
  };

  std::shared_ptr<GraphMemory> find_capture(cudaStream_t stream, cudaStreamCaptureStatus status);
  // `bytes` on entry: the required size; on return: the size of the block.
  void* allocate_captured(size_t& bytes, cudaStream_t stream,
                          const std::shared_ptr<GraphMemory>& graph);
  void* allocate_aside(size_t bytes);
  void release_block(void* data, Block block, cudaStream_t stream);
  void release_gone();
  bool trim();

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;  // the blocks in use
  std::map<std::pair<cudaStream_t, size_t>, std::vector<void*>> cache_;
  size_t cached_bytes_ = 0;
  const size_t cache_limit_;
  int open_captures_ = 0;
  std::map<unsigned long long, std::shared_ptr<GraphMemory>> captures_;  // graphs by capture id
  std::vector<std::shared_ptr<GraphMemory>> graphs_;
  cudaStream_t aside_ = nullptr;  // for memory that belongs to no stream
};

}  // namespace te_fl::cuda
