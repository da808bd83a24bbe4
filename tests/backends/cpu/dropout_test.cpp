// Dropout of the CPU backend: its mask equals the scalar Philox stream's, bit for bit.
#include "te_fl/ops/dropout.h"

#include <cmath>

#include "support/cpu_call.hpp"
#include "support/expect.hpp"

namespace te_fl::testing::dropout_test {
namespace {

TEST(CpuDropout, MaskIsTheStreamAndValuesFollow) {
  // The second offset carries into the high half of the counter within the first blocks.
  for (uint64_t offset : {uint64_t{7}, (uint64_t{1} << 32) - 3, ~uint64_t{0} - 2}) {
    for (int64_t n : {0, 1, 7, 64, 65, 1000, 70003}) {
      for (float p : {0.0f, 0.1f, 0.999f}) {
        for (int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16}) {
          const te_fl_rng rng{.seed = 0xfeedbeef12345678u, .offset = offset};
          HostTensor x({n}, dtype, random_values(n, 1, 0.5, 1)), y({n}, dtype), want({n}, dtype);
          HostTensor mask({(n + 7) / 8}, TE_FL_U8), want_mask({(n + 7) / 8}, TE_FL_U8);
          te_fl_dropout_fwd_args a;
          a.input = x, a.output = y, a.mask = mask, a.p = p;
          ASSERT_OK(run_cpu("dropout_fwd", a, rng));
          a.output = want, a.mask = want_mask;
          ASSERT_OK(run_reference("dropout_fwd", a, rng));
          ASSERT_EQ(mask.bytes(), want_mask.bytes()) << n << " " << p << " " << offset;
          const double rtol = dtype == TE_FL_F32 ? 2e-7 : dtype == TE_FL_F16 ? 1e-3 : 1e-2;
          expect_near(y.values(), want.values(), 0, rtol, "y");
          te_fl_dropout_bwd_args g;
          HostTensor dx({n}, dtype);
          g.grad_output = x, g.grad_input = dx, g.mask = mask, g.p = p;
          ASSERT_OK(run_cpu("dropout_bwd", g));
          EXPECT_EQ(dx.bytes(), y.bytes()) << "the same map";
          a.output = x, a.mask = mask;
          ASSERT_OK(run_cpu("dropout_fwd", a, rng));
          EXPECT_EQ(x.bytes(), y.bytes()) << "in place";
        }
      }
    }
  }
}

TEST(CpuDropout, StateInMemoryCountsAndMaskIsChecked) {
  // This seed replaces rng.seed; this offset is added to rng.offset.
  const uint64_t state[2] = {3, 4};
  HostTensor x({100}, TE_FL_F32, random_values(100, 1)), y({100}, TE_FL_F32);
  HostTensor mask({13}, TE_FL_U8), same({13}, TE_FL_U8);
  te_fl_dropout_fwd_args a;
  a.input = x, a.output = y, a.mask = mask, a.p = 0.5f;
  ASSERT_OK(run_cpu("dropout_fwd", a, te_fl_rng{.seed = 3, .offset = 5}));
  a.mask = same;
  ASSERT_OK(run_cpu(
      "dropout_fwd", a,
      te_fl_rng{.seed = 1, .offset = 1, .seed_address = &state[0], .offset_address = &state[1]}));
  EXPECT_EQ(mask.bytes(), same.bytes());
  // A seed address and an offset address work independently of each other.
  ASSERT_OK(
      run_cpu("dropout_fwd", a, te_fl_rng{.seed = 1, .offset = 5, .seed_address = &state[0]}));
  EXPECT_EQ(mask.bytes(), same.bytes());
  ASSERT_OK(
      run_cpu("dropout_fwd", a, te_fl_rng{.seed = 3, .offset = 1, .offset_address = &state[1]}));
  EXPECT_EQ(mask.bytes(), same.bytes());
  x.fill(std::vector<double>(100, NAN));
  a.mask = mask;
  ASSERT_OK(run_cpu("dropout_fwd", a, te_fl_rng{.seed = 3, .offset = 5}));
  int zeros = 0;
  for (double v : y.values()) zeros += v == 0;
  EXPECT_GT(zeros, 20) << "a dropped NaN leaves zero";
}

}  // namespace
}  // namespace te_fl::testing::dropout_test
