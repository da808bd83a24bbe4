// Activations with a scale per row, and SiTU-GLU. A block processes one row at a time.
#include <algorithm>

#include "common/overlap.hpp"
#include "common/pack.cuh"
#include "plugin/families.hpp"
#include "pointwise/activation.cuh"
#include "pointwise/pointwise_choice.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::cuda {
namespace {

// ---- arithmetic

// The value of a gated activation of (a, b) and its derivatives with respect to a and b. srelu has
// no b.
struct GateAt {
  float value, by_a, by_b;
};

struct SreluGate {
  static constexpr bool kGated = false;
  __device__ float value(float a, float) const { return Srelu::value(a); }
  __device__ GateAt at(float a, float) const {
    const Dual act = Srelu::dual(a);
    return {act.value, act.derivative, 0.0f};
  }
};

struct SwigluGate {
  static constexpr bool kGated = true;
  __device__ float value(float a, float b) const { return Silu::value(a) * b; }
  __device__ GateAt at(float a, float b) const {
    const Dual act = Silu::dual(a);
    return {act.value * b, act.derivative * b, act.value};
  }
};

struct ScaledClampedGate {
  static constexpr bool kGated = true;
  float limit, alpha, offset;
  __device__ float value(float a, float b) const {
    return swish(low(a), alpha) * (within(b) + offset);
  }
  __device__ GateAt at(float a, float b) const {
    const Dual act = swish_dual(low(a), alpha);
    const float factor = within(b) + offset;
    return {act.value * factor, a > limit ? 0.0f : act.derivative * factor,
            fabsf(b) > limit ? 0.0f : act.value};
  }

 private:
  __device__ float low(float a) const { return a > limit ? limit : a; }  // NaN is kept
  __device__ float within(float b) const { return low(b < -limit ? -limit : b); }
};

// Computes beta tanh(u) with u = x / beta. Uses a series where 1 - exp(-2 |u|) would lose
// precision, else a quotient.
struct Bounded {
  bool small;
  float series, power, divisor, dividend;
  __device__ Bounded(float x, float beta, float inverse) {
    const float u = x * inverse, u2 = u * u;
    small = fabsf(u) < 0.125f;
    series = fmaf(x * u2, fmaf(u2, 2.0f / 15.0f, -1.0f / 3.0f), x);
    power = fast_exp2(-2.0f * kLog2E * fabsf(u));
    divisor = 1.0f + power;
    dividend = copysignf(fmaf(-beta, power, beta), x);
  }
};
struct BoundedDual {
  float value, slope;
  __device__ BoundedDual(const Bounded& b) {
    const float r = fast_reciprocal(b.divisor), share = b.power * r;
    value = b.small ? b.series : b.dividend * r;
    slope = 4.0f * fmaf(-share, share, share);
  }
};

struct SituGate {
  static constexpr bool kGated = true;
  float beta1, beta2, inverse1, inverse2;
  SituGate(float first, float second)
      : beta1(first), beta2(second), inverse1(1.0f / first), inverse2(1.0f / second) {}

  // Computes one reciprocal of the product of the three divisors, because a reciprocal costs as
  // much as eight multiplications.
  __device__ float value(float a, float b) const {
    const Bounded x(a, beta1, inverse1), y(b, beta2, inverse2);
    const float divisor = (x.small ? 1.0f : x.divisor) * (y.small ? 1.0f : y.divisor);
    const float r = fast_reciprocal(divisor * (1.0f + fast_exp2(-kLog2E * a)));
    return (x.small ? x.series : x.dividend) * r * (y.small ? y.series : y.dividend);
  }
  __device__ GateAt at(float a, float b) const {
    const BoundedDual x(Bounded(a, beta1, inverse1)), y(Bounded(b, beta2, inverse2));
    const Sigmoids s(-kLog2E * a);
    const float factor = s.plus * y.value;
    return {x.value * factor, factor * fmaf(x.value, s.minus, x.slope), x.value * s.plus * y.slope};
  }
};

// ---- kernels

// The shape of a call: `count` rows of `half` results and `width` inputs. An input row alternates
// between `turns` columns of a and `turns` columns of b. A thread processes `step` columns at once,
// all in the same run of `turns` columns.
struct ScaledRows {
  int64_t count, half, width;
  FastDiv turns;
  int step;

