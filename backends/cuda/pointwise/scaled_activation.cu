// Activations with a factor of each row, and SiTU-GLU. A block takes a row at a time; the
// activation and the dtypes are looked at while the kernel runs, which memory hides.
#include <algorithm>

#include "common/overlap.hpp"
#include "common/pack.cuh"
#include "plugin/families.hpp"
#include "pointwise/activation.cuh"
#include "te_fl/backend/activation_checks.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::cuda {
namespace {

enum class ScaledAct : int { kSrelu, kSwiglu, kClamped, kSitu };

struct ScaledOptions {
  ScaledAct act = ScaledAct::kSwiglu;
  float limit = 0, alpha = 0, offset = 0;
  float beta1 = 1, beta2 = 1;
};

// ---- arithmetic

// beta tanh(x / beta) and its derivative; odd powers where 1 - exp(-2 |u|) has lost digits.
struct Bounded {
  float value, slope;
  __device__ Bounded(float x, float beta) {
    const float u = x / beta, size = fabsf(u), u2 = u * u;
    const float e = fast_exp2(-2.0f * kLog2E * size), r = fast_reciprocal(1.0f + e);
    const float series =
        fmaf(u2, fmaf(u2, fmaf(u2, 62.0f / 2835.0f, -17.0f / 315.0f), 2.0f / 15.0f), -1.0f / 3.0f);
    const float t = size < 0.25f ? fmaf(u * u2, series, u) : copysignf((1.0f - e) * r, u);
    value = isnan(x) ? x : beta * t;
    slope = 4.0f * e * r * r;
  }
};

// The result of (a, b) and its derivatives by both; srelu has no b.
struct GateAt {
  float value, by_a, by_b;
};

__device__ inline GateAt clamped_gate(const ScaledOptions& o, float a, float b) {
  const float x = a > o.limit ? o.limit : a;  // a NaN passes
  const float low = b < -o.limit ? -o.limit : b, y = low > o.limit ? o.limit : low;
  const Dual act = swish_dual(x, o.alpha);
  return {act.value * (y + o.offset), a > o.limit ? 0.0f : act.derivative * (y + o.offset),
          fabsf(b) > o.limit ? 0.0f : act.value};
}
__device__ inline GateAt situ_gate(const ScaledOptions& o, float a, float b) {
  const Bounded first(a, o.beta1), second(b, o.beta2);
  const Sigmoids s(-kLog2E * a);
  return {first.value * s.plus * second.value,
          s.plus * fmaf(first.value, s.minus, first.slope) * second.value,
          first.value * s.plus * second.slope};
}

// Calls f with the gate of the call: the switch stands outside of the loop over elements.
template <class F>
__device__ inline void with_gate(const ScaledOptions& o, F&& f) {
  switch (o.act) {
    case ScaledAct::kSrelu:
      return f([](float a, float) {
        const Dual act = Srelu::dual(a);
        return GateAt{act.value, act.derivative, 0.0f};
      });
    case ScaledAct::kSwiglu:
      return f([](float a, float b) {
        const Dual act = Silu::dual(a);
        return GateAt{act.value * b, act.derivative * b, act.value};
      });
    case ScaledAct::kClamped:
      return f([&o](float a, float b) { return clamped_gate(o, a, b); });
    default:
      return f([&o](float a, float b) { return situ_gate(o, a, b); });
  }
}

// ---- kernels

// Rows of `half` results and `width` inputs. `turns`: columns of a before as many of b. A thread
// takes `step` columns, which no turn parts.
struct ScaledRows {
  int64_t count, half, width;
  uint32_t turns;
  int step;

  __host__ __device__ bool gated() const { return width != half; }
  // The place of a's column; b's is `turns` further.
  __device__ int64_t place(int64_t row, int64_t col) const {
    const int64_t skipped = gated() ? static_cast<uint32_t>(col) / turns * int64_t{turns} : 0;
    return row * width + col + skipped;
  }
};

static __global__ void __launch_bounds__(kThreads)
    scaled_forward_kernel(Source input, Source scales, Target output, ScaledRows rows,
                          ScaledOptions options) {
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const float scale = scales.data != nullptr ? scales.at(row) : 1.0f;
    for (int64_t col = int64_t{threadIdx.x} * rows.step; col < rows.half;
         col += int64_t{blockDim.x} * rows.step) {
      const int n = static_cast<int>(min(int64_t{rows.step}, rows.half - col));
      const int64_t at = rows.place(row, col);
      float a[kGroup], b[kGroup] = {};
      input.load(at, n, a);
      if (rows.gated()) input.load(at + rows.turns, n, b);
      with_gate(options, [&](auto gate) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) a[i] = scale * gate(a[i], b[i]).value;
      });
      output.store(row * rows.half + col, n, a);
    }
  }
}

