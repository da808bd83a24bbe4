#include "loss_kernels.hpp"

#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "loss_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

HWY_INLINE VF LoadOr(const float* x, int64_t rest, VF other) {
  return hn::IfThenElse(hn::FirstN(DF(), static_cast<size_t>(rest)), LoadF32(x), other);
}

float MaxOf(float so_far, const float* x, int64_t n) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF least = SetF(-std::numeric_limits<float>::infinity());
  VF max = least;
  auto nan = hn::IsNaN(max);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF v = LoadF32(x + i);
    nan = hn::Or(nan, hn::IsNaN(v));
    max = hn::Max(max, v);
  }
  if (i < n) {
    const VF v = LoadOr(x + i, n - i, least);
    nan = hn::Or(nan, hn::IsNaN(v));
    max = hn::Max(max, v);
  }
  if (std::isnan(so_far) || !hn::AllFalse(DF(), nan)) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float largest = hn::GetLane(hn::MaxOfLanes(DF(), max));
  return largest > so_far ? largest : so_far;
}

// exp(x - shift) for x <= shift. Clamped below -87, where it is negligible.
HWY_INLINE VF ExpTerm(VF x, VF shift) {
  return ExpInRange(hn::Max(hn::Sub(x, shift), SetF(-87.0f)));
}

// Sums up to 64 vectors in FP32, then adds these sums in double.
double SumOfExp(const float* x, int64_t n, float shift_) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF shift = SetF(shift_);
  double total = 0.0;
  int64_t i = 0;
  while (i < n) {
    const int64_t end = n - i > 64 * lanes ? i + 64 * lanes : n;
    VF sum = SetF(0.0f), second = sum;
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      sum = hn::Add(sum, ExpTerm(LoadF32(x + i), shift));
      second = hn::Add(second, ExpTerm(LoadF32(x + i + lanes), shift));
    }
    sum = hn::Add(sum, second);
    for (; i + lanes <= end; i += lanes) sum = hn::Add(sum, ExpTerm(LoadF32(x + i), shift));
    if (i < end) {
      const VF e = ExpTerm(LoadF32(x + i), shift);
      sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(DF(), static_cast<size_t>(end - i)), e));
      i = end;
    }
    total += hn::GetLane(hn::SumOfLanes(DF(), sum));
  }
  return total;
}

void ExpGradient(const float* x, int64_t n, float shift_, float less_, float g_, float* out) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF shift = SetF(shift_), less = SetF(less_), g = SetF(g_);
  for (int64_t i = 0; i < n; i += lanes) {
    const VF e = Exp(hn::Sub(LoadF32(x + i), shift));
    StoreF32(hn::Mul(g, hn::Sub(e, less)), out + i);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {

HWY_EXPORT(MaxOf);
HWY_EXPORT(SumOfExp);
HWY_EXPORT(ExpGradient);

float running_max(float so_far, const float* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(MaxOf)(so_far, x, n);
}
double sum_of_exp(const float* x, int64_t n, float shift) {
  return HWY_DYNAMIC_DISPATCH(SumOfExp)(x, n, shift);
}
void exp_gradient(const float* x, int64_t n, float shift, float less, float g, float* out) {
  HWY_DYNAMIC_DISPATCH(ExpGradient)(x, n, shift, less, g, out);
}

}  // namespace te_fl::cpu
#endif
