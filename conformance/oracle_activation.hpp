#pragma once

#include <algorithm>
#include <cmath>

// Activations and derivatives in double precision.
namespace te_fl::conformance {

inline double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

struct Activation {
  const char* name;
  double (*f)(double);
  double (*df)(double);
};

namespace activation {
constexpr double kC = 0.79788456080286535588;  // sqrt(2 / pi)
inline double gelu(double x) { return 0.5 * x * (1 + std::tanh(kC * (x + 0.044715 * x * x * x))); }
inline double dgelu(double x) {
  const double t = std::tanh(kC * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kC * (1 + 3 * 0.044715 * x * x);
}
inline double qgelu(double x) { return x * sigmoid(1.702 * x); }
inline double dqgelu(double x) {
  const double s = sigmoid(1.702 * x);
  return s + 1.702 * x * s * (1 - s);
}
inline double relu(double x) { return std::max(x, 0.0); }
inline double drelu(double x) { return x > 0 ? 1 : 0; }
inline double srelu(double x) { return x <= 0 ? 0 : x * x; }  // NaN passes
inline double dsrelu(double x) { return x > 0 ? 2 * x : 0; }
inline double silu(double x) { return x * sigmoid(x); }
inline double dsilu(double x) {
  const double s = sigmoid(x);
  return s + x * s * (1 - s);
}
inline double dsigmoid(double x) {
  const double s = sigmoid(x);
  return s * (1 - s);
}
}  // namespace activation

inline constexpr Activation kGelu{"gelu", activation::gelu, activation::dgelu};
inline constexpr Activation kQgelu{"qgelu", activation::qgelu, activation::dqgelu};
inline constexpr Activation kRelu{"relu", activation::relu, activation::drelu};
inline constexpr Activation kSrelu{"srelu", activation::srelu, activation::dsrelu};
inline constexpr Activation kSilu{"silu", activation::silu, activation::dsilu};
inline constexpr Activation kSigmoid{"sigmoid", sigmoid, activation::dsigmoid};

}  // namespace te_fl::conformance
