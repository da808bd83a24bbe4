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
// tensors, of one dimension, share the parameter's memory; undefined where the part is empty, and
// the value of a parameter of FP8 codes alone.
struct OwnPart {
  int64_t begin = 0, end = 0;
  Tensor grad, value;
  bool empty() const { return begin == end; }
};

// The elements of flat memory from `begin` on, in this shape: a view.
Result<Tensor> shaped(const Tensor& flat, int64_t begin, std::span<const int64_t> shape);

// Behind DataParallel: gradients, and with ZeRO the values, in flat memory. Parameters tell it of
// the writes of their gradients. For one thread.
class GradientBuckets final : public GradientListener {
 public:
  // The last three as DataParallelOptions has them.
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
  // The step's last backward begins and ends, for DataParallel::LastBackward.
  void open();
  void close();

  void wrote(size_t gradient) override;
  void cleared() override;

  // With ZeRO: what this rank has of a parameter; null if it is none of create()'s.
  const OwnPart* own_part(const Parameter& parameter) const;
  // With ZeRO: the ranks' parts of the values of these parameters' buckets, for all ranks.
  // `masters`, one for each parameter: of codes alone, this rank's part of the new values (F32),
  // from whose whole every rank makes the codes; undefined if it is empty, and of other parameters.
  Status gather_values(const std::vector<NamedParameter>& parameters,
                       const std::vector<Tensor>& masters) const;

 private:
  struct Member {
    NamedParameter parameter;
    size_t bucket = 0;
    int64_t begin = 0;            // its first element in the bucket
    const void* grad = nullptr;   // where its gradient lies
    const void* value = nullptr;  // with ZeRO, where its value lies
    OwnPart own;                  // with ZeRO
  };
  struct Bucket {
    Tensor grads;   // all members', flat
    Tensor values;  // with ZeRO, unless they are codes
    std::vector<size_t> members;
    bool codes = false;
  };

  GradientBuckets(std::shared_ptr<const Comm> ranks, bool zero)
      : ranks_(std::move(ranks)), zero_(zero) {}
  // Buckets of at most `most` bytes of gradients, or of one parameter.
  Status add_buckets(const std::vector<NamedParameter>& parameters, int64_t most);
  Status add_bucket(const std::vector<NamedParameter>& parameters);
  Status add_member(Bucket& bucket, const NamedParameter& parameter, int64_t begin);
  Status find_own(Member& member, const Bucket& bucket);
  Status use_streams(std::optional<bool> overlap);
  // The part of flat memory that is rank `ranks_->rank()`'s.
  Result<Tensor> own_of(const Tensor& flat) const;
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
  Status failure_;  // of what began in a backward; average() returns it
  // Where devices have streams, the collectives that begin in a backward run on a stream of their
  // own, from `ready_` until `done_`.
  Stream side_;
  Event ready_, done_;
  void* backwards_ = nullptr;  // the stream on which the backward runs
  bool on_side_ = false;       // the side stream has work that the backward's has not waited for
};

}  // namespace te_fl::nn::detail
