// Activations, their gradients, and gradients fused with the bias gradient.
#include "te_fl/ops/activation.h"

#include "activation.cuh"
#include "families.hpp"
#include "overlap.hpp"
#include "store.cuh"

namespace te_fl::cuda {
namespace {

template <class Act>
struct Forward {
  Source input;
  int64_t cols;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    input.load(row * cols + col, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = Act::value(v[i]);
  }
};

template <class Act>
struct Gradient {
  Source grad, input;
  int64_t cols;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float x[kGroup];
    input.load(row * cols + col, n, x);
    grad.load(row * cols + col, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] *= Act::derivative(x[i]);
  }
};

template <class Gate>
struct Gated {
  Source input;
  int64_t half;
  Gate gate;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float b[kGroup];
    input.load(row * 2 * half + col, n, v);
    input.load(row * 2 * half + half + col, n, b);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = gate.value(v[i], b[i]);
  }
};

// The gradient of [a, b], in the first and the second half.
template <class Gate>
struct GatedGradient {
  Source grad, input;
  int64_t half;
  Gate gate;
  __device__ void part(bool first, int64_t row, int64_t c, int n, float* v) const {
    float a[kGroup], b[kGroup];
    grad.load(row * half + c, n, v);
    input.load(row * 2 * half + c, n, a);
    input.load(row * 2 * half + half + c, n, b);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      v[i] = first ? gate.first(v[i], a[i], b[i]) : gate.second(v[i], a[i], b[i]);
    }
  }
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    if (col + n <= half) return part(true, row, col, n, v);
    if (col >= half) return part(false, row, col - half, n, v);
    for (int i = 0; i < kGroup; ++i) {  // across the middle, where half is no multiple of 8
      float one[kGroup];
      if (i >= n) break;
      const bool first = col + i < half;
      part(first, row, first ? col + i : col + i - half, 1, one);
      v[i] = one[0];
    }
  }
};

template <class Act>
struct ActGate {
  __device__ float value(float a, float b) const { return Act::value(a) * b; }
  __device__ float first(float dy, float a, float b) const { return dy * Act::derivative(a) * b; }
  __device__ float second(float dy, float a, float) const { return dy * Act::value(a); }
};

struct ClampedGate {
  float limit, alpha;
  // min and clamp that let a NaN pass.
  __device__ float high(float x) const { return x > limit ? limit : x; }
  __device__ float both(float x) const { return high(x < -limit ? -limit : x); }
  __device__ float value(float a, float b) const {
    return swish(high(a), alpha) * (both(b) + 1.0f);
  }
  __device__ float first(float dy, float a, float b) const {
    return a > limit ? 0.0f : dy * swish_derivative(a, alpha) * (both(b) + 1.0f);
  }
  __device__ float second(float dy, float a, float b) const {
    return fabsf(b) > limit ? 0.0f : dy * swish(high(a), alpha);
  }
};

int64_t cols_of(const te_fl_tensor& t) { return backend::as_matrix(t).cols; }

template <class Act>
void forward(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args) {
  check_output(*args.output, "output");
  store_output(ctx, *args.output, Forward<Act>{Source(*args.input), cols_of(*args.output)});
}
template <class Act, class Args>
Gradient<Act> gradient(const Args& args) {
  return {Source(*args.grad), Source(*args.input), cols_of(*args.output)};
}
template <class Act>
void backward(const te_fl_context& ctx, const te_fl_activation_act_bwd_args& args) {
  check_output(*args.output, "output");
  store_output(ctx, *args.output, gradient<Act>(args));
}
template <class Act>
void backward_dbias(const te_fl_context& ctx, const te_fl_activation_dbias_act_args& args) {
  check_output(*args.output, "output");
  const backend::Matrix matrix = backend::as_matrix(*args.output);
  auto* partials = reinterpret_cast<float*>(static_cast<char*>(ctx.workspace) + kStoreWorkspace);
  // Before the output is written: it may have the memory of an input.
  column_sums(ctx, matrix.rows, matrix.cols, partials, *args.dbias, false, gradient<Act>(args));
  store_output(ctx, *args.output, gradient<Act>(args));
}
template <class Act>
void gated_forward(const te_fl_context& ctx, const te_fl_activation_glu_fwd_args& args) {
  check_output(*args.output, "output");
  store_output(ctx, *args.output,
               Gated<ActGate<Act>>{Source(*args.input), cols_of(*args.output), {}});
}
template <class Act>
void gated_backward(const te_fl_context& ctx, const te_fl_activation_glu_bwd_args& args) {
  check_output(*args.output, "output");
  store_output(ctx, *args.output,
               GatedGradient<ActGate<Act>>{
                   Source(*args.grad), Source(*args.input), cols_of(*args.output) / 2, {}});
}
void clamped_forward(const te_fl_context& ctx, const te_fl_activation_clamped_fwd_args& args) {
  check_output(*args.output, "output");
  store_output(
      ctx, *args.output,
      Gated<ClampedGate>{Source(*args.input), cols_of(*args.output), {args.limit, args.alpha}});
}
void clamped_backward(const te_fl_context& ctx, const te_fl_activation_clamped_bwd_args& args) {
  check_output(*args.output, "output");
  store_output(ctx, *args.output,
               GatedGradient<ClampedGate>{Source(*args.grad),
                                          Source(*args.input),
                                          cols_of(*args.output) / 2,
                                          {args.limit, args.alpha}});
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
  return kStoreWorkspace + column_sums_bytes(matrix.rows, matrix.cols);
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
