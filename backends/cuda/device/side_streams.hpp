// Side streams: additional streams over which an op distributes independent kernels of one call.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

namespace te_fl::cuda {

struct SideStreamSet;

// Distributes one call's work over the caller's stream and its side streams. The side streams wait
// for the earlier work of the caller's stream, and join() makes the caller's stream wait for the
// side streams. Each stream has its own side streams, so that they can be captured with it. A mutex
// serialises threads that use a SpreadWork on the same stream. The device must be current. No other
// work may be enqueued on the caller's stream meanwhile.
class SpreadWork {
 public:
  static constexpr int kMostLanes = 8;

  // `lanes`: number of streams, of which the caller's is the first. cudaStreamPerThread, which is
  // not one fixed stream, always gets one lane. Throws backend::Error.
  SpreadWork(int device, cudaStream_t stream, int lanes);
  // Joins the side streams if join() was not called and CUDA still works.
  ~SpreadWork();
  SpreadWork(const SpreadWork&) = delete;
  SpreadWork& operator=(const SpreadWork&) = delete;

  int lanes() const { return lanes_; }
  cudaStream_t stream(int lane) const;
  // Makes the caller's stream wait for the side streams. Call it once, at the end.
  void join();

 private:
  cudaError_t join_lanes() noexcept;

  const cudaStream_t stream_;
  int lanes_ = 1;
  bool joined_ = true;
  SideStreamSet* set_ = nullptr;  // NULL with one lane; otherwise locked
  std::unique_lock<std::mutex> lock_;
};

// Destroys a stream's side streams once their enqueued work is complete. Call it before the stream
// is destroyed.
void forget_side_streams(int device, cudaStream_t stream) noexcept;
// Destroys all side streams when the plugin ends; does nothing in a forked child.
void give_back_side_streams() noexcept;

}  // namespace te_fl::cuda
