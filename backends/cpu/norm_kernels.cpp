#include "norm_kernels.hpp"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "norm_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// Splits an FP32 vector into two FP64 vectors. A single lane counts as the lower half.
#if HWY_TARGET == HWY_SCALAR
using DD = hn::Rebind<double, DF>;
using VD = hn::Vec<DD>;
HWY_INLINE VD Lower(VF v) { return hn::PromoteTo(DD(), v); }
HWY_INLINE VD Upper(VF) { return hn::Zero(DD()); }
#else
using DH = hn::Half<DF>;
using DD = hn::Rebind<double, DH>;
using VD = hn::Vec<DD>;
HWY_INLINE VD Lower(VF v) { return hn::PromoteTo(DD(), hn::LowerHalf(DH(), v)); }
HWY_INLINE VD Upper(VF v) { return hn::PromoteTo(DD(), hn::UpperHalf(DH(), v)); }
#endif
HWY_INLINE VF Masked(VF v, int64_t rest) {
  return hn::IfThenElseZero(hn::FirstN(DF(), static_cast<size_t>(rest)), v);
}
// Number of vectors that are summed in FP32 before the sum is added to FP64: few enough to keep
// sufficient precision, many enough that the conversion costs little.
constexpr int64_t kFold = 8;
HWY_INLINE double FoldedSum(VD low, VD high) {
  return hn::GetLane(hn::SumOfLanes(DD(), hn::Add(low, high)));
}
HWY_INLINE void Fold(VF& sum, VD& low, VD& high) {
  low = hn::Add(low, Lower(sum));
  high = hn::Add(high, Upper(sum));
  sum = SetF(0.0f);
}

float RoughMean(const float* x, int64_t n) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  VF sum[4] = {SetF(0.0f), SetF(0.0f), SetF(0.0f), SetF(0.0f)};
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    for (int64_t j = 0; j < 4; ++j) sum[j] = hn::Add(sum[j], LoadF32(x + i + j * lanes));
  }
  for (; i < n; i += lanes) sum[0] = hn::Add(sum[0], LoadF32(x + i));  // the padding is zero
  const VF all = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
  return hn::GetLane(hn::SumOfLanes(DF(), all)) / static_cast<float>(n);
}

Moments RowMoments(const float* x, int64_t n, float shift) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF m = SetF(shift);
  VD sum_low = hn::Zero(DD()), sum_high = sum_low, square_low = sum_low, square_high = sum_low;
  int64_t i = 0;
  while (i + lanes <= n) {
    VF sum[2] = {SetF(0.0f), SetF(0.0f)}, square[2] = {sum[0], sum[0]};
    const int64_t end = i + std::min((n - i) / lanes, 2 * kFold) * lanes;
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      for (int64_t j = 0; j < 2; ++j) {
        const VF v = hn::Sub(LoadF32(x + i + j * lanes), m);
        sum[j] = hn::Add(sum[j], v);
        square[j] = hn::MulAdd(v, v, square[j]);
      }
    }
    for (; i < end; i += lanes) {
      const VF v = hn::Sub(LoadF32(x + i), m);
      sum[0] = hn::Add(sum[0], v);
      square[0] = hn::MulAdd(v, v, square[0]);
    }
    for (int j = 0; j < 2; ++j) {
      Fold(sum[j], sum_low, sum_high);
      Fold(square[j], square_low, square_high);
    }
  }
  if (i < n) {
    VF v = Masked(hn::Sub(LoadF32(x + i), m), n - i);
    VF square = hn::Mul(v, v);
    Fold(v, sum_low, sum_high);
    Fold(square, square_low, square_high);
  }
  return {FoldedSum(sum_low, sum_high), FoldedSum(square_low, square_high)};
}

double RowSum(const float* x, int64_t n) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  VD low = hn::Zero(DD()), high = low;
  for (int64_t i = 0; i < n;) {  // the padding is zero
    VF sum[2] = {SetF(0.0f), SetF(0.0f)};
    const int64_t end = std::min(n, i + 2 * kFold * lanes);
    for (int which = 0; i < end; i += lanes, which ^= 1) {
      sum[which] = hn::Add(sum[which], LoadF32(x + i));
    }
    Fold(sum[0], low, high);
    Fold(sum[1], low, high);
  }
  return FoldedSum(low, high);
}

