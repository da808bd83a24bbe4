#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace te_fl::nn::detail {

// Says which bucket of gradients may be reduced next while a backward still runs. The order is that
// of the buckets from the last to the first, which is nearly the order of a backward and the same
// on all ranks, whatever their backwards do. The first backward that it sees tells how often each
// gradient is written (a tied weight's more than once); from the second on a bucket may start with
// the last write of its last gradient. For one thread.
class BucketSchedule {
 public:
  // bucket_of: the bucket of each gradient. held: that many buckets, the first ones, whose
  // gradients are not finished by their last write, are never complete.
  BucketSchedule(std::vector<size_t> bucket_of, size_t buckets, size_t held);

  // The step's last backward begins: writes are counted from now on.
  void begin();
  void wrote(size_t gradient);
  // Takes the next bucket if all its gradients have been written as often as they are.
  std::optional<size_t> take_complete();
  // Takes the next bucket, complete or not; none after the first bucket.
  std::optional<size_t> take();
  // True if the gradient's bucket has been taken in this step.
  bool taken(size_t gradient) const { return bucket_of_[gradient] >= left_; }
  // The step is over, and its counts are what the next one is expected to write.
  void end();
  // The step is given up: what was taken counts as not taken, and nothing is learnt.
  void reset();

 private:
  std::vector<size_t> bucket_of_;
  std::vector<int64_t> seen_, expected_;
  std::vector<size_t> incomplete_;  // gradients of each bucket that are still to be written
  size_t buckets_, held_;
  size_t left_;            // buckets [0, left_) have not been taken
  bool counting_ = false;  // begin() was called in this step
  bool learnt_ = false;
};

}  // namespace te_fl::nn::detail
