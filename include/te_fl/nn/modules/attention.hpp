#pragma once

#include <memory>

#include "te_fl/nn/modules/attention_inputs.hpp"
#include "te_fl/nn/modules/attention_options.hpp"
#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

namespace detail {
struct Fp8Mode;
}

// o = softmax(cap(scale q k^T) + bias, masked) v. q [.., H, D], k [.., G, D], v [.., G, Dv] in the
// layout
// -> o [.., H, Dv]. Strided views of packed QKV are accepted. Parameter (kLearnable only):
// softmax_offset [H], F32. FP8 site (recipe with fp8_dpa): fp8, forward slots qkv, s, o, backward
// slots do, dp, dqkv.
class TE_FL_API DotProductAttention : public Module {
 public:
  struct Gradients {
    Tensor dq, dk, dv;  // of q, k, v; compact unless the caller gave them
    Tensor dbias;       // of AttentionInputs::bias if it was given
  };
  static Result<std::unique_ptr<DotProductAttention>> create(
      const DotProductAttentionOptions& options);
  ~DotProductAttention() override;
  // ctx null: inference, no dropout.
  Result<Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, Ctx* ctx,
                         const AttentionInputs& inputs = {});
  // Each gradient has its input's dtype. `into`: where to write dq, dk and dv instead of new
  // tensors; strided views of q's, k's and v's shape, in any high-precision dtype. FP8 attention
  // also writes to quantised views and takes a quantised d_o.
  Result<Gradients> backward(const Tensor& d_o, Ctx& ctx, const Gradients* into = nullptr);

 private:
  friend class MultiheadAttention;
  // MultiheadAttention needs these to keep q, k, v, o and their gradients in codes between FP8
  // attention and the products around it: how a forward is to compute (mode.fp8: in FP8); new
  // codes, of which q, k and v, or their gradients, are slices; and forward() whose q, k and v may
  // be codes and whose o is, with room for a column-wise copy if `columns`.
  enum class Codes : uint8_t { kQkv, kOutputGrad, kQkvGrad };
  Result<detail::Fp8Mode> begin(bool training);
  Result<Tensor> codes(const detail::Fp8Mode& mode, Codes what, std::span<const int64_t> shape);
  Result<Tensor> forward_codes(const Tensor& q, const Tensor& k, const Tensor& v, Ctx* ctx,
                               const AttentionInputs& inputs, bool columns);
  struct Impl;
  explicit DotProductAttention(const DotProductAttentionOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
