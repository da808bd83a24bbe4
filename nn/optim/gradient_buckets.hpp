#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "nn/autograd/gradient_listener.hpp"
#include "nn/optim/bucket_schedule.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/device.hpp"
#include "te_fl/nn/autograd/parameter.hpp"

namespace te_fl::nn::detail {

// The elements [begin, end) of a flattened parameter, which this rank's optimizer updates. The
// tensors are 1-d views of the parameter's memory. They are undefined if the part is empty; `value`
// is also undefined for an FP8-only parameter.
struct OwnPart {
  int64_t begin = 0, end = 0;
  Tensor grad, value;
  bool empty() const { return begin == end; }
};

// A view of `flat` in the given shape, from element `begin` on.
Result<Tensor> shaped(const Tensor& flat, int64_t begin, std::span<const int64_t> shape);

// The implementation of DataParallel: stores gradients, and with ZeRO also values, in flat buckets.
// Parameters report writes of their gradients to it. Not thread-safe.
class GradientBuckets final : public GradientListener {
 public:
  // `bucket_bytes`, `zero` and `overlap` are those of DataParallelOptions.
  static Result<std::shared_ptr<GradientBuckets>> create(
      const std::vector<NamedParameter>& parameters, std::shared_ptr<const Comm> ranks,
      int64_t bucket_bytes, bool zero, std::optional<bool> overlap);
  ~GradientBuckets() override;
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  const Comm& ranks() const { return *ranks_; }
  bool zero() const { return zero_; }
  size_t count() const { return buckets_.size(); }
  bool averaged() const { return averaged_; }

  Status average();
  // Called at the begin and the end of the step's last backward pass, by
  // DataParallel::LastBackward.
  void open();
  void close();

  void wrote(size_t gradient) override;
  void cleared() override;

  // With ZeRO: this rank's part of a parameter; null if the parameter was not passed to create().
  const OwnPart* own_part(const Parameter& parameter) const;
  // With ZeRO: gathers the values of these parameters' buckets from the ranks that updated them.
  // `masters` has one entry per parameter. For an FP8-only parameter the entry is this rank's part
  // of the new values (F32), and every rank quantises the gathered parameter. The entry is
  // undefined if the part is empty, and for other parameters.
  Status gather_values(const std::vector<NamedParameter>& parameters,
                       const std::vector<Tensor>& masters) const;

 private:
  struct Member {
    NamedParameter parameter;
    size_t bucket = 0;
    int64_t begin = 0;            // offset in the bucket, in elements
    const void* grad = nullptr;   // address of its gradient
    const void* value = nullptr;  // with ZeRO, address of its value
    OwnPart own;                  // with ZeRO, this rank's part
  };
  struct Bucket {
    Tensor grads;   // gradients of all members, flat
    Tensor values;  // with ZeRO, except for FP8-only parameters
    std::vector<size_t> members;
    bool codes = false;
  };

  GradientBuckets(std::shared_ptr<const Comm> ranks, bool zero)
      : ranks_(std::move(ranks)), zero_(zero) {}
  // Creates buckets. Each has at most `most` bytes of gradients, or a single parameter that has
  // more.
  Status add_buckets(const std::vector<NamedParameter>& parameters, int64_t most);
  Status add_bucket(const std::vector<NamedParameter>& parameters);
  Status add_member(Bucket& bucket, const NamedParameter& parameter, int64_t begin);
  Status find_own(Member& member, const Bucket& bucket);
  Status use_streams(std::optional<bool> overlap);
  // This rank's part of a flat tensor.
  Result<Tensor> find_own_part(const Tensor& flat) const;
  Status check(const Bucket& bucket) const;
  Status reduce(const Bucket& bucket) const;
  Status start_early(const Bucket& bucket);
  Status gather(const Tensor& flat) const;
  Status gather_codes(const Bucket& bucket, const std::vector<const Tensor*>& masters) const;
  void fail(Status status);

  std::shared_ptr<const Comm> ranks_;
  bool zero_;
  std::vector<Bucket> buckets_;
  std::vector<Member> members_;
  std::unique_ptr<BucketSchedule> schedule_;
  bool overlap_ = false;
  bool open_ = false;
  bool averaged_ = false;
  Status failure_;  // of reductions during a backward; returned by average()
  // On devices with streams, collectives that start during a backward run on the separate stream
  // `side_`. It waits for the backward's stream by the event `ready_`; the backward's stream waits
  // for it by `done_`.
  Stream side_;
  Event ready_, done_;
  void* backwards_ = nullptr;  // the stream of the backward
  bool on_side_ = false;       // the backward's stream has not waited yet for work of side_
};

}  // namespace te_fl::nn::detail
