// Scaled softmaxes of the reference backend.
#include "te_fl/ops/softmax.h"

#include <cmath>
#include <functional>

#include "support/expect.hpp"
#include "support/reference_call.hpp"

namespace te_fl::testing {
namespace {

using Visible = std::function<bool(int64_t row, int64_t key)>;  // row: index of a row of the [rows,
                                                                // keys] matrix

// exp(s x) / sum without subtracting the maximum, as double has the range for these inputs.
std::vector<double> softmax(const std::vector<double>& x, int64_t keys, double scale,
                            const Visible& visible) {
  std::vector<double> y(x.size(), 0);
  for (int64_t row = 0; row < static_cast<int64_t>(x.size()) / keys; ++row) {
    double sum = 0;
    for (int64_t k = 0; k < keys; ++k) {
      if (visible(row, k)) sum += std::exp(scale * x[row * keys + k]);
    }
    for (int64_t k = 0; k < keys; ++k) {
      if (visible(row, k)) y[row * keys + k] = std::exp(scale * x[row * keys + k]) / sum;
    }
  }
  return y;
}

// Returns the derivative of sum(softmax * weight) by central differences.
std::vector<double> derivative(std::vector<double> x, int64_t keys, double scale,
                               const Visible& visible, const std::vector<double>& weight) {
  const auto loss = [&] {
    const std::vector<double> y = softmax(x, keys, scale, visible);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * weight[i];
    return sum;
  };
  std::vector<double> out;
  for (double& v : x) {
    const double saved = v, step = 1e-5;
    v = saved + step;
    const double up = loss();
    v = saved - step;
    out.push_back((up - loss()) / (2 * step));
    v = saved;
  }
  return out;
}

template <class Forward, class Backward>
void check(const std::string& name, const Shape& shape, const Visible& visible, Forward f,
           Backward b) {
  const float scale = 0.75f;
  const int64_t keys = shape.back();
  const std::vector<double> x = random_values(count(shape), 1, -4, 4);
  HostTensor input(shape, TE_FL_F32, x), output(shape, TE_FL_F32);
  f.input = input, f.output = output, f.scale = scale;
  ASSERT_OK(run_reference((name + "_forward").c_str(), f));
  expect_near(output.values(), softmax(x, keys, scale, visible), 1e-6, 5e-6, "y");

  HostTensor grad(shape, TE_FL_F32, random_values(count(shape), 2)), result(shape, TE_FL_F32);
  b.output_grad = grad, b.softmax_results = output, b.input_grad = result, b.scale = scale;
  ASSERT_OK(run_reference((name + "_backward").c_str(), b));
  expect_near(result.values(), derivative(x, keys, scale, visible, grad.values()), 2e-6, 1e-5,
              "dx");

  // In place.
  const std::vector<double> y = output.values(), dx = result.values();
  f.output = input;
  ASSERT_OK(run_reference((name + "_forward").c_str(), f));
  EXPECT_EQ(input.values(), y);
  b.input_grad = grad;
  ASSERT_OK(run_reference((name + "_backward").c_str(), b));
  EXPECT_EQ(grad.values(), dx);
}

using Fwd4 = te_fl_scaled_softmax_forward_args;
using Bwd4 = te_fl_scaled_softmax_backward_args;

TEST(ReferenceSoftmax, Unmasked) {
  const Visible all = [](int64_t, int64_t) { return true; };
  check("scaled_softmax", {2, 3, 4, 5}, all, Fwd4{}, Bwd4{});
  check("scaled_softmax", {1, 1, 1, 1}, all, Fwd4{}, Bwd4{});
  check("scaled_softmax", {2, 0, 4, 5}, all, Fwd4{}, Bwd4{});
}

TEST(ReferenceSoftmax, MaskBroadcasts) {
  const int64_t b = 2, h = 3, q = 4, k = 5;
  for (const Shape& mask_shape : {Shape{b, h, q, k}, {b, 1, q, k}, {1, h, q, k}, {1, 1, q, k}}) {
    std::vector<double> bits;
    for (double r : random_values(count(mask_shape), 3, 0, 2)) bits.push_back(r > 1 ? 7 : 0);
    for (int64_t j = 0; j < k; ++j) bits[static_cast<size_t>(k + j)] = 1;  // query 1 sees no keys
    HostTensor mask(mask_shape, TE_FL_U8, bits);
    te_fl_scaled_masked_softmax_forward_args f;
    f.mask = mask;
    const Visible visible = [&](int64_t row, int64_t key) {
      const int64_t mb = mask_shape[0] == 1 ? 0 : row / q / h;
      const int64_t mh = mask_shape[1] == 1 ? 0 : row / q % h;
      return bits[static_cast<size_t>(((mb * mask_shape[1] + mh) * q + row % q) * k + key)] == 0;
    };
    check("scaled_masked_softmax", {b, h, q, k}, visible, f,
          te_fl_scaled_masked_softmax_backward_args{});
  }
}

TEST(ReferenceSoftmax, UpperTriangular) {
  check(
      "scaled_upper_triang_masked_softmax", {2, 4, 4},
      [](int64_t row, int64_t key) { return key <= row % 4; },
      te_fl_scaled_upper_triang_masked_softmax_forward_args{},
      te_fl_scaled_upper_triang_masked_softmax_backward_args{});
}

TEST(ReferenceSoftmax, AlignedCausal) {
  for (auto [q, k] : {std::pair<int64_t, int64_t>{3, 5}, {5, 3}, {4, 4}}) {
    check(
        "scaled_aligned_causal_masked_softmax", {2, 2, q, k},
        [q = q, k = k](int64_t row, int64_t key) { return key - (k - 1) <= row % q - (q - 1); },
        te_fl_scaled_aligned_causal_masked_softmax_forward_args{},
        te_fl_scaled_aligned_causal_masked_softmax_backward_args{});
  }
}

// exp(0) = 1 and exp(log 3) = 3; a difference of 200 must not overflow.
TEST(ReferenceSoftmax, HandDerivedAndExtreme) {
  HostTensor x({1, 1, 4, 2}, TE_FL_F32,
               {0, std::log(3.0) / 2, 400, 300, -INFINITY, -INFINITY, NAN, -INFINITY});
  HostTensor y({1, 1, 4, 2}, TE_FL_F32);
  Fwd4 a;
  a.input = x, a.output = y, a.scale = 2;
  ASSERT_OK(run_reference("scaled_softmax_forward", a));
  const std::vector<double> got = y.values();
  EXPECT_NEAR(got[0], 0.25, 1e-7);
  EXPECT_NEAR(got[1], 0.75, 1e-7);
  EXPECT_EQ(got[2], 1);
  EXPECT_NEAR(got[3], 0, 1e-30);
  EXPECT_EQ(got[4], 0) << "nothing to attend to";
  EXPECT_EQ(got[5], 0);
  EXPECT_TRUE(std::isnan(got[6]) && std::isnan(got[7])) << "NaN is not a mask";
}

TEST(ReferenceSoftmax, HalfPrecisionAndStrides) {
  HostTensor base({2, 1, 5, 4}, TE_FL_BF16, random_values(40, 9, -3, 3));
  HostTensor x(base, {2, 1, 4, 5}, {20, 20, 1, 4}, 0);  // transposed view
  HostTensor y({2, 1, 4, 5}, TE_FL_BF16);
  Fwd4 a;
  a.input = x, a.output = y;
  ASSERT_OK(run_reference("scaled_softmax_forward", a));
  std::vector<double> want = softmax(x.values(), 5, 1, [](int64_t, int64_t) { return true; });
  HostTensor rounded({2, 1, 4, 5}, TE_FL_BF16, want);
  expect_near(y.values(), rounded.values(), 0, 0.004, "bf16 y");
}

}  // namespace
}  // namespace te_fl::testing
