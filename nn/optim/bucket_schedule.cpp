#include "nn/optim/bucket_schedule.hpp"

#include <utility>

namespace te_fl::nn::detail {

BucketSchedule::BucketSchedule(std::vector<size_t> bucket_of, size_t buckets, size_t held)
    : bucket_of_(std::move(bucket_of)),
      seen_(bucket_of_.size()),
      expected_(bucket_of_.size()),
      incomplete_(buckets),
      buckets_(buckets),
      held_(held),
      left_(buckets) {}

void BucketSchedule::begin() {
  reset();
  counting_ = true;
  if (!learnt_) return;
  incomplete_.assign(buckets_, 0);
  for (size_t i = 0; i < bucket_of_.size(); ++i) incomplete_[bucket_of_[i]] += expected_[i] > 0;
}

void BucketSchedule::wrote(size_t gradient) {
  if (!counting_) return;
  const int64_t count = ++seen_[gradient];
  if (learnt_ && count == expected_[gradient]) --incomplete_[bucket_of_[gradient]];
}

std::optional<size_t> BucketSchedule::take_complete() {
  if (!counting_ || !learnt_ || left_ <= held_ || incomplete_[left_ - 1] > 0) return std::nullopt;
  return --left_;
}

std::optional<size_t> BucketSchedule::take() {
  if (left_ == 0) return std::nullopt;
  return --left_;
}

void BucketSchedule::end() {
  if (counting_) {
    expected_ = seen_;
    learnt_ = true;
  }
  reset();
}

void BucketSchedule::reset() {
  if (!counting_ && left_ == buckets_) return;  // nothing was counted or taken
  seen_.assign(seen_.size(), 0);
  left_ = buckets_;
  counting_ = false;
}

}  // namespace te_fl::nn::detail
