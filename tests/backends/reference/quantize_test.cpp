#include <cfloat>
#include <limits>

#include "support/expect.hpp"
#include "support/reference_ops.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/ops/quantize.h"

namespace te_fl::testing {
namespace {

constexpr double kNanInput = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
using Bytes = std::vector<uint8_t>;
using Values = std::vector<double>;

Outcome quantize(const te_fl_tensor* input, const te_fl_tensor* output) {
  te_fl_quantize_args args;
  args.input = input;
  args.output = output;
  return call("quantize", args);
}

std::vector<double> dequantize(const te_fl_tensor* input, std::vector<int64_t> shape) {
  Array output(TE_FL_F32, std::move(shape));
  te_fl_dequantize_args args;
  args.input = input;
  args.output = output;
  EXPECT_OK(call("dequantize", args));
  return output.values();
}

TEST(ReferenceQuantize, GivenScaleSaturatesAndKeepsARunningAmax) {
  Array x(TE_FL_F32, {7}, {0.5, -1, 300, kNanInput, 0, -0.0, 1.0 / 1024});
  Array q(TE_FL_F8E4M3, {7});
  q.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0, 2.0f).amax() = 5.0f;
  EXPECT_OK(quantize(x, q));
  // Codes of 1, -2, 448 (600 saturates), NaN, 0, -0 and 2^-9, the smallest subnormal.
  EXPECT_EQ(q.bytes(), (Bytes{0x38, 0xC0, 0x7E, 0x7F, 0x00, 0x80, 0x01}));
  EXPECT_EQ(q.row_scales()[0], 0.5f);
  EXPECT_EQ(q.amax(), 300.0f);
  EXPECT_EQ(q.scale(), 2.0f);
  q.amax() = 301.0f;
  EXPECT_OK(quantize(x, q));
  EXPECT_EQ(q.amax(), 301.0f);
}

TEST(ReferenceQuantize, InfinitiesSaturateInBothFormats) {
  Array x(TE_FL_BF16, {3}, {kInfinity, -kInfinity, 1e38});
  Array e4m3(TE_FL_F8E4M3, {3}), e5m2(TE_FL_F8E5M2, {3});
  EXPECT_OK(quantize(x, e4m3.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0)));
  EXPECT_OK(quantize(x, e5m2.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0)));
  EXPECT_EQ(e4m3.bytes(), (Bytes{0x7E, 0xFE, 0x7E}));
  EXPECT_EQ(e5m2.bytes(), (Bytes{0x7B, 0xFB, 0x7B}));
  EXPECT_EQ(e4m3.amax(), std::numeric_limits<float>::infinity());
}

TEST(ReferenceQuantize, BothCopiesOrTheColumnwiseOneAlone) {
  Array x(TE_FL_F32, {2, 3}, {1, 2, 3, 4, 5, 6});
  const Bytes rows{0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C}, columns{0x38, 0x48, 0x40, 0x4A, 0x44, 0x4C};
  Array both(TE_FL_F8E4M3, {2, 3}), alone(TE_FL_F8E4M3, {2, 3});
  EXPECT_OK(quantize(x, both.quantised(TE_FL_SCALING_TENSOR, 0, 1, 1)));
  EXPECT_EQ(both.bytes(), rows);
  EXPECT_EQ(both.columns(), columns);
  EXPECT_OK(quantize(x, alone.quantised(TE_FL_SCALING_TENSOR, 0, 0, 1)));
  EXPECT_TRUE(alone.untouched());
  EXPECT_EQ(alone.columns(), columns);
  EXPECT_EQ(dequantize(alone, {2, 3}), (std::vector<double>{1, 2, 3, 4, 5, 6}));
}

