#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nn/modules/gemm_unit.hpp"

namespace te_fl::nn::detail {

// Linear maps whose operands' rows follow each other, each with the parameters and the FP8 state of
// a GemmUnit, and their products in one call.
class GroupedGemm {
 public:
  using Splits = std::span<const int64_t>;  // the rows of each unit

  // The units have one device, one activation dtype and the same features.
  explicit GroupedGemm(std::vector<std::unique_ptr<GemmUnit>> units) : units_(std::move(units)) {}

  const std::vector<std::unique_ptr<GemmUnit>>& units() const noexcept { return units_; }
  const GemmUnit::Spec& spec() const noexcept { return units_.front()->spec(); }
  const std::shared_ptr<DelayedWgrad>& delayed() const noexcept { return delayed_; }

  // x [rows, in] -> [rows, out] in the activation dtype, in `into` if that is defined, and in
  // `uses` what each unit's backward reads, of which `input_grad`, its `into`, may hold nothing.
  // Splits sum to x's rows.
  Result<Tensor> forward(std::vector<GemmUnit::Use>& uses, const Tensor& x, Splits splits,
                         const ForwardOptions& options, bool training, const Tensor& into,
                         const Tensor& input_grad);
  // dy [rows, out] -> dx [rows, in], in `into` if that is defined, else undefined without `dgrad`;
  // adds to the parameters' gradients.
  Result<Tensor> backward(const std::vector<GemmUnit::Use>& uses, const Tensor& dy, Splits splits,
                          bool dgrad, const Tensor& into);

 private:
  using Uses = std::vector<GemmUnit::Use>;
  using Gradients = std::vector<GemmUnit::Gradient>;
  // The rows of each unit as its products read them.
  Result<std::vector<Tensor>> inputs(Uses& uses, const Tensor& x, Splits splits);
  // The products of a forward but for D; `weights` keeps their weights, of which all that are
  // quantised are so in one op.
  Result<std::vector<te_fl_generic_gemm_args>> products(const Uses& uses,
                                                        const std::vector<Tensor>& inputs,
                                                        const ForwardOptions& options,
                                                        std::vector<Tensor>& weights);
  Result<Gradients> gradients(const Uses& uses, const Tensor& dy, Splits splits);
  Result<Tensor> dgrad(const Uses& uses, const Gradients& grads, Splits splits, int64_t rows,
                       const Tensor& into);
  Status wgrad(const Uses& uses, const Gradients& grads);
  Status run_wgrad(const Uses& uses, const Gradients& grads);

  std::vector<std::unique_ptr<GemmUnit>> units_;
  std::shared_ptr<DelayedWgrad> delayed_ = std::make_shared<DelayedWgrad>();
};

}  // namespace te_fl::nn::detail
