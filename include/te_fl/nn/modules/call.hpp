#pragma once

#include <functional>
#include <utility>

#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/tape.hpp"
#include "te_fl/nn/modules/attention.hpp"
#include "te_fl/nn/modules/embedding.hpp"
#include "te_fl/nn/modules/loss.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/modules/transformer.hpp"
#include "te_fl/status.hpp"

// Calls modules as functions of tape values.
namespace te_fl::nn {

// Calls module.forward(x, ctx, args...) and records it on x's tape.
template <class Called, class... Args>
Value call(Called& module, const Value& x, const Args&... args);

// Overloads for modules whose forward has another signature.
TE_FL_API Value call(DotProductAttention& attention, const Value& q, const Value& k, const Value& v,
                     const AttentionInputs& inputs = {});
// Cross-attention. `encoder` replaces inputs.encoder_output.
TE_FL_API Value call(MultiheadAttention& attention, const Value& x, const Value& encoder,
                     const AttentionInputs& inputs = {});
// A decoder layer. `encoder` replaces cross.encoder_output.
TE_FL_API Value call(TransformerLayer& decoder, const Value& x, const Value& encoder,
                     const AttentionInputs& inputs = {}, const AttentionInputs& cross = {});
TE_FL_API Value call(Residual& residual, const Value& a, const Value& b);
TE_FL_API Value call(Tape& tape, Embedding& embedding, const Tensor& indices);
// The mean of the rows' losses (CrossEntropyLoss::forward()), F32 [1].
TE_FL_API Value cross_entropy(const Value& logits, const Tensor& targets,
                              const CrossEntropyOptions& options = {}, double divisor = 0);

namespace detail {

// Calls forward() with the options if it accepts them.
template <class Called>
Result<Tensor> forward_with(Called& module, const Tensor& x, Ctx* ctx,
                            const ForwardOptions& options) {
  if constexpr (requires { module.forward(x, ctx, options); }) {
    return module.forward(x, ctx, options);
  } else if constexpr (requires { module.forward(x, ctx, AttentionInputs{}, options); }) {
    return module.forward(x, ctx, AttentionInputs{}, options);
  } else {
    return module.forward(x, ctx);
  }
}

using Forward = std::function<Result<Tensor>(const Tensor& x, Ctx* ctx)>;
using Back = std::function<Result<Tensor>(const Tensor& dy, Ctx& ctx)>;
TE_FL_API Value call_module(const Module& module, const Value& x, const Forward& forward,
                            Back backward);

}  // namespace detail

template <class Called, class... Args>
Value call(Called& module, const Value& x, const Args&... args) {
  return detail::call_module(
      module, x,
      [&](const Tensor& in, Ctx* ctx) -> Result<Tensor> {
        if constexpr (sizeof...(args) == 0) {
          return detail::forward_with(module, in, ctx, x.tape()->options);
        } else if constexpr (requires { module.forward(in, ctx, args..., x.tape()->options); }) {
          return module.forward(in, ctx, args..., x.tape()->options);
        } else {
          return module.forward(in, ctx, args...);
        }
      },
      [&module](const Tensor& dy, Ctx& ctx) -> Result<Tensor> { return module.backward(dy, ctx); });
}

}  // namespace te_fl::nn
