#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace te_fl::nn::detail {

// Decides which gradient bucket may be reduced next while a backward pass is running. Buckets are
// taken from the last to the first. This is close to the order of a backward, and it is the same on
// all ranks, even if their backward passes differ. The first backward records how often each
// gradient is written (a tied weight's more than once). In later backward passes a bucket is
// complete after the last write of its last gradient. Not thread-safe.
class BucketSchedule {
 public:
  // `bucket_of`: the bucket of each gradient. `held`: the number of leading buckets that never
  // count as complete, since their gradients change after the last write.
  BucketSchedule(std::vector<size_t> bucket_of, size_t buckets, size_t held);

  // Must be called when the step's last backward pass begins; writes of gradients are counted from
  // then on.
  void begin();
  void wrote(size_t gradient);
  // Takes the next bucket if each of its gradients has received the expected number of writes.
  std::optional<size_t> take_complete();
  // Takes the next bucket, complete or not; nullopt after the first bucket.
  std::optional<size_t> take();
  // True if the gradient's bucket has been taken in this step.
  bool taken(size_t gradient) const { return bucket_of_[gradient] >= left_; }
  // Ends the step. Its counts are the expected counts of the next step.
  void end();
  // Discards the step: no bucket counts as taken, and its counts are not used.
  void reset();

 private:
  std::vector<size_t> bucket_of_;
  std::vector<int64_t> seen_, expected_;
  std::vector<size_t> incomplete_;  // number of pending gradients of each bucket
  size_t buckets_, held_;
  size_t left_;            // buckets [0, left_) have not been taken
  bool counting_ = false;  // begin() was called in this step
  bool learnt_ = false;
};

}  // namespace te_fl::nn::detail
