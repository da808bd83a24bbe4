// The activations and their derivatives, in double. 0.5 (1 + tanh(u)) is computed as sigmoid(2 u),
// which avoids cancellation where the result is small.
#pragma once

#include <cmath>

namespace te_fl::reference {

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double sigmoid_derivative(double x) { return sigmoid(x) * sigmoid(-x); }

struct Gelu {
  static constexpr double kTwoC = 2.0 * 0.7978845608028654;  // equals 2 sqrt(2 / pi)
  static double value(double x) { return x * sigmoid(kTwoC * (x + 0.044715 * x * x * x)); }
  static double derivative(double x) {
    const double u = kTwoC * (x + 0.044715 * x * x * x);
    return sigmoid(u) + x * sigmoid_derivative(u) * kTwoC * (1.0 + 3.0 * 0.044715 * x * x);
  }
};

struct Sigmoid {
  static double value(double x) { return sigmoid(x); }
  static double derivative(double x) { return sigmoid_derivative(x); }
};

inline double swish(double x, double alpha) { return x * sigmoid(alpha * x); }
inline double swish_derivative(double x, double alpha) {
  return sigmoid(alpha * x) + alpha * x * sigmoid_derivative(alpha * x);
}

struct Silu {
  static double value(double x) { return swish(x, 1.0); }
  static double derivative(double x) { return swish_derivative(x, 1.0); }
};

struct Qgelu {
  static double value(double x) { return swish(x, 1.702); }
  static double derivative(double x) { return swish_derivative(x, 1.702); }
};

struct Relu {  // keeps NaN; -0 becomes +0
  static double value(double x) { return x <= 0.0 ? 0.0 : x; }
  static double derivative(double x) { return x > 0.0 ? 1.0 : 0.0; }
};

struct Srelu {
  static double value(double x) { return x <= 0.0 ? 0.0 : x * x; }
  static double derivative(double x) { return x <= 0.0 ? 0.0 : 2.0 * x; }
};

}  // namespace te_fl::reference
