// Optimizers over lists of tensors. One launch processes many tensors; each tensor has its own row
// of blocks in the grid.
#include "te_fl/ops/optimizer.h"

#include <algorithm>
#include <cmath>

#include "common/overlap.hpp"
#include "common/pack.cuh"
#include "common/store.cuh"
#include "optimizer/adam.cuh"
#include "optimizer/list_choice.hpp"
#include "plugin/families.hpp"
#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {
namespace {

using TensorList = const te_fl_tensor* const*;

constexpr int kLists = 5, kTensors = list_choice::kTensors;

// Up to kTensors tensors of each of up to kLists lists, as a kernel parameter.
struct Batch {
  void* data[kLists][kTensors];
  int8_t dtype[kLists][kTensors];
  int64_t size[kTensors];
  unsigned first_block[kTensors];  // first block of the tensor's chunks; kernels over chunks only
  int count = 0;

  __device__ Source source(int list, int tensor) const {
    Source s;
    s.data = data[list][tensor];
    s.dtype = dtype[list][tensor];
    return s;
  }
  __device__ Target target(int list, int tensor) const {
    Target t;
    t.data = data[list][tensor];
    t.dtype = dtype[list][tensor];
    return t;
  }
};

// Calls f(batch, index of its first tensor, grid) for each batch. Empty lists have NULL data.
template <class F>
void for_each_batch(std::initializer_list<TensorList> lists, int64_t count, F&& f) {
  for (int64_t first = 0; first < count; first += kTensors) {
    Batch batch{};
    int64_t most = 1;
    batch.count = static_cast<int>(std::min<int64_t>(kTensors, count - first));
    int list = 0;
    for (const TensorList tensors : lists) {
      for (int i = 0; tensors != nullptr && i < batch.count; ++i) {
        const te_fl_tensor& t = *tensors[first + i];
        batch.data[list][i] = backend::data<void>(t);
        batch.dtype[list][i] = static_cast<int8_t>(dtype_of(t));
        batch.size[i] = backend::numel(t);
        most = std::max(most, batch.size[i]);
      }
      ++list;
    }
    const dim3 grid(std::min(blocks_for(ceil_div(most, kGroup)), 512u),
                    static_cast<unsigned>(batch.count));
    f(batch, first, grid);
  }
}

// Calls f(first element, count) for each of the thread's groups of a tensor.
template <class F>
__device__ void for_each_group(int64_t size, F&& f) {
  const int64_t step = int64_t{gridDim.x} * kThreads * kGroup;
  for (int64_t i = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * kGroup; i < size; i += step) {
    f(i, static_cast<int>(size - i < kGroup ? size - i : kGroup));
  }
}

// ---- scale

__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Batch b, float scale, const float* norm, float max_norm,
                 int32_t* noop_flag) {
  bool finite = true;
  if (norm != nullptr) {
    finite = isfinite(*norm);
    if (finite && *norm > max_norm) scale *= max_norm / *norm;
  }
  const int t = static_cast<int>(blockIdx.y);
  const Source in = b.source(0, t);
  const Target out = b.target(1, t);
  // A finite product may overflow the output's dtype: from this limit on it rounds to infinity.
  const float limit = out.dtype == TE_FL_F16    ? 65520.0f
                      : out.dtype == TE_FL_BF16 ? 3.3961775e38f
                                                : INFINITY;
  // True if the output need not be written. The values are checked nevertheless, because `norm` may
  // come from other tensors.
  const bool stays = scale == 1.0f && in.data == out.data && in.dtype == out.dtype;
  for_each_group(b.size[t], [&](int64_t i, int n) {
    float v[kGroup];
    in.load(i, n, v);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      finite = finite && isfinite(v[j]);
      v[j] *= scale;
      finite = finite && (j >= n || (isfinite(v[j]) && fabsf(v[j]) < limit));
    }
    if (!stays) out.store(i, n, v);
  });
  if (!finite) *noop_flag = 1;
}
void scale(const te_fl_context& ctx, const te_fl_multi_tensor_scale_args& a) {
  const auto* norm = a.norm != nullptr ? backend::data<const float>(*a.norm) : nullptr;
  for_each_batch({a.inputs, a.outputs}, a.inputs_count, [&](const Batch& b, int64_t, dim3 grid) {
    scale_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(b, a.scale, norm, a.max_norm,
                                                        backend::data<int32_t>(*a.noop_flag));
    check_launch("multi_tensor_scale");
  });
}

