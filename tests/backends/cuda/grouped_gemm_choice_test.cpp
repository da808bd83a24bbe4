// The choice between the plugin's kernel and cuBLASLt for a grouped GEMM, and the number of
// streams. Needs no GPU.
#include "backends/cuda/gemm/grouped_gemm_choice.hpp"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "metadata_tensor.hpp"

namespace te_fl::cuda::grouped_gemm_choice_test {
namespace {

int lanes(int64_t count, int64_t m, int64_t n, int most = kGroupedStreams) {
  GroupSize group;
  for (int64_t i = 0; i < count; ++i) group.add(m, n);
  return choose_lanes(group, 132, most);
}

TEST(CudaGroupedGemmChoice, SmallProductsGoOverStreams) {
  EXPECT_EQ(lanes(64, 128, 1536), 4);
  EXPECT_EQ(lanes(8, 1024, 7168), 4);
  EXPECT_EQ(lanes(3, 128, 1536), 3);
  EXPECT_EQ(lanes(64, 128, 1536, 8), 8);
  EXPECT_EQ(lanes(64, 128, 1536, 1), 1);
}

TEST(CudaGroupedGemmChoice, OneProductOrManyWavesStayOnTheCallersStream) {
  EXPECT_EQ(lanes(0, 128, 1536), 1);
  EXPECT_EQ(lanes(1, 128, 1536), 1);
  EXPECT_EQ(lanes(8, 8192, 8192), 1);  // 4096 tiles per product
  EXPECT_EQ(lanes(8, 8192, 4096), 4);  // 2048 tiles per product: 15.5 waves
}

constexpr GemmDevice kHopper{90, 132, true};

// D_i[m_i, n] = A_i[m_i, k] B_i[n, k]^T, as in a forward of experts.
struct GroupCall {
  std::deque<MetadataTensor> tensors;
  std::vector<const te_fl_tensor*> a, b, d, bias, bias_grad;
  te_fl_grouped_gemm_args args{};

