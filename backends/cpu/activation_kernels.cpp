#include "activation_kernels.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "activation_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// Each activation has the functions Value(x) and Both(x, value, derivative). 0.5 (1 + tanh(u)) is
// computed as sigmoid(2 u), which avoids cancellation where the result is small.

struct Gelu {
  static constexpr float kTwoC = 2.0f * 0.7978845608f, kCubic = 0.044715f;
  HWY_INLINE static VF Inner(VF x, VF x2) {
    return hn::Mul(hn::Mul(x, SetF(kTwoC)), hn::MulAdd(x2, SetF(kCubic), SetF(1.0f)));
  }
  HWY_INLINE static VF Value(VF x) { return hn::Mul(x, SigmoidOfNumber(Inner(x, hn::Mul(x, x)))); }
  HWY_INLINE static void Both(VF x, VF& value, VF& derivative) {
    // Beyond |x| = 100 the sigmoid is 0 or 1. The limit keeps the square finite, because infinity
    // times 0 would be NaN.
    const VF x2 = hn::Min(hn::Mul(x, x), SetF(1e4f));
    const VF s = SigmoidOfNumber(Inner(x, x2));
    // s'(u) = s(u) s(-u). s(-u) is computed as 1 - s, which loses precision only where the term is
    // negligible.
    const VF slope = hn::MulAdd(x2, SetF(3.0f * kCubic * kTwoC), SetF(kTwoC));
    const VF tail = hn::Mul(hn::Sub(SetF(1.0f), s), slope);
    value = hn::Mul(x, s);
    derivative = hn::MulAdd(value, tail, s);
  }
};

// x sigmoid(u) with u = alpha x. With e = exp(-u) the derivative is (1 + e (1 + u)) / (1 + e)^2.
// Near the derivative's zero, the numerator keeps its precision.
HWY_INLINE void SwishBoth(VF x, VF alpha, VF& value, VF& derivative) {
  const VF u = hn::Mul(x, alpha);
  const VF one = SetF(1.0f);
  const VF e = ExpInRange(hn::Min(hn::Max(hn::Neg(u), SetF(-87.0f)), SetF(89.0f)));
  const VF s = hn::Div(one, hn::Add(one, e));
  value = hn::Mul(x, s);
  // Bounds the operands, so that the numerator is finite where s underflows to 0.
  const VF bounded_e = hn::Min(e, SetF(1e34f)), bounded_u = hn::Max(u, SetF(-80.0f));
  const VF numerator = hn::MulAdd(bounded_e, hn::Add(bounded_u, one), one);
  // For large u, e is clamped to exp(-87), so its product with u would grow without bound; the true
  // product is 0.
  const VF far_above = hn::IfThenElse(hn::Gt(u, SetF(80.0f)), one, numerator);
  // Adding value * 0 gives NaN for NaN and infinities, like sigmoid(u) + value (1 - sigmoid(u)).
  derivative = hn::MulAdd(value, SetF(0.0f), hn::Mul(hn::Mul(far_above, s), s));
}
struct Silu {
  HWY_INLINE static VF Value(VF x) { return hn::Mul(x, SigmoidOfNumber(x)); }
  HWY_INLINE static void Both(VF x, VF& value, VF& derivative) {
    SwishBoth(x, SetF(1.0f), value, derivative);
  }
};
struct Qgelu {
  HWY_INLINE static VF Value(VF x) { return hn::Mul(x, SigmoidOfNumber(hn::Mul(x, SetF(1.702f)))); }
  HWY_INLINE static void Both(VF x, VF& value, VF& derivative) {
    SwishBoth(x, SetF(1.702f), value, derivative);
  }
};

struct Sigmoid_ {
  HWY_INLINE static VF Value(VF x) { return Sigmoid(x); }
  HWY_INLINE static void Both(VF x, VF& value, VF& derivative) {
    value = Sigmoid(x);
    derivative = hn::Mul(value, Sigmoid(hn::Neg(x)));
  }
};

// Keeps NaN; -0 becomes +0.
struct Relu {
  HWY_INLINE static VF Value(VF x) { return hn::IfThenZeroElse(hn::Le(x, SetF(0.0f)), x); }
  HWY_INLINE static void Both(VF x, VF& value, VF& derivative) {
    value = Value(x);
    derivative = hn::IfThenElseZero(hn::Gt(x, SetF(0.0f)), SetF(1.0f));
  }
};
struct Srelu {
  HWY_INLINE static VF Value(VF x) {
    const VF r = Relu::Value(x);
    return hn::Mul(r, r);
  }
  HWY_INLINE static void Both(VF x, VF& value, VF& derivative) {
    const VF r = Relu::Value(x);
    value = hn::Mul(r, r);
    derivative = hn::Add(r, r);
  }
};

template <class A>
void Forward(const float* x, int64_t n, float* y) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) StoreF32(A::Value(LoadF32(x + i)), y + i);
}

