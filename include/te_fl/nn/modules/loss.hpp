#pragma once

#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

struct CrossEntropyOptions {
  float label_smoothing = 0;
  int64_t ignore_index =
      -100;  // rows with this target add nothing (they still count in the mean, see forward)
};

// Softmax cross-entropy of integer targets.
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
  Result<Tensor> run_backward(const Saved& saved, const Tensor& grad_loss);
  CrossEntropyOptions options_;
};

}  // namespace te_fl::nn