TEST(ReferenceQuantize, CurrentScalingDerivesTheScale) {
  struct Case {
    double value;
    uint32_t more_flags;
    float epsilon, scale, amax;
  };
  const Case cases[] = {
      {3.5, 0, 0, 128.0f, 3.5f},
      {3.0, 0, 0, 448.0f / 3.0f, 3.0f},
      {3.0, TE_FL_QUANT_POW2_SCALE, 0, 128.0f, 3.0f},
      {3.5, 0, 7.0f, 64.0f, 3.5f},     // epsilon is a lower bound of the amax for the scale
      {0.0, 0, 0, 1.0f, 0.0f},         // amax 0 gives scale 1
      {1e-40, 0, 0, FLT_MAX, 1e-40f},  // an infinite scale becomes FLT_MAX
      {kInfinity, 0, 0, 1.0f, std::numeric_limits<float>::infinity()},
      {kNanInput, 0, 0, 1.0f, 0.0f},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.value);
    Array x(TE_FL_F32, {2}, {0, c.value}), q(TE_FL_F8E4M3, {2});
    q.quantised(TE_FL_SCALING_TENSOR, TE_FL_QUANT_COMPUTE_SCALE | c.more_flags, 1, 0);
    q.quant().amax_epsilon = c.epsilon;
    q.amax() = 1e30f;  // overwritten, not accumulated
    EXPECT_OK(quantize(x, q));
    EXPECT_EQ(q.scale(), c.scale);
    EXPECT_EQ(q.row_scales()[0], 1.0f / c.scale);
    EXPECT_EQ(q.amax(), c.amax);
  }
  Array x(TE_FL_F32, {2}, {1, -3.5}), q(TE_FL_F8E4M3, {2});
  EXPECT_OK(quantize(x, q.quantised(TE_FL_SCALING_TENSOR, TE_FL_QUANT_COMPUTE_SCALE, 1, 0)));
  EXPECT_EQ(q.bytes(), (Bytes{0x70, 0xFE}));  // 128, -448
}

TEST(ReferenceQuantize, EmptyTensors) {
  for (const uint32_t flags : {0u, static_cast<uint32_t>(TE_FL_QUANT_COMPUTE_SCALE)}) {
    Array x(TE_FL_F16, {0, 5}), q(TE_FL_F8E5M2, {0, 5});
    q.quantised(TE_FL_SCALING_TENSOR, flags, 1, 0, 4.0f);
    EXPECT_OK(quantize(x, q));
    EXPECT_EQ(q.row_scales()[0], flags == 0 ? 0.25f : 1.0f);
    EXPECT_EQ(q.amax(), 0.0f);
  }
  Array x(TE_FL_F16, {3, 0}), q(TE_FL_F8E4M3, {3, 0});
  EXPECT_OK(quantize(x, q.quantised(TE_FL_SCALING_BLOCK_1X128, 0, 0, 0)));
  EXPECT_EQ(dequantize(q, {3, 0}).size(), 0u);
}

// Shape [3, 130]: every row-wise block and every column has its own amax.
TEST(ReferenceQuantize, Block1x128LayoutAndPadding) {
  Array x(TE_FL_F32, {3, 130}), q(TE_FL_F8E4M3, {3, 130});
  for (int m = 0; m < 3; ++m) {
    for (int k = 0; k < 130; ++k) x.set(m * 130 + k, k < 128 ? 7.0 * (m + 1) : 3.5 * (m + 1));
  }
  q.quantised(TE_FL_SCALING_BLOCK_1X128, 0, 2 * 4, 1 * 132);
  EXPECT_OK(quantize(x, q));
  EXPECT_EQ(q.row_scales(), (std::vector<float>{1 / 64.0f, 1 / 32.0f, 1 / (448.0f / 21), 0,  //
                                                1 / 128.0f, 1 / 64.0f, 1 / (448.0f / 10.5f), 0}));
  // Each block is constant, so every code is 448.
  for (const uint8_t code : q.bytes()) EXPECT_EQ(code, 0x7E);
  const std::vector<float> columns = q.column_scales();
  for (int k = 0; k < 132; ++k) {
    EXPECT_EQ(columns[k], k < 128 ? 1 / (448.0f / 21) : k < 130 ? 1 / (448.0f / 10.5f) : 0) << k;
  }
  // Column 0 has 7, 14, 21 with amax 21: 149.33, 298.67, 448 round to 144 (0x71), 288 (0x79), 448.
  EXPECT_EQ(Bytes(q.columns().begin(), q.columns().begin() + 3), (Bytes{0x71, 0x79, 0x7E}));
  EXPECT_EQ(q.amax(), 21.0f);
  const auto row_values = dequantize(q, {3, 130});
  EXPECT_NEAR(row_values[2 * 130 + 129], 10.5, 1e-6);
  q.tensor().dl.data = nullptr;  // only the column-wise data is left to read
  EXPECT_NEAR(dequantize(q, {3, 130})[130], 14.0, 0.6);
  EXPECT_NE(dequantize(q, {3, 130})[130], row_values[130]);
}

