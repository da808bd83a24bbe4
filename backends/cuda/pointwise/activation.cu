// The activation ops: forward, gradient, and gradient with the bias gradient.
#include "te_fl/ops/activation.h"

#include "common/elementwise.cuh"
#include "common/overlap.hpp"
#include "plugin/families.hpp"
#include "pointwise/activation.cuh"
#include "pointwise/activation.hpp"
#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {
namespace {

template <class Act>
struct Forward {
  static constexpr int kSources = 1, kOutputs = 1;
  __device__ void operator()(const float (&x)[1], float (&v)[1]) const { v[0] = Act::value(x[0]); }
  __device__ float bound(const float (&x)[1]) const requires(Act::kSteepest > 0) {
    return fabsf(x[0]);
  }
};
template <class Act>
struct Gradient {  // sources: (grad, input)
  static constexpr int kSources = 2, kOutputs = 1;
  __device__ void operator()(const float (&x)[2], float (&v)[1]) const {
    v[0] = x[0] * Act::dual(x[1]).derivative;
  }
  __device__ float bound(const float (&x)[2]) const requires(Act::kSteepest > 0) {
    return Act::kSteepest * fabsf(x[0]);
  }
};
template <class Gate>
struct Gated {  // sources: the halves of the input
  static constexpr int kSources = 2, kOutputs = 1;
  Gate gate;
  __device__ void operator()(const float (&x)[2], float (&v)[1]) const {
    v[0] = gate.value(x[0], x[1]);
  }
};
template <class Gate>
struct GatedGradient {  // sources: grad and the halves of the input; results: the gradients of both
                        // halves
  static constexpr int kSources = 3, kOutputs = 2;
  Gate gate;
  __device__ void operator()(const float (&x)[3], float (&v)[2]) const {
    gate.gradient(x[0], x[1], x[2], v[0], v[1]);
  }
};

template <class Act>
struct ActGate {
  __device__ float value(float a, float b) const { return Act::value(a) * b; }
  __device__ void gradient(float dy, float a, float b, float& da, float& db) const {
    const Dual act = Act::dual(a);
    da = dy * act.derivative * b;
    db = dy * act.value;
  }
};

struct ClampedGate {
  float limit, alpha, offset;
  // high() is a minimum with `limit`, both() a clamp to [-limit, limit]; NaN stays NaN.
  __device__ float high(float x) const { return x > limit ? limit : x; }
  __device__ float both(float x) const { return high(x < -limit ? -limit : x); }
  __device__ float value(float a, float b) const {
    return swish(high(a), alpha) * (both(b) + offset);
  }
  __device__ void gradient(float dy, float a, float b, float& da, float& db) const {
    const Dual act = swish_dual(high(a), alpha);
    da = a > limit ? 0.0f : dy * act.derivative * (both(b) + offset);
    db = fabsf(b) > limit ? 0.0f : dy * act.value;
  }
};

int64_t cols_of(const te_fl_tensor& t) { return backend::as_matrix(t).cols; }
MatrixSource whole(const te_fl_tensor& t) { return {Source(t), 0, cols_of(t)}; }
MatrixSource half(const te_fl_tensor& t, int which) {
  return {Source(t), which * (cols_of(t) / 2), cols_of(t)};
}

// ---- calls as elementwise ops

template <class Act>
Elementwise<Forward<Act>> forward(const te_fl_activation_act_fwd_args& args) {
  return {{whole(*args.input)}, {}};
}
template <class Act, class Args>
Elementwise<Gradient<Act>> gradient(const Args& args) {
  return {{whole(*args.grad), whole(*args.input)}, {}};
}
template <class Gate, class Args>
Elementwise<Gated<Gate>> gated_by(const Args& args, const Gate& gate) {
  return {{half(*args.input, 0), half(*args.input, 1)}, {gate}};
}
template <class Gate, class Args>
Elementwise<GatedGradient<Gate>> gradient_by(const Args& args, const Gate& gate) {
  return {{whole(*args.grad), half(*args.input, 0), half(*args.input, 1)}, {gate}};
}
template <class Act>
auto gated(const te_fl_activation_glu_fwd_args& args) {
  return gated_by(args, ActGate<Act>{});
}
template <class Act>
auto gated_gradient(const te_fl_activation_glu_bwd_args& args) {
  return gradient_by(args, ActGate<Act>{});
}
auto clamped(const te_fl_activation_clamped_fwd_args& args) {
  return gated_by(args, ClampedGate{args.limit, args.alpha, args.glu_linear_offset});
}
auto clamped_gradient(const te_fl_activation_clamped_bwd_args& args) {
  return gradient_by(args, ClampedGate{args.limit, args.alpha, args.glu_linear_offset});
}

template <class Args>
concept SumsBias = requires(const Args& args) {
  args.dbias;
};
template <class Args>
const te_fl_tensor* bias_of(const Args& args) {
  if constexpr (SumsBias<Args>) {
    return args.dbias;
  } else {
    return nullptr;
  }
}
// Runs a call. Op: the function that returns the call's elementwise op.
template <class Args, auto Op>
void store(const te_fl_context& ctx, const Args& args) {
  store_elementwise<SumsBias<Args>>(ctx, *args.output, Op(args), bias_of(args));
}
template <class Args, auto Op>
std::string describe_choice(const te_fl_context&, const Args& args) {
  return choose_store(Op(args), *args.output, bias_of(args), false).text();
}

// ---- calls that are refused

Refusal refuse_forward(const te_fl_activation_act_fwd_args& args) {
  if (!dense(args.input)) return kNotContiguous;
  return overlaps_askew(*args.output, *args.input) ? kOverlaps : refuse_output(*args.output);
}
template <class Args>
Refusal refuse_backward(const Args& args) {
  if (!all_dense(args.grad, args.input)) return kNotContiguous;
  const bool askew =
      overlaps_askew(*args.output, *args.grad) || overlaps_askew(*args.output, *args.input);
  return askew ? kOverlaps : refuse_output(*args.output);
}
Refusal refuse_dbias(const te_fl_activation_dbias_act_args& args) {
  return dense(args.dbias) ? refuse_backward(args) : kNotContiguous;
}
template <class Args>
Refusal refuse_gated(const Args& args) {
  if (!dense(args.input)) return kNotContiguous;
  return overlaps(*args.output, *args.input) ? kOverlaps : refuse_output(*args.output);
}
template <class Args>
Refusal refuse_gated_backward(const Args& args) {
  if (!all_dense(args.grad, args.input)) return kNotContiguous;
  const bool meets = overlaps(*args.output, *args.grad) || overlaps(*args.output, *args.input);
  return meets ? kOverlaps : refuse_output(*args.output);
}

using Ops = std::vector<te_fl_op_desc>;

template <class Args, auto Op, auto Refuses>
void append(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, store<Args, Op>, Refuses>(name));
  ops.back().describe = backend::describe_thunk<Args, describe_choice<Args, Op>>;
  ops.back().workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
    *bytes = kStoreWorkspace;
    return te_fl_status{TE_FL_OK};
  };
}

