#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "nn/modules/gemm_unit.hpp"
#include "nn/modules/grouped_parameter.hpp"

namespace te_fl::nn::detail {

// Several linear maps on consecutive row ranges of one matrix. Each has the parameters and FP8
// state of a GemmUnit; their products run in one call.
class GroupedGemm {
 public:
  using Splits = std::span<const int64_t>;  // number of rows of each unit

  // The units must have the same device, activation dtype and features.
  explicit GroupedGemm(std::vector<std::unique_ptr<GemmUnit>> units) : units_(std::move(units)) {}

  const std::vector<std::unique_ptr<GemmUnit>>& units() const noexcept { return units_; }
  const GemmUnit::Spec& spec() const noexcept { return units_.front()->spec(); }
  const std::shared_ptr<DelayedWgrad>& delayed() const noexcept { return delayed_; }
  // Makes all weights slices of one parameter, and all biases, if they exist, slices of another.
  // Call it before the first forward. INVALID_ARGUMENT with the module's name for FP8-only weights.
  Status group_weights(const char* module);
  Status group_biases(const char* module);
  // Null without group_weights() and group_biases().
  const GroupedParameter* weight() const noexcept { return weight_.get(); }
  const GroupedParameter* bias() const noexcept { return bias_.get(); }

  // x [rows, in] -> [rows, out] in the activation dtype, in `into` if that is defined. Fills `uses`
  // with the tensors that each unit's backward reads; these must not share memory with
  // `input_grad`, to which the backward will write. The splits must sum to x's rows.
  Result<Tensor> forward(std::vector<GemmUnit::Use>& uses, const Tensor& x, Splits splits,
                         const ForwardOptions& options, bool training, const Tensor& into,
                         const Tensor& input_grad);
  // dy [rows, out] -> dx [rows, in], in `into` if that is defined; undefined without `dgrad`. Adds
  // to the parameters' gradients.
  Result<Tensor> backward(std::vector<GemmUnit::Use>& uses, const Tensor& dy, Splits splits,
                          bool dgrad, const Tensor& into);
  // For callers that can make the forward's input again. drop_inputs() frees the inputs that are
  // not quantised; give_inputs() must then be called before the backward. It calls `make` only if
  // the backward reads an input that was dropped.
  static void drop_inputs(std::vector<GemmUnit::Use>& uses);
  Status give_inputs(std::vector<GemmUnit::Use>& uses, Splits splits,
                     const std::function<Result<Tensor>()>& make) const;

 private:
  using Uses = std::vector<GemmUnit::Use>;
  using Gradients = std::vector<GemmUnit::Gradient>;
  // Splits x into the rows of each unit, quantised or cast as the unit's GEMMs need them. Fills
  // `uses` for the backward.
  Result<std::vector<Tensor>> inputs(Uses& uses, const Tensor& x, Splits splits);
  // The arguments of a forward's products without D. `weights` owns their weights; those that need
  // quantisation are quantised in one op.
  Result<std::vector<te_fl_generic_gemm_args>> products(const Uses& uses,
                                                        const std::vector<Tensor>& inputs,
                                                        const ForwardOptions& options,
                                                        std::vector<GemmUnit::Weight>& weights);
  Result<Gradients> gradients(const Uses& uses, const Tensor& dy, Splits splits);
  Result<Tensor> dgrad(const Uses& uses, const Gradients& grads, Splits splits, int64_t rows,
                       const Tensor& into);
  Status wgrad(const Uses& uses, const Gradients& grads);
  Status run_wgrad(const Uses& uses, const Gradients& grads);

  Status spread();
  Status multiply_wgrad(std::vector<std::pair<size_t, te_fl_generic_gemm_args>> left);

  std::vector<std::unique_ptr<GemmUnit>> units_;
  std::unique_ptr<GroupedParameter> weight_, bias_;  // null: each unit has its own
  std::shared_ptr<DelayedWgrad> delayed_ = std::make_shared<DelayedWgrad>();
};

}  // namespace te_fl::nn::detail
