// Calls one op through the dispatcher and prints the implementation that dispatch chose.
#include <cstdio>

#include "te_fl/te_fl.hpp"

int main() {
  const float values[] = {-2, -1, 0, 1, 2, 3};
  auto x = te_fl::Tensor::from_values({2, 3}, values, te_fl::DType::kBF16);
  auto y = te_fl::Tensor::empty({2, 3}, te_fl::DType::kF32);
  if (!x.ok() || !y.ok()) return 1;

  const te_fl_gelu_args args{.input = *x, .output = *y};
  if (const te_fl::Status status = te_fl::ops::gelu(args); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.to_string().c_str());
    return 1;
  }
  for (int i = 0; i < 6; ++i) std::printf("gelu(%g) = %.6f\n", values[i], y->data<float>()[i]);

  const auto resolution = te_fl::OpManager::instance().resolve(te_fl::op::gelu, &args);
  if (!resolution.ok()) return 1;
  for (const auto& c : resolution->candidates) {
    std::printf("%s %s: %s\n", c.chosen ? "->" : "  ", c.impl_id.c_str(), c.reason.c_str());
  }
  return 0;
}
