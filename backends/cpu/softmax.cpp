// The scaled softmax ops: unmasked, with a mask tensor, upper-triangular and aligned causal.
// Processes one row at a time, which stays in the cache between its maximum, its exponentials and
// its division.
#include "te_fl/ops/softmax.h"

#include <cmath>
#include <vector>

#include "convert.hpp"
#include "families.hpp"
#include "te_fl/attention.hpp"
#include "tensor_view.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "softmax.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// exp(x) for x <= 0; 0 below -87. NaN gives NaN.
HWY_INLINE VF ExpOfDifference(VF x) {
  const auto tiny = hn::Lt(x, SetF(-87.0f));
  const VF result = ExpInRange(hn::IfThenElse(tiny, SetF(-87.0f), x));
  return hn::IfThenElse(tiny, SetF(0.0f), result);
}

// y = softmax of factor * x over the first `visible` elements whose mask is 0; `mask` may be NULL.
// y must have room for padded(visible) floats.
template <class T>
void ForwardRow(const void* raw, int64_t visible, int64_t cols, float factor, const uint8_t* mask,
                float* HWY_RESTRICT y) {
  const T* x = static_cast<const T*>(raw);
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF scale = SetF(factor), lowest = SetF(-INFINITY);
  VF top = lowest;
  int64_t j = 0;
  const hn::Rebind<uint8_t, DU> d8;
  const auto hide = [&](VF v, VU hidden) HWY_ATTR {
    return hn::IfThenElse(hn::RebindMask(DF(), hn::Eq(hidden, hn::Zero(DU()))), v, lowest);
  };
  for (; j + lanes <= visible; j += lanes) {
    hwy::Prefetch(x + j + cols);  // prefetches the next row while exponentials are computed
    VF v = hn::Mul(LoadF32(x + j), scale);
    if (mask != nullptr) v = hide(v, hn::PromoteTo(DU(), hn::LoadU(d8, mask + j)));
    top = hn::Max(top, v);
    StoreF32(v, y + j);
  }
  if (j < visible) {
    const int64_t rest = visible - j;
    StoreF32(hn::Mul(LoadPart(x + j, static_cast<size_t>(rest)), scale), y + j);
    for (int64_t l = 0; l < lanes; ++l) {
      if (l >= rest || (mask != nullptr && mask[j + l] != 0)) y[j + l] = -INFINITY;
    }
    top = hn::Max(top, LoadF32(y + j));
  }
  const VF max = hn::MaxOfLanes(DF(), top);
  const VF base = hn::IfThenElse(hn::Eq(max, lowest), SetF(0.0f), max);
  VF sum = SetF(0.0f);
  for (int64_t i = 0; i < visible; i += lanes) {
    const VF e = ExpOfDifference(hn::Sub(LoadF32(y + i), base));
    sum = hn::Add(sum, e);
    StoreF32(e, y + i);
  }
  // NaN stays NaN. A row without visible keys becomes zeros.
  const float total = hn::GetLane(hn::SumOfLanes(DF(), sum));
  const VF inverse = SetF(total == 0.0f ? 0.0f : 1.0f / total);
  for (int64_t i = 0; i < visible; i += lanes) {
    StoreF32(hn::Mul(LoadF32(y + i), inverse), y + i);
  }
  if (mask == nullptr || !std::isnan(total)) return;
  for (int64_t i = 0; i < visible; ++i) {  // masked elements are 0 even in a row with NaN
    if (mask[i] != 0) y[i] = 0.0f;
  }
}