  GroupCall(int dtype, const std::vector<int64_t>& rows, int64_t n, int64_t k,
            int d_dtype = TE_FL_BF16) {
    for (const int64_t m : rows) {
      a.push_back(add(dtype, {m, k})), b.push_back(add(dtype, {n, k}));
      d.push_back(add(d_dtype, {m, n}));
    }
    args.trans_b = 1, args.alpha = args.beta = 1.0f;
  }
  const te_fl_tensor* add(int dtype, const std::vector<int64_t>& shape) {
    MetadataTensor& t = tensors.emplace_back(dtype, shape);
    if (is_fp8(dtype)) t.quantise(TE_FL_SCALING_TENSOR, true);
    return &t.t;
  }
  GroupedPath path(const GemmDevice& device = kHopper) {
    args.a = a.data(), args.b = b.data(), args.d = d.data(), args.bias = bias.data();
    args.bias_grad = bias_grad.data();
    args.a_count = args.b_count = args.d_count = static_cast<int64_t>(a.size());
    args.bias_count = static_cast<int64_t>(bias.size());
    args.bias_grad_count = static_cast<int64_t>(bias_grad.size());
    return choose_grouped_gemm(args, device);
  }
  std::string unfit(const GemmDevice& device = kHopper) {
    const GroupedPath found = path(device);
    EXPECT_EQ(found.form == GroupedForm::kLibrary, found.unfit != nullptr);
    return found.unfit != nullptr ? found.unfit : "";
  }
};

TEST(CudaGroupedGemmChoice, TheKernelRunsTheProductsOfALayer) {
  const std::vector<int64_t> rows = {128, 0, 3, 300};
  GroupCall forward(TE_FL_BF16, rows, 1536, 2048);
  EXPECT_EQ(forward.path().form, GroupedForm::kBf16);
  forward.args.accumulate = 1;
  EXPECT_EQ(forward.path().form, GroupedForm::kBf16);
  GroupCall input_gradient(TE_FL_BF16, {64, 64}, 64, 64);
  input_gradient.args.trans_b = 0;
  EXPECT_EQ(input_gradient.path().form, GroupedForm::kBf16AcrossB);
  input_gradient.args.trans_a = 1;
  EXPECT_EQ(input_gradient.path().form, GroupedForm::kBf16Across);
  GroupCall wide(TE_FL_BF16, rows, 1536, 2048, TE_FL_F32);
  EXPECT_EQ(wide.path().form, GroupedForm::kBf16);
  GroupCall codes(TE_FL_F8E4M3, {16, 128}, 1536, 2048);
  EXPECT_EQ(codes.path().form, GroupedForm::kCodes);
  codes.args.use_split_accumulator = 1;
  EXPECT_EQ(codes.path().form, GroupedForm::kCodesSplit);
  for (const te_fl_tensor* t : codes.a)
    const_cast<te_fl_tensor*>(t)->dl.dtype = to_c(DType::kF8E5M2);
  EXPECT_EQ(codes.path().form, GroupedForm::kGradientCodes);
}

TEST(CudaGroupedGemmChoice, BlocksOfBothKinds) {
  const auto path = [](int64_t k, uint32_t scaling_b, int a_dtype = TE_FL_F8E4M3) {
    GroupCall call(TE_FL_F8E4M3, {512, 512}, 2048, k);
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      if (i % 3 < 2)
        call.tensors[i].quantise(i % 3 == 0 ? TE_FL_SCALING_BLOCK_1X128 : scaling_b, true);
      if (i % 3 == 0) call.tensors[i].t.dl.dtype = to_c(static_cast<DType>(a_dtype));
    }
    return call.path();
  };
  EXPECT_EQ(path(768, TE_FL_SCALING_BLOCK_128X128).form, GroupedForm::kBlocks);
  EXPECT_EQ(path(768, TE_FL_SCALING_BLOCK_1X128).form, GroupedForm::kVectors);
  EXPECT_EQ(path(76800, TE_FL_SCALING_BLOCK_128X128).form, GroupedForm::kBlocks);
  const GroupedPath large = path(76800, TE_FL_SCALING_BLOCK_1X128);
  EXPECT_EQ(large.form, GroupedForm::kLibrary);
  EXPECT_STREQ(large.unfit,
               "both operands are scaled by 1x128, and products this large are faster in cuBLASLt");
  EXPECT_EQ(path(768, TE_FL_SCALING_BLOCK_128X128, TE_FL_F8E5M2).form, GroupedForm::kLibrary);
}

TEST(CudaGroupedGemmChoice, TheKernelIsRefusedWithAReason) {
  EXPECT_EQ(GroupCall(TE_FL_BF16, {64}, 64, 64).unfit({89, 100, true}),
            "the kernel is for GPUs of compute capability 9.0 (Hopper)");
  EXPECT_EQ(GroupCall(TE_FL_BF16, {64}, 64, 64).unfit({90, 132, false}),
            "the driver has no tensor maps");
  EXPECT_EQ(GroupCall(TE_FL_F16, {64}, 64, 64).unfit(),
            "operands that are not BF16 or FP8 as a layer has them");
  EXPECT_EQ(GroupCall(TE_FL_BF16, {64}, 64, 60).unfit(),
            "rows of operands that are no whole pieces of 16 bytes");
  EXPECT_EQ(GroupCall(TE_FL_BF16, {64}, 60, 64).unfit(),
            "results whose columns are no multiple of 8");
  EXPECT_EQ(GroupCall(TE_FL_BF16, {64}, 64, 64, TE_FL_F16).unfit(),
            "a result that is not BF16 or FP32");
  EXPECT_EQ(GroupCall(TE_FL_F8E4M3, {64}, 64, 72).unfit(), "operands that cuBLASLt has to convert");
  EXPECT_EQ(GroupCall(TE_FL_BF16, {0, 0}, 64, 64).unfit(), "there is nothing to compute");
  EXPECT_EQ(GroupCall(TE_FL_BF16, {}, 64, 64).unfit(), "there is nothing to compute");
  GroupCall sums(TE_FL_BF16, {64}, 64, 64);
  sums.bias_grad.push_back(sums.add(TE_FL_BF16, {64}));
  EXPECT_EQ(sums.unfit(), "a bias gradient is requested");
  GroupCall biased(TE_FL_BF16, {64}, 64, 64);
  biased.bias.push_back(biased.add(TE_FL_F32, {64}));
  EXPECT_EQ(biased.unfit(), "a bias that is not BF16");
  GroupCall mixed(TE_FL_BF16, {64, 64}, 64, 64);
  mixed.d[1] = mixed.add(TE_FL_F32, {64, 64});
  EXPECT_EQ(mixed.unfit(), "results of several dtypes");
}

TEST(CudaGroupedGemmChoice, TilesLieSideBySideWhereThatTakesFewer) {
  EXPECT_TRUE(GroupCall(TE_FL_BF16, std::vector<int64_t>(8, 128), 1536, 2048).path().wide);
  EXPECT_FALSE(GroupCall(TE_FL_BF16, std::vector<int64_t>(8, 512), 2048, 768).path().wide);
  EXPECT_FALSE(GroupCall(TE_FL_BF16, std::vector<int64_t>(8, 200), 256, 768).path().wide);
}

}  // namespace
}  // namespace te_fl::cuda::grouped_gemm_choice_test