  // Returns the index in an input row of column `col` of the gate a. The matching column of b lies
  // turns.divisor columns behind it.
  template <class Gate>
  __device__ uint32_t place(uint32_t col) const {
    if constexpr (!Gate::kGated) return col;
    uint32_t rest = 0;
    return col + turns(col, rest) * turns.divisor;
  }
};

__device__ inline float scale_of(const Source& scales, int64_t row) {
  return scales.data != nullptr ? scales.at(row) : 1.0f;
}

template <class Gate>
__global__ void __launch_bounds__(kThreads)
    scaled_forward_kernel(Source input, Source scales, Target output, ScaledRows rows, Gate gate) {
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const float scale = scale_of(scales, row);
    for (int64_t col = int64_t{threadIdx.x} * rows.step; col < rows.half;
         col += int64_t{blockDim.x} * rows.step) {
      const int n = static_cast<int>(min(int64_t{rows.step}, rows.half - col));
      const int64_t at = row * rows.width + rows.place<Gate>(static_cast<uint32_t>(col));
      float a[kGroup], b[kGroup] = {};
      input.load(at, n, a);
      if constexpr (Gate::kGated) input.load(at + rows.turns.divisor, n, b);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) a[i] = scale * gate.value(a[i], b[i]);
      output.store(row * rows.half + col, n, a);
    }
  }
}

// Sums `dot` over the threads of a block. Thread 0 receives the result.
__device__ inline float block_dot(float dot) {
  __shared__ float dots[kThreads / 32];
  __syncthreads();  // waits until all threads have read the previous sum
  dot = warp_sum(dot);
  if (threadIdx.x % 32 == 0) dots[threadIdx.x / 32] = dot;
  __syncthreads();
  float sum = 0.0f;
  for (unsigned w = 0; threadIdx.x == 0 && w < blockDim.x / 32; ++w) sum += dots[w];
  return sum;
}

// Computes the gradients of one pair of columns in place, and adds dy times the result to `dot`.
template <class Gate>
__device__ inline void compute_gradient(const Gate& gate, float scale, float dy, float& a, float& b,
                                   float& dot) {
  const GateAt g = gate.at(a, b);
  dot = fmaf(dy, g.value, dot);
  const float scaled = scale * dy;
  a = scaled * g.by_a, b = scaled * g.by_b;
}

// Columns past the row's end are loaded as 0, for which every gate is 0.
template <class Gate>
__global__ void __launch_bounds__(kThreads)
    scaled_gradient_kernel(Source grad, Source input, Source scales, Target output,
                           Target grad_scales, ScaledRows rows, Gate gate) {
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const float scale = scale_of(scales, row);
    float dot = 0.0f;
    for (int64_t col = int64_t{threadIdx.x} * rows.step; col < rows.half;
         col += int64_t{blockDim.x} * rows.step) {
      const int n = static_cast<int>(min(int64_t{rows.step}, rows.half - col));
      const int64_t at = row * rows.width + rows.place<Gate>(static_cast<uint32_t>(col));
      float a[kGroup], b[kGroup] = {}, dy[kGroup];
      input.load(at, n, a);
      if constexpr (Gate::kGated) input.load(at + rows.turns.divisor, n, b);
      grad.load(row * rows.half + col, n, dy);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) compute_gradient(gate, scale, dy[i], a[i], b[i], dot);
      output.store(at, n, a);
      if constexpr (Gate::kGated) output.store(at + rows.turns.divisor, n, b);
    }
    if (grad_scales.data == nullptr) continue;
    const float sum = block_dot(dot);
    if (threadIdx.x == 0) grad_scales.store(row, 1, &sum);
  }
}

// Kernels for rows of one dtype whose length is a multiple of a pack. A thread loads kPacksAtOnce
// packs before it computes.
constexpr int kPacksAtOnce = 2;

template <class T, class Gate>
__global__ void __launch_bounds__(kThreads)
    scaled_forward_packs(const T* input, Source scales, T* output, ScaledRows rows, Gate gate) {
  using Columns = Pack<T, kGroup>;
  const uint32_t step = blockDim.x * kGroup, half = static_cast<uint32_t>(rows.half);
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const T* const x = input + row * rows.width;
    T* const y = output + row * rows.half;
    for (uint32_t first = threadIdx.x * kGroup; first < half; first += kPacksAtOnce * step) {
      Columns a[kPacksAtOnce], b[kPacksAtOnce];
      uint32_t at[kPacksAtOnce];
#pragma unroll
      for (int u = 0; u < kPacksAtOnce; ++u) {
        const uint32_t col = first + u * step;
        if (col >= half) continue;
        at[u] = rows.place<Gate>(col);
        a[u].load(x + at[u]);
        if constexpr (Gate::kGated) b[u].load(x + at[u] + rows.turns.divisor);
      }
      const float scale = scale_of(scales, row);
#pragma unroll
      for (int u = 0; u < kPacksAtOnce; ++u) {
        const uint32_t col = first + u * step;
        if (col >= half) continue;
        float v[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          v[i] = scale * gate.value(a[u][i], Gate::kGated ? b[u][i] : 0.0f);
        }
        a[u].set(v);
        a[u].store_set(y + col);
      }
    }
  }
}

