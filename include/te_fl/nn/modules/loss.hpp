#pragma once

#include <memory>

#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/modules/tensor_parallel.hpp"

namespace te_fl::nn {

namespace detail {
class IdTable;
}

struct CrossEntropyOptions {
  float label_smoothing = 0;
  // Rows with this target have loss 0 (they still count in the mean, see forward).
  int64_t ignore_index = -100;
  // The ranks among which the vocabulary is sharded. logits are this rank's columns, in rank order,
  // with the same number on each rank. targets and ignore_index are ids in the full vocabulary.
  TensorParallel parallel = {};
};

// Softmax cross-entropy with integer targets. If the vocabulary is sharded among ranks, the loss is
// the same on all ranks; the forward then has one collective, of one number per row plus one, and
// the backward none. In this case, ignored targets on a device must also lie in the vocabulary.
class TE_FL_API CrossEntropyLoss : public Module {
 public:
  explicit CrossEntropyLoss(CrossEntropyOptions options = {}) : options_(options) {}
  // logits [..., V], targets I32 or I64 [...] -> F32 [1]: the sum of the rows' losses divided by
  // `divisor`; 0 means the number of rows. If some targets are ignored, pass the number of the
  // other rows as divisor. Does not wait for the device; item() reads the result.
  Result<Tensor> forward(const Tensor& logits, const Tensor& targets, Ctx* ctx, double divisor = 0);
  // Returns the gradient of grad_scale * loss with respect to the logits: [..., V] in their dtype.
  Result<Tensor> backward(Ctx& ctx, double grad_scale = 1);
  // Returns the logits' gradient, given the loss's gradient `dloss`, F32 [1] on the device.
  Result<Tensor> backward(Ctx& ctx, const Tensor& dloss);

 private:
  struct Saved;
  Result<Tensor> divided_forward(const Tensor& targets, Saved& saved);
  Result<Tensor> divided_backward(const Saved& saved, const Tensor& dloss);
  CrossEntropyOptions options_;
  std::shared_ptr<detail::IdTable> targets_;  // null until first needed
};

}  // namespace te_fl::nn
