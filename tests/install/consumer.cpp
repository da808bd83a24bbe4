// A user's program, built against the installed prefix: runs silu and prints the implementation
// that ran it.
#include <cmath>
#include <cstdio>

#include "te_fl/te_fl.hpp"

int main() {
  const float values[] = {-1, 0, 2};
  auto x = te_fl::Tensor::from_values({3}, values);
  auto y = te_fl::Tensor::empty({3}, te_fl::DType::kF32);
  if (!x.ok() || !y.ok()) return 1;
  if (const te_fl::Status s = te_fl::ops::silu({.input = *x, .output = *y}); !s.ok()) {
    std::fprintf(stderr, "%s\n", s.to_string().c_str());
    return 1;
  }
  for (int i = 0; i < 3; ++i) {
    if (std::fabs(y->data<float>()[i] - values[i] / (1 + std::exp(-values[i]))) > 1e-6) return 2;
  }
  for (const auto& u : te_fl::OpManager::instance().usage())
    std::printf("%s %s\n", u.op.c_str(), u.impl_id.c_str());
  return 0;
}