template <class T, class Gate>
__global__ void __launch_bounds__(kThreads)
    scaled_gradient_packs(const T* grad, const T* input, Source scales, T* output,
                          Target grad_scales, ScaledRows rows, Gate gate) {
  using Columns = Pack<T, kGroup>;
  const uint32_t step = blockDim.x * kGroup, half = static_cast<uint32_t>(rows.half);
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const T* const x = input + row * rows.width;
    const T* const dy = grad + row * rows.half;
    T* const dx = output + row * rows.width;
    float dot = 0.0f;
    for (uint32_t first = threadIdx.x * kGroup; first < half; first += kPacksAtOnce * step) {
      Columns a[kPacksAtOnce], b[kPacksAtOnce], g[kPacksAtOnce];
      uint32_t at[kPacksAtOnce];
#pragma unroll
      for (int u = 0; u < kPacksAtOnce; ++u) {
        const uint32_t col = first + u * step;
        if (col >= half) continue;
        at[u] = rows.place<Gate>(col);
        a[u].load(x + at[u]);
        if constexpr (Gate::kGated) b[u].load(x + at[u] + rows.turns.divisor);
        g[u].load(dy + col);
      }
      const float scale = scale_of(scales, row);
#pragma unroll
      for (int u = 0; u < kPacksAtOnce; ++u) {
        const uint32_t col = first + u * step;
        if (col >= half) continue;
        float by_a[kGroup], by_b[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          by_a[i] = a[u][i], by_b[i] = Gate::kGated ? b[u][i] : 0.0f;
          compute_gradient(gate, scale, g[u][i], by_a[i], by_b[i], dot);
        }
        a[u].set(by_a);
        a[u].store_set(dx + at[u]);
        if constexpr (Gate::kGated) {
          b[u].set(by_b);
          b[u].store_set(dx + at[u] + rows.turns.divisor);
        }
      }
    }
    if (grad_scales.data == nullptr) continue;
    const float sum = block_dot(dot);
    if (threadIdx.x == 0) grad_scales.store(row, 1, &sum);
  }
}

// ---- calls

template <class Args>
auto gate_of(const Args& a) {
  if constexpr (requires { a.beta1; }) {
    return SituGate(a.beta1, a.beta2);
  } else if constexpr (requires { a.limit; }) {
    return ScaledClampedGate{a.limit, a.alpha, a.glu_linear_offset};
  } else if constexpr (requires { a.glu_interleave_size; }) {
    return SwigluGate{};
  } else {
    return SreluGate{};
  }
}

// Returns ScaledRows::turns of a call.
template <class Args>
int64_t interleave_width(const Args& a) {
  if constexpr (requires { a.glu_interleave_size; }) {
    return a.glu_interleave_size;
  } else {
    return 0;
  }
}

// `narrow`: a tensor with the shape of the result.
template <class Args>
ScaledRows make_rows(const Args& a, const te_fl_tensor& narrow) {
  const backend::Matrix m = backend::as_matrix(narrow);
  const int64_t turns = interleave_width(a);
  const int step = turns % kGroup == 0 ? kGroup : 1;
  return {m.rows, m.cols, backend::as_matrix(*a.input).cols,
          FastDiv(turns == 0 ? std::max<int64_t>(m.cols, 1) : turns), step};
}

template <class Args>
PointwiseChoice choose_kernel(const Args& a) {
  if constexpr (requires { a.grad; }) {
    const int64_t half = backend::as_matrix(*a.grad).cols;
    return choose_scaled(false, {a.grad, a.input, a.output}, half, interleave_width(a));
  } else {
    const int64_t half = backend::as_matrix(*a.output).cols;
    return choose_scaled(true, {a.input, a.output}, half, interleave_width(a));
  }
}

// Launch configuration. A thread processes `each` columns of a row at once.
struct RowLaunch {
  unsigned blocks, threads;
  RowLaunch(const ScaledRows& rows, int64_t each)
      : blocks(static_cast<unsigned>(std::min<int64_t>(rows.count, 1 << 22))),
        threads(static_cast<unsigned>(
            std::clamp<int64_t>(round_up(ceil_div(rows.half, each), 32), 32, kThreads))) {}
};

Source make_source(const te_fl_tensor* t) { return t != nullptr ? Source(*t) : Source(); }
Target make_target(const te_fl_tensor* t) { return t != nullptr ? Target(*t) : Target(); }

template <class Args>
const te_fl_tensor* scales_of(const Args& a) {
  if constexpr (requires { a.act_scales; }) {
    return a.act_scales;
  } else {
    return nullptr;
  }
}
template <class Args>
const te_fl_tensor* grad_scales_of(const Args& a) {
  if constexpr (requires { a.grad_scales; }) {
    return a.grad_scales;
  } else {
    return nullptr;
  }
}

