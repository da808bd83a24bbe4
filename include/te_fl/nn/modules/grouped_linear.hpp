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
  DType activation_dtype = DType::kF32;  // of the output
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;   // weights ~ N(0, init_std^2), biases 0
  bool return_bias = false;  // the biases are parameters that the caller adds, as in Linear
};

// Compact memory for what GroupedLinear computes, of the result's shape and dtype, which the caller
// keeps until then; undefined: memory of its own. INVALID_ARGUMENT where it is memory that the
// products still read: x, where no codes are made of it, or the output's gradient.
struct GroupedMemory {
  Tensor output;      // [rows, out]
  Tensor input_grad;  // [rows, in], which the backward of the forward with it writes
};

// The linear maps of a mixture's experts: y_i = x_i W_i^T + b_i, where the rows x_i follow each
// other. The products of all experts are one op in each direction; in FP8 each expert has scales of
// its own, as a Linear would have, and the rows of all are quantised in one op. Values and
// gradients are those of a loop over Linear. Parameters: weight0 .. [out, in], and then bias0 ..
// [out]. FP8 sites: gemm0 ...
class TE_FL_API GroupedLinear : public Module {
 public:
  static Result<std::unique_ptr<GroupedLinear>> create(const GroupedLinearOptions& options);
  ~GroupedLinear() override;
  // x [rows, in] -> [rows, out]. splits: the rows of each expert, which may be 0; together they are
  // all that x has, else INVALID_ARGUMENT. An expert without rows keeps its amaxes, and its
  // parameters get gradients of zeros. ctx and options are as in Linear.
  Result<Tensor> forward(const Tensor& x, std::span<const int64_t> splits, Ctx* ctx,
                         const ForwardOptions& options = {}, const GroupedMemory& memory = {});
  // dy [rows, out] -> dx [rows, in] in x's dtype, undefined where ctx does not want it and there is
  // no memory for it; adds to the parameters' gradients.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  GroupedLinear();
  std::unique_ptr<detail::GroupedGemm> group_;
};

}  // namespace te_fl::nn