size_t dbias_workspace(const te_fl_context&, const te_fl_activation_dbias_act_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.output);
  return dbias_dgelu_workspace(matrix.rows, matrix.cols);
}

using ForwardArgs = te_fl_activation_act_fwd_args;
using BackwardArgs = te_fl_activation_act_bwd_args;
using DbiasArgs = te_fl_activation_dbias_act_args;

template <class Act>
void append_plain(Ops& ops, const char* name, const char* gradient_name, const char* dbias_name) {
  append<ForwardArgs, forward<Act>, refuse_forward>(ops, name);
  append<BackwardArgs, gradient<Act, BackwardArgs>, refuse_backward<BackwardArgs>>(ops,
                                                                                   gradient_name);
  append<DbiasArgs, gradient<Act, DbiasArgs>, refuse_dbias>(ops, dbias_name);
  ops.back().workspace = backend::workspace_thunk<DbiasArgs, dbias_workspace>;
}
template <class Act>
void append_gated(Ops& ops, const char* name, const char* gradient_name) {
  append<te_fl_activation_glu_fwd_args, gated<Act>, refuse_gated<te_fl_activation_glu_fwd_args>>(
      ops, name);
  append<te_fl_activation_glu_bwd_args, gated_gradient<Act>,
         refuse_gated_backward<te_fl_activation_glu_bwd_args>>(ops, gradient_name);
}

}  // namespace

void gelu(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args) {
  store<ForwardArgs, forward<Gelu>>(ctx, args);
}
void dgelu(const te_fl_context& ctx, const te_fl_activation_act_bwd_args& args) {
  store<BackwardArgs, gradient<Gelu, BackwardArgs>>(ctx, args);
}
void dbias_dgelu(const te_fl_context& ctx, const te_fl_activation_dbias_act_args& args) {
  store<DbiasArgs, gradient<Gelu, DbiasArgs>>(ctx, args);
}
size_t gelu_measured_workspace() { return kStoreWorkspace; }
void gelu_measured(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args) {
  store_elementwise<false>(ctx, *args.output, forward<Gelu>(args), nullptr, nullptr, FLT_MAX, true);
}
size_t dbias_dgelu_workspace(int64_t rows, int64_t cols) {
  return kStoreWorkspace + column_sums_bytes(rows, cols);
}

void append_activation(Ops& ops) {
  append_plain<Gelu>(ops, "gelu", "dgelu", "dbias_dgelu");
  append_plain<Qgelu>(ops, "qgelu", "dqgelu", "dbias_dqgelu");
  append_plain<Relu>(ops, "relu", "drelu", "dbias_drelu");
  append_plain<Srelu>(ops, "srelu", "dsrelu", "dbias_dsrelu");
  append_plain<Silu>(ops, "silu", "dsilu", "dbias_dsilu");
  append_gated<Gelu>(ops, "geglu", "dgeglu");
  append_gated<Qgelu>(ops, "qgeglu", "dqgeglu");
  append_gated<Relu>(ops, "reglu", "dreglu");
  append_gated<Srelu>(ops, "sreglu", "dsreglu");
  append_gated<Silu>(ops, "swiglu", "dswiglu");
  append_gated<Sigmoid>(ops, "glu", "dglu");
  append<te_fl_activation_clamped_fwd_args, clamped,
         refuse_gated<te_fl_activation_clamped_fwd_args>>(ops, "clamped_swiglu");
  ops.back().later_args = "glu_linear_offset";
  append<te_fl_activation_clamped_bwd_args, clamped_gradient,
         refuse_gated_backward<te_fl_activation_clamped_bwd_args>>(ops, "clamped_dswiglu");
  ops.back().later_args = "glu_linear_offset";
}

}  // namespace te_fl::cuda