template <class Args>
void scaled_forward(const te_fl_context& ctx, const Args& a) {
  const ScaledRows rows = make_rows(a, *a.output);
  if (rows.count == 0 || rows.half == 0) return;
  const auto gate = gate_of(a);
  const Source scales = make_source(scales_of(a));
  if (!choose_kernel(a).aligned) {
    const RowLaunch launch(rows, rows.step);
    scaled_forward_kernel<<<launch.blocks, launch.threads, 0, stream_of(ctx)>>>(
        Source(*a.input), scales, Target(*a.output), rows, gate);
    return check_launch("scaled_forward_kernel");
  }
  const RowLaunch launch(rows, kPacksAtOnce * kGroup);
  with_type(dtype_of(*a.input), [&]<class T>(T) {
    scaled_forward_packs<<<launch.blocks, launch.threads, 0, stream_of(ctx)>>>(
        backend::data<const T>(*a.input), scales, backend::data<T>(*a.output), rows, gate);
  });
  check_launch("scaled_forward_packs");
}

template <class Args>
void scaled_backward(const te_fl_context& ctx, const Args& a) {
  const ScaledRows rows = make_rows(a, *a.grad);
  if (rows.count == 0) return;
  const auto gate = gate_of(a);
  const Source scales = make_source(scales_of(a));
  const Target grad_scales = make_target(grad_scales_of(a));
  if (!choose_kernel(a).aligned) {
    const RowLaunch launch(rows, rows.step);
    scaled_gradient_kernel<<<launch.blocks, launch.threads, 0, stream_of(ctx)>>>(
        Source(*a.grad), Source(*a.input), scales, Target(*a.output), grad_scales, rows, gate);
    return check_launch("scaled_gradient_kernel");
  }
  const RowLaunch launch(rows, kPacksAtOnce * kGroup);
  with_type(dtype_of(*a.input), [&]<class T>(T) {
    scaled_gradient_packs<<<launch.blocks, launch.threads, 0, stream_of(ctx)>>>(
        backend::data<const T>(*a.grad), backend::data<const T>(*a.input), scales,
        backend::data<T>(*a.output), grad_scales, rows, gate);
  });
  check_launch("scaled_gradient_packs");
}

// ---- calls that are refused

constexpr const char* kLongRows = "rows have 2^31 elements or more";

template <class Args>
Refusal refuse_scaled_forward(const Args& a) {
  if (!all_dense(a.input, scales_of(a), a.output)) return kNotContiguous;
  if (overlaps(*a.output, *a.input)) return kOverlaps;
  return backend::as_matrix(*a.input).cols < kFastDivLimit ? nullptr : kLongRows;
}
template <class Args>
Refusal refuse_scaled_backward(const Args& a) {
  if (!all_dense(a.grad, a.input, scales_of(a), a.output, grad_scales_of(a))) {
    return kNotContiguous;
  }
  if (overlaps(*a.output, *a.input) || overlaps(*a.output, *a.grad)) return kOverlaps;
  return backend::as_matrix(*a.input).cols < kFastDivLimit ? nullptr : kLongRows;
}

template <class Args>
std::string scaled_words(const te_fl_context&, const Args& a) {
  return choose_kernel(a).text();
}

template <class Forward, class Backward>
void append_scaled(std::vector<te_fl_op_desc>& ops, const char* name, const char* gradient) {
  ops.push_back(descriptor<Forward, scaled_forward<Forward>, refuse_scaled_forward<Forward>>(name));
  ops.back().describe = backend::describe_thunk<Forward, scaled_words<Forward>>;
  ops.push_back(
      descriptor<Backward, scaled_backward<Backward>, refuse_scaled_backward<Backward>>(gradient));
  ops.back().describe = backend::describe_thunk<Backward, scaled_words<Backward>>;
}

}  // namespace

void append_scaled_activation(std::vector<te_fl_op_desc>& ops) {
  append_scaled<te_fl_situglu_args, te_fl_dsituglu_args>(ops, "situglu", "dsituglu");
  append_scaled<te_fl_scaled_swiglu_args, te_fl_scaled_dswiglu_args>(ops, "scaled_swiglu",
                                                                     "scaled_dswiglu");
  append_scaled<te_fl_scaled_clamped_swiglu_args, te_fl_scaled_clamped_dswiglu_args>(
      ops, "scaled_clamped_swiglu", "scaled_clamped_dswiglu");
  append_scaled<te_fl_scaled_srelu_args, te_fl_scaled_dsrelu_args>(ops, "scaled_srelu",
                                                                   "scaled_dsrelu");
  append_scaled<te_fl_scaled_situglu_args, te_fl_scaled_dsituglu_args>(ops, "scaled_situglu",
                                                                       "scaled_dsituglu");
}

}  // namespace te_fl::cuda
