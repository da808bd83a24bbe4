// Calls that the CUDA plugin does not give to cuDNN versions that compute them wrongly. Needs no
// GPU.
#include "backends/cuda/attention/cudnn_limits.hpp"
#include "support/expect.hpp"

#include <gtest/gtest.h>

#include <string>

namespace te_fl::cuda::cudnn_limits_test {
namespace {

TEST(CudaCudnnLimits, LongFp8ForwardsAreKeptFromOldVersions) {
  constexpr int64_t kEdge = INT32_MAX;
  for (const size_t version : {91400, 91401, 91500, 91801}) {
    EXPECT_EQ(refuse_long_fp8_forward(version, kEdge), nullptr) << version;
    const char* why = refuse_long_fp8_forward(version, kEdge + 1);
    ASSERT_NE(why, nullptr) << version;
    EXPECT_HAS(std::string(why), "install 9.19.0 or newer") << why;
    EXPECT_NE(refuse_long_fp8_forward(version, int64_t{1} << 33), nullptr);
  }
  for (const size_t version : {91900, 91901, 92300, 100000}) {
    EXPECT_EQ(refuse_long_fp8_forward(version, int64_t{1} << 33), nullptr) << version;
  }
}

}  // namespace
}  // namespace te_fl::cuda::cudnn_limits_test
