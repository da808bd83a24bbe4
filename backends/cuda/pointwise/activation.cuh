// The activations and their derivatives in FP32, in a few instructions each. Exponentials and
// reciprocals use the hardware's approximations, whose relative error is about 2^-22. A sigmoid is
// therefore accurate to a few units in the last place, except where the result is subnormal in
// FP32; there it is 0. The formulas avoid cancellation where the result is small: 0.5 (1 + tanh(u))
// is computed as sigmoid(2 u), and 1 - sigmoid(u) as sigmoid(-u).
#pragma once

namespace te_fl::cuda {

constexpr float kLog2E = 1.442695041f;

__device__ inline float fast_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline float fast_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Returns sigmoid(u), given t = -u log2(e). If 2^t overflows to infinity, the result is 0.
__device__ inline float fast_sigmoid(float t) { return fast_reciprocal(1.0f + fast_exp2(t)); }
__device__ inline float sigmoid(float x) { return fast_sigmoid(-kLog2E * x); }

// sigmoid(u) and sigmoid(-u), both with full relative precision.
struct Sigmoids {
  float plus, minus;
  __device__ explicit Sigmoids(float t) {
    const float z = fast_exp2(-fabsf(t)), large = fast_reciprocal(1.0f + z), small = z * large;
    plus = t <= 0.0f ? large : small;
    minus = t <= 0.0f ? small : large;
  }
};

// A function's value and derivative at one point.
struct Dual {
  float value, derivative;
};

// x sigmoid(u) with u = alpha x. The derivative is s (1 + u (1 - s)), written such that near its
// zero only small terms cancel.
__device__ inline float swish(float x, float alpha) { return x * fast_sigmoid(-kLog2E * alpha * x); }
__device__ inline Dual swish_dual(float x, float alpha) {
  const float u = alpha * x;
  const Sigmoids s(-kLog2E * u);
  return {x * s.plus, s.plus * fmaf(1.0f + u, s.minus, s.plus)};
}

// kSteepest: an upper bound of |derivative|, for functions with |value(x)| <= |x|; 0 for other
// functions.
struct Gelu {
  static constexpr float kSteepest = 1.13f;
  static constexpr float kTwoC = 2.0f * 0.7978845608f, kCubic = 0.044715f;
  // The exponent for fast_sigmoid(): -log2(e) 2 c (x + kCubic x^3).
  __device__ static float exponent(float x, float x2) {
    return x * fmaf(x2, -kLog2E * kTwoC * kCubic, -kLog2E * kTwoC);
  }
  __device__ static float value(float x) { return x * fast_sigmoid(exponent(x, x * x)); }
  __device__ static Dual dual(float x) {
    // Beyond |x| = 100 the sigmoid is 0 or 1. The limit keeps the square finite, because infinity
    // times 0 would be NaN.
    const float x2 = fminf(x * x, 1e4f);
    const Sigmoids s(exponent(x, x2));
    const float y = x * s.plus;
    return {y, fmaf(y, s.minus * fmaf(x2, 3.0f * kCubic * kTwoC, kTwoC), s.plus)};
  }
  // Returns the derivative s + x s (1 - s) u', with 1 - s computed as a difference. For results of
  // at most 16 bits, because the error is up to 4e-6 (where s is nearly 1).
  __device__ static float rough_derivative(float x) {
    const float x2 = fminf(x * x, 1e4f);
    const float s = fast_sigmoid(exponent(x, x2)), steep = fmaf(x2, 3.0f * kCubic * kTwoC, kTwoC);
    return fmaf(s * steep, fmaf(-x, s, x), s);
  }
};
struct Sigmoid {
  static constexpr float kSteepest = 0.0f;
  __device__ static float value(float x) { return sigmoid(x); }
  __device__ static Dual dual(float x) {
    const Sigmoids s(-kLog2E * x);
    return {s.plus, s.plus * s.minus};
  }
};
struct Silu {
  static constexpr float kSteepest = 1.1f;
  __device__ static float value(float x) { return swish(x, 1.0f); }
  __device__ static Dual dual(float x) { return swish_dual(x, 1.0f); }
};
struct Qgelu {
  static constexpr float kSteepest = 1.1f;
  __device__ static float value(float x) { return swish(x, 1.702f); }
  __device__ static Dual dual(float x) { return swish_dual(x, 1.702f); }
};
struct Relu {  // keeps NaN; -0 becomes +0
  static constexpr float kSteepest = 1.0f;
  __device__ static float value(float x) { return x <= 0.0f ? 0.0f : x; }
  __device__ static Dual dual(float x) { return {value(x), x > 0.0f ? 1.0f : 0.0f}; }
};
struct Srelu {
  static constexpr float kSteepest = 0.0f;
  __device__ static float value(float x) { return x <= 0.0f ? 0.0f : x * x; }
  __device__ static Dual dual(float x) { return {value(x), x <= 0.0f ? 0.0f : 2.0f * x}; }
};

}  // namespace te_fl::cuda
