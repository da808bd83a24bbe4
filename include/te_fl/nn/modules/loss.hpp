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
  int64_t ignore_index =
      -100;  // rows with this target add nothing (they still count in the mean, see forward)
  // The ranks that divide the vocabulary: logits are this rank's columns, the same number on each,
  // in the order of the ranks; targets and ignore_index are ids of the whole.
  TensorParallel parallel = {};
};

// Softmax cross-entropy of integer targets. Over a divided vocabulary the loss is the same on all
// ranks; its forward has one collective, of a number for each row and one more, and its backward
// none. Targets on a device that are ignored must then lie in the vocabulary as all others.
class TE_FL_API CrossEntropyLoss : public Module {
 public:
  explicit CrossEntropyLoss(CrossEntropyOptions options = {}) : options_(options) {}
  // logits [..., V], targets I32 or I64 [...] -> F32 [1]: sum of the rows' losses over `divisor`; 0
  // means the number of rows. With ignored targets give their complement's count. Does not wait for
  // the device; see item().
  Result<Tensor> forward(const Tensor& logits, const Tensor& targets, Ctx* ctx, double divisor = 0);
  // Gradient of grad_scale * loss: [..., V] in the logits' dtype.
  Result<Tensor> backward(Ctx& ctx, double grad_scale = 1);
  // Gradient of dloss * loss; dloss is F32 [1] on the device, the gradient that reaches the loss.
  Result<Tensor> backward(Ctx& ctx, const Tensor& dloss);

 private:
  struct Saved;
  Result<Tensor> divided_forward(const Tensor& targets, Saved& saved);
  Result<Tensor> divided_backward(const Saved& saved, const Tensor& dloss);
  CrossEntropyOptions options_;
  std::shared_ptr<detail::IdTable> targets_;  // null: not needed so far
};

}  // namespace te_fl::nn