// ---- norms: each block writes a partial sum of a tensor, and the partial sums are added in a
// fixed order

constexpr int kPartials = 128;

// Returns the block's partial sum of squares. It is computed in FP64, because squares of FP32
// values range from 2^-298 to 2^256. Uses four chains of additions; all loads of an iteration are
// in flight before the first addition.
template <class T>
__device__ double sum_of_squares(const T* x, int64_t size) {
  constexpr int kSize = Pack<T>::kSize, kAtOnce = 8;
  double sums[4] = {};
  const int64_t step = int64_t{gridDim.x} * kThreads * kSize;
  const int64_t first = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * kSize - misalignment(x);
  for (int64_t at = first; at < size; at += kAtOnce * step) {
    Pack<T> raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (at + u * step < size) load_cut(raw[u], x, at + u * step, size);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (at + u * step >= size) continue;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const double v = raw[u][i];
        sums[i % 4] = fma(v, v, sums[i % 4]);
      }
    }
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
__device__ inline double warp_sum(double v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

__global__ void __launch_bounds__(kThreads)
    squares_kernel(const __grid_constant__ Batch b, double* partials) {
  __shared__ double sums[kThreads / 32];
  const int t = static_cast<int>(blockIdx.y), dtype = b.dtype[0][t];
  const void* data = b.data[0][t];
  const int64_t size = b.size[t];
  const double total = dtype == TE_FL_F32    ? sum_of_squares(static_cast<const float*>(data), size)
                       : dtype == TE_FL_BF16 ? sum_of_squares(static_cast<const bf16*>(data), size)
                                             : sum_of_squares(static_cast<const fp16*>(data), size);
  double all = warp_sum(total);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = all;
  __syncthreads();
  if (threadIdx.x != 0) return;
  all = 0;
  for (double s : sums) all += s;
  partials[int64_t{t} * kPartials + blockIdx.x] = all;
}
// Launched as one block. Its warps sum the partials of one tensor each, then the tensors' sums are
// added. The norm is multiplied by |factor|, which gives the norm of the tensors multiplied by
// `factor`.
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const double* partials, int64_t tensors, const float* factor, float* norm,
                float* each) {
  __shared__ double sums[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const double f = factor != nullptr ? fabs(double{*factor}) : 1.0;
  double total = 0;
  for (int64_t t = warp; t < tensors; t += kThreads / 32) {
    const double* part = partials + t * kPartials;
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kPartials; i += 32) sum += part[i + lane];
    sum = warp_sum(sum);
    if (each != nullptr && lane == 0) each[t] = static_cast<float>(f * sqrt(sum));
    total += sum;
  }
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  total = 0;
  for (double s : sums) total += s;
  *norm = static_cast<float>(f * sqrt(total));
}
void norms(const te_fl_context& ctx, TensorList inputs, int64_t count, const te_fl_tensor* factor,
           const te_fl_tensor& norm, const te_fl_tensor* per_tensor) {
  auto* partials = static_cast<double*>(ctx.workspace);
  for_each_batch({inputs}, count, [&](const Batch& b, int64_t first, dim3 grid) {
    grid.x = kPartials;
    squares_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(b, partials + first * kPartials);
    check_launch("squares_kernel");
  });
  norm_kernel<<<1, kThreads, 0, stream_of(ctx)>>>(
      partials, count, factor != nullptr ? backend::data<const float>(*factor) : nullptr,
      backend::data<float>(norm),
      per_tensor != nullptr ? backend::data<float>(*per_tensor) : nullptr);
  check_launch("norm_kernel");
}
void l2norm(const te_fl_context& ctx, const te_fl_multi_tensor_l2norm_args& a) {
  norms(ctx, a.inputs, a.inputs_count, nullptr, *a.norm, a.per_tensor_norms);
}
void unscale_l2norm(const te_fl_context& ctx, const te_fl_multi_tensor_unscale_l2norm_args& a) {
  norms(ctx, a.inputs, a.inputs_count, a.inv_scale, *a.norm, a.per_tensor_norms);
}
template <class Args>
size_t norm_workspace(const te_fl_context&, const Args& a) {
  return static_cast<size_t>(std::max<int64_t>(1, a.inputs_count)) * kPartials * sizeof(double);
}

