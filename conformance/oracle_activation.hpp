#pragma once

#include <algorithm>
#include <cmath>

// Activation functions and their derivatives in double precision.
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
inline double srelu(double x) { return x <= 0 ? 0 : x * x; }  // passes NaN through
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

// ---- gated activations with a factor for each row, and SiTU-GLU

enum class ScaledKind { kSrelu, kSwiglu, kClamped, kSitu };
struct ScaledOp {
  const char *name, *gradient;
  ScaledKind kind;
  bool scaled;
};
inline constexpr ScaledOp kScaledOps[] = {
    {"situglu", "dsituglu", ScaledKind::kSitu, false},
    {"scaled_swiglu", "scaled_dswiglu", ScaledKind::kSwiglu, true},
    {"scaled_clamped_swiglu", "scaled_clamped_dswiglu", ScaledKind::kClamped, true},
    {"scaled_srelu", "scaled_dsrelu", ScaledKind::kSrelu, true},
    {"scaled_situglu", "scaled_dsituglu", ScaledKind::kSitu, true},
};
struct ScaledParameters {
  double limit = 7, alpha = 1.702, offset = 1, beta1 = 4, beta2 = 25;
};
// The result for (a, b) and its derivatives, without the row's factor.
struct ScaledResult {
  double y, da, db;
};
inline ScaledResult scaled_result(ScaledKind kind, const ScaledParameters& p, double a, double b) {
  using namespace activation;
  switch (kind) {
    case ScaledKind::kSrelu:
      return {srelu(a), dsrelu(a), 0};
    case ScaledKind::kSwiglu:
      return {silu(a) * b, dsilu(a) * b, silu(a)};
    case ScaledKind::kClamped: {
      const double ca = std::min(a, p.limit), cb = std::clamp(b, -p.limit, p.limit);
      const double s = sigmoid(p.alpha * ca);
      return {ca * s * (cb + p.offset),
              a > p.limit ? 0 : (s + p.alpha * ca * s * (1 - s)) * (cb + p.offset),
              std::fabs(b) > p.limit ? 0 : ca * s};
    }
    default: {
      const double s = sigmoid(a), ta = std::tanh(a / p.beta1), tb = std::tanh(b / p.beta2);
      const double slope = 1 / std::pow(std::cosh(a / p.beta1), 2);
      return {p.beta1 * ta * s * p.beta2 * tb,
              (slope * s + p.beta1 * ta * s * (1 - s)) * p.beta2 * tb,
              p.beta1 * ta * s / std::pow(std::cosh(b / p.beta2), 2)};
    }
  }
}

}  // namespace te_fl::conformance
