#include <functional>

#include "support/expect.hpp"
#include "support/reference_ops.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::testing {
namespace {

using Values = std::vector<double>;
using Function = double (*)(double);
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
}
double qgelu(double x) { return x * sigmoid(1.702 * x); }
double silu(double x) { return x * sigmoid(x); }
double relu(double x) { return x > 0 ? x : 0; }
double srelu(double x) { return relu(x) * relu(x); }

double slope(const std::function<double(double)>& f, double x) {
  return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5;
}

struct Activation {
  const char* name;
  const char* gated;
  Function f;
};
const Activation kActivations[] = {{"gelu", "geglu", gelu},  {"qgelu", "qgeglu", qgelu},
                                   {"relu", "reglu", relu},  {"srelu", "sreglu", srelu},
                                   {"silu", "swiglu", silu}, {nullptr, "glu", sigmoid}};

const Values kX{-30, -6, -1.5, -0.25, 0.125, 0.75, 3, 40};
const Values kDy{1, -2, 0.5, 3, -0.25, 1.5, 2, -1};

TEST(ReferenceActivation, PlainFormsAndGradients) {
  for (const Activation& act : kActivations) {
    if (act.name == nullptr) continue;
    SCOPED_TRACE(act.name);
    Values y, dx;
    for (size_t i = 0; i < kX.size(); ++i) {
      y.push_back(act.f(kX[i]));
      dx.push_back(kDy[i] * slope(act.f, kX[i]));
    }
    Array x(TE_FL_F32, {2, 4}, kX), grad(TE_FL_F32, {2, 4}, kDy), out(TE_FL_F32, {2, 4});
    te_fl_activation_act_fwd_args forward;
    forward.input = x;
    forward.output = out;
    EXPECT_OK(call(act.name, forward));
    expect_near(out.values(), y, 1e-7, 1e-6);

    te_fl_activation_act_bwd_args backward;
    backward.grad = grad;
    backward.input = x;
    backward.output = out;
    EXPECT_OK(call(std::string("d") + act.name, backward));
    expect_near(out.values(), dx, 1e-6, 1e-6);

    Array dbias(TE_FL_F32, {4});
    te_fl_activation_dbias_act_args fused;
    fused.grad = grad;
    fused.input = x;
    fused.output = grad;  // in place
    fused.dbias = dbias;
    EXPECT_OK(call(std::string("dbias_d") + act.name, fused));
    expect_near(grad.values(), dx, 1e-6, 1e-6);
    for (int c = 0; c < 4; ++c) EXPECT_NEAR(dbias.get(c), dx[c] + dx[c + 4], 1e-5);

    forward.output = x;  // in place
    EXPECT_OK(call(act.name, forward));
    expect_near(x.values(), y, 1e-7, 1e-6);
  }
}

TEST(ReferenceActivation, GatedFormsAndGradients) {
  for (const Activation& act : kActivations) {
    SCOPED_TRACE(act.gated);
    // Gated activation: two rows [a | b] with H = 2.
    Array input(TE_FL_F32, {2, 4}, kX), grad(TE_FL_F32, {2, 2}, {1, -2, 0.5, 3}),
        out(TE_FL_F32, {2, 2});
    Values y, dx(8);
    for (int r = 0; r < 2; ++r) {
      for (int c = 0; c < 2; ++c) {
        const double a = kX[r * 4 + c], b = kX[r * 4 + 2 + c], dy = grad.get(r * 2 + c);
        y.push_back(act.f(a) * b);
        dx[r * 4 + c] = dy * slope(act.f, a) * b;
        dx[r * 4 + 2 + c] = dy * act.f(a);
      }
    }
    te_fl_activation_glu_fwd_args forward;
    forward.input = input;
    forward.output = out;
    EXPECT_OK(call(act.gated, forward));
    expect_near(out.values(), y, 1e-7, 1e-6);
    te_fl_activation_glu_bwd_args backward;
    backward.grad = grad;
    backward.input = input;
    backward.output = input;  // in place
    EXPECT_OK(call(std::string("d") + act.gated, backward));
    expect_near(input.values(), dx, 2e-5, 1e-6);
  }
}

TEST(ReferenceActivation, InPlaceGatedGradientOfLongRows) {
  constexpr int kHalf = 5000;  // longer than any block that the op may work in
  Array input(TE_FL_F32, {1, 2 * kHalf}), grad(TE_FL_F32, {1, kHalf});
  for (int i = 0; i < kHalf; ++i) {
    input.set(i, i + 1);
    input.set(kHalf + i, 2 * i);
    grad.set(i, 1);
  }
  te_fl_activation_glu_bwd_args args;
  args.grad = grad;
  args.input = input;
  args.output = input;
  EXPECT_OK(call("dreglu", args));
  for (int i = 0; i < kHalf; ++i) {
    ASSERT_EQ(input.get(i), 2.0 * i);
    ASSERT_EQ(input.get(kHalf + i), i + 1.0);
  }
}