// ---- Adam

constexpr int kTurns = 2;                              // loads of a thread before it computes
constexpr int kChunk = kThreads * kFour * kTurns * 8;  // number of elements per block

__device__ inline bool four_aligned(const Batch& b, int t) {
  uintptr_t all = 0;
#pragma unroll
  for (int list = 0; list < kLists; ++list) all |= reinterpret_cast<uintptr_t>(b.data[list][t]);
  return all % 16 == 0;
}

// Each block processes one chunk of a tensor, which it finds through Batch::first_block.
__global__ void __launch_bounds__(kThreads, 4)
    adam_kernel(const __grid_constant__ Batch b, Adam a, const int32_t* noop) {
  if (noop != nullptr && *noop != 0) return;
  a.read_tensors();
  int t = 0;
  while (t + 1 < b.count && b.first_block[t + 1] <= blockIdx.x) ++t;
  const int64_t begin = int64_t{blockIdx.x - b.first_block[t]} * kChunk;
  const int64_t end = begin + kChunk < b.size[t] ? begin + kChunk : b.size[t];
  const Source grads = b.source(0, t);
  auto* m_data = static_cast<float*>(b.data[2][t]);
  auto* v_data = static_cast<float*>(b.data[3][t]);
  const bool has_master = b.data[4][t] != nullptr;
  const Target out = b.target(1, t);
  Target params = out;
  if (has_master) params = b.target(4, t);
  int64_t i = begin + threadIdx.x * kFour;
  if (four_aligned(b, t)) {
    constexpr int kStep = kThreads * kFour;
    for (; i + (kTurns - 1) * kStep + kFour <= end; i += kTurns * kStep) {
      Four g[kTurns], p[kTurns], m[kTurns], v[kTurns];
#pragma unroll
      for (int k = 0; k < kTurns; ++k) {
        g[k] = load_four(grads.data, grads.dtype, i + k * kStep);
        p[k] = load_four(params.data, params.dtype, i + k * kStep);
        m[k] = load_four(m_data, TE_FL_F32, i + k * kStep);
        v[k] = load_four(v_data, TE_FL_F32, i + k * kStep);
      }
#pragma unroll
      for (int k = 0; k < kTurns; ++k) {
        float gs[kFour], ps[kFour], ms[kFour], vs[kFour];
        unpack_four(g[k], grads.dtype, gs);
        unpack_four(p[k], params.dtype, ps);
        unpack_four(m[k], TE_FL_F32, ms);
        unpack_four(v[k], TE_FL_F32, vs);
#pragma unroll
        for (int j = 0; j < kFour; ++j) a.step(gs[j], ps[j], ms[j], vs[j]);
        const int64_t at = i + k * kStep;
        Target moments;
        moments.data = m_data;
        store_four(moments, at, ms);
        moments.data = v_data;
        store_four(moments, at, vs);
        if (has_master) store_four(params, at, ps);
        store_four(out, at, ps);
      }
    }
  }
  // Processes the remaining elements one by one: those after the last complete group of four, or
  // all elements of an unaligned tensor.
  for (; i < end; i += kThreads * kFour) {
    for (int64_t j = i; j < i + kFour && j < end; ++j) {
      Source from;
      from.data = params.data;
      from.dtype = params.dtype;
      float p = from.at(j), m = m_data[j], v = v_data[j];
      a.step(grads.at(j), p, m, v);
      m_data[j] = m;
      v_data[j] = v;
      if (has_master) params.store(j, 1, &p);
      out.store(j, 1, &p);
    }
  }
}
void adam(const te_fl_context& ctx, const te_fl_multi_tensor_adam_args& a) {
  const auto correction = [&](float beta) {
    return a.bias_correction ? static_cast<float>(1.0 - std::pow(double{beta}, double(a.step)))
                             : 1.0f;
  };
  const Adam constants{
      a.lr,
      a.beta1,
      a.beta2,
      static_cast<float>(1.0 - double{a.beta1}),
      static_cast<float>(1.0 - double{a.beta2}),
      a.epsilon,
      a.weight_decay,
      correction(a.beta1),
      correction(a.beta2),
      a.mode == TE_FL_ADAM_MODE_L2,
      a.bias_correction != 0,
      a.lr_tensor != nullptr ? backend::data<const float>(*a.lr_tensor) : nullptr,
      a.step_tensor != nullptr ? backend::data<const int64_t>(*a.step_tensor) : nullptr};
  const auto* noop = a.noop_flag != nullptr ? backend::data<const int32_t>(*a.noop_flag) : nullptr;
  if (a.fp8_params_count != 0) return adam_with_fp8(ctx, a, constants, noop);
  for_each_batch({a.grads, a.params, a.exp_avgs, a.exp_avg_sqs,
                  a.master_params_count != 0 ? a.master_params : nullptr},
                 a.grads_count, [&](Batch& b, int64_t, dim3) {
                   unsigned blocks = 0;
                   for (int t = 0; t < b.count; ++t) {
                     b.first_block[t] = blocks;
                     blocks += static_cast<unsigned>(ceil_div(b.size[t], kChunk));
                   }
                   if (blocks == 0) return;
                   adam_kernel<<<blocks, kThreads, 0, stream_of(ctx)>>>(b, constants, noop);
                   check_launch("multi_tensor_adam");
                 });
}

