// Dropout of the reference backend.
#include "te_fl/ops/dropout.h"

#include <cmath>

#include "support/expect.hpp"
#include "support/reference_call.hpp"
#include "te_fl/ops.hpp"

namespace te_fl::testing {
namespace {

bool bit(const HostTensor& mask, int64_t i) { return (mask.bytes()[i / 8] >> (i % 8) & 1) != 0; }

TEST(ReferenceDropout, MaskOutputAndGradientAgree) {
  const int64_t n = 3 * 7;
  const te_fl_rng rng{.seed = 0xfeedfacecafebeefu, .offset = 5};
  const std::vector<double> x = random_values(n, 1);
  HostTensor input({3, 7}, TE_FL_F32, x), output({3, 7}, TE_FL_F32), mask({3}, TE_FL_U8);
  te_fl_dropout_fwd_args a;
  a.input = input, a.output = output, a.mask = mask, a.p = 0.375f;
  ASSERT_OK(run_reference("dropout_fwd", a, rng));
  int kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = numeric::philox4x32(rng.seed, rng.offset + i / 4)[i % 4];
    const bool keep = word / 4294967296.0 >= 0.375;
    EXPECT_EQ(bit(mask, i), keep) << i;
    EXPECT_NEAR(output.values()[i], keep ? x[i] / 0.625 : 0, 1e-6) << i;
    kept += keep;
  }
  EXPECT_GT(kept, 0);
  EXPECT_LT(kept, n);
  for (int64_t i = n; i < 24; ++i) EXPECT_FALSE(bit(mask, i)) << "bits past the end are zero";

  HostTensor grad({3, 7}, TE_FL_F32, random_values(n, 2)), dx({3, 7}, TE_FL_F32);
  te_fl_dropout_bwd_args b;
  b.grad_output = grad, b.mask = mask, b.grad_input = dx, b.p = 0.375f;
  ASSERT_OK(run_reference("dropout_bwd", b));
  for (int64_t i = 0; i < n; ++i) {
    EXPECT_NEAR(dx.values()[i], bit(mask, i) ? grad.values()[i] / 0.625 : 0, 1e-6);
  }
  const std::vector<double> y = output.values();
  a.output = input;
  ASSERT_OK(run_reference("dropout_fwd", a, rng));
  EXPECT_EQ(input.values(), y) << "in place";
}

// Philox 4x32-10 with key 0 and counter 0 begins with 6627e8d5 e169c58d bc57ac4c 9b00dbd8 (the
// authors' known answers): as fractions 0.399, 0.881, 0.736, 0.605.
TEST(ReferenceDropout, KnownAnswer) {
  HostTensor input({4}, TE_FL_F32, {1, 1, 1, 1}), output({4}, TE_FL_F32), mask({1}, TE_FL_U8);
  te_fl_dropout_fwd_args a;
  a.input = input, a.output = output, a.mask = mask, a.p = 0.7f;
  ASSERT_OK(run_reference("dropout_fwd", a));
  EXPECT_EQ(mask.bytes()[0], 0b0110);
  const uint64_t state[2] = {0, ~uint64_t{0} - 8};  // added to rng.offset, it gives 0 modulo 2^64
  ASSERT_OK(run_reference(
      "dropout_fwd", a,
      te_fl_rng{.seed = 9, .offset = 9, .seed_address = &state[0], .offset_address = &state[1]}));
  EXPECT_EQ(mask.bytes()[0], 0b0110) << "the seed in memory wins";
}

TEST(ReferenceDropout, ZeroKeepsAllAndEmptyIsFine) {
  HostTensor input({9}, TE_FL_F32, random_values(9, 3)), output({9}, TE_FL_F32),
      mask({2}, TE_FL_U8);
  te_fl_dropout_fwd_args a;
  a.input = input, a.output = output, a.mask = mask;
  ASSERT_OK(run_reference("dropout_fwd", a));
  EXPECT_EQ(output.values(), input.values());
  EXPECT_EQ(mask.bytes(), (std::vector<uint8_t>{0xFF, 0x01}));
  HostTensor none({0, 4}, TE_FL_F32), no_mask({0}, TE_FL_U8);
  a.input = a.output = none, a.mask = no_mask;
  ASSERT_OK(run_reference("dropout_fwd", a));
}

TEST(ReferenceDropout, MaskOfWrongSize) {
  HostTensor input({9}, TE_FL_F32, random_values(9, 3)), output({9}, TE_FL_F32),
      mask({1}, TE_FL_U8);
  te_fl_dropout_fwd_args a;
  a.input = input, a.output = output, a.mask = mask;
  EXPECT_REFUSED(ops::dropout_fwd(a),
                 "argument 'mask' has shape [1], must be [2] (rule \"@.../8\", set by 'input')");
  EXPECT_TRUE(output.untouched() && mask.untouched());
  te_fl_dropout_bwd_args b;
  b.grad_output = input, b.grad_input = output, b.mask = mask;
  EXPECT_REFUSED(ops::dropout_bwd(b), "argument 'mask' has shape [1], must be [2]");
  EXPECT_TRUE(output.untouched());
}

}  // namespace
}  // namespace te_fl::testing
