#pragma once

#include <memory>

#include "te_fl/comm.hpp"
#include "te_fl/nn/modules/attention.hpp"

namespace te_fl::nn {

// DotProductAttention to sequences that the ranks of a communicator divide (context parallelism):
// each rank gathers all keys and values, and attends to them with its own queries. Each sequence is
// cut into 2 R chunks of equal length for R ranks; rank r has the chunks r and 2 R - 1 - r, in that
// order, so that a causal mask gives all ranks equally much work. Tensors are [this rank's tokens,
// B, heads, head size] (layout kSBHD). Masks kNone and kCausal; a window with kCausal. All ranks
// make the same calls in the same order. Parameters and FP8 state are those of DotProductAttention,
// as the submodule "attention"; the gradient of a sink is that of this rank's queries.
class TE_FL_API SequenceAttention : public Module {
 public:
  static Result<std::unique_ptr<SequenceAttention>> create(
      const DotProductAttentionOptions& options, std::shared_ptr<const Comm> ranks);
  ~SequenceAttention() override;
  // ctx null: inference, no dropout.
  Result<Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, Ctx* ctx);
  // The gradients of this rank's q, k and v; those of k and v are summed over the ranks.
  Result<DotProductAttention::Gradients> backward(const Tensor& d_o, Ctx& ctx);

 private:
  struct Impl;
  explicit SequenceAttention(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