// ---- SGD

struct Sgd {
  float lr, weight_decay, momentum, keep, scale;  // keep is 1 - dampening
  bool nesterov, first_run, wd_after_momentum;
  const float* lr_tensor;  // replaces lr unless NULL
};
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(const __grid_constant__ Batch b, Sgd a, const int32_t* noop) {
  if (noop != nullptr && *noop != 0) return;
  if (a.lr_tensor != nullptr) a.lr = *a.lr_tensor;
  const int t = static_cast<int>(blockIdx.y);
  const Source grads = b.source(0, t), params = b.source(1, t);
  const Target out = b.target(1, t);
  auto* m_data = static_cast<float*>(b.data[2][t]);
  const bool copies = b.data[3][t] != nullptr;
  const Target copy = b.target(3, t);
  for_each_group(b.size[t], [&](int64_t i, int n) {
    float g[kGroup], p[kGroup], m[kGroup] = {};
    grads.load(i, n, g);
    params.load(i, n, p);
    if (a.momentum != 0.0f) load_group(m_data + i, n, m);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      float grad = g[j] * a.scale;
      if (!a.wd_after_momentum) grad = fmaf(a.weight_decay, p[j], grad);
      if (a.momentum != 0.0f) {
        m[j] = a.first_run ? grad : a.momentum * m[j] + a.keep * grad;
        grad = a.nesterov ? fmaf(a.momentum, m[j], grad) : m[j];
      }
      if (a.wd_after_momentum) grad = fmaf(a.weight_decay, p[j], grad);
      p[j] -= a.lr * grad;
    }
    if (a.momentum != 0.0f) store_group(m_data + i, n, m);
    out.store(i, n, p);
    if (!copies) return;
    // Copies the parameters as they are stored, that is, after rounding.
    params.load(i, n, p);
    copy.store(i, n, p);
  });
}
void sgd(const te_fl_context& ctx, const te_fl_multi_tensor_sgd_args& a) {
  const Sgd constants{a.lr,
                      a.weight_decay,
                      a.momentum,
                      static_cast<float>(1.0 - double{a.dampening}),
                      a.scale,
                      a.nesterov != 0,
                      a.first_run != 0,
                      a.wd_after_momentum != 0,
                      a.lr_tensor != nullptr ? backend::data<const float>(*a.lr_tensor) : nullptr};
  const auto* noop = a.noop_flag != nullptr ? backend::data<const int32_t>(*a.noop_flag) : nullptr;
  for_each_batch({a.grads, a.params, a.momentum != 0 ? a.momentums : nullptr,
                  a.param_copies_count != 0 ? a.param_copies : nullptr},
                 a.grads_count, [&](const Batch& b, int64_t, dim3 grid) {
                   sgd_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(b, constants, noop);
                   check_launch("multi_tensor_sgd");
                 });
}

