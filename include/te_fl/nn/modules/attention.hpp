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
// layout -> o [.., H, Dv]. Accepts strided views of packed QKV. Parameter (kLearnable only):
// softmax_offset [H], F32. FP8 state (recipes with fp8_dpa): fp8, with forward slots qkv, s, o and
// backward slots do, dp, dqkv.
class TE_FL_API DotProductAttention : public Module {
 public:
  struct Gradients {
    Tensor dq, dk, dv;  // gradients of q, k, v; compact unless the caller provided the tensors
    Tensor dbias;       // gradient of AttentionInputs::bias, if that was given
  };
  static Result<std::unique_ptr<DotProductAttention>> create(
      const DotProductAttentionOptions& options);
  ~DotProductAttention() override;
  // ctx null: inference, no dropout.
  Result<Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, Ctx* ctx,
                         const AttentionInputs& inputs = {});
  // Each gradient has its input's dtype. `into`: tensors that receive dq, dk and dv, instead of new
  // ones; strided views of the shapes of q, k and v, in any high-precision dtype. FP8 attention
  // also writes to quantised views and accepts a quantised d_o.
  Result<Gradients> backward(const Tensor& d_o, Ctx& ctx, const Gradients* into = nullptr);

 private:
  friend class MultiheadAttention;
  // Interface for MultiheadAttention, which keeps q, k, v, o and their gradients as FP8 tensors
  // between FP8 attention and the linear layers around it. begin() decides how a forward computes
  // (mode.fp8: in FP8). codes() allocates an FP8 tensor that holds q, k and v, or their gradients,
  // as slices. forward_codes() is a forward whose q, k and v may be FP8 tensors and whose o is an
  // FP8 tensor, with memory for column-wise data if `columns`.
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
