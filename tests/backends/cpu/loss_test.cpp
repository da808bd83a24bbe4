// The CPU backend's cross-entropy kernels for each SIMD target: a NaN at any position reaches the
// result, and sums agree with double precision.
#include "backends/cpu/loss_kernels.hpp"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <limits>
#include <vector>

#include "backends/cpu/convert.hpp"

namespace te_fl::cpu::loss_test {
namespace {

class CpuLoss : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (GetParam() != 0 && (hwy::SupportedTargets() & GetParam()) == 0) GTEST_SKIP();
    hwy::SetSupportedTargetsForTest(GetParam() != 0 ? GetParam() : int64_t{HWY_STATIC_TARGET});
    hwy::GetChosenTarget().DeInit();
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
};
#if HWY_ARCH_X86
INSTANTIATE_TEST_SUITE_P(Target, CpuLoss, ::testing::Values(HWY_AVX3, HWY_AVX2, 0));
#else
INSTANTIATE_TEST_SUITE_P(Target, CpuLoss, ::testing::Values(0));
#endif

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> falling(int64_t n) {
  std::vector<float> x(static_cast<size_t>(padded(n)), 0.0f);
  for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = 2.0f - 0.37f * static_cast<float>(i);
  return x;
}

TEST_P(CpuLoss, MaxIsNanWhereverTheNanIs) {
  for (const int64_t n : {1, 15, 16, 33, 100}) {
    for (int64_t at = 0; at < n; ++at) {
      std::vector<float> x = falling(n);
      EXPECT_EQ(running_max(-kInf, x.data(), n), 2.0f);
      x[static_cast<size_t>(at)] = std::nanf("");
      EXPECT_TRUE(std::isnan(running_max(-kInf, x.data(), n))) << n << " elements, NaN at " << at;
      EXPECT_TRUE(std::isnan(running_max(kInf, x.data(), n))) << n << " elements, NaN at " << at;
    }
    EXPECT_TRUE(std::isnan(running_max(std::nanf(""), falling(n).data(), n)));
  }
}

TEST_P(CpuLoss, SumOfExpHoldsAgainstDouble) {
  for (const int64_t n : {1, 16, 31, 32, 33, 47, 100, 1000, 1024}) {
    std::vector<float> x = falling(n);
    if (n > 40) x[40] = -kInf;
    double expected = 0.0;
    for (int64_t i = 0; i < n; ++i) expected += std::exp(double{x[static_cast<size_t>(i)]} - 2.0);
    EXPECT_NEAR(sum_of_exp(x.data(), n, 2.0f), expected, 1e-6 * expected) << n;
  }
}

}  // namespace
}  // namespace te_fl::cpu::loss_test
