#include "norm_kernels.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "norm_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// A vector of FP32 as two of FP64. A single lane is the lower one.
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
HWY_INLINE void AddTo(VF v, double* sums) {
  [[maybe_unused]] const auto half = hn::Lanes(DD());
  hn::StoreU(hn::Add(hn::LoadU(DD(), sums), Lower(v)), DD(), sums);
#if HWY_TARGET != HWY_SCALAR
  hn::StoreU(hn::Add(hn::LoadU(DD(), sums + half), Upper(v)), DD(), sums + half);
#endif
}
HWY_INLINE void AddPartTo(VF v, int64_t rest, double* sums) {
  HWY_ALIGN float values[16] = {};
  hn::Store(v, DF(), values);
  for (int64_t i = 0; i < rest; ++i) sums[i] += values[i];
}

double RowSum(const float* x, int64_t n) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  VD low = hn::Zero(DD()), high = low;
  for (int64_t i = 0; i < n; i += lanes) {  // the padding is zero
    const VF v = LoadF32(x + i);
    low = hn::Add(low, Lower(v));
    high = hn::Add(high, Upper(v));
  }
  return hn::GetLane(hn::SumOfLanes(DD(), hn::Add(low, high)));
}

double RowSquares(const float* x, int64_t n, float mean, float mean_rest) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF m0 = SetF(mean), m1 = SetF(mean_rest);
  VD low = hn::Zero(DD()), high = low;
  for (int64_t i = 0; i < n; i += lanes) {
    VF v = hn::Sub(hn::Sub(LoadF32(x + i), m0), m1);
    if (i + lanes > n) v = Masked(v, n - i);
    const VD a = Lower(v), b = Upper(v);
    low = hn::MulAdd(a, a, low);
    high = hn::MulAdd(b, b, high);
  }
  return hn::GetLane(hn::SumOfLanes(DD(), hn::Add(low, high)));
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
              double* dgamma, double* dbeta) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF m = SetF(mean), rs = SetF(rsigma);
  // Two of each, so that a sum does not wait for itself.
  VF d_sum[2] = {SetF(0.0f), SetF(0.0f)}, dn_sum[2] = {SetF(0.0f), SetF(0.0f)};
  int64_t i = 0;
  for (int which = 0; i + lanes <= n; i += lanes, which ^= 1) {
    const VF grad = LoadF32(dz + i);
    const VF normal = hn::Mul(hn::Sub(LoadF32(x + i), m), rs);
    const VF d = hn::Mul(grad, LoadF32(g + i));
    d_sum[which] = hn::Add(d_sum[which], d);
    dn_sum[which] = hn::MulAdd(d, normal, dn_sum[which]);
    AddTo(hn::Mul(grad, normal), dgamma + i);
    if (dbeta != nullptr) AddTo(grad, dbeta + i);
  }
  if (i < n) {
    const VF grad = Masked(LoadF32(dz + i), n - i);
    const VF normal = Masked(hn::Mul(hn::Sub(LoadF32(x + i), m), rs), n - i);
    const VF d = Masked(hn::Mul(grad, LoadF32(g + i)), n - i);
    d_sum[0] = hn::Add(d_sum[0], d);
    dn_sum[0] = hn::MulAdd(d, normal, dn_sum[0]);
    AddPartTo(hn::Mul(grad, normal), n - i, dgamma + i);
    if (dbeta != nullptr) AddPartTo(grad, n - i, dbeta + i);
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
HWY_EXPORT(RowSquares);
HWY_EXPORT(Normalise);
HWY_EXPORT(Sums);
HWY_EXPORT(Gradient);

double row_sum(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(RowSum)(x, n); }
double row_squares(const float* x, int64_t n, float mean, float mean_rest) {
  return HWY_DYNAMIC_DISPATCH(RowSquares)(x, n, mean, mean_rest);
}
void normalise(const float* x, int64_t n, float mean, float mean_rest, float rsigma, const float* g,
               const float* beta, float* z) {
  HWY_DYNAMIC_DISPATCH(Normalise)(x, n, mean, mean_rest, rsigma, g, beta, z);
}
NormSums norm_sums(const float* dz, const float* x, const float* g, int64_t n, float mean,
                   float rsigma, double* dgamma, double* dbeta) {
  return HWY_DYNAMIC_DISPATCH(Sums)(dz, x, g, n, mean, rsigma, dgamma, dbeta);
}
void norm_gradient(const float* dz, const float* x, const float* g, const float* add, int64_t n,
                   float mean, float rsigma, float mean_d, float mean_dn, float* dx) {
  HWY_DYNAMIC_DISPATCH(Gradient)(dz, x, g, add, n, mean, rsigma, mean_d, mean_dn, dx);
}

}  // namespace te_fl::cpu
#endif
