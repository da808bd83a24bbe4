// The dropout ops, which save a mask of one bit per element, and the op add, which can apply
// dropout to one operand.
#include "te_fl/ops/dropout.h"

#include "common/overlap.hpp"
#include "common/pack.cuh"
#include "common/random.cuh"
#include "plugin/families.hpp"
#include "pointwise/pointwise_choice.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/ops/tensor.h"

namespace te_fl::cuda {
namespace {

constexpr int kGroupsAtOnce = 2;  // groups that a thread has in flight

// Index of the thread's u-th group of eight elements. A block processes kGroupsAtOnce groups per
// thread; those of a thread are kThreads apart.
__device__ inline int64_t group_index(int u) {
  return (blockIdx.x * int64_t{kGroupsAtOnce} + u) * kThreads + threadIdx.x;
}
__device__ inline int group_elements(int64_t group, int64_t size) {
  const int64_t left = size - group * kGroup;
  return left >= kGroup ? kGroup : left > 0 ? static_cast<int>(left) : 0;
}
// Returns a mask of n low bits, one for each element of a group of n elements.
__device__ inline uint32_t existing(int n) { return n == kGroup ? 0xFFu : (1u << n) - 1u; }

template <class T>
__device__ inline void load_elements(Pack<T, kGroup>& x, const T* p, int n, bool aligned) {
  if (aligned && n == kGroup) return x.load(p);
  x.load_some(p, 0, n);
}
template <class T>
__device__ inline void store_elements(const Pack<T, kGroup>& x, T* p, int n, bool aligned) {
  if (aligned && n == kGroup) return x.store(p);
  x.store_some(p, 0, n);
}

// Multiplies kept elements by 1 / (1 - p).
template <class T, bool kForward>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T* in, T* out, uint8_t* mask, int64_t size, float factor,
                   DropoutStream stream, bool aligned) {
  Pack<T, kGroup> x[kGroupsAtOnce];
#pragma unroll
  for (int u = 0; u < kGroupsAtOnce; ++u) {
    const int64_t g = group_index(u);
    load_elements(x[u], in + g * kGroup, group_elements(g, size), aligned);
  }
#pragma unroll
  for (int u = 0; u < kGroupsAtOnce; ++u) {
    const int64_t g = group_index(u);
    const int n = group_elements(g, size);
    if (n == 0) continue;
    uint32_t bits;
    if constexpr (kForward) {
      bits = stream.keep_eight(g * kGroup) & existing(n);
      mask[g] = static_cast<uint8_t>(bits);
    } else {
      bits = mask[g];
    }
    float v[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = (bits >> i & 1u) != 0 ? x[u][i] * factor : 0.0f;
    x[u].set(v);
    store_elements(x[u], out + g * kGroup, n, aligned);
  }
}

template <class T, bool kDrops>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const T* a, const T* b, T* out, uint8_t* mask, int64_t size, float factor,
               DropoutStream stream, bool aligned) {
  Pack<T, kGroup> x[kGroupsAtOnce], y[kGroupsAtOnce];
#pragma unroll
  for (int u = 0; u < kGroupsAtOnce; ++u) {
    const int64_t g = group_index(u);
    const int n = group_elements(g, size);
    load_elements(x[u], a + g * kGroup, n, aligned);
    load_elements(y[u], b + g * kGroup, n, aligned);
  }
#pragma unroll
  for (int u = 0; u < kGroupsAtOnce; ++u) {
    const int64_t g = group_index(u);
    const int n = group_elements(g, size);
    if (n == 0) continue;
    float v[kGroup];
    if constexpr (kDrops) {
      const uint32_t bits = stream.keep_eight(g * kGroup) & existing(n);
      mask[g] = static_cast<uint8_t>(bits);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        v[i] = (bits >> i & 1u) != 0 ? fmaf(y[u][i], factor, x[u][i]) : x[u][i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = x[u][i] + y[u][i];
    }
    x[u].set(v);
    store_elements(x[u], out + g * kGroup, n, aligned);
  }
}

// Computes the op add for any combination of dtypes.
__global__ void __launch_bounds__(kThreads)
    add_mixed_kernel(Source a, Source b, Target out, uint8_t* mask, int64_t size, float factor,
                     DropoutStream stream) {
  const int64_t groups = (size + kGroup - 1) / kGroup;
  for (int64_t g = blockIdx.x * int64_t{kThreads} + threadIdx.x; g < groups;
       g += int64_t{gridDim.x} * kThreads) {
    const int n = group_elements(g, size);
    float v[kGroup], w[kGroup];
    a.load(g * kGroup, n, v);
    b.load(g * kGroup, n, w);
    uint32_t bits = 0xFFu;
    if (mask != nullptr) {
      bits = stream.keep_eight(g * kGroup) & existing(n);
      mask[g] = static_cast<uint8_t>(bits);
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if ((bits >> i & 1u) != 0) v[i] = fmaf(w[i], factor, v[i]);
    }
    out.store(g * kGroup, n, v);
  }
}

unsigned dropout_blocks(int64_t size) {
  return static_cast<unsigned>(ceil_div(size, int64_t{kGroup} * kThreads * kGroupsAtOnce));
}
float keep_factor(float p) { return static_cast<float>(1.0 / (1.0 - static_cast<double>(p))); }

template <bool kForward>
void dropout(const te_fl_context& ctx, const te_fl_tensor& in, const te_fl_tensor& out,
             const te_fl_tensor& mask, float p, const DropoutStream& stream) {
  const int64_t n = backend::numel(in);
  const PointwiseChoice choice = choose_dropout(in, out);
  if (n == 0) return;
  with_type(dtype_of(in), [&]<class T>(T) {
    const T* x = backend::data<const T>(in);
    T* y = backend::data<T>(out);
    dropout_kernel<T, kForward><<<dropout_blocks(n), kThreads, 0, stream_of(ctx)>>>(
        x, y, backend::data<uint8_t>(mask), n, keep_factor(p), stream, choice.aligned);
  });
}
void dropout_fwd(const te_fl_context& ctx, const te_fl_dropout_fwd_args& a) {
  dropout<true>(ctx, *a.input, *a.output, *a.mask, a.p, DropoutStream(*ctx.rng, a.p));
  check_launch("dropout_fwd");
}
void dropout_bwd(const te_fl_context& ctx, const te_fl_dropout_bwd_args& a) {
  dropout<false>(ctx, *a.grad_output, *a.grad_input, *a.mask, a.p, DropoutStream(*ctx.rng, a.p));
  check_launch("dropout_bwd");
}
Refusal refuse_fwd(const te_fl_dropout_fwd_args& a) {
  if (!all_dense(a.input, a.output, a.mask)) return kNotContiguous;
  return overlaps_askew(*a.output, *a.input) ? kOverlaps : nullptr;
}
Refusal refuse_bwd(const te_fl_dropout_bwd_args& a) {
  if (!all_dense(a.grad_output, a.grad_input, a.mask)) return kNotContiguous;
  return overlaps_askew(*a.grad_input, *a.grad_output) ? kOverlaps : nullptr;
}

// ---- add

void add(const te_fl_context& ctx, const te_fl_add_args& args) {
  const int64_t size = backend::numel(*args.output);
  if (size == 0) return;
  const int dtype = dtype_of(*args.output);
  uint8_t* mask = args.mask != nullptr ? backend::data<uint8_t>(*args.mask) : nullptr;
  const DropoutStream random(*ctx.rng, args.p);
  const float factor = keep_factor(args.p);
  const PointwiseChoice choice = choose_pointwise(args);
  if (dtype_of(*args.a) != dtype || dtype_of(*args.b) != dtype) {
    add_mixed_kernel<<<blocks_for(ceil_div(size, kGroup)), kThreads, 0, stream_of(ctx)>>>(
        Source(*args.a), Source(*args.b), Target(*args.output), mask, size, factor, random);
    return check_launch("add");
  }
  with_type(dtype, [&]<class T>(T) {
    const T *a = backend::data<const T>(*args.a), *b = backend::data<const T>(*args.b);
    T* out = backend::data<T>(*args.output);
    const auto kernel = mask != nullptr ? add_kernel<T, true> : add_kernel<T, false>;
    kernel<<<dropout_blocks(size), kThreads, 0, stream_of(ctx)>>>(a, b, out, mask, size, factor,
                                                                  random, choice.aligned);
  });
  check_launch("add");
}
Refusal refuse_add(const te_fl_add_args& args) {
  if (!all_dense(args.a, args.b, args.output, args.mask)) return kNotContiguous;
  const bool askew = overlaps_askew(*args.output, *args.a) || overlaps_askew(*args.output, *args.b);
  return askew ? kOverlaps : nullptr;
}

template <class Args>
std::string words_of_dropout(const te_fl_context&, const Args& a) {
  return "kernel " + choose_pointwise(a).text();
}
template <class Args, auto F, auto Refuses>
void append_dropout(std::vector<te_fl_op_desc>& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().describe = backend::describe_thunk<Args, words_of_dropout<Args>>;
}

}  // namespace

void append_dropout(std::vector<te_fl_op_desc>& ops) {
  append_dropout<te_fl_dropout_fwd_args, dropout_fwd, refuse_fwd>(ops, "dropout_fwd");
  append_dropout<te_fl_dropout_bwd_args, dropout_bwd, refuse_bwd>(ops, "dropout_bwd");
  append_dropout<te_fl_add_args, add, refuse_add>(ops, "add");
}

}  // namespace te_fl::cuda