void Normalise(const float* x, int64_t n, float mean, float mean_rest, float rsigma, const float* g,
               const float* beta, float* z) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF m0 = SetF(mean), m1 = SetF(mean_rest), rs = SetF(rsigma);
  for (int64_t i = 0; i < n; i += lanes) {
    const VF v = hn::Mul(hn::Sub(hn::Sub(LoadF32(x + i), m0), m1), rs);
    const VF product = hn::Mul(v, LoadF32(g + i));
    StoreF32(beta != nullptr ? hn::Add(product, LoadF32(beta + i)) : product, z + i);
  }
}

NormSums Sums(const float* dz, const float* x, const float* g, int64_t n, float mean, float rsigma,
              float* dgamma, float* dbeta) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF m = SetF(mean), rs = SetF(rsigma);
  // Two accumulators per sum, so that consecutive additions are independent.
  VF d_sum[2] = {SetF(0.0f), SetF(0.0f)}, dn_sum[2] = {SetF(0.0f), SetF(0.0f)};
  const auto step = [&](int64_t i, VF grad, VF normal, int which) HWY_ATTR {
    const VF d = hn::Mul(grad, LoadF32(g + i));
    d_sum[which] = hn::Add(d_sum[which], d);
    dn_sum[which] = hn::MulAdd(d, normal, dn_sum[which]);
    StoreF32(hn::MulAdd(grad, normal, LoadF32(dgamma + i)), dgamma + i);
    if (dbeta != nullptr) StoreF32(hn::Add(grad, LoadF32(dbeta + i)), dbeta + i);
  };
  const auto normal_at = [&](int64_t i)
                             HWY_ATTR { return hn::Mul(hn::Sub(LoadF32(x + i), m), rs); };
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    step(i, LoadF32(dz + i), normal_at(i), 0);
    step(i + lanes, LoadF32(dz + i + lanes), normal_at(i + lanes), 1);
  }
  for (; i < n; i += lanes) {
    step(i, Masked(LoadF32(dz + i), n - i), Masked(normal_at(i), n - i), 0);
  }
  return {hn::GetLane(hn::SumOfLanes(DF(), hn::Add(d_sum[0], d_sum[1]))),
          hn::GetLane(hn::SumOfLanes(DF(), hn::Add(dn_sum[0], dn_sum[1])))};
}

void Gradient(const float* dz, const float* x, const float* g, const float* add, int64_t n,
              float mean, float rsigma, float mean_d, float mean_dn, float* dx) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF m = SetF(mean), rs = SetF(rsigma), md = SetF(mean_d), mdn = SetF(mean_dn);
  for (int64_t i = 0; i < n; i += lanes) {
    const VF normal = hn::Mul(hn::Sub(LoadF32(x + i), m), rs);
    const VF d = hn::Mul(LoadF32(dz + i), LoadF32(g + i));
    VF v = hn::Mul(rs, hn::NegMulAdd(normal, mdn, hn::Sub(d, md)));
    if (add != nullptr) v = hn::Add(v, LoadF32(add + i));
    StoreF32(v, dx + i);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {

HWY_EXPORT(RowSum);
HWY_EXPORT(RoughMean);
HWY_EXPORT(RowMoments);
HWY_EXPORT(Normalise);
HWY_EXPORT(Sums);
HWY_EXPORT(Gradient);

double row_sum(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(RowSum)(x, n); }
float rough_mean(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(RoughMean)(x, n); }
Moments row_moments(const float* x, int64_t n, float shift) {
  return HWY_DYNAMIC_DISPATCH(RowMoments)(x, n, shift);
}
void normalise(const float* x, int64_t n, float mean, float mean_rest, float rsigma, const float* g,
               const float* beta, float* z) {
  HWY_DYNAMIC_DISPATCH(Normalise)(x, n, mean, mean_rest, rsigma, g, beta, z);
}
NormSums norm_sums(const float* dz, const float* x, const float* g, int64_t n, float mean,
                   float rsigma, float* dgamma, float* dbeta) {
  return HWY_DYNAMIC_DISPATCH(Sums)(dz, x, g, n, mean, rsigma, dgamma, dbeta);
}
void norm_gradient(const float* dz, const float* x, const float* g, const float* add, int64_t n,
                   float mean, float rsigma, float mean_d, float mean_dn, float* dx) {
  HWY_DYNAMIC_DISPATCH(Gradient)(dz, x, g, add, n, mean, rsigma, mean_d, mean_dn, dx);
}

}  // namespace te_fl::cpu
#endif
