// The CUDA plugin's description of the kernels for a generic_gemm call. Needs no GPU.
#include "backends/cuda/gemm/gemm_path.hpp"

#include <gtest/gtest.h>

namespace te_fl::cuda::gemm_path_test {
namespace {

TEST(GemmPath, OneProductNamesTheLibraryAndWhatIsLeftOfTheEpilogue) {
  EXPECT_EQ(GemmPath{}.text(), "cuBLASLt, which writes the result");
  EXPECT_EQ(GemmPath{.fp8 = true}.text(), "cuBLASLt in FP8, which writes the result");
  EXPECT_EQ((GemmPath{.converted = "widened to FP32", .indirect = "d_sum is requested"}).text(),
            "cuBLASLt on operands widened to FP32 into FP32 scratch, then the epilogue's kernel: "
            "d_sum is requested");
  EXPECT_EQ((GemmPath{.empty = true, .indirect = "there is nothing to contract"}).text(),
            "zeros into FP32 scratch, then the epilogue's kernel: there is nothing to contract");
}

TEST(GemmPath, TheLibrarysAlgorithmStandsBehindTheProduct) {
  EXPECT_EQ(GemmPath{.algorithm = "id 66 tile 29: the choice of a file"}.text(),
            "cuBLASLt, which writes the result; algorithm id 66 tile 29: the choice of a file");
  EXPECT_EQ((GemmPath{.kind = GemmPath::Kind::kComposed,
                      .unfused = "K is too short",
                      .algorithm = "id 66: the choice of a file"})
                .text(),
            "cuBLASLt, which writes the product, then the kernel of GELU; algorithm id 66: the "
            "choice of a file; not fused_gemm: K is too short");
  EXPECT_EQ((GemmPath{.kind = GemmPath::Kind::kFused, .algorithm = "id 66"}).text(),
            "fused_gemm: product and GELU in one kernel of the plugin");
}

TEST(GemmPath, WithGeluItSaysWhyNoKernelDoesBoth) {
  EXPECT_EQ(GemmPath{.kind = GemmPath::Kind::kFused}.text(),
            "fused_gemm: product and GELU in one kernel of the plugin");
  const GemmPath composed{.kind = GemmPath::Kind::kComposed,
                          .unfused = "too few tiles for the chip"};
  EXPECT_EQ(composed.text(),
            "cuBLASLt, which writes the product, then the kernel of GELU; not fused_gemm: too few "
            "tiles for the chip");
}

}  // namespace
}  // namespace te_fl::cuda::gemm_path_test
