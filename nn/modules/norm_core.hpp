#pragma once

#include <memory>

#include "nn/modules/gemm_unit.hpp"
#include "te_fl/nn/modules/norm.hpp"
#include "te_fl/nn/modules/tensor_parallel.hpp"

namespace te_fl::nn::detail {

// LayerNorm or RMSNorm on matrices [rows, hidden], with its parameters.
class NormCore {
 public:
  struct Saved {
    Tensor x, mu, rsigma;
    uint64_t version = 0;  // of the weight

    void visit_tensors(const Ctx::Visitor& visitor) {
      for (Tensor* t : {&x, &mu, &rsigma}) visitor(*t);
    }
  };

  static Result<std::unique_ptr<NormCore>> create(Normalization kind, const NormOptions& options);
  const NormOptions& options() const noexcept { return options_; }
  const std::shared_ptr<Parameter>& weight() const noexcept { return weight_; }
  const std::shared_ptr<Parameter>& bias() const noexcept { return bias_; }  // null for RMSNorm
  // True if a backward computes the gradient of at least one parameter.
  bool trains() const {
    return weight_->requires_grad || (bias_ != nullptr && bias_->requires_grad);
  }

  // Computes z = norm(x), where z may be quantised, and fills `saved`.
  Status forward(const Tensor& x, const Tensor& z, Saved& saved) const;
  // FAILED_PRECONDITION if the weight was changed since the forward that filled `saved`.
  Status check_unchanged(const Saved& saved) const;
  // dz [rows, hidden] -> dx in x's dtype. Adds `residual` (same shape) if it is not null.
  Result<Tensor> backward(const Tensor& dz, const Saved& saved, const Tensor* residual) const;

 private:
  NormCore(Normalization kind, const NormOptions& options) : kind_(kind), options_(options) {}
  Status run_backward(const Tensor& dz, const Saved& saved, const Tensor* residual,
                      const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) const;

  Normalization kind_;
  NormOptions options_;
  std::shared_ptr<Parameter> weight_;
  std::shared_ptr<Parameter> bias_;
};

// Computes norm(x) as the input of `gemm`. Under FP8 the norm writes the quantised tensor directly,
// with two exceptions. If `high_precision` is not null, it receives norm(x) in the activation
// dtype, which is then quantised. If the rows are sharded over ranks, the scale depends on all
// ranks.
Result<Tensor> normed_input(const NormCore& norm, GemmUnit& gemm, GemmUnit::Use& use,
                            const Tensor& x, NormCore::Saved& saved, Tensor* high_precision,
                            const TensorParallel& parallel);

}  // namespace te_fl::nn::detail