// dx = factor * y (dy - sum dy y) over the first `visible` elements. dx must have room for
// padded(visible) floats.
template <class T>
void BackwardRow(const void* raw_dy, const void* raw_y, int64_t visible, int64_t cols, float factor,
                 float* HWY_RESTRICT dx) {
  const T* dy = static_cast<const T*>(raw_dy);
  const T* y = static_cast<const T*>(raw_y);
  const auto lanes = static_cast<int64_t>(NumLanes());
  VF sum0 = SetF(0.0f), sum1 = sum0;
  int64_t j = 0;
  for (; j + 2 * lanes <= visible; j += 2 * lanes) {
    hwy::Prefetch(dy + j + cols);  // prefetches the next row
    hwy::Prefetch(y + j + cols);
    sum0 = hn::MulAdd(LoadF32(dy + j), LoadF32(y + j), sum0);
    sum1 = hn::MulAdd(LoadF32(dy + j + lanes), LoadF32(y + j + lanes), sum1);
  }
  for (; j + lanes <= visible; j += lanes) {
    sum0 = hn::MulAdd(LoadF32(dy + j), LoadF32(y + j), sum0);
  }
  const auto rest = static_cast<size_t>(visible - j);
  if (rest > 0) sum1 = hn::MulAdd(LoadPart(dy + j, rest), LoadPart(y + j, rest), sum1);
  const VF dot = hn::SumOfLanes(DF(), hn::Add(sum0, sum1));
  const VF scale = SetF(factor);
  const auto gradient = [&](VF d, VF p)
                            HWY_ATTR { return hn::Mul(hn::Mul(scale, p), hn::Sub(d, dot)); };
  for (j = 0; j + lanes <= visible; j += lanes) {
    StoreF32(gradient(LoadF32(dy + j), LoadF32(y + j)), dx + j);
  }
  if (rest > 0) StoreF32(gradient(LoadPart(dy + j, rest), LoadPart(y + j, rest)), dx + j);
}

void SoftmaxForwardRow(int dtype, const void* x, int64_t visible, int64_t cols, float scale,
                       const uint8_t* mask, float* y) {
  switch (dtype) {
    case TE_FL_F32:
      return ForwardRow<float>(x, visible, cols, scale, mask, y);
    case TE_FL_F16:
      return ForwardRow<numeric::half>(x, visible, cols, scale, mask, y);
    default:
      return ForwardRow<numeric::bfloat16>(x, visible, cols, scale, mask, y);
  }
}