TEST(ReferenceActivation, ClampedSwiglu) {
  // Pairs (a, b) for a clamped gated activation: both inside the limits; a above; b above; b below;
  // a far below, where a is not clamped.
  const Values a{1, 3, 1, 0.5, -9}, b{0.5, -1, 4, -5, 1.5};
  constexpr double kLimit = 2, kAlpha = 1.5, kOffset = 0.25;
  const auto f = [&](double x, double g) {
    const double ca = std::min(x, kLimit), cb = std::max(-kLimit, std::min(g, kLimit));
    return ca * sigmoid(kAlpha * ca) * (cb + kOffset);
  };
  Values input = a, y, dx(10);
  input.insert(input.end(), b.begin(), b.end());
  for (int i = 0; i < 5; ++i) {
    y.push_back(f(a[i], b[i]));
    dx[i] = 2 * slope([&](double v) { return f(v, b[i]); }, a[i]);
    dx[5 + i] = 2 * slope([&](double v) { return f(a[i], v); }, b[i]);
  }
  Array x(TE_FL_F32, {10}, input), out(TE_FL_F32, {5}), grad(TE_FL_F32, {5}, {2, 2, 2, 2, 2});
  Array dx_out(TE_FL_F32, {10});
  te_fl_activation_clamped_fwd_args forward;
  forward.input = x;
  forward.output = out;
  forward.limit = kLimit;
  forward.alpha = kAlpha;
  forward.glu_linear_offset = kOffset;
  EXPECT_OK(call("clamped_swiglu", forward));
  expect_near(out.values(), y, 1e-7, 1e-6);
  te_fl_activation_clamped_bwd_args backward;
  backward.grad = grad;
  backward.input = x;
  backward.output = dx_out;
  backward.limit = kLimit;
  backward.alpha = kAlpha;
  backward.glu_linear_offset = kOffset;
  EXPECT_OK(call("clamped_dswiglu", backward));
  expect_near(dx_out.values(), dx, 1e-6, 1e-6);
  EXPECT_EQ(dx_out.get(1), 0.0);
  EXPECT_EQ(dx_out.get(7), 0.0);
  EXPECT_EQ(dx_out.get(8), 0.0);
}

TEST(ReferenceActivation, QuantisesFromFp32NotFromTheInputType) {
  // silu(1) = 0.7310586 times the scale 448 / 0.7310586 is exactly 448 only if silu(1) is not
  // rounded to BF16 first.
  Array x(TE_FL_BF16, {1, 1}, {1}), q(TE_FL_F8E4M3, {1, 1});
  q.quantised(TE_FL_SCALING_TENSOR, TE_FL_QUANT_COMPUTE_SCALE, 1, 0);
  te_fl_activation_act_fwd_args args;
  args.input = x;
  args.output = q;
  EXPECT_OK(call("silu", args));
  EXPECT_EQ(q.get(0), 448.0);
  EXPECT_EQ(q.amax(), static_cast<float>(silu(1)));
}

// Writes an FP8 result over its own FP32 input: all of the input must be read before the first
// write.
TEST(ReferenceActivation, QuantisedOutputInTheInputsMemory) {
  Array x(TE_FL_F32, {2, 2}, {1, 2, 3, 4}), columns(TE_FL_F8E4M3, {2, 2});
  Array q(x, TE_FL_F8E4M3, {2, 2});
  te_fl_quant quant;
  float scale = 1, scale_inv = 0, amax = 0;
  quant.scaling = TE_FL_SCALING_TENSOR;
  quant.flags = TE_FL_QUANT_COMPUTE_SCALE;
  quant.scale = &scale;
  quant.scale_inv = &scale_inv;
  quant.amax = &amax;
  quant.columnwise_data = columns.bytes().data();
  q.tensor().quant = &quant;
  te_fl_activation_act_fwd_args args;
  args.input = x;
  args.output = q;
  EXPECT_OK(call("relu", args));
  EXPECT_EQ(scale, 112.0f);
  const std::vector<uint8_t> head(x.bytes().begin(), x.bytes().begin() + 4);
  EXPECT_EQ(head, (std::vector<uint8_t>{0x6E, 0x76, 0x7A, 0x7E}));  // 112, 224, 336 -> 320, 448
  EXPECT_EQ(columns.bytes(), (std::vector<uint8_t>{0x6E, 0x7A, 0x76, 0x7E}));
}

// Writes a result over an input of a narrower dtype in the same memory.
TEST(ReferenceActivation, WiderOutputInTheInputsMemory) {
  Array memory(TE_FL_F32, {4});
  Array x(memory, TE_FL_BF16, {4});
  for (int i = 0; i < 4; ++i) memory.data<uint16_t>()[i] = numeric::float_to_bf16(i - 1.0f);
  te_fl_activation_act_fwd_args args;
  args.input = x;
  args.output = memory;
  EXPECT_OK(call("srelu", args));
  EXPECT_EQ(memory.values(), (Values{0, 0, 1, 4}));
}

TEST(ReferenceActivation, NanEmptyStridesAndScalars) {
  Array base(TE_FL_F16, {2, 3}, {kNan, -1, 9, 2, 3, 9}), out(TE_FL_F32, {2, 2});
  Array x(base, TE_FL_F16, {2, 2}, {1, 3});  // transposed view
  te_fl_activation_act_fwd_args args;
  args.input = x;
  args.output = out;
  EXPECT_OK(call("relu", args));
  expect_near(out.values(), {kNan, 2, 0, 3}, 0, 0);
  Array none(TE_FL_F32, {0, 7}), scalar(TE_FL_F32, {}, {-2});
  args.input = args.output = none;
  EXPECT_OK(call("gelu", args));
  args.input = args.output = scalar;
  EXPECT_OK(call("relu", args));
  EXPECT_EQ(scalar.get(0), 0.0);
  Array large(TE_FL_F32, {2}, {-1e30, 1e30});
  args.input = args.output = large;
  EXPECT_OK(call("gelu", args));
  EXPECT_EQ(large.get(0), 0.0);
  EXPECT_EQ(large.get(1), static_cast<double>(1e30f));
}

}  // namespace
}  // namespace te_fl::testing