TEST(ReferenceQuantize, InfiniteBlockScaleBecomesTheInputTypesLargestValue) {
  Array f32(TE_FL_F32, {1, 2}, {1e-40, 0}), bf16(TE_FL_BF16, {1, 2}, {std::ldexp(1, -133), 0});
  Array q(TE_FL_F8E4M3, {1, 2});
  q.quantised(TE_FL_SCALING_BLOCK_1X128, 0, 4, 0);
  EXPECT_OK(quantize(f32, q));
  EXPECT_EQ(q.row_scales()[0], 1.0f / FLT_MAX);
  EXPECT_OK(quantize(bf16, q));
  EXPECT_EQ(q.row_scales()[0], 1.0f / 3.38953139e38f);
  q.quant().flags = TE_FL_QUANT_POW2_SCALE;
  EXPECT_OK(quantize(f32, q));
  EXPECT_EQ(q.row_scales()[0], std::ldexp(1.0f, -127));
}

TEST(ReferenceQuantize, Block128x128SharesBlocksBetweenTheCopies) {
  constexpr int kRows = 130, kCols = 260;
  Array x(TE_FL_F32, {kRows, kCols}), q(TE_FL_F8E4M3, {kRows, kCols});
  const auto amax = [](int m, int k) { return std::ldexp(1.75, (m / 128) * 3 + k / 128); };
  for (int m = 0; m < kRows; ++m) {
    for (int k = 0; k < kCols; ++k) x.set(m * kCols + k, amax(m, k) * ((m + k) % 2 ? 1 : -0.5));
  }
  q.quantised(TE_FL_SCALING_BLOCK_128X128, 0, 2 * 4, 3 * 4);
  EXPECT_OK(quantize(x, q));
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 4; ++j) {
      const float expected = j < 3 ? static_cast<float>(amax(128 * i, 128 * j) / 448) : 0.0f;
      EXPECT_EQ(q.row_scales()[i * 4 + j], expected);
    }
  }
  for (int j = 0; j < 3; ++j) {
    for (int i = 0; i < 4; ++i) {
      const float expected = i < 2 ? static_cast<float>(amax(128 * i, 128 * j) / 448) : 0.0f;
      EXPECT_EQ(q.column_scales()[j * 4 + i], expected);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int k = 0; k < kCols; ++k) {
      ASSERT_EQ(q.bytes()[m * kCols + k], (m + k) % 2 ? 0x7E : 0xF6);  // 448, -224
      ASSERT_EQ(q.columns()[k * kRows + m], (m + k) % 2 ? 0x7E : 0xF6);
    }
  }
}

TEST(ReferenceQuantize, Mxfp8KeepsTheElementOrderInBothCopies) {
  Array x(TE_FL_BF16, {2, 40}), q(TE_FL_F8E4M3, {2, 40});
  for (int k = 0; k < 40; ++k) {
    x.set(k, k < 32 ? 448 : 449 * 2);  // 449 * 2 rounds to 896 in BF16, so the block's scale factor
                                       // is 2
    x.set(40 + k, k < 32 ? kNanInput : k == 33 ? kInfinity : 0);
  }
  q.quantised(TE_FL_SCALING_MXFP8, 0, 128 * 4, 4 * 128);
  EXPECT_OK(quantize(x, q));
  const Bytes& rows = q.row_scale_bytes();
  EXPECT_EQ(Bytes(rows.begin(), rows.begin() + 8), (Bytes{127, 128, 0, 0, 0, 0xFE, 0, 0}));
  for (size_t i = 8; i < rows.size(); ++i) ASSERT_EQ(rows[i], 0) << i;
  EXPECT_EQ(q.bytes()[0], 0x7E);
  EXPECT_EQ(q.bytes()[39], 0x7E);
  EXPECT_EQ(q.bytes()[40], 0x7F);
  EXPECT_EQ(q.bytes()[40 + 33], 0x7E);
  EXPECT_EQ(q.bytes()[40 + 34], 0x00);
  const Bytes& columns = q.column_scale_bytes();
  EXPECT_EQ(columns[0], 127);
  EXPECT_EQ(columns[32], 128);
  EXPECT_EQ(columns[33], 0xFE);
  for (size_t i = 40; i < columns.size(); ++i) ASSERT_EQ(columns[i], 0) << i;
  EXPECT_EQ(q.columns()[1], 0x7E);
  EXPECT_EQ(q.columns()[40 + 1], 0x7F);
  EXPECT_EQ(q.columns()[33], 0x00);  // 896 * 2^-127 is below half the smallest subnormal
  EXPECT_EQ(dequantize(q, {2, 40})[39], 896.0);
}

