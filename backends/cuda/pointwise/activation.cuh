// The activations and their derivatives in FP32, a handful of instructions each: exponentials and
// reciprocals by the hardware's approximations, whose relative error is about 2^-22, so that a
// sigmoid is right to a few units in the last place wherever it is not below FP32's normal numbers
// (there it is 0). Forms are chosen so that nothing cancels where the result is small:
// 0.5 (1 + tanh(u)) = sigmoid(2 u), and 1 - sigmoid(u) = sigmoid(-u) is computed as such.
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

// sigmoid(u) from t = -u log2(e). A power beyond FP32 is infinite, and its reciprocal 0.
__device__ inline float sigmoid_of(float t) { return fast_reciprocal(1.0f + fast_exp2(t)); }
__device__ inline float sigmoid(float x) { return sigmoid_of(-kLog2E * x); }

// sigmoid(u) and sigmoid(-u), both to full relative precision.
struct Sigmoids {
  float plus, minus;
  __device__ explicit Sigmoids(float t) {
    const float z = fast_exp2(-fabsf(t)), large = fast_reciprocal(1.0f + z), small = z * large;
    plus = t <= 0.0f ? large : small;
    minus = t <= 0.0f ? small : large;
  }
};

// The values of a function and its derivative at one point.
struct Dual {
  float value, derivative;
};

// x sigmoid(u), u = alpha x; its derivative is s (1 + u (1 - s)), written so that the terms that
// cancel where it vanishes are small.
__device__ inline float swish(float x, float alpha) { return x * sigmoid_of(-kLog2E * alpha * x); }
__device__ inline Dual swish_dual(float x, float alpha) {
  const float u = alpha * x;
  const Sigmoids s(-kLog2E * u);
  return {x * s.plus, s.plus * fmaf(1.0f + u, s.minus, s.plus)};
}

// kSteepest: more than any |derivative|, of functions with |value(x)| <= |x|; 0 for others.
struct Gelu {
  static constexpr float kSteepest = 1.13f;
  static constexpr float kTwoC = 2.0f * 0.7978845608f, kCubic = 0.044715f;
  // -log2(e) 2 c (x + kCubic x^3)
  __device__ static float exponent(float x, float x2) {
    return x * fmaf(x2, -kLog2E * kTwoC * kCubic, -kLog2E * kTwoC);
  }
  __device__ static float value(float x) { return x * sigmoid_of(exponent(x, x * x)); }
  __device__ static Dual dual(float x) {
    // Beyond |x| = 100 the sigmoid is 0 or 1; an infinite square would spoil the product with 0.
    const float x2 = fminf(x * x, 1e4f);
    const Sigmoids s(exponent(x, x2));
    const float y = x * s.plus;
    return {y, fmaf(y, s.minus * fmaf(x2, 3.0f * kCubic * kTwoC, kTwoC), s.plus)};
  }
  // s + x s (1 - s) u' with a difference for 1 - s, for results of 16 bits and less: 4e-6 off at
  // the most, where s is nearly 1.
  __device__ static float rough_derivative(float x) {
    const float x2 = fminf(x * x, 1e4f);
    const float s = sigmoid_of(exponent(x, x2)), steep = fmaf(x2, 3.0f * kCubic * kTwoC, kTwoC);
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
struct Relu {  // a NaN passes; -0 becomes +0
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