template <class A>
void Backward(const float* dy, const float* x, int64_t n, float* dx) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) {
    VF value, derivative;
    A::Both(LoadF32(x + i), value, derivative);
    StoreF32(hn::Mul(LoadF32(dy + i), derivative), dx + i);
  }
}

template <class A>
void GatedForward(const float* a, const float* b, int64_t n, float* y) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) {
    StoreF32(hn::Mul(A::Value(LoadF32(a + i)), LoadF32(b + i)), y + i);
  }
}

template <class A>
void GatedBackward(const float* dy, const float* a, const float* b, int64_t n, float* da,
                   float* db) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) {
    VF value, derivative;
    A::Both(LoadF32(a + i), value, derivative);
    const VF grad = LoadF32(dy + i), gate = LoadF32(b + i);
    if (da != nullptr) StoreF32(hn::Mul(hn::Mul(grad, derivative), gate), da + i);
    if (db != nullptr) StoreF32(hn::Mul(grad, value), db + i);
  }
}

// AtMost() returns min(x, limit); Within() returns clamp(x, -limit, limit). Both functions return
// NaN for NaN.
HWY_INLINE VF AtMost(VF x, VF limit) { return hn::IfThenElse(hn::Gt(x, limit), limit, x); }
HWY_INLINE VF Within(VF x, VF limit) {
  const VF low = hn::Neg(limit);
  return AtMost(hn::IfThenElse(hn::Lt(x, low), low, x), limit);
}

void ClampedForward(const GateOptions& clamp, const float* a, const float* b, int64_t n, float* y) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF limit = SetF(clamp.limit), alpha = SetF(clamp.alpha), offset = SetF(clamp.offset);
  for (int64_t i = 0; i < n; i += lanes) {
    const VF x = AtMost(LoadF32(a + i), limit);
    const VF swish = hn::Mul(x, SigmoidOfNumber(hn::Mul(alpha, x)));
    const VF gate = hn::Add(Within(LoadF32(b + i), limit), offset);
    StoreF32(hn::Mul(swish, gate), y + i);
  }
}

void ClampedBackward(const GateOptions& clamp, const float* dy, const float* a, const float* b,
                     int64_t n, float* da, float* db) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF limit = SetF(clamp.limit), alpha = SetF(clamp.alpha), offset = SetF(clamp.offset);
  for (int64_t i = 0; i < n; i += lanes) {
    const VF x = LoadF32(a + i), second = LoadF32(b + i), grad = LoadF32(dy + i);
    VF value, derivative;
    SwishBoth(AtMost(x, limit), alpha, value, derivative);
    const VF gate = hn::Add(Within(second, limit), offset);
    const VF grad_a = hn::Mul(hn::Mul(grad, derivative), gate);
    const VF grad_b = hn::Mul(grad, value);
    if (da != nullptr) StoreF32(hn::IfThenZeroElse(hn::Gt(x, limit), grad_a), da + i);
    if (db != nullptr) {
      StoreF32(hn::IfThenZeroElse(hn::Gt(hn::Abs(second), limit), grad_b), db + i);
    }
  }
}

// Computes beta tanh(u), with u = x / beta, and its derivative. Uses a power series where 1 -
// exp(-2 |u|) would lose precision.
HWY_INLINE void BoundedBoth(VF x, float beta, VF& value, VF& derivative) {
  const VF one = SetF(1.0f), most = SetF(100.0f);
  const VF u = hn::Max(hn::Min(hn::Div(x, SetF(beta)), most), hn::Neg(most)), u2 = hn::Mul(u, u);
  VF series = hn::MulAdd(u2, SetF(62.0f / 2835.0f), SetF(-17.0f / 315.0f));
  series = hn::MulAdd(u2, series, SetF(2.0f / 15.0f));
  series = hn::MulAdd(u2, series, SetF(-1.0f / 3.0f));
  const VF size = hn::Abs(u), small = hn::MulAdd(hn::Mul(u, u2), series, u);
  const VF e = ExpInRange(hn::Max(hn::Mul(size, SetF(-2.0f)), SetF(-87.0f)));
  const VF r = hn::Div(one, hn::Add(one, e));
  const VF large = hn::CopySign(hn::Mul(hn::Sub(one, e), r), u);
  const VF t = hn::IfThenElse(hn::Lt(size, SetF(0.25f)), small, large);
  const auto is_number = hn::Eq(x, x);  // Min and Max may drop a NaN
  value = hn::IfThenElse(is_number, hn::Mul(SetF(beta), t), x);
  derivative = hn::IfThenElse(is_number, hn::Mul(hn::Mul(SetF(4.0f), e), hn::Mul(r, r)), x);
}

void SituForward(const GateOptions& o, const float* a, const float* b, int64_t n, float* y) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) {
    const VF x = LoadF32(a + i);
    VF first, second, unused;
    BoundedBoth(x, o.beta1, first, unused);
    BoundedBoth(LoadF32(b + i), o.beta2, second, unused);
    StoreF32(hn::Mul(hn::Mul(first, Sigmoid(x)), second), y + i);
  }
}