// The power-of-two scale factor is rounded up: an amax of 449 needs the factor 2, while 448 needs
// 1.
TEST(ReferenceQuantize, Mxfp8ScaleRoundsUp) {
  Array x(TE_FL_F32, {1, 2}, {449, -225}), q(TE_FL_F8E4M3, {1, 2});
  EXPECT_OK(quantize(x, q.quantised(TE_FL_SCALING_MXFP8, 0, 128 * 4, 0)));
  EXPECT_EQ(q.row_scale_bytes()[0], 128);
  EXPECT_EQ(q.bytes(), (Bytes{0x76, 0xEE}));  // 224.5 -> 224, -112.5 -> -112
}

// amax 12 gives the tensor-level factor 2688 / 12 = 224, so a block's E4M3 scale is amax / 6 * 224.
TEST(ReferenceQuantize, Nvfp4TwoLevelScales) {
  Array x(TE_FL_F32, {2, 18}), q(TE_FL_F4E2M1, {2, 18});
  for (int k = 0; k < 18; ++k) {
    x.set(k, k < 16 ? 12 : -6);
    x.set(18 + k, k < 16 ? 1.5 : 0);
  }
  x.set(18, 0.25);
  q.quantised(TE_FL_SCALING_NVFP4, 0, 128 * 4, 128 * 4);
  EXPECT_OK(quantize(x, q));
  EXPECT_EQ(q.amax(), 12.0f);
  const Bytes& rows = q.row_scale_bytes();
  // Scales of row 0: 448, 224; of row 1: 56, 0.
  EXPECT_EQ(Bytes(rows.begin(), rows.begin() + 8), (Bytes{0x7E, 0x76, 0, 0, 0x66, 0, 0, 0}));
  for (size_t i = 8; i < rows.size(); ++i) ASSERT_EQ(rows[i], 0) << i;
  EXPECT_EQ(q.bytes()[0], 0x77);    // 6, 6; low nibble first
  EXPECT_EQ(q.bytes()[8], 0xFF);    // -6, -6
  EXPECT_EQ(q.bytes()[9], 0x72);    // 0.25 with block amax 1.5 gives 1; 1.5 gives 6
  EXPECT_EQ(q.columns()[0], 0x07);  // column 0: 12 -> 6; 0.25 / 2 is below half of 0.5
  // Column 1: 12 -> 6; 1.5 / 2 is a tie between 0.5 and 1, rounded to even.
  EXPECT_EQ(q.columns()[1], 0x27);
  const auto values = dequantize(q, {2, 18});
  EXPECT_EQ(values[0], 12.0);
  EXPECT_EQ(values[17], -6.0);
  EXPECT_EQ(values[18], 0.25);
  EXPECT_EQ(values[19], 1.5);
  EXPECT_EQ(values[18 + 17], 0.0);
}

TEST(ReferenceQuantize, Nvfp4CopiesMayHaveAmaxesOfTheirOwn) {
  Array x(TE_FL_F32, {2, 18}, Values(36, 6)), q(TE_FL_F4E2M1, {2, 18});
  float own = -1;
  q.quantised(TE_FL_SCALING_NVFP4, 0, 128 * 4, 128 * 4).quant().columnwise_amax = &own;
  EXPECT_OK(quantize(x, q));
  EXPECT_EQ(q.amax(), 6.0f);
  EXPECT_EQ(own, 6.0f) << "both copies are made from the same values";
  own = 12;  // simulates column-wise data with twice the amax
  EXPECT_EQ(dequantize(q, {2, 18})[0], 6.0);
  q.tensor().dl.data = nullptr;
  q.quant().amax = nullptr;
  EXPECT_EQ(dequantize(q, {2, 18})[0], 12.0);
}

