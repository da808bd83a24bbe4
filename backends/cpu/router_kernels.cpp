#include "router_kernels.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "router_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// Highway's log functions need highway.h to be included first.
#include <hwy/contrib/math/math-inl.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// 1 / (1 + e^-x) is 1 in FP32 from 16.6 on, although the sigmoid is not before 17.3, and experts
// that differ would be equal. So it is 1 - e^-x / (1 + e^-x) for positive x.
void SigmoidRow(const float* x, int64_t n, float* y) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF one = SetF(1.0f);
  for (int64_t i = 0; i < n; i += lanes) {
    const VF v = LoadF32(x + i);
    const VF e = ExpInRange(hn::Neg(hn::Min(hn::Max(v, SetF(0.0f)), SetF(87.0f))));
    const VF large = hn::Sub(one, hn::Div(e, hn::Add(one, e)));
    StoreF32(hn::IfThenElse(hn::Gt(v, SetF(0.0f)), large, Sigmoid(v)), y + i);
  }
}

void SqrtSoftplusRow(const float* x, int64_t n, float* y) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) {
    const VF v = LoadF32(x + i);
    const VF term = hn::Log1p(DF(), Exp(hn::Neg(hn::Abs(v))));
    const VF value = hn::Sqrt(hn::Add(hn::Max(v, SetF(0.0f)), term));
    // For small x, exp(x / 2) is exact to FP32's precision, while exp(x) would underflow.
    const VF small = Exp(hn::Mul(v, SetF(0.5f)));
    const VF either = hn::IfThenElse(hn::Lt(v, SetF(-20.0f)), small, value);
    StoreF32(hn::IfThenElse(hn::IsNaN(v), v, either), y + i);
  }
}

float Dot(const float* a, const float* b, int64_t n) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  VF sum = SetF(0.0f);
  for (int64_t i = 0; i < n; i += lanes) sum = hn::MulAdd(LoadF32(a + i), LoadF32(b + i), sum);
  return hn::GetLane(hn::SumOfLanes(DF(), sum));
}

void AddScaled(const float* x, float factor, int64_t n, float* acc) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF f = SetF(factor);
  for (int64_t i = 0; i < n; i += lanes) {
    StoreF32(hn::MulAdd(LoadF32(x + i), f, LoadF32(acc + i)), acc + i);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {

HWY_EXPORT(SigmoidRow);
HWY_EXPORT(SqrtSoftplusRow);
HWY_EXPORT(Dot);
HWY_EXPORT(AddScaled);

void sigmoid_f32(const float* x, int64_t n, float* y) { HWY_DYNAMIC_DISPATCH(SigmoidRow)(x, n, y); }
void sqrt_softplus_f32(const float* x, int64_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(SqrtSoftplusRow)(x, n, y);
}
float dot_f32(const float* a, const float* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(Dot)(a, b, n);
}
void add_scaled_f32(const float* x, float factor, int64_t n, float* acc) {
  HWY_DYNAMIC_DISPATCH(AddScaled)(x, factor, n, acc);
}

}  // namespace te_fl::cpu
#endif
