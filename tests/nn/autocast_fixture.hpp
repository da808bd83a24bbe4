// Fixture of the FP8 autocast tests: one Linear layer, its input and its output gradient.
#pragma once

#include <algorithm>

#include "nn_test_util.hpp"

namespace te_fl::nn::testing {

inline constexpr int64_t kRows = 32, kIn = 64, kOut = 48;

inline Tensor input(double range = 1, uint64_t seed = 1) {
  return tensor({kRows, kIn}, random_values(kRows * kIn, seed, range));
}
inline Tensor gradient(double range = 1, uint64_t seed = 2) {
  return tensor({kRows, kOut}, random_values(kRows * kOut, seed, range));
}
inline float amax_of(const Tensor& t) {
  double amax = 0;
  for (double v : values_of(t)) amax = std::max(amax, std::abs(v));
  return static_cast<float>(amax);
}
inline float at(const Module& module, const std::string& name, int64_t i) {
  return find_state(module, name).data<float>()[i];
}
inline std::unique_ptr<Linear> make_linear(bool bias = true) {
  return take(Linear::create(
      {.in_features = kIn, .out_features = kOut, .bias = bias, .seed = 3, .init_std = 0.2f}));
}

}  // namespace te_fl::nn::testing