TEST(ReferenceQuantize, EpsilonBoundsMxfp8AndNvfp4Amaxes) {
  Array x(TE_FL_F32, {1, 1}, {1}), mx(TE_FL_F8E4M3, {1, 1}), nv(TE_FL_F4E2M1, {1, 1});
  mx.quantised(TE_FL_SCALING_MXFP8, 0, 128 * 4, 0).quant().amax_epsilon = 448;
  EXPECT_OK(quantize(x, mx));
  EXPECT_EQ(mx.row_scale_bytes()[0], 127);
  EXPECT_EQ(mx.get(0), 1.0);
  nv.quantised(TE_FL_SCALING_NVFP4, 0, 128 * 4, 0).quant().amax_epsilon = 12;
  EXPECT_OK(quantize(x, nv));
  EXPECT_EQ(nv.amax(), 12.0f);
  EXPECT_NEAR(dequantize(nv, {1, 1})[0], 1.0, 0.04);
}

TEST(ReferenceQuantize, Nvfp4BlockBelowItsSmallestScaleBecomesZeros) {
  Array x(TE_FL_F32, {1, 32}, Values(32, 1e-6)), q(TE_FL_F4E2M1, {1, 32});
  x.set(0, -448);
  x.set(17, -1e-6);
  EXPECT_OK(quantize(x, q.quantised(TE_FL_SCALING_NVFP4, 0, 128 * 4, 0)));
  EXPECT_EQ(q.row_scale_bytes()[0], 0x7E);
  EXPECT_EQ(q.row_scale_bytes()[1], 0);
  EXPECT_EQ(q.bytes()[0], 0x0F);
  EXPECT_EQ(q.bytes()[8], 0x80);  // 0, -0
  EXPECT_EQ(dequantize(q, {1, 32})[16], 0.0);
}

TEST(ReferenceQuantize, NoopFlagLeavesEverythingAlone) {
  Array x(TE_FL_F32, {3}, {1, 2, 3}), q(TE_FL_F8E4M3, {3}), flag(TE_FL_F32, {1}, {1});
  q.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0).amax() = 0.5f;
  te_fl_quantize_args args;
  args.input = x;
  args.output = q;
  args.noop_flag = flag;
  EXPECT_OK(call("quantize", args));
  EXPECT_TRUE(q.untouched());
  EXPECT_EQ(q.amax(), 0.5f);
  flag.set(0, 0);
  EXPECT_OK(call("quantize", args));
  EXPECT_EQ(q.bytes()[0], 0x38);
}

TEST(ReferenceQuantize, MissingPartsAreNamed) {
  Array x(TE_FL_F32, {2}, {1, 2}), q(TE_FL_F8E4M3, {2}), fp4(TE_FL_F4E2M1, {2});
  q.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0).quant().scale = nullptr;
  const auto refuse = [&](const te_fl_tensor* output, const char* part) {
    te_fl_quantize_args args;
    args.input = x, args.output = output;
    EXPECT_REFUSED(ops::quantize(args), "argument 'output' is ", part);
  };
  refuse(q, "its scale is missing (NULL)");
  q.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0).quant().scale_inv = nullptr;
  refuse(q, "its scale_inv is missing (NULL), where the reciprocal of its scale is written");
  q.quantised(TE_FL_SCALING_BLOCK_1X128, 0, 4, 4).quant().columnwise_scale_inv = nullptr;
  refuse(q, "with column-wise data: its columnwise_scale_inv is missing (NULL)");
  q.quantised(TE_FL_SCALING_NVFP4, 0, 512, 0);
  refuse(q, "scaling nvfp4 needs dtype f4e2m1");
  fp4.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0);
  refuse(fp4, "scaling tensor needs dtype f8e4m3|f8e5m2");
  fp4.quantised(TE_FL_SCALING_NVFP4, 0, 512, 0).quant().amax = nullptr;
  refuse(fp4, "its amax is missing (NULL)");
  EXPECT_TRUE(q.untouched());
  EXPECT_TRUE(fp4.untouched());
}