void SoftmaxBackwardRow(int dtype, const void* dy, const void* y, int64_t visible, int64_t cols,
                        float scale, float* dx) {
  switch (dtype) {
    case TE_FL_F32:
      return BackwardRow<float>(dy, y, visible, cols, scale, dx);
    case TE_FL_F16:
      return BackwardRow<numeric::half>(dy, y, visible, cols, scale, dx);
    default:
      return BackwardRow<numeric::bfloat16>(dy, y, visible, cols, scale, dx);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {
namespace {

HWY_EXPORT(SoftmaxForwardRow);
HWY_EXPORT(SoftmaxBackwardRow);

// Number of leading keys that the query of a row of a [.., queries, keys] tensor sees.
struct Visible {
  Visible(const te_fl_tensor& t, bool causal_mask)
      : queries(t.dl.shape[t.dl.ndim - 2]), keys(t.dl.shape[t.dl.ndim - 1]), causal(causal_mask) {}
  int64_t operator()(int64_t row) const {
    if (!causal) return keys;
    // Aligned at the bottom right. With as many keys as queries this is the upper-triangular mask.
    return std::clamp<int64_t>(row % queries + keys - queries + 1, 0, keys);
  }
  int64_t queries, keys;
  bool causal;
};

// Calls compute(row, visible, to) for every row, on the pool. Stores the result from `to`, followed
// by zeros. `out` may be the memory of `input`.
template <class Compute>
void for_each_row(const te_fl_tensor& input, const te_fl_tensor& out, bool causal,
                  Compute&& compute) {
  const backend::Matrix m = backend::as_matrix(out);
  const Visible visible(out, causal);
  const int dtype = dtype_of(out);
  const int64_t bytes = element_bytes(out);
  char* to = backend::data<char>(out);
  const bool stream = to != backend::data<char>(input) && exceeds_cache(m.rows * m.cols * bytes);
  Parts(m.rows, grain_of_rows(m.cols)).run([&](int64_t, int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(padded(m.cols)));
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = visible(r);
      compute(r, n, row.data());
      std::fill(row.begin() + n, row.end(), 0.0f);
      store_f32(dtype, row.data(), m.cols, to + r * m.cols * bytes, stream);
    }
    if (stream) store_fence();
  });
}

void forward(const te_fl_tensor& in, const te_fl_tensor& out, float scale, bool causal,
             const te_fl_tensor* mask) {
  const int64_t cols = backend::as_matrix(in).cols, row_bytes = cols * element_bytes(in);
  const int64_t* shape = in.dl.shape;
  const auto kernel = HWY_DYNAMIC_DISPATCH(SoftmaxForwardRow);
  for_each_row(in, out, causal, [&](int64_t r, int64_t visible, float* y) {
    const uint8_t* hidden = nullptr;
    if (mask != nullptr) {
      const int64_t head = r / shape[2];
      hidden = backend::data<const uint8_t>(*mask) +
               backend::broadcast_offset(*mask, head / shape[1], head % shape[1], r % shape[2], 0);
    }
    kernel(dtype_of(in), element(backend::data<void>(in), r, row_bytes), visible, cols, scale,
           hidden, y);
  });
}

template <bool kCausal, class Args>
void softmax_forward(const te_fl_context&, const Args& a) {
  forward(*a.input, *a.output, a.scale, kCausal, nullptr);
}

void masked_forward(const te_fl_context&, const te_fl_softmax_masked_args& a) {
  forward(*a.input, *a.output, a.scale, false, a.mask);
}

template <bool kCausal, class Args>
void softmax_backward(const te_fl_context&, const Args& a) {
  const te_fl_tensor &dy = *a.output_grad, &y = *a.softmax_results;
  const int64_t cols = backend::as_matrix(dy).cols, row_bytes = cols * element_bytes(dy);
  const auto kernel = HWY_DYNAMIC_DISPATCH(SoftmaxBackwardRow);
  for_each_row(dy, *a.input_grad, kCausal, [&](int64_t r, int64_t visible, float* dx) {
    kernel(dtype_of(dy), element(backend::data<void>(dy), r, row_bytes),
           element(backend::data<void>(y), r, row_bytes), visible, cols, a.scale, dx);
  });
}

template <class Args>
Refusal forward_refusal(const Args& a) {
  if (!all_dense(a.input, a.output)) return kNotContiguous;
  return overlaps_askew(*a.output, *a.input) ? kOverlaps : nullptr;
}

Refusal masked_refusal(const te_fl_softmax_masked_args& a) {
  const te_fl_tensor& mask = *a.mask;
  const bool unit = mask.dl.strides == nullptr || mask.dl.strides[3] == 1 || mask.dl.shape[3] <= 1;
  return unit ? forward_refusal(a) : kNotContiguous;
}

template <class Args>
Refusal backward_refusal(const Args& a) {
  if (!all_dense(a.output_grad, a.softmax_results, a.input_grad)) return kNotContiguous;
  return overlaps_askew(*a.input_grad, *a.output_grad) ? kOverlaps : nullptr;
}

template <bool kCausal, class Args>
te_fl_op_desc forward_op(const char* name) {
  return descriptor<Args, softmax_forward<kCausal, Args>, forward_refusal<Args>>(name);
}
template <bool kCausal, class Args>
te_fl_op_desc backward_op(const char* name) {
  return descriptor<Args, softmax_backward<kCausal, Args>, backward_refusal<Args>>(name);
}

}  // namespace

void append_softmax(std::vector<te_fl_op_desc>& ops) {
  using Fwd4 = te_fl_softmax_fwd4_args;
  using Bwd4 = te_fl_softmax_bwd4_args;
  using Fwd3 = te_fl_softmax_fwd3_args;
  using Bwd3 = te_fl_softmax_bwd3_args;
  using Masked = te_fl_softmax_masked_args;
  ops.push_back(forward_op<false, Fwd4>("scaled_softmax_forward"));
  ops.push_back(backward_op<false, Bwd4>("scaled_softmax_backward"));
  ops.push_back(
      descriptor<Masked, masked_forward, masked_refusal>("scaled_masked_softmax_forward"));
  ops.push_back(backward_op<false, Bwd4>("scaled_masked_softmax_backward"));
  ops.push_back(forward_op<true, Fwd3>("scaled_upper_triang_masked_softmax_forward"));
  ops.push_back(backward_op<true, Bwd3>("scaled_upper_triang_masked_softmax_backward"));
  ops.push_back(forward_op<true, Fwd4>("scaled_aligned_causal_masked_softmax_forward"));
  ops.push_back(backward_op<true, Bwd4>("scaled_aligned_causal_masked_softmax_backward"));
}

}  // namespace te_fl::cpu
#endif
