#pragma once

#include <memory>

#include "te_fl/comm.hpp"
#include "te_fl/nn/modules/sequence_ranks.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// Collectives of a communicator on the calling thread's stream.
Status all_gather(const Comm& ranks, const Tensor& from, const Tensor& to);
Status all_reduce(const Comm& ranks, const Tensor& data, int32_t reduction = 0);
Status reduce_scatter(const Comm& ranks, const Tensor& whole, const Tensor& part);

// The ranks of a communicator as SequenceRanks. The functions enqueue their collectives on the
// stream before they return.
class CommRanks final : public SequenceRanks {
 public:
  explicit CommRanks(std::shared_ptr<const Comm> ranks) : ranks_(std::move(ranks)) {}
  int size() const noexcept override { return ranks_->size(); }
  int rank() const noexcept override { return ranks_->rank(); }
  Begun all_gather(const Tensor& part, const Tensor& whole, bool now) override;
  Begun reduce_scatter(const Tensor& whole, const Tensor& part, bool now) override;
  Status sum(const Tensor& values) override;
  Status largest(const Tensor& values) override;
  bool share_amaxes(const AmaxReduction* reduction) const noexcept override;

 private:
  std::shared_ptr<const Comm> ranks_;
};

}  // namespace te_fl::nn::detail
