#include "te_fl/ops/tensor.h"
#include "support/expect.hpp"
#include "support/reference_ops.hpp"
#include "te_fl/ops.hpp"

namespace te_fl::testing {
namespace {

using Values = std::vector<double>;
using Bytes = std::vector<uint8_t>;
constexpr double kNanValue = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfValue = std::numeric_limits<double>::infinity();

TEST(ReferenceTensor, AddInPlaceAndMixedDtypes) {
  Array a(TE_FL_F32, {2, 2}, {1, 2, 3, 4}), b(TE_FL_BF16, {2, 2}, {10, 20, 30, 40});
  te_fl_add_args args;
  args.a = a;
  args.b = b;
  args.output = b;
  EXPECT_OK(call("add", args));
  EXPECT_EQ(b.values(), (Values{11, 22, 33, 44}));
  Array mask(TE_FL_U8, {1});
  args.mask = mask;
  args.output = a;
  EXPECT_OK(call("add", args));  // p = 0 keeps every element, and the mask shows it
  EXPECT_EQ(a.values(), (Values{12, 24, 36, 48}));
  EXPECT_EQ(mask.bytes(), (Bytes{0x0F}));
}

// Philox 4x32-10 with key 0 and counter 0 begins with 6627e8d5 e169c58d bc57ac4c 9b00dbd8 (the
// authors' known answers): as fractions 0.399, 0.881, 0.736, 0.605.
TEST(ReferenceTensor, AddDropsByThePhiloxStream) {
  Array a(TE_FL_F32, {4}, {1, 1, 1, 1}), b(TE_FL_F32, {4}, {3, 3, 3, 3}), y(TE_FL_F32, {4});
  Array mask(TE_FL_U8, {1});
  te_fl_add_args args;
  args.a = a;
  args.b = b;
  args.output = y;
  args.mask = mask;
  args.p = 0.625f;
  EXPECT_OK(call("add", args));
  EXPECT_EQ(y.values(), (Values{1, 9, 9, 1}));
  EXPECT_EQ(mask.bytes(), (Bytes{0x06}));
  // This seed replaces rng.seed; this offset added to rng.offset gives 0 mod 2^64.
  const uint64_t state[2] = {0, ~uint64_t{0} - 6};
  EXPECT_OK(call("add", args,
                 {.seed = 1, .offset = 7, .seed_address = &state[0], .offset_address = &state[1]}));
  EXPECT_EQ(mask.bytes(), (Bytes{0x06}));
}

TEST(ReferenceTensor, AddContinuesTheStreamAtTheOffset) {
  Array zero(TE_FL_F32, {21}, Values(21, 0)), one(TE_FL_F32, {21}, Values(21, 1)),
      y(TE_FL_F32, {21});
  Array mask(TE_FL_U8, {3}), tail(TE_FL_U8, {3});
  te_fl_add_args args;
  args.a = zero;
  args.b = one;
  args.output = y;
  args.mask = mask;
  args.p = 0.5f;
  EXPECT_OK(call("add", args, {.seed = 5, .offset = 3}));
  EXPECT_EQ(mask.bytes()[2] >> 5, 0);  // padding bits
  args.mask = tail;
  EXPECT_OK(call("add", args, {.seed = 5, .offset = 4}));
  // One Philox counter value gives the random numbers of four elements: element i at offset 4
  // equals element i + 4 at offset 3.
  for (int i = 0; i < 17; ++i) {
    EXPECT_EQ(tail.bytes()[i / 8] >> (i % 8) & 1, mask.bytes()[(i + 4) / 8] >> ((i + 4) % 8) & 1);
  }
  Array wrong(TE_FL_U8, {4});
  args.mask = wrong;
  EXPECT_REFUSED(ops::add(args), "argument 'mask' has shape [4], must be [3]");
  EXPECT_TRUE(wrong.untouched());
}

TEST(ReferenceTensor, CopyBetweenStrides) {
  Array x(TE_FL_I32, {2, 3}, {1, 2, 3, 4, 5, 6}), y(TE_FL_I32, {3, 2});
  Array transposed(x, TE_FL_I32, {3, 2}, {1, 3}), broadcast(x, TE_FL_I32, {3, 2}, {0, 1}, 1);
  te_fl_strided_copy_args args;
  args.input = transposed;
  args.output = y;
  EXPECT_OK(call("strided_copy", args));
  EXPECT_EQ(y.values(), (Values{1, 4, 2, 5, 3, 6}));
  args.input = broadcast;
  EXPECT_OK(call("strided_copy", args));
  EXPECT_EQ(y.values(), (Values{2, 3, 2, 3, 2, 3}));
  Array f(TE_FL_F32, {3, 2});
  args.output = f;
  EXPECT_REFUSED(call("strided_copy", args), "i32", "f32");
  EXPECT_TRUE(f.untouched());
}

TEST(ReferenceTensor, CopyConvertsWithOneRounding) {
  // Rounding to FP32 first would turn 1 + 2^-11 + 2^-40 into the tie 1 + 2^-11 and then into 1.
  Array x(TE_FL_F64, {6},
          {1 + std::ldexp(1, -11) + std::ldexp(1, -40), 65520, -1e300, kNanValue, 1e-30, 500});
  Array h(TE_FL_F16, {6}), e(TE_FL_F8E4M3, {6}), s(TE_FL_F8E8M0, {6}), back(TE_FL_F32, {6});
  te_fl_strided_copy_args args;
  args.input = x;
  args.output = h;
  EXPECT_OK(call("strided_copy", args));
  expect_near(h.values(), {1 + std::ldexp(1, -10), kInfValue, -kInfValue, kNanValue, 0, 500}, 0, 0);
  args.output = e;
  EXPECT_OK(call("strided_copy", args));
  EXPECT_EQ(e.bytes(), (Bytes{0x38, 0x7E, 0xFE, 0x7F, 0x00, 0x7E}));
  args.input = e;
  args.output = back;
  EXPECT_OK(call("strided_copy", args));
  expect_near(back.values(), {1, 448, -448, kNanValue, 0, 448}, 0, 0);
  args.input = x;
  args.output = s;
  EXPECT_OK(call("strided_copy", args));
  EXPECT_EQ(s.bytes()[0], 128);  // rounded up to 2
  EXPECT_EQ(s.bytes()[5], 136);  // 512
}

TEST(ReferenceTensor, CopyKeepsBitsAndPacksFp4) {
  Array x(TE_FL_F16, {1}), y(TE_FL_F16, {1});
  x.data<uint16_t>()[0] = 0x7D01;  // a signalling NaN
  te_fl_strided_copy_args args;
  args.input = x;
  args.output = y;
  EXPECT_OK(call("strided_copy", args));
  EXPECT_EQ(y.data<uint16_t>()[0], 0x7D01);
  Array f(TE_FL_F32, {3}, {1, -6, 0.5}), q(TE_FL_F4E2M1, {3}), r(TE_FL_F4E2M1, {3});
  q.bytes()[1] = 0xA0;
  args.input = f;
  args.output = q;
  EXPECT_OK(call("strided_copy", args));
  // The nibble after the last element must not be written.
  EXPECT_EQ(q.bytes(), (Bytes{0xF2, 0xA1}));
  args.input = q;
  args.output = r;
  EXPECT_OK(call("strided_copy", args));
  EXPECT_EQ(r.bytes()[0], 0xF2);
  EXPECT_EQ(r.bytes()[1] & 0xF, 1);
}

TEST(ReferenceTensor, FillRanges) {
  struct Case {
    te_fl_dtype_index dtype;
    double value;
    bool fits;
  };
  const Case cases[] = {{TE_FL_I8, -128, true},
                        {TE_FL_I8, 128, false},
                        {TE_FL_U8, 255, true},
                        {TE_FL_U8, -1, false},
                        {TE_FL_I32, 2147483647, true},
                        {TE_FL_I32, 2147483648.0, false},
                        {TE_FL_I64, -9223372036854775808.0, true},
                        {TE_FL_I64, 9223372036854775808.0, false},
                        {TE_FL_U64, 18446744073709549568.0, true},
                        {TE_FL_U64, 18446744073709551616.0, false},
                        {TE_FL_BOOL, 1, true},
                        {TE_FL_BOOL, 2, false},
                        {TE_FL_I16, kNanValue, false},
                        {TE_FL_F16, 1e9, true}};
  for (const Case& c : cases) {
    Array y(c.dtype, {3});
    te_fl_fill_args args;
    args.output = y;
    args.value = c.value;
    if (c.fits) {
      EXPECT_OK(call("fill", args));
      EXPECT_EQ(y.bytes().size() % 3, 0u);
      EXPECT_FALSE(y.untouched());
    } else {
      EXPECT_REFUSED(ops::fill(args), "argument 'value' is");
      EXPECT_TRUE(y.untouched());
    }
  }
  Array base(TE_FL_F32, {2, 2}, {1, 1, 1, 1}), column(base, TE_FL_F32, {2}, {2}, 1);
  te_fl_fill_args args;
  args.output = column;
  args.value = 0.1;
  EXPECT_OK(call("fill", args));
  EXPECT_EQ(base.values(), (Values{1, 0.1f, 1, 0.1f}));
}

TEST(ReferenceTensor, EmbeddingLooksUpAndChecks) {
  Array table(TE_FL_BF16, {3, 2}, {1, 2, 3, 4, 5, 6}), y(TE_FL_F32, {2, 2, 2});
  Array indices(TE_FL_I64, {2, 2}, {2, 0, 1, 2});
  te_fl_embedding_fwd_args args;
  args.indices = indices;
  args.weight = table;
  args.output = y;
  EXPECT_OK(call("embedding_fwd", args));
  EXPECT_EQ(y.values(), (Values{5, 6, 1, 2, 3, 4, 5, 6}));
  Array fresh(TE_FL_F32, {2, 2, 2});
  args.output = fresh;
  for (const double bad : {-1.0, 3.0}) {
    indices.set(3, bad);
    EXPECT_REFUSED(call("embedding_fwd", args), "indices[3]", bad < 0 ? "-1" : "3", "[0, 3)");
    EXPECT_TRUE(fresh.untouched());
  }
}

TEST(ReferenceTensor, EmbeddingGradientSumsRepeatedRows) {
  Array indices(TE_FL_I32, {3}, {1, 0, 1}), grad(TE_FL_BF16, {3, 2}, {1, 2, 3, 4, 5, 6});
  Array dw(TE_FL_F32, {3, 2}, {9, 9, 9, 9, 9, 9});
  te_fl_embedding_bwd_args args;
  args.indices = indices;
  args.grad_output = grad;
  args.grad_weight = dw;
  EXPECT_OK(call("embedding_bwd", args));
  EXPECT_EQ(dw.values(), (Values{3, 4, 6, 8, 0, 0}));
  args.accumulate = 1;
  EXPECT_OK(call("embedding_bwd", args));
  EXPECT_EQ(dw.values(), (Values{6, 8, 12, 16, 0, 0}));
  indices.set(0, 7);
  EXPECT_REFUSED(call("embedding_bwd", args), "indices[0] is 7", "[0, 3)");
  EXPECT_EQ(dw.get(0), 6.0);
}

TEST(ReferenceTensor, CrossEntropyAndItsGradient) {
  const Values logits{1, 2, 0.5, 1000, 1001, 999, 3, 3, 3};
  Array x(TE_FL_F32, {3, 3}, logits), targets(TE_FL_I32, {3}, {1, 0, -100});
  Array loss(TE_FL_F32, {3}), lse(TE_FL_F32, {3}), grad_loss(TE_FL_F32, {3}, {2, 1, 5});
  for (const double eps : {0.0, 0.1}) {
    const auto row_loss = [&](const Values& v, size_t target) {
      double sum = 0, mean = 0;
      const double max = std::max({v[0], v[1], v[2]});
      for (const double e : v) sum += std::exp(e - max), mean += e / 3;
      return max + std::log(sum) - (1 - eps) * v[target] - eps * mean;
    };
    te_fl_cross_entropy_fwd_args args;
    args.logits = x;
    args.targets = targets;
    args.loss = loss;
    args.lse = lse;
    args.label_smoothing = static_cast<float>(eps);
    EXPECT_OK(call("cross_entropy_fwd", args));
    expect_near(loss.values(), {row_loss({1, 2, 0.5}, 1), row_loss({1000, 1001, 999}, 0), 0}, 1e-5,
                0);
    EXPECT_NEAR(lse.get(2), 3 + std::log(3), 1e-6);

    Array dx(TE_FL_F32, {3, 3}, logits);
    te_fl_cross_entropy_bwd_args back;
    back.grad_loss = grad_loss;
    back.logits = dx;
    back.targets = targets;
    back.lse = lse;
    back.grad_logits = dx;  // in place
    back.label_smoothing = static_cast<float>(eps);
    EXPECT_OK(call("cross_entropy_bwd", back));
    for (size_t j = 0; j < 3; ++j) {
      Values up{1, 2, 0.5}, down = up;
      up[j] += 1e-5, down[j] -= 1e-5;
      EXPECT_NEAR(dx.get(j), 2 * (row_loss(up, 1) - row_loss(down, 1)) / 2e-5, 1e-5);
      EXPECT_EQ(dx.get(6 + j), 0.0);
    }
  }
}

TEST(ReferenceTensor, CrossEntropyEdges) {
  Array x(TE_FL_F32, {2}, {-kInfValue, 4}), target(TE_FL_I64, {}, {1}), loss(TE_FL_F32, {}),
      lse(TE_FL_F32, {});
  te_fl_cross_entropy_fwd_args args;
  args.logits = x;
  args.targets = target;
  args.loss = loss;
  args.lse = lse;
  EXPECT_OK(call("cross_entropy_fwd", args));  // a masked class must not make the loss NaN
  EXPECT_EQ(loss.get(0), 0.0);
  EXPECT_EQ(lse.get(0), 4.0);
  Array fresh(TE_FL_F32, {});
  args.loss = fresh;
  target.set(0, 2);
  EXPECT_REFUSED(call("cross_entropy_fwd", args), "targets[0] is 2", "[0, 2)", "ignore_index");
  EXPECT_TRUE(fresh.untouched());
}

}  // namespace
}  // namespace te_fl::testing