TEST(ReferenceQuantize, BiasGradientSumsUnquantisedValues) {
  Array x(TE_FL_BF16, {3, 2}, {1, 1000, 0.00390625, 1000, 2, 1000}), q(TE_FL_F8E4M3, {3, 2});
  Array bias(TE_FL_F32, {2});
  te_fl_bgrad_quantize_args args;
  args.input = x;
  args.output = q.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0);
  args.bias_grad = bias;
  EXPECT_OK(call("bgrad_quantize", args));
  EXPECT_EQ(bias.values(), (std::vector<double>{3.00390625, 3000}));
  EXPECT_EQ(q.bytes(), (Bytes{0x38, 0x7E, 0x02, 0x7E, 0x40, 0x7E}));
}

TEST(ReferenceQuantize, SplitCoversTheInput) {
  Array x(TE_FL_F32, {3, 2}, {1, 2, 3, 4, 5, 6});
  Array first(TE_FL_F8E4M3, {1, 2}), none(TE_FL_F8E4M3, {0, 2}), rest(TE_FL_F8E4M3, {2, 2});
  for (Array* part : {&first, &none, &rest}) part->quantised(TE_FL_SCALING_TENSOR, 0, 1, 0);
  const te_fl_tensor* outputs[] = {first, none, rest};
  te_fl_split_quantize_args args;
  args.input = x;
  args.outputs = outputs;
  args.outputs_count = 2;
  EXPECT_REFUSED(ops::split_quantize(args), "argument 'input' is f32[3,2] cpu",
                 "'outputs' is a list of 2 with 2 elements in all", "the parts cover the input");
  EXPECT_TRUE(first.untouched());
  args.outputs_count = 3;
  EXPECT_OK(call("split_quantize", args));
  EXPECT_EQ(first.bytes(), (Bytes{0x38, 0x40}));
  EXPECT_EQ(rest.bytes(), (Bytes{0x44, 0x48, 0x4A, 0x4C}));
  EXPECT_EQ(rest.amax(), 6.0f);
}

TEST(ReferenceQuantize, MultiTensor) {
  Array x0(TE_FL_F32, {1}, {1}), x1(TE_FL_F16, {2}, {2, 3});
  Array q0(TE_FL_F8E4M3, {1}), q1(TE_FL_F8E5M2, {2});
  q0.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0);
  q1.quantised(TE_FL_SCALING_TENSOR, 0, 1, 0);
  const te_fl_tensor* inputs[] = {x0, x1};
  const te_fl_tensor* outputs[] = {q0, q1};
  te_fl_multi_tensor_quantize_args args;
  args.inputs = inputs;
  args.outputs = outputs;
  args.inputs_count = 2;
  args.outputs_count = 2;
  EXPECT_OK(call("multi_tensor_quantize", args));
  EXPECT_EQ(q0.bytes(), (Bytes{0x38}));
  EXPECT_EQ(q1.bytes(), (Bytes{0x40, 0x42}));
}

TEST(ReferenceQuantize, CastToBareFp8) {
  Array x(TE_FL_F32, {2, 2}, {1, -2, 3, 4}), scale(TE_FL_F32, {1}, {2}), amax(TE_FL_F32, {1}, {1});
  Array inverse(TE_FL_F32, {1}), base(TE_FL_F8E4M3, {2, 3});
  Array output(base, TE_FL_F8E4M3, {2, 2}, {3, 1});  // column 2 of the array must stay unchanged
  te_fl_cast_to_fp8_args args;
  args.input = x;
  args.output = output;
  args.scale = scale;
  EXPECT_OK(call("cast_to_fp8", args));
  EXPECT_EQ(base.bytes(), (Bytes{0x40, 0xC8, 0xAB, 0x4C, 0x50, 0xAB}));
  args.amax = amax;
  args.scale_inv = inverse;
  EXPECT_OK(call("cast_to_fp8", args));
  EXPECT_EQ(amax.get(0), 4.0);
  EXPECT_EQ(inverse.get(0), 0.5);
}

TEST(ReferenceQuantize, TransposeMovesCodes) {
  Array x(TE_FL_U8, {2, 3}, {1, 2, 3, 4, 255, 127}), y(TE_FL_U8, {3, 2});
  te_fl_fp8_transpose_args args;
  args.input = x;
  args.output = y;
  EXPECT_OK(call("fp8_transpose", args));
  EXPECT_EQ(y.bytes(), (Bytes{1, 4, 2, 255, 3, 127}));
}

