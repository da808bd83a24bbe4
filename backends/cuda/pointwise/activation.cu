// Activations, their gradients, and gradients fused with the bias gradient.
#include "te_fl/ops/activation.h"

#include "common/elementwise.cuh"
#include "common/overlap.hpp"
#include "plugin/families.hpp"
#include "pointwise/activation.cuh"
#include "pointwise/activation.hpp"

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
struct Gradient {  // of (grad, input)
  static constexpr int kSources = 2, kOutputs = 1;
  __device__ void operator()(const float (&x)[2], float (&v)[1]) const {
    v[0] = x[0] * Act::dual(x[1]).derivative;
  }
  __device__ float bound(const float (&x)[2]) const requires(Act::kSteepest > 0) {
    return Act::kSteepest * fabsf(x[0]);
  }
};
template <class Gate>
struct Gated {  // of the halves of the input
  static constexpr int kSources = 2, kOutputs = 1;
  Gate gate;
  __device__ void operator()(const float (&x)[2], float (&v)[1]) const {
    v[0] = gate.value(x[0], x[1]);
  }
};
template <class Gate>
struct GatedGradient {  // of (grad, the halves of the input), into both halves
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
  float limit, alpha;
  // min and clamp that let a NaN pass.
  __device__ float high(float x) const { return x > limit ? limit : x; }
  __device__ float both(float x) const { return high(x < -limit ? -limit : x); }
  __device__ float value(float a, float b) const {
    return swish(high(a), alpha) * (both(b) + 1.0f);
  }
  __device__ void gradient(float dy, float a, float b, float& da, float& db) const {
    const Dual act = swish_dual(high(a), alpha);
    da = a > limit ? 0.0f : dy * act.derivative * (both(b) + 1.0f);
    db = fabsf(b) > limit ? 0.0f : dy * act.value;
  }
};

int64_t cols_of(const te_fl_tensor& t) { return backend::as_matrix(t).cols; }
MatrixSource whole(const te_fl_tensor& t) { return {Source(t), 0, cols_of(t)}; }
MatrixSource half(const te_fl_tensor& t, int which) {
  return {Source(t), which * (cols_of(t) / 2), cols_of(t)};
}

template <class Act>
void forward(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args) {
  check_output(*args.output, "output");
  store_elementwise<false>(ctx, *args.output, Elementwise<Forward<Act>>{{whole(*args.input)}, {}});
}
template <class Act, class Args>
Elementwise<Gradient<Act>> gradient(const Args& args) {
  return {{whole(*args.grad), whole(*args.input)}, {}};
}
template <class Act>
void backward(const te_fl_context& ctx, const te_fl_activation_act_bwd_args& args) {
  check_output(*args.output, "output");
  store_elementwise<false>(ctx, *args.output, gradient<Act>(args));
}
template <class Act>
void backward_dbias(const te_fl_context& ctx, const te_fl_activation_dbias_act_args& args) {
  check_output(*args.output, "output");
  store_elementwise<true>(ctx, *args.output, gradient<Act>(args), args.dbias);
}

template <class Gate, class Args>
void gated(const te_fl_context& ctx, const Args& args, const Gate& gate) {
  check_output(*args.output, "output");
  store_elementwise<false>(
      ctx, *args.output,
      Elementwise<Gated<Gate>>{{half(*args.input, 0), half(*args.input, 1)}, {gate}});
}
template <class Gate, class Args>
void gated_gradient(const te_fl_context& ctx, const Args& args, const Gate& gate) {
  check_output(*args.output, "output");
  store_elementwise<false>(
      ctx, *args.output,
      Elementwise<GatedGradient<Gate>>{
          {whole(*args.grad), half(*args.input, 0), half(*args.input, 1)}, {gate}});
}
template <class Act>
void gated_forward(const te_fl_context& ctx, const te_fl_activation_glu_fwd_args& args) {
  gated(ctx, args, ActGate<Act>{});
}
template <class Act>
void gated_backward(const te_fl_context& ctx, const te_fl_activation_glu_bwd_args& args) {
  gated_gradient(ctx, args, ActGate<Act>{});
}
void clamped_forward(const te_fl_context& ctx, const te_fl_activation_clamped_fwd_args& args) {
  gated(ctx, args, ClampedGate{args.limit, args.alpha});
}
void clamped_backward(const te_fl_context& ctx, const te_fl_activation_clamped_bwd_args& args) {
  gated_gradient(ctx, args, ClampedGate{args.limit, args.alpha});
}

// ---- what is not served

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

template <class Args, auto F, auto Refuses>
void append(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
    *bytes = kStoreWorkspace;
    return te_fl_status{TE_FL_OK};
  };
}

size_t dbias_workspace(const te_fl_context&, const te_fl_activation_dbias_act_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.output);
  return dbias_dgelu_workspace(matrix.rows, matrix.cols);
}

template <class Act>
void append_plain(Ops& ops, const char* name, const char* gradient_name, const char* dbias_name) {
  append<te_fl_activation_act_fwd_args, forward<Act>, refuse_forward>(ops, name);
  append<te_fl_activation_act_bwd_args, backward<Act>,
         refuse_backward<te_fl_activation_act_bwd_args>>(ops, gradient_name);
  append<te_fl_activation_dbias_act_args, backward_dbias<Act>, refuse_dbias>(ops, dbias_name);
  ops.back().workspace = backend::workspace_thunk<te_fl_activation_dbias_act_args, dbias_workspace>;
}
template <class Act>
void append_gated(Ops& ops, const char* name, const char* gradient_name) {
  append<te_fl_activation_glu_fwd_args, gated_forward<Act>,
         refuse_gated<te_fl_activation_glu_fwd_args>>(ops, name);
  append<te_fl_activation_glu_bwd_args, gated_backward<Act>,
         refuse_gated_backward<te_fl_activation_glu_bwd_args>>(ops, gradient_name);
}

}  // namespace

void gelu(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args) {
  forward<Gelu>(ctx, args);
}
void dgelu(const te_fl_context& ctx, const te_fl_activation_act_bwd_args& args) {
  backward<Gelu>(ctx, args);
}
void dbias_dgelu(const te_fl_context& ctx, const te_fl_activation_dbias_act_args& args) {
  backward_dbias<Gelu>(ctx, args);
}
size_t gelu_measured_workspace() { return kStoreWorkspace; }
void gelu_measured(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args) {
  check_output(*args.output, "output");
  store_elementwise<false>(ctx, *args.output, Elementwise<Forward<Gelu>>{{whole(*args.input)}, {}},
                           nullptr, nullptr, FLT_MAX, true);
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
  append<te_fl_activation_clamped_fwd_args, clamped_forward,
         refuse_gated<te_fl_activation_clamped_fwd_args>>(ops, "clamped_swiglu");
  append<te_fl_activation_clamped_bwd_args, clamped_backward,
         refuse_gated_backward<te_fl_activation_clamped_bwd_args>>(ops, "clamped_dswiglu");
}

}  // namespace te_fl::cuda