void SituBackward(const GateOptions& o, const float* dy, const float* a, const float* b, int64_t n,
                  float* da, float* db) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) {
    const VF x = LoadF32(a + i), grad = LoadF32(dy + i);
    const VF plus = Sigmoid(x), minus = Sigmoid(hn::Neg(x));
    VF first, first_slope, second, second_slope;
    BoundedBoth(x, o.beta1, first, first_slope);
    BoundedBoth(LoadF32(b + i), o.beta2, second, second_slope);
    const VF slope = hn::Mul(plus, hn::MulAdd(first, minus, first_slope));
    if (da != nullptr) StoreF32(hn::Mul(hn::Mul(grad, slope), second), da + i);
    if (db != nullptr) {
      StoreF32(hn::Mul(hn::Mul(grad, hn::Mul(first, plus)), second_slope), db + i);
    }
  }
}

void ActForward(Act act, const float* x, int64_t n, float* y) {
  switch (act) {
    case Act::kGelu:
      return Forward<Gelu>(x, n, y);
    case Act::kQgelu:
      return Forward<Qgelu>(x, n, y);
    case Act::kRelu:
      return Forward<Relu>(x, n, y);
    case Act::kSrelu:
      return Forward<Srelu>(x, n, y);
    case Act::kSilu:
      return Forward<Silu>(x, n, y);
    default:
      return Forward<Sigmoid_>(x, n, y);
  }
}

void ActBackward(Act act, const float* dy, const float* x, int64_t n, float* dx) {
  switch (act) {
    case Act::kGelu:
      return Backward<Gelu>(dy, x, n, dx);
    case Act::kQgelu:
      return Backward<Qgelu>(dy, x, n, dx);
    case Act::kRelu:
      return Backward<Relu>(dy, x, n, dx);
    case Act::kSrelu:
      return Backward<Srelu>(dy, x, n, dx);
    case Act::kSilu:
      return Backward<Silu>(dy, x, n, dx);
    default:
      return Backward<Sigmoid_>(dy, x, n, dx);
  }
}

void GatedForwardByAct(Act act, GateOptions clamp, const float* a, const float* b, int64_t n,
                       float* y) {
  switch (act) {
    case Act::kGelu:
      return GatedForward<Gelu>(a, b, n, y);
    case Act::kQgelu:
      return GatedForward<Qgelu>(a, b, n, y);
    case Act::kRelu:
      return GatedForward<Relu>(a, b, n, y);
    case Act::kSrelu:
      return GatedForward<Srelu>(a, b, n, y);
    case Act::kSilu:
      return GatedForward<Silu>(a, b, n, y);
    case Act::kSigmoid:
      return GatedForward<Sigmoid_>(a, b, n, y);
    case Act::kSitu:
      return SituForward(clamp, a, b, n, y);
    default:
      return ClampedForward(clamp, a, b, n, y);
  }
}

void GatedBackwardByAct(Act act, GateOptions clamp, const float* dy, const float* a, const float* b,
                        int64_t n, float* da, float* db) {
  switch (act) {
    case Act::kGelu:
      return GatedBackward<Gelu>(dy, a, b, n, da, db);
    case Act::kQgelu:
      return GatedBackward<Qgelu>(dy, a, b, n, da, db);
    case Act::kRelu:
      return GatedBackward<Relu>(dy, a, b, n, da, db);
    case Act::kSrelu:
      return GatedBackward<Srelu>(dy, a, b, n, da, db);
    case Act::kSilu:
      return GatedBackward<Silu>(dy, a, b, n, da, db);
    case Act::kSigmoid:
      return GatedBackward<Sigmoid_>(dy, a, b, n, da, db);
    case Act::kSitu:
      return SituBackward(clamp, dy, a, b, n, da, db);
    default:
      return ClampedBackward(clamp, dy, a, b, n, da, db);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {

HWY_EXPORT(ActForward);
HWY_EXPORT(ActBackward);
HWY_EXPORT(GatedForwardByAct);
HWY_EXPORT(GatedBackwardByAct);

void act_forward(Act act, const float* x, int64_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(ActForward)(act, x, n, y);
}
void act_backward(Act act, const float* dy, const float* x, int64_t n, float* dx) {
  HWY_DYNAMIC_DISPATCH(ActBackward)(act, dy, x, n, dx);
}
void gated_forward(Act act, GateOptions clamp, const float* a, const float* b, int64_t n,
                   float* y) {
  HWY_DYNAMIC_DISPATCH(GatedForwardByAct)(act, clamp, a, b, n, y);
}
void gated_backward(Act act, GateOptions clamp, const float* dy, const float* a, const float* b,
                    int64_t n, float* da, float* db) {
  HWY_DYNAMIC_DISPATCH(GatedBackwardByAct)(act, clamp, dy, a, b, n, da, db);
}

}  // namespace te_fl::cpu
#endif