TEST(ReferenceQuantize, AmaxIgnoresNanAndGaps) {
  Array base(TE_FL_F32, {2, 3}, {1, -7, 100, kNanInput, 2, 100}), amax(TE_FL_F32, {1}, {50});
  Array x(base, TE_FL_F32, {2, 2}, {3, 1}), empty(TE_FL_F32, {0});
  te_fl_compute_amax_args args;
  args.input = x;
  args.amax = amax;
  EXPECT_OK(call("compute_amax", args));
  EXPECT_EQ(amax.get(0), 7.0);
  args.input = empty;
  EXPECT_OK(call("compute_amax", args));
  EXPECT_EQ(amax.get(0), 0.0);
}

TEST(ReferenceQuantize, DelayedScalingUpdate) {
  // History columns: one rolls with row 0, one uses the reduced amax, one has amax 0 and keeps its
  // history and scale.
  Array history(TE_FL_F32, {3, 3}, {7, 1, 0, 14, 2, 0, 28, 4, 0}),
      scales(TE_FL_F32, {3}, {9, 9, 9});
  Array one_row(TE_FL_F32, {1, 1}, {3.5}), one_scale(TE_FL_F32, {1}, {9});
  Array reduced(TE_FL_F32, {4}, {0, 56, 0, 0});
  const te_fl_tensor* histories[] = {history, one_row};
  const te_fl_tensor* all_scales[] = {scales, one_scale};
  te_fl_fused_amax_and_scale_update_after_reduction_args args;
  args.amax_reduction_buffer = reduced;
  args.amax_histories = histories;
  args.amax_histories_count = 2;
  args.scales = all_scales;
  args.scales_count = 2;
  args.margin = 1;
  EXPECT_OK(call("fused_amax_and_scale_update_after_reduction", args));
  EXPECT_EQ(history.values(), (std::vector<double>{0, 0, 0, 28, 4, 0, 7, 56, 0}));
  // The scales are 224 / 28, 224 / 56, and the unchanged old scale.
  EXPECT_EQ(scales.values(), (std::vector<double>{8, 4, 9}));
  EXPECT_EQ(one_row.get(0), 0.0);
  EXPECT_EQ(one_scale.get(0), 64.0);

  args.algo = TE_FL_AMAX_ALGO_MOST_RECENT;
  args.fp8_dtype = TE_FL_FP8_FORMAT_E5M2;
  args.amax_reduction_buffer = nullptr;
  history.set(0, 7);
  EXPECT_OK(call("fused_amax_and_scale_update_after_reduction", args));
  // 28672 / 7; a column without a new amax keeps its scale.
  EXPECT_EQ(scales.values(), (std::vector<double>{4096, 4, 9}));
  args.algo = TE_FL_AMAX_ALGO_MAX;
  const std::vector<double> rolled = history.values();  // row 0 of the history is all 0 now
  EXPECT_OK(call("fused_amax_and_scale_update_after_reduction", args));
  EXPECT_EQ(history.values(), rolled);
  EXPECT_EQ(scales.values(), (std::vector<double>{4096, 4, 9}));

  Array no_rows(TE_FL_F32, {0, 1});
  const te_fl_tensor* short_histories[] = {history, no_rows};
  args.amax_histories = short_histories;
  EXPECT_REFUSED(ops::fused_amax_and_scale_update_after_reduction(args),
                 "argument 'amax_histories'[1] has shape [0, 1]", "rule \"L+1 N\"");
  args.amax_histories = histories;
  Array one_amax(TE_FL_F32, {1}, {9});
  args.amax_reduction_buffer = one_amax;
  EXPECT_REFUSED(ops::fused_amax_and_scale_update_after_reduction(args),
                 "'amax_reduction_buffer' is f32[1]", "one amax for each tensor");
  args.amax_reduction_buffer = nullptr;
  args.margin = 500;
  EXPECT_REFUSED(ops::fused_amax_and_scale_update_after_reduction(args),
                 "'margin' is 500, must be from -112 to 134");
}

}  // namespace
}  // namespace te_fl::testing
