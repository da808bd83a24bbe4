// The choice of the kernel for a generic_gemm call from shape, dtype and scaling. Needs no GPU.
#include "backends/cuda/gemm/gemm_choice.hpp"

#include <gtest/gtest.h>

#include <string>

#include "metadata_tensor.hpp"

namespace te_fl::cuda::gemm_choice_test {
namespace {

constexpr GemmDevice kHopper{90, 132, true};
constexpr GemmDevice kAmpere{80, 0, false};

// D[m, n] = A[m, k] B[n, k]^T, as in a layer's forward.
struct GemmCall {
  MetadataTensor a, b, d, bias, pre, sums, columns;
  te_fl_generic_gemm_args args{};

  GemmCall(int dtype, int64_t m, int64_t n, int64_t k, int d_dtype = TE_FL_BF16)
      : a(dtype, {m, k}),
        b(dtype, {n, k}),
        d(d_dtype, {m, n}),
        bias(TE_FL_BF16, {n}),
        pre(TE_FL_BF16, {m, n}),
        sums(TE_FL_BF16, {n}),
        columns(TE_FL_BF16, {m}) {
    args.a = &a.t, args.b = &b.t, args.d = &d.t;
    args.trans_b = 1, args.alpha = args.beta = 1.0f;
    for (MetadataTensor* t : {&a, &b}) {
      if (is_fp8(dtype)) t->quantise(TE_FL_SCALING_TENSOR, true);
    }
  }
  std::string text(const GemmDevice& device = kHopper) const {
    return choose_gemm(args, device).text();
  }
};

TEST(CudaGemmChoice, PlainProductsAreTheLibrarys) {
  EXPECT_EQ(GemmCall(TE_FL_BF16, 64, 48, 32).text(), "cuBLASLt, which writes the result");
  EXPECT_EQ(GemmCall(TE_FL_BF16, 64, 48, 32, TE_FL_F32).text(kAmpere),
            "cuBLASLt, which writes the result");
  EXPECT_EQ(GemmCall(TE_FL_F32, 64, 48, 32).text(),
            "cuBLASLt into FP32 scratch, then the epilogue's kernel: D is of a dtype that the "
            "library does not make of such operands");
  EXPECT_EQ(GemmCall(TE_FL_BF16, 64, 48, 0).text(),
            "zeros into FP32 scratch, then the epilogue's kernel: there is nothing to contract");
}

TEST(CudaGemmChoice, OperandsOfTwoDtypesAreWidened) {
  GemmCall mixed(TE_FL_BF16, 64, 48, 32, TE_FL_F32);
  mixed.b.t.dl.dtype = to_c(DType::kF32);
  EXPECT_EQ(mixed.text(), "cuBLASLt on operands widened to FP32, which writes the result");
  GemmCall gradients(TE_FL_F8E5M2, 64, 48, 32);
  EXPECT_EQ(gradients.text(),
            "cuBLASLt on operands widened to FP32 into FP32 scratch, then the epilogue's kernel: D "
            "is not where, or of no dtype in which, the library could write it");
}

TEST(CudaGemmChoice, Fp8) {
  EXPECT_EQ(GemmCall(TE_FL_F8E4M3, 64, 48, 32).text(), "cuBLASLt in FP8, which writes the result");
  EXPECT_EQ(GemmCall(TE_FL_F8E4M3, 64, 40, 32).text(),
            "cuBLASLt in FP8 on operands padded to multiples of 16 into FP32 scratch, then the "
            "epilogue's kernel: D is not where, or of no dtype in which, the library could write "
            "it");
  GemmCall codes(TE_FL_F8E4M3, 64, 48, 32, TE_FL_F8E4M3);
  codes.d.quantise(TE_FL_SCALING_TENSOR, false);
  float scale = 1.0f;
  codes.d.quant.scale = &scale;
  EXPECT_EQ(codes.text(), "cuBLASLt in FP8, which writes the result");
  EXPECT_TRUE(choose_gemm(codes.args, kHopper).problem.codes);
  codes.d.quantise(TE_FL_SCALING_TENSOR, true);
  EXPECT_EQ(codes.text(),
            "cuBLASLt in FP8 into FP32 scratch, then the epilogue's kernel: the library writes no "
            "such codes of such a call");
}

TEST(CudaGemmChoice, Mxfp8IsDequantised) {
  GemmCall call(TE_FL_F8E4M3, 64, 48, 32);
  for (MetadataTensor* t : {&call.a, &call.b}) t->quantise(TE_FL_SCALING_MXFP8, true);
  const std::string direct = "cuBLASLt on operands dequantised to BF16, which writes the result";
  EXPECT_EQ(call.text(), direct);
  EXPECT_EQ(call.text(kAmpere), direct);
  const GemmPath path = choose_gemm(call.args, kHopper);
  EXPECT_FALSE(path.problem.fp8);
  EXPECT_EQ(path.problem.library_dtype(path.problem.a), TE_FL_BF16);
  call.b.quantise(TE_FL_SCALING_TENSOR, true);
  EXPECT_EQ(path.problem.convert, Convert::kBf16);
  EXPECT_EQ(choose_gemm(call.args, kHopper).problem.convert, Convert::kWiden);
  GemmCall halves(TE_FL_F8E4M3, 64, 48, 32, TE_FL_F16);
  for (MetadataTensor* t : {&halves.a, &halves.b}) t->quantise(TE_FL_SCALING_MXFP8, true);
  EXPECT_EQ(halves.text(),
            "cuBLASLt on operands dequantised to BF16 into FP32 scratch, then the epilogue's "
            "kernel: D is of a dtype that the library does not make of such operands");
}

TEST(CudaGemmChoice, Blocks) {
  GemmCall blocks(TE_FL_F8E4M3, 64, 48, 128);
  blocks.a.quantise(TE_FL_SCALING_BLOCK_1X128, true);
  blocks.b.quantise(TE_FL_SCALING_BLOCK_128X128, true);
  EXPECT_EQ(blocks.text(), "cuBLASLt in FP8, which writes the result");
  EXPECT_TRUE(choose_gemm(blocks.args, kHopper).problem.block);
  GemmCall odd(TE_FL_F8E4M3, 64, 48, 100, TE_FL_F32);
  odd.a.quantise(TE_FL_SCALING_BLOCK_1X128, true);
  odd.b.quantise(TE_FL_SCALING_BLOCK_128X128, true);
  EXPECT_EQ(odd.text(), "cuBLASLt on operands widened to FP32, which writes the result");
}

TEST(CudaGemmChoice, BlocksOfBothFormatsWhoseLastIsShort) {
  const auto in_blocks = [](int64_t m, int64_t k, int a, int b, uint32_t a_scaling) {
    GemmCall call(TE_FL_F8E4M3, m, 48, k);
    call.a.t.dl.dtype = to_c(static_cast<DType>(a));
    call.b.t.dl.dtype = to_c(static_cast<DType>(b));
    call.a.quantise(a_scaling, true);
    call.b.quantise(TE_FL_SCALING_BLOCK_1X128, true);
    return choose_gemm(call.args, kHopper).problem.block;
  };
  constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;
  constexpr uint32_t kRows = TE_FL_SCALING_BLOCK_1X128, kSquares = TE_FL_SCALING_BLOCK_128X128;
  EXPECT_TRUE(in_blocks(64, 80, kE4, kE4, kRows));
  EXPECT_TRUE(in_blocks(64, 128, kE5, kE4, kRows));
  EXPECT_TRUE(in_blocks(64, 128, kE4, kE5, kSquares));
  EXPECT_FALSE(in_blocks(64, 128, kE5, kE5, kRows));
  EXPECT_TRUE(in_blocks(63, 128, kE4, kE4, kSquares));
  EXPECT_FALSE(in_blocks(63, 128, kE4, kE4, kRows));
  EXPECT_FALSE(in_blocks(64, 120, kE4, kE4, kRows));
}

TEST(CudaGemmChoice, EpiloguesThatTheLibraryDoesNotDo) {
  const std::string general = "cuBLASLt into FP32 scratch, then the epilogue's kernel: ";
  GemmCall bias(TE_FL_BF16, 64, 44, 32);
  bias.args.bias = &bias.bias.t;
  EXPECT_EQ(bias.text(), general + "with a bias, rows that are not whole pieces of 16 bytes");
  GemmCall sum(TE_FL_BF16, 64, 48, 32);
  sum.args.bias = &sum.bias.t;
  sum.args.accumulate = 1;
  EXPECT_EQ(sum.text(), general + "a bias on a sum that D holds");
  sum.args.accumulate = 0;
  sum.args.d_sum = &sum.sums.t;
  EXPECT_EQ(sum.text(), general + "d_sum is requested");
}

TEST(CudaGemmChoice, TheLibraryTakesTheBiasGradientOfTransposedOperands) {
  GemmCall gradient(TE_FL_BF16, 64, 48, 32);
  gradient.args.bias_grad = &gradient.columns.t;
  EXPECT_TRUE(choose_gemm(gradient.args, kHopper).problem.bias_grad);
  gradient.args.accumulate_bias_grad = 1;
  EXPECT_FALSE(choose_gemm(gradient.args, kHopper).problem.bias_grad);
}

TEST(CudaGemmChoice, GeluJoinsLargeProductsOnHopper) {
  GemmCall call(TE_FL_BF16, 4096, 4096, 1024);
  call.args.gelu = 1;
  call.args.pre_gelu_out = &call.pre.t;
  EXPECT_EQ(call.text(), "fused_gemm: product and GELU in one kernel of the plugin");
  EXPECT_EQ(choose_gemm(call.args, kHopper).form, FusedForm::kForward);
  const std::string composed = "cuBLASLt, which writes the product, then the kernel of GELU; ";
  EXPECT_EQ(call.text(kAmpere),
            composed + "not fused_gemm: the kernel is for GPUs of compute capability 9.0 (Hopper)");
  EXPECT_EQ(call.text({90, 132, false}),
            composed + "not fused_gemm: the driver has no tensor maps");
  EXPECT_EQ(call.text({90, 4 * 256 + 4, true}),
            composed + "not fused_gemm: too few tiles for the chip");
  GemmCall odd(TE_FL_BF16, 4096, 4104, 1024);
  odd.args.gelu = 1;
  odd.args.pre_gelu_out = &odd.pre.t;
  EXPECT_EQ(odd.text(), composed + "not fused_gemm: extents that are no multiples of 256");
}

TEST(CudaGemmChoice, FormsOfTheFusedKernel) {
  GemmCall fp8(TE_FL_F8E4M3, 4096, 4096, 1024, TE_FL_F8E4M3);
  fp8.args.gelu = 1;
  fp8.args.pre_gelu_out = &fp8.pre.t;
  fp8.d.quantise(TE_FL_SCALING_TENSOR, true);
  EXPECT_EQ(choose_gemm(fp8.args, kHopper).form, FusedForm::kForwardCodes);
  fp8.d.quantise(TE_FL_SCALING_TENSOR, true, true);
  EXPECT_EQ(choose_gemm(fp8.args, kHopper).form, FusedForm::kForwardMeasured);
  fp8.args.use_split_accumulator = 1;
  EXPECT_EQ(choose_gemm(fp8.args, kHopper).kind, GemmPath::Kind::kComposed);
  GemmCall backward(TE_FL_BF16, 4096, 4096, 1024);
  const MetadataTensor weight(TE_FL_BF16, {1024, 4096});  // shape [K, N]
  backward.args.b = &weight.t;
  backward.args.trans_b = 0;
  backward.args.pre_gelu_in = &backward.pre.t;
  EXPECT_EQ(choose_gemm(backward.args, kHopper).form, FusedForm::kBackward);
}

TEST(CudaGemmChoice, ProductsOfOtherPreActivationsAreNotComposed) {
  GemmCall call(TE_FL_BF16, 64, 48, 32);
  call.args.gelu = 1;
  EXPECT_EQ(call.text(kAmpere),
            "cuBLASLt into FP32 scratch, then the epilogue's kernel: the library's GELU is not "
            "exact enough; not fused_gemm: the kernel is for GPUs of compute capability 9.0 "
            "(Hopper)");
}

}  // namespace
}  // namespace te_fl::cuda::gemm_choice_test
