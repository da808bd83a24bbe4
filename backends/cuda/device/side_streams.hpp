// Streams beside a caller's, over which an op spreads work whose parts do not depend on each other.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

namespace te_fl::cuda {

struct SideStreamSet;

// One call's work on the caller's stream and others, which begin after what the caller's stream has
// and which it waits for at the end. A stream's side streams are its own, so that they may be
// captured with it; threads that share a stream enqueue one after the other. Wants the device
// current. No work may go to the caller's stream by others meanwhile.
class SpreadWork {
 public:
  static constexpr int kMostLanes = 8;

  // `lanes`: the caller's stream is the first; with 1 there is no other. Where streams have no
  // fixed identity (cudaStreamPerThread) there is one lane. Throws backend::Error.
  SpreadWork(int device, cudaStream_t stream, int lanes);
  // Joins as far as CUDA lets it, if join() was not reached.
  ~SpreadWork();
  SpreadWork(const SpreadWork&) = delete;
  SpreadWork& operator=(const SpreadWork&) = delete;

  int lanes() const { return lanes_; }
  cudaStream_t stream(int lane) const;
  // Makes the caller's stream wait for the others. Once, at the end.
  void join();

 private:
  cudaError_t join_lanes() noexcept;

  const cudaStream_t stream_;
  int lanes_ = 1;
  bool joined_ = true;
  SideStreamSet* set_ = nullptr;  // if there is more than one lane, locked
  std::unique_lock<std::mutex> lock_;
};

// Before a stream is destroyed: destroys its side streams, which finish what they have.
void forget_side_streams(int device, cudaStream_t stream) noexcept;
// Destroys all of them as the plugin ends; in a child of a fork they are out of reach.
void give_back_side_streams() noexcept;

}  // namespace te_fl::cuda
