#include "device/side_streams.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>

#include "device/cuda_check.hpp"
#include "device/outside_capture.hpp"

namespace te_fl::cuda {

// The side streams of one stream, created on demand.
struct SideStreamSet {
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t finished = nullptr;
  };

  std::mutex mutex;  // held while a call enqueues
  cudaEvent_t begun = nullptr;
  std::array<Lane, SpreadWork::kMostLanes - 1> lanes{};

  ~SideStreamSet() {
    for (const Lane& lane : lanes) {
      if (lane.finished != nullptr) cudaEventDestroy(lane.finished);
      if (lane.stream != nullptr) cudaStreamDestroy(lane.stream);
    }
    if (begun != nullptr) cudaEventDestroy(begun);
  }

  // Creates side streams up to `count`. If it throws backend::Error, those made so far remain.
  void make(cudaStream_t beside, int count) {
    const OutsideCapture outside;
    make_event(begun);
    for (int i = 0; i < count; ++i) {
      Lane& lane = lanes[static_cast<size_t>(i)];
      make_event(lane.finished);
      if (lane.stream != nullptr) continue;
      int priority = 0;
      check(cudaStreamGetPriority(beside, &priority), "cudaStreamGetPriority");
      check(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, priority),
            "cudaStreamCreateWithPriority");
    }
  }

 private:
  static void make_event(cudaEvent_t& event) {
    if (event != nullptr) return;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
};

namespace {

// Never destroyed, because CUDA may be unloaded first at process exit.
struct Sets {
  std::mutex mutex;
  std::map<std::pair<int, cudaStream_t>, std::unique_ptr<SideStreamSet>> all;
};
Sets& sets() {
  static auto* const made = new Sets();
  return *made;
}

// Returns the side streams of a stream. They live until forget_side_streams(), which must not be
// called while a SpreadWork uses them.
SideStreamSet* find_set(int device, cudaStream_t stream) {
  const std::lock_guard lock(sets().mutex);
  std::unique_ptr<SideStreamSet>& set = sets().all[{device, stream}];
  if (set == nullptr) set = std::make_unique<SideStreamSet>();
  return set.get();
}

}  // namespace

SpreadWork::SpreadWork(int device, cudaStream_t stream, int lanes) : stream_(stream) {
  if (lanes <= 1 || stream == cudaStreamPerThread) return;
  set_ = find_set(device, stream);
  lock_ = std::unique_lock(set_->mutex);
  const int beside = std::min(lanes, kMostLanes) - 1;
  set_->make(stream, beside);
  check(cudaEventRecord(set_->begun, stream), "cudaEventRecord");
  joined_ = false;
  for (int i = 0; i < beside; ++i) {
    check(cudaStreamWaitEvent(set_->lanes[static_cast<size_t>(i)].stream, set_->begun, 0),
          "cudaStreamWaitEvent");
    ++lanes_;
  }
}

SpreadWork::~SpreadWork() {
  if (!joined_) (void)join_lanes();
}

cudaStream_t SpreadWork::stream(int lane) const {
  return lane == 0 ? stream_ : set_->lanes[static_cast<size_t>(lane - 1)].stream;
}

cudaError_t SpreadWork::join_lanes() noexcept {
  joined_ = true;
  cudaError_t first = cudaSuccess;
  for (int i = 0; i + 1 < lanes_; ++i) {
    const SideStreamSet::Lane& lane = set_->lanes[static_cast<size_t>(i)];
    cudaError_t error = cudaEventRecord(lane.finished, lane.stream);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_, lane.finished, 0);
    if (first == cudaSuccess) first = error;
  }
  return first;
}

void SpreadWork::join() {
  if (!joined_) check(join_lanes(), "cudaStreamWaitEvent");
}

void forget_side_streams(int device, cudaStream_t stream) noexcept {
  const std::lock_guard lock(sets().mutex);
  sets().all.erase({device, stream});
}

void give_back_side_streams() noexcept {
  (void)backend::guard(nullptr, [] {
    refuse_after_fork();
    const std::lock_guard lock(sets().mutex);
    sets().all.clear();
  });
}

}  // namespace te_fl::cuda