// Columns behind a row's last are loaded as 0, of which every gate is 0.
static __global__ void __launch_bounds__(kThreads)
    scaled_gradient_kernel(Source grad, Source input, Source scales, Target output,
                           Target grad_scales, ScaledRows rows, ScaledOptions options) {
  __shared__ float dots[kThreads / 32];
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const float scale = scales.data != nullptr ? scales.at(row) : 1.0f;
    float dot = 0.0f;
    for (int64_t col = int64_t{threadIdx.x} * rows.step; col < rows.half;
         col += int64_t{blockDim.x} * rows.step) {
      const int n = static_cast<int>(min(int64_t{rows.step}, rows.half - col));
      const int64_t at = rows.place(row, col);
      float a[kGroup], b[kGroup] = {}, dy[kGroup];
      input.load(at, n, a);
      if (rows.gated()) input.load(at + rows.turns, n, b);
      grad.load(row * rows.half + col, n, dy);
      with_gate(options, [&](auto gate) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const GateAt g = gate(a[i], b[i]);
          dot = fmaf(dy[i], g.value, dot);
          const float scaled = scale * dy[i];
          a[i] = scaled * g.by_a, b[i] = scaled * g.by_b;
        }
      });
      output.store(at, n, a);
      if (rows.gated()) output.store(at + rows.turns, n, b);
    }
    if (grad_scales.data == nullptr) continue;
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) dots[threadIdx.x / 32] = dot;
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0.0f;
      for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += dots[w];
      grad_scales.store(row, 1, &sum);
    }
    __syncthreads();
  }
}

// ---- calls

template <class Args>
ScaledOptions options_of(const Args& a) {
  ScaledOptions o;
  if constexpr (requires { a.beta1; }) {
    o.act = ScaledAct::kSitu, o.beta1 = a.beta1, o.beta2 = a.beta2;
  } else if constexpr (requires { a.limit; }) {
    o.act = ScaledAct::kClamped;
    o.limit = a.limit, o.alpha = a.alpha, o.offset = a.glu_linear_offset;
  } else if constexpr (!requires { a.glu_interleave_size; }) {
    o.act = ScaledAct::kSrelu;
  }
  return o;
}

// `narrow` has the rows of results.
template <class Args>
ScaledRows rows_of(const Args& a, const te_fl_tensor& narrow) {
  const backend::Matrix m = backend::as_matrix(narrow);
  int64_t turns = 0;
  if constexpr (requires { a.glu_interleave_size; }) turns = a.glu_interleave_size;
  backend::check_interleave(turns, m.cols);
  const int step = turns % kGroup == 0 ? kGroup : 1;
  if (turns == 0) turns = std::max<int64_t>(m.cols, 1);
  return {m.rows, m.cols, backend::as_matrix(*a.input).cols, static_cast<uint32_t>(turns), step};
}

struct RowLaunch {
  unsigned blocks, threads;
  explicit RowLaunch(const ScaledRows& rows)
      : blocks(static_cast<unsigned>(std::min<int64_t>(rows.count, 1 << 22))),
        threads(static_cast<unsigned>(
            std::clamp<int64_t>(round_up(ceil_div(rows.half, rows.step), 32), 32, kThreads))) {}
};

Source source_of(const te_fl_tensor* t) { return t != nullptr ? Source(*t) : Source(); }
Target target_of(const te_fl_tensor* t) { return t != nullptr ? Target(*t) : Target(); }

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
  const ScaledRows rows = rows_of(a, *a.output);
  if (rows.count == 0 || rows.half == 0) return;
  const RowLaunch launch(rows);
  scaled_forward_kernel<<<launch.blocks, launch.threads, 0, stream_of(ctx)>>>(
      Source(*a.input), source_of(scales_of(a)), Target(*a.output), rows, options_of(a));
  check_launch("scaled_forward_kernel");
}

template <class Args>
void scaled_backward(const te_fl_context& ctx, const Args& a) {
  const ScaledRows rows = rows_of(a, *a.grad);
  if (rows.count == 0) return;
  const RowLaunch launch(rows);
  scaled_gradient_kernel<<<launch.blocks, launch.threads, 0, stream_of(ctx)>>>(
      Source(*a.grad), Source(*a.input), source_of(scales_of(a)), Target(*a.output),
      target_of(grad_scales_of(a)), rows, options_of(a));
  check_launch("scaled_gradient_kernel");
}

// ---- what is not served

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

template <class Args, bool kForward>
std::string scaled_words(const te_fl_context&, const Args& a) {
  const te_fl_tensor* narrow = a.output;
  if constexpr (!kForward) narrow = a.grad;
  return std::string(kForward ? "scaled_forward_kernel: " : "scaled_gradient_kernel: ") +
         (rows_of(a, *narrow).step == kGroup
              ? "eight columns of a thread"
              : "one column of a thread, as glu_interleave_size is no multiple of 8");
}

template <class Forward, class Backward>
void append_scaled(std::vector<te_fl_op_desc>& ops, const char* name, const char* gradient) {
  ops.push_back(descriptor<Forward, scaled_forward<Forward>, refuse_scaled_forward<Forward>>(name));
  ops.back().describe = backend::describe_thunk<Forward, scaled_words<Forward, true>>;
  ops.push_back(
      descriptor<Backward, scaled_backward<Backward>, refuse_scaled_backward<Backward>>(gradient));
  ops.back().describe = backend::describe_thunk<Backward, scaled_words<Backward, false>>;
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
