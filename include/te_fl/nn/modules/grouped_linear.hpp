#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

namespace detail {
class GroupedGemm;
}  // namespace detail

struct GroupedLinearOptions {
  int64_t num_gemms = 1;
  int64_t in_features = 0;
  int64_t out_features = 0;
  bool bias = true;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;  // dtype of the output
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;   // weights ~ N(0, init_std^2), biases 0
  bool return_bias = false;  // leave the biases to the caller, see LinearOptions
  // All weights are one parameter "weight" [num_gemms, out, in], and all biases one parameter
  // "bias" [num_gemms, out]. A framework then tracks two parameters instead of two per expert.
  bool single_grouped_weight = false;
  bool single_grouped_bias = false;
};

// Memory for the results of GroupedLinear, provided by the caller: compact tensors of the result's
// shape and dtype. The caller keeps each tensor alive until its result has been written. Undefined:
// GroupedLinear allocates the result. INVALID_ARGUMENT if the memory overlaps a tensor that the
// GEMMs still read: x (unless it is quantised first) or the output's gradient.
struct GroupedMemory {
  Tensor output;      // [rows, out]
  Tensor input_grad;  // [rows, in]; written by the backward of the forward that it was passed to
};

// The linear layers of a mixture of experts: y_i = x_i W_i^T + b_i, where the rows of all x_i are
// concatenated. One op per direction computes the GEMMs of all experts. In FP8 each expert has its
// own scales, as a Linear would have, and one op quantises the rows of all experts. Results and
// gradients are those of a loop over Linear, to the bit unless the device's grouped_gemm adds in
// another order than its generic_gemm, as on Hopper GPUs. Parameters: weight0 .. [out, in], then
// bias0 .. [out], or the single parameters of the options. FP8 states: gemm0 ...
class TE_FL_API GroupedLinear : public Module {
 public:
  static Result<std::unique_ptr<GroupedLinear>> create(const GroupedLinearOptions& options);
  ~GroupedLinear() override;
  // x [rows, in] -> [rows, out]. splits: the number of rows of each expert, which may be 0;
  // INVALID_ARGUMENT unless they sum to the rows of x. An expert without rows keeps its amaxes, and
  // its parameters get zero gradients. ctx and options are as in Linear.
  Result<Tensor> forward(const Tensor& x, std::span<const int64_t> splits, Ctx* ctx,
                         const ForwardOptions& options = {}, const GroupedMemory& memory = {});
  // dy [rows, out] -> dx [rows, in] in x's dtype. dx is undefined if ctx.input_grad is false and no
  // memory was given for it. Adds to the parameters' gradients.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  GroupedLinear();
  std::unique_ptr<detail::GroupedGemm> group_;
};

}  // namespace te_fl::nn
