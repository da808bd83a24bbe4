// The activations and their derivatives in FP32. The sigmoid forms do not cancel where the result
// is small: 0.5 (1 + tanh(u)) = sigmoid(2 u).
#pragma once

namespace te_fl::cuda {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// x sigmoid(u), u = alpha x. With e = exp(-u) its derivative is (1 + e (1 + u)) / (1 + e)^2, whose
// numerator keeps its digits where it vanishes.
__device__ inline float swish(float x, float alpha) { return x * sigmoid(alpha * x); }
__device__ inline float swish_derivative(float x, float alpha) {
  const float u = alpha * x;
  if (u < -80.0f)
    return x == -INFINITY ? NAN : 0.0f;  // below FP32; -inf times 0, as in the formula
  if (u > 80.0f) return x == INFINITY ? NAN : 1.0f;
  const float e = expf(-u), s = 1.0f / (1.0f + e);
  return fmaf(e, 1.0f + u, 1.0f) * s * s;
}

struct Gelu {
  static constexpr float kTwoC = 2.0f * 0.7978845608f, kCubic = 0.044715f;
  __device__ static float inner(float x, float x2) { return x * kTwoC * fmaf(x2, kCubic, 1.0f); }
  __device__ static float value(float x) { return x * sigmoid(inner(x, x * x)); }
  __device__ static float derivative(float x) {
    // Beyond |x| = 100 the sigmoid is 0 or 1; an infinite square would spoil the product with 0.
    const float x2 = fminf(x * x, 1e4f);
    const float s = sigmoid(inner(x, x2));
    return fmaf(x * s, (1.0f - s) * fmaf(x2, 3.0f * kCubic * kTwoC, kTwoC), s);
  }
};
struct Sigmoid {
  __device__ static float value(float x) { return sigmoid(x); }
  __device__ static float derivative(float x) { return sigmoid(x) * sigmoid(-x); }
};
struct Silu {
  __device__ static float value(float x) { return swish(x, 1.0f); }
  __device__ static float derivative(float x) { return swish_derivative(x, 1.0f); }
};
struct Qgelu {
  __device__ static float value(float x) { return swish(x, 1.702f); }
  __device__ static float derivative(float x) { return swish_derivative(x, 1.702f); }
};
struct Relu {  // a NaN passes; -0 becomes +0
  __device__ static float value(float x) { return x <= 0.0f ? 0.0f : x; }
  __device__ static float derivative(float x) { return x > 0.0f ? 1.0f : 0.0f; }
};
struct Srelu {
  __device__ static float value(float x) { return x <= 0.0f ? 0.0f : x * x; }
  __device__ static float derivative(float x) { return x <= 0.0f ? 0.0f : 2.0f * x; }
};

}  // namespace te_fl::cuda
