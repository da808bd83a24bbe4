#include "device/memory.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "device/cuda_check.hpp"
#include "device/driver.hpp"
#include "device/outside_capture.hpp"

namespace te_fl::cuda {
namespace {

// Freed blocks larger than this always return to the memory pool, which merges adjacent blocks. The
// time is negligible compared with that of the kernels that use such blocks.
constexpr size_t kLargestCached = size_t{32} << 20;

// Rounds sizes up to an eighth of their power of two, so that tensors of similar size can share
// blocks.
size_t rounded(size_t bytes) {
  bytes = std::max<size_t>(bytes, 1);
  const int top = std::bit_width(bytes - 1);
  const size_t step = size_t{1} << std::max(9, top - 3);
  return bytes > SIZE_MAX - step ? bytes : (bytes + step - 1) / step * step;
}

std::string memory_account(size_t asked) {
  size_t available = 0, total = 0;
  cudaMemGetInfo(&available, &total);
  (void)cudaGetLastError();
  const auto mib = [](size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
  return "; requested " + std::to_string(asked) + " bytes, " + mib(available) + " of " +
         mib(total) + " are free";
}

cudaStreamCaptureStatus capture_status(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (stream_capture_status(stream, &status) == cudaSuccess) return status;
  (void)cudaGetLastError();  // the default stream, while another stream is being captured
  return cudaStreamCaptureStatusNone;
}

// Returns the id of the stream's capture, or 0 if `status` is not "active". Stores the capture's
// graph in `graph`.
unsigned long long capture_id(cudaStream_t stream, cudaStreamCaptureStatus status,
                              cudaGraph_t* graph) {
  if (status != cudaStreamCaptureStatusActive) return 0;
  unsigned long long id = 0;
#if CUDART_VERSION >= 13000
  check(cudaStreamGetCaptureInfo(stream, &status, &id, graph), "cudaStreamGetCaptureInfo");
#else
  check(cudaStreamGetCaptureInfo_v2(stream, &status, &id, graph), "cudaStreamGetCaptureInfo");
#endif
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

}  // namespace

Memory::~Memory() {
  if (cudaDeviceSynchronize() == cudaSuccess) {
    if (aside_ == nullptr && cudaStreamCreateWithFlags(&aside_, cudaStreamNonBlocking)) return;
    for (const auto& [key, list] : cache_) {
      for (void* data : list) cudaFreeAsync(data, aside_);
    }
    for (const auto& graph : graphs_) {
      if (!graph->gone || graph->live > 0) continue;
      for (void* data : graph->all) cudaFreeAsync(data, aside_);
      for (const auto& [data, block] : graph->kept) cudaFreeAsync(data, aside_);
    }
    cudaStreamSynchronize(aside_);
    cudaStreamDestroy(aside_);
  }
  (void)cudaGetLastError();
}

// Returns the memory of the graph into which the stream is being captured; NULL if it is not
// capturing. The caller must hold the mutex.
std::shared_ptr<Memory::GraphMemory> Memory::find_capture(cudaStream_t stream,
                                                          cudaStreamCaptureStatus status) {
  cudaGraph_t graph = nullptr;
  const unsigned long long id = capture_id(stream, status, &graph);
  if (id == 0) {  // a capture that the application began on this stream may have ended
    for (const auto& ended : graphs_) ended->open = ended->open && ended->stream != stream;
    return nullptr;
  }
  if (const auto at = captures_.find(id); at != captures_.end()) return at->second;
  auto made = std::make_shared<GraphMemory>();
  made->stream = stream;
  // The graph and its executables hold references to this user object, which is destroyed with the
  // last of them. Its destructor must not call CUDA.
  auto handle = std::make_unique<std::shared_ptr<GraphMemory>>(made);
  cudaUserObject_t object = nullptr;
  check(cudaUserObjectCreate(
            &object, handle.get(),
            [](void* data) {
              auto* owned = static_cast<std::shared_ptr<GraphMemory>*>(data);
              (*owned)->gone = true;
              delete owned;
            },
            1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
  handle.release();
  const cudaError_t error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) {
    cudaUserObjectRelease(object, 1);
    throw_error(error, "cudaGraphRetainUserObject");
  }
  graphs_.push_back(made);
  captures_.emplace(id, made);
  return made;
}

void* Memory::allocate(size_t asked, cudaStream_t stream) {
  size_t bytes = rounded(asked);
  const std::lock_guard lock(mutex_);
  const cudaStreamCaptureStatus status = capture_status(stream);
  if (const auto graph = find_capture(stream, status)) {
    void* data = allocate_captured(bytes, stream, graph);
    blocks_[data] = {bytes, graph};
    ++graph->live;
    return data;
  }
  if (!graphs_.empty()) release_gone();
  void* data = nullptr;
  if (const auto at = cache_.find({stream, bytes}); at != cache_.end() && !at->second.empty()) {
    data = at->second.back();
    at->second.pop_back();
    cached_bytes_ -= bytes;
  } else {
    // Checked here only, because the cache has no blocks for streams of other devices.
    refuse_foreign(DeviceGuard::current(), stream, status);
    cudaError_t error = cudaMallocAsync(&data, bytes, stream);
    if (error == cudaErrorMemoryAllocation && trim()) {
      (void)cudaGetLastError();
      error = cudaMallocAsync(&data, bytes, stream);
    }
    if (error != cudaSuccess) throw_error(error, "cudaMallocAsync", memory_account(asked));
  }
  blocks_[data] = {bytes, nullptr};
  return data;
}

// Returns the smallest idle block of the capture that has at least `bytes` and at most a quarter
// more, or else a new block.
void* Memory::allocate_captured(size_t& bytes, cudaStream_t stream,
                                const std::shared_ptr<GraphMemory>& graph) {
  for (auto at = graph->idle.lower_bound({stream, bytes}); at != graph->idle.end(); ++at) {
    if (at->first.first != stream || at->first.second > bytes + bytes / 4) break;
    if (at->second.empty()) continue;
    void* data = at->second.back();
    at->second.pop_back();
    bytes = at->first.second;
    return data;
  }
  void* data = allocate_aside(bytes);
  graph->all.push_back(data);
  return data;
}

// Allocates memory that is usable on every stream when this returns.
void* Memory::allocate_aside(size_t bytes) {
  const OutsideCapture outside;
  if (aside_ == nullptr) {
    check(cudaStreamCreateWithFlags(&aside_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  void* data = nullptr;
  const cudaError_t error = cudaMallocAsync(&data, bytes, aside_);
  if (error != cudaSuccess) {
    throw_error(error, "cudaMallocAsync", memory_account(bytes) + ", in a capture");
  }
  check(cudaStreamSynchronize(aside_), "cudaStreamSynchronize");
  return data;
}

void Memory::free(void* data, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const auto at = blocks_.find(data);
  if (at == blocks_.end()) {
    throw backend::Error(TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN,
                         "this is no memory that allocate() returned, or it is freed twice");
  }
  Block block = std::move(at->second);
  blocks_.erase(at);
  release_block(data, std::move(block), stream);
  if (!graphs_.empty()) release_gone();
}

void Memory::release_block(void* data, Block block, cudaStream_t stream) {
  const cudaStreamCaptureStatus status = capture_status(stream);
  const auto capture = find_capture(stream, status);
  if (capture != nullptr && block.graph != capture) {
    capture->kept.emplace_back(data, std::move(block));
    return;
  }
  if (block.graph != nullptr) {
    --block.graph->live;
    if (block.graph->open) block.graph->idle[{stream, block.bytes}].push_back(data);
    return;
  }
  if (status == cudaStreamCaptureStatusInvalidated) {  // nothing can be enqueued until the capture
                                                       // ends
    cache_[{stream, block.bytes}].push_back(data);
    cached_bytes_ += block.bytes;
    return;
  }
  // cudaStreamPerThread is a different stream in each thread, so a block cached for it would not be
  // ordered.
  const bool ambiguous = stream == cudaStreamPerThread;
  if (block.bytes > kLargestCached || block.bytes > cache_limit_ || ambiguous) {
    check(cudaFreeAsync(data, stream), "cudaFreeAsync");
    return;
  }
  if (cached_bytes_ + block.bytes > cache_limit_) {
    for (auto& [key, list] : cache_) {
      if (key.first != stream) continue;
      for (void* old : list) check(cudaFreeAsync(old, stream), "cudaFreeAsync");
      cached_bytes_ -= list.size() * key.second;
      list.clear();
    }
  }
  if (cached_bytes_ + block.bytes > cache_limit_) {  // other streams' blocks fill the cache
    check(cudaFreeAsync(data, stream), "cudaFreeAsync");
    return;
  }
  cache_[{stream, block.bytes}].push_back(data);
  cached_bytes_ += block.bytes;
}

// Frees the memory of destroyed graphs. The graphs' last launches have ended, but work that was
// enqueued before a capture may still use blocks that were freed during the capture. So this
// function waits for the device first; if a capture is in progress, which forbids waiting, it does
// nothing.
void Memory::release_gone() {
  const auto releasable = [](const auto& graph) { return graph->gone && graph->live == 0; };
  if (open_captures_ > 0 || std::none_of(graphs_.begin(), graphs_.end(), releasable)) return;
  for (const auto& graph : graphs_) {
    if (!graph->gone && graph->open) return;  // a capture is in progress: try again later
  }
  if (cudaDeviceSynchronize() != cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  std::vector<std::shared_ptr<GraphMemory>> done;
  std::erase_if(graphs_, [&](const auto& graph) {
    if (!releasable(graph)) return false;
    done.push_back(graph);
    return true;
  });
  std::erase_if(captures_, [](const auto& entry) { return entry.second->gone.load(); });
  for (const auto& graph : done) {
    for (void* data : graph->all) check(cudaFreeAsync(data, aside_), "cudaFreeAsync");
    for (auto& [data, block] : graph->kept) {
      if (block.graph != nullptr) {
        --block.graph->live;  // freed together with its own graph
      } else {
        if (aside_ == nullptr) {
          check(cudaStreamCreateWithFlags(&aside_, cudaStreamNonBlocking),
                "cudaStreamCreateWithFlags");
        }
        check(cudaFreeAsync(data, aside_), "cudaFreeAsync");
      }
    }
  }
}

// Returns all cached blocks to the memory pool. Returns false if there were none or a capture
// prevents it.
bool Memory::trim() {
  if (cached_bytes_ == 0 || open_captures_ > 0) return false;
  if (cudaDeviceSynchronize() != cudaSuccess) {  // fails during a capture: the cache stays
    (void)cudaGetLastError();
    return false;
  }
  if (aside_ == nullptr) {
    check(cudaStreamCreateWithFlags(&aside_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  for (auto& [key, list] : cache_) {
    for (void* data : list) check(cudaFreeAsync(data, aside_), "cudaFreeAsync");
  }
  cache_.clear();
  cached_bytes_ = 0;
  check(cudaStreamSynchronize(aside_), "cudaStreamSynchronize");
  return true;
}

void Memory::forget(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  for (const auto& graph : graphs_) {  // the application's capture on this stream has ended
    if (graph->stream != stream) continue;
    graph->open = false;
    graph->idle.clear();
  }
  std::erase_if(cache_, [&](const auto& entry) {
    if (entry.first.first != stream) return false;
    for (void* data : entry.second) check(cudaFreeAsync(data, stream), "cudaFreeAsync");
    cached_bytes_ -= entry.second.size() * entry.first.second;
    return true;
  });
}

void Memory::open_capture() {
  const std::lock_guard lock(mutex_);
  release_gone();
  ++open_captures_;
}

void Memory::abandon_capture() {
  const std::lock_guard lock(mutex_);
  --open_captures_;
}

void Memory::close_capture(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  --open_captures_;
  cudaGraph_t graph = nullptr;
  const unsigned long long id = capture_id(stream, capture_status(stream), &graph);
  const auto at = captures_.find(id);
  if (at == captures_.end()) return;
  at->second->open = false;
  at->second->idle.clear();
  captures_.erase(at);
}

}  // namespace te_fl::cuda