bool list_dense(TensorList tensors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!dense(tensors[i])) return false;
  }
  return true;
}
Refusal refuse_scale(const te_fl_multi_tensor_scale_args& a) {
  if (!list_dense(a.inputs, a.inputs_count) || !list_dense(a.outputs, a.outputs_count)) {
    return kNotContiguous;
  }
  for (int64_t i = 0; i < std::min(a.inputs_count, a.outputs_count); ++i) {
    if (overlaps_askew(*a.outputs[i], *a.inputs[i])) return kOverlaps;
  }
  return nullptr;
}
template <class Args>
Refusal refuse_norm(const Args& a) {
  return list_dense(a.inputs, a.inputs_count) && dense(a.per_tensor_norms) ? nullptr
                                                                           : kNotContiguous;
}
Refusal refuse_adam(const te_fl_multi_tensor_adam_args& a) {
  const bool all = list_dense(a.grads, a.grads_count) && list_dense(a.params, a.params_count) &&
                   list_dense(a.exp_avgs, a.exp_avgs_count) &&
                   list_dense(a.exp_avg_sqs, a.exp_avg_sqs_count) &&
                   list_dense(a.master_params, a.master_params_count);
  return all ? refuse_fp8_params(a) : kNotContiguous;
}
Refusal refuse_sgd(const te_fl_multi_tensor_sgd_args& a) {
  const bool all = list_dense(a.grads, a.grads_count) && list_dense(a.params, a.params_count) &&
                   list_dense(a.momentums, a.momentums_count) &&
                   list_dense(a.param_copies, a.param_copies_count);
  return all ? nullptr : kNotContiguous;
}

template <class Args>
std::string describe_choice(const te_fl_context&, const Args& a) {
  return "kernel " + choose_list(a).text();
}
template <class Args, auto F, auto Refuses>
void append(std::vector<te_fl_op_desc>& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().describe = backend::describe_thunk<Args, describe_choice<Args>>;
}

}  // namespace

void append_optimizer(std::vector<te_fl_op_desc>& ops) {
  using L2 = te_fl_multi_tensor_l2norm_args;
  using Unscale = te_fl_multi_tensor_unscale_l2norm_args;
  append<te_fl_multi_tensor_scale_args, scale, refuse_scale>(ops, "multi_tensor_scale");
  ops.back().later_args = "norm max_norm";
  append<L2, l2norm, refuse_norm<L2>>(ops, "multi_tensor_l2norm");
  ops.back().workspace = backend::workspace_thunk<L2, norm_workspace<L2>>;
  append<Unscale, unscale_l2norm, refuse_norm<Unscale>>(ops, "multi_tensor_unscale_l2norm");
  ops.back().workspace = backend::workspace_thunk<Unscale, norm_workspace<Unscale>>;
  append<te_fl_multi_tensor_adam_args, adam, refuse_adam>(ops, "multi_tensor_adam");
  ops.back().later_args = "lr_tensor step_tensor fp8_params";
  append<te_fl_multi_tensor_sgd_args, sgd, refuse_sgd>(ops, "multi_tensor_sgd");
  ops.back().later_args = "lr_tensor";
}

}  // namespace te_fl::cuda
