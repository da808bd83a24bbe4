// Memory of one CUDA device: cudaMallocAsync's pool, a cache of freed blocks in front of it, and
// what captured graphs own.
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

// All functions want the device current and may be called from any thread.
//
// A block that is freed on a stream is given again to the same stream only, so its order needs no
// events. In a capture blocks come from memory of the graph: they are given again within that
// capture, and go back to the pool when the graph and all its executables are gone and no block is
// in use any more. A block from before the capture that is freed in it is kept as long, because the
// graph's launches may read it.
class Memory {
 public:
  explicit Memory(size_t cache_bytes) : cache_limit_(cache_bytes) {}
  // Gives everything back as far as CUDA is still there.
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // 256-byte aligned, at least one byte. Throws backend::Error, also for another device's stream.
  void* allocate(size_t bytes, cudaStream_t stream);
  void free(void* data, cudaStream_t stream);
  // Before a stream is destroyed, whoever made it: gives back what is cached for it, in its order.
  void forget(cudaStream_t stream);
  // Around a capture that this plugin begins and ends on a stream: meanwhile nothing waits for the
  // device, and afterwards the graph takes no more blocks.
  void open_capture();
  void abandon_capture();  // it did not begin
  void close_capture(cudaStream_t stream);

 private:
  struct GraphMemory;
  struct Block {
    size_t bytes = 0;
    std::shared_ptr<GraphMemory> graph;  // null: of the pool
  };
  // Memory of one captured graph.
  struct GraphMemory {
    std::atomic<bool> gone{false};  // the graph and its executables have been destroyed
    bool open = true;               // the capture goes on, on this stream
    cudaStream_t stream = nullptr;
    size_t live = 0;                                                     // blocks in use outside
    std::map<std::pair<cudaStream_t, size_t>, std::vector<void*>> idle;  // for this capture
    std::vector<void*> all;                                              // allocated for it
    std::vector<std::pair<void*, Block>> kept;  // of others, freed in the capture
  };

  std::shared_ptr<GraphMemory> capture_of(cudaStream_t stream, cudaStreamCaptureStatus status);
  // `bytes`: in, what is wanted; out, what the block has.
  void* allocate_captured(size_t& bytes, cudaStream_t stream,
                          const std::shared_ptr<GraphMemory>& graph);
  void* allocate_aside(size_t bytes);
  void release_block(void* data, Block block, cudaStream_t stream);
  void release_gone();
  bool trim();

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;  // in use
  std::map<std::pair<cudaStream_t, size_t>, std::vector<void*>> cache_;
  size_t cached_bytes_ = 0;
  const size_t cache_limit_;
  int open_captures_ = 0;
  std::map<unsigned long long, std::shared_ptr<GraphMemory>> captures_;  // by capture id
  std::vector<std::shared_ptr<GraphMemory>> graphs_;
  cudaStream_t aside_ = nullptr;  // for memory that belongs to no stream
};

}  // namespace te_fl::cuda
