// The choice of the CUDA plugin's kernel for a norm, and the stated reason if it is not a faster
// one. Needs no GPU.
#include "backends/cuda/norm/norm_choice.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace te_fl::cuda::norm_choice_test {
namespace {

alignas(16) char norm_memory[64];

// Metadata of a compact matrix or row; its elements are never read.
struct NormTensor {
  std::vector<int64_t> shape;
  te_fl_quant quant{};
  te_fl_tensor t{};

  NormTensor(int dtype, std::vector<int64_t> extents) : shape(std::move(extents)) {
    t.struct_size = sizeof t;
    t.dl.data = norm_memory;
    t.dl.ndim = static_cast<int32_t>(shape.size());
    t.dl.dtype = to_c(static_cast<DType>(dtype));
    t.dl.shape = shape.data();
  }
  NormTensor(const NormTensor&) = delete;
  void quantise(uint32_t scaling, bool both, bool compute_scale = false) {
    quant.scaling = scaling;
    quant.columnwise_data = both ? norm_memory : nullptr;
    quant.flags = compute_scale ? TE_FL_QUANT_COMPUTE_SCALE : 0;
    t.quant = &quant;
  }
};

bool grants_all(int, const NormCluster&) { return true; }
bool grants_none(int, const NormCluster&) { return false; }
bool grants_up_to_8(int, const NormCluster& cluster) { return cluster.blocks <= 8; }

constexpr NormDevice kHopper{0, 90, 227 << 10, grants_all};
constexpr NormDevice kAmpere{0, 80, 163 << 10, grants_none};
constexpr NormDevice kSmall{0, 120, 99 << 10, grants_all};

// A layernorm_fwd and a layernorm_bwd on [rows, cols].
struct NormCall {
  NormTensor x, weight, z, statistic, other, residual, sum, dx;

  explicit NormCall(int dtype, int64_t rows = 64, int64_t cols = 1024, int z_dtype = -1)
      : x(dtype, {rows, cols}),
        weight(dtype, {cols}),
        z(z_dtype < 0 ? dtype : z_dtype, {rows, cols}),
        statistic(TE_FL_F32, {rows}),
        other(dtype, {rows, cols}),
        residual(dtype, {rows, cols}),
        sum(dtype, {rows, cols}),
        dx(dtype, {rows, cols}) {}

  NormForward forward(bool with_residual = false) const {
    return {&x.t,
            &weight.t,
            &weight.t,
            &z.t,
            &statistic.t,
            &statistic.t,
            with_residual ? &residual.t : nullptr,
            with_residual ? &sum.t : nullptr,
            1e-5f,
            false};
  }
  NormBackward backward(bool add = false) const {
    return {&other.t,     &x.t,         add ? &residual.t : nullptr,
            &statistic.t, &statistic.t, &weight.t,
            &dx.t,        &weight.t,    &weight.t,
            false};
  }
};

std::string chosen(const NormCall& call, const NormDevice& device = kHopper,
                   bool with_residual = false) {
  return choose_norm(call.forward(with_residual), device).text();
}

TEST(CudaNormChoice, PlainResults) {
  EXPECT_EQ(chosen(NormCall(TE_FL_BF16)), "plain16: rows of 16-bit elements, in and out");
  EXPECT_EQ(chosen(NormCall(TE_FL_F16), kAmpere), "plain16: rows of 16-bit elements, in and out");
  EXPECT_EQ(chosen(NormCall(TE_FL_BF16), kHopper, true), "rowwise: there is a residual");
  EXPECT_EQ(chosen(NormCall(TE_FL_F32)), "rowwise: x is FP32");
  NormCall mixed(TE_FL_BF16);
  mixed.weight.t.dl.dtype = to_c(DType::kF32);
  EXPECT_EQ(chosen(mixed), "rowwise: tensors of another dtype than x");
}

TEST(CudaNormChoice, GeneralKernelsTakeTheRest) {
  EXPECT_EQ(chosen(NormCall(TE_FL_BF16, 64, 1001)),
            "general rows: rows of no multiple of 8 elements");
  EXPECT_EQ(chosen(NormCall(TE_FL_BF16, 64, 1001), kHopper, true),
            "statistics by general, result by general: rows of no multiple of 8 elements");
  EXPECT_EQ(chosen(NormCall(TE_FL_BF16, 64, 16392)),
            "statistics by general, result by general: rows of too many elements");
  EXPECT_EQ(chosen(NormCall(TE_FL_BF16, 0, 64)),
            "statistics by general, result by general: a tensor without elements");
  EXPECT_EQ(chosen(NormCall(TE_FL_BF16, 64, 1024, TE_FL_F32)),
            "general rows: z is of another dtype than x");
  EXPECT_EQ(chosen(NormCall(TE_FL_BF16, 64, 1024, TE_FL_F32), kHopper, true),
            "statistics by rowwise, result by general: z is of another dtype than x");
  NormCall askew(TE_FL_BF16);
  askew.x.t.dl.byte_offset = 2;
  EXPECT_EQ(chosen(askew), "general rows: a tensor is not aligned to 16 bytes");
}

TEST(CudaNormChoice, CodesUnderAGivenScale) {
  NormCall call(TE_FL_BF16, 64, 1024, TE_FL_F8E4M3);
  call.z.quantise(TE_FL_SCALING_TENSOR, false);
  EXPECT_EQ(chosen(call, kAmpere), "rowwise: row-wise codes under a given scale");
  call.z.quantise(TE_FL_SCALING_TENSOR, true);
  EXPECT_EQ(chosen(call), "cluster: column-wise codes under a given scale");
  EXPECT_EQ(chosen(call, kHopper, true), "cluster: column-wise codes under a given scale");
  EXPECT_EQ(chosen(call, kAmpere),
            "statistics by rowwise, result by general: clusters need compute capability 9.0");
  EXPECT_EQ(chosen(call, {0, 90, 227 << 10, grants_none}),
            "statistics by rowwise, result by general: the device grants no such cluster");
  NormCall odd(TE_FL_BF16, 40, 1024, TE_FL_F8E4M3);
  odd.z.quantise(TE_FL_SCALING_TENSOR, true);
  EXPECT_EQ(chosen(odd),
            "statistics by rowwise, result by general: column-wise codes that are not aligned to "
            "16 bytes");
}

TEST(CudaNormChoice, CurrentScalingNeedsTheAmaxFirst) {
  NormCall call(TE_FL_BF16, 64, 1024, TE_FL_F8E4M3);
  call.z.quantise(TE_FL_SCALING_TENSOR, true, true);
  EXPECT_EQ(chosen(call),
            "amax by plain16, result by block128: column-wise codes under current scaling");
  EXPECT_EQ(chosen(call, kAmpere),
            "amax by plain16, result by block128: column-wise codes under current scaling");
  EXPECT_EQ(chosen(call, kHopper, true), "amax by rowwise, result by cluster: there is a residual");
  EXPECT_EQ(chosen(call, kAmpere, true),
            "statistics by rowwise, result by general: clusters need compute capability 9.0");
  call.z.quantise(TE_FL_SCALING_TENSOR, false, true);
  EXPECT_EQ(chosen(call),
            "amax by rowwise, result by rowwise: row-wise codes under current scaling");
  NormCall odd(TE_FL_BF16, 64, 1001, TE_FL_F8E4M3);
  odd.z.quantise(TE_FL_SCALING_TENSOR, false, true);
  EXPECT_EQ(chosen(odd),
            "statistics by general, result by general: rows of no multiple of 8 elements");
}

TEST(CudaNormChoice, Mxfp8TakesStatisticsAndTheGeneralKernel) {
  NormCall call(TE_FL_BF16, 64, 1024, TE_FL_F8E4M3);
  call.z.quantise(TE_FL_SCALING_MXFP8, true);
  EXPECT_EQ(chosen(call), "statistics by rowwise, result by general: codes of MXFP8");
}

TEST(CudaNormChoice, Blocks) {
  for (const uint32_t scaling : {TE_FL_SCALING_BLOCK_1X128, TE_FL_SCALING_BLOCK_128X128}) {
    NormCall call(TE_FL_F16, 64, 1024, TE_FL_F8E4M3);
    call.z.quantise(scaling, true);
    EXPECT_EQ(chosen(call), "block128: scales of 128 blocks");
    EXPECT_EQ(chosen(call, kAmpere, true), "block128: scales of 128 blocks");
    NormCall few(TE_FL_F16, 8, 1024, TE_FL_F8E4M3);
    few.z.quantise(scaling, false);
    EXPECT_EQ(chosen(few), "statistics by rowwise, result by general: fewer than 16 rows");
    NormCall wide(TE_FL_F32, 64, 1024, TE_FL_F8E4M3);
    wide.z.quantise(scaling, false);
    EXPECT_EQ(chosen(wide), "statistics by rowwise, result by general: x is FP32");
  }
}

TEST(CudaNormChoice, ClustersAreAsSmallAsRowsAllow) {
  for (const auto& [cols, blocks] : std::vector<std::pair<int64_t, int>>{
           {8, 1}, {512, 1}, {520, 2}, {1024, 2}, {4096, 8}, {8192, 8}, {8200, 16}, {16384, 16}}) {
    EXPECT_EQ(norm_choice::cluster_blocks(cols), blocks) << cols;
    EXPECT_GE(norm_choice::cluster_width(cols) * blocks, cols);
    EXPECT_EQ(norm_choice::cluster_width(cols) % 8, 0);
    NormCall call(TE_FL_BF16, 64, cols, TE_FL_F8E4M3);
    call.z.quantise(TE_FL_SCALING_TENSOR, true);
    const NormDevice few{0, 90, 227 << 10, grants_up_to_8};
    EXPECT_EQ(choose_norm(call.forward(), few).result == NormKernel::kCluster, blocks <= 8) << cols;
  }
}

TEST(CudaNormChoice, SharedMemoryRefusesNothingOnHopper) {
  for (const int dtype : {TE_FL_BF16, TE_FL_F32}) {
    for (int64_t cols = 8; cols <= 16384; cols += 8) {
      const NormCall call(dtype, 64, cols);
      for (const bool more : {false, true}) {
        const bool too_wide = dtype == TE_FL_F32 && cols > (more ? 12288 : 16384);
        const NormKernel forward = choose_norm(call.forward(more), kHopper).result;
        EXPECT_EQ(forward == NormKernel::kPlain16 || forward == NormKernel::kRowwise, !too_wide)
            << cols;
        EXPECT_EQ(choose_norm(call.backward(more), kHopper).result == NormKernel::kGrad,
                  dtype != TE_FL_F32 || cols <= 8192)
            << cols;
      }
    }
  }
}

TEST(CudaNormChoice, SmallerSharedMemoryRefusesWideRows) {
  const NormCall wide(TE_FL_F32, 64, 16384);
  EXPECT_EQ(chosen(wide, kSmall),
            "statistics by rowwise, result by general: a row does not fit this GPU's shared "
            "memory");
  EXPECT_EQ(chosen(NormCall(TE_FL_F32, 64, 2048), kSmall), "rowwise: x is FP32");
  const NormCall gradient(TE_FL_BF16, 64, 12288);
  EXPECT_EQ(choose_norm(gradient.backward(true), kSmall).text(),
            "general: a row does not fit this GPU's shared memory");
}

TEST(CudaNormChoice, Gradients) {
  EXPECT_EQ(choose_norm(NormCall(TE_FL_BF16).backward(), kAmpere).text(),
            "grad: rows that a block holds, all of one dtype");
  EXPECT_EQ(choose_norm(NormCall(TE_FL_BF16, 64, 1001).backward(), kHopper).text(),
            "general: rows of no multiple of 8 elements");
  NormCall mixed(TE_FL_BF16);
  mixed.other.t.dl.dtype = to_c(DType::kF32);
  EXPECT_EQ(choose_norm(mixed.backward(), kHopper).text(),
            "general: tensors of another dtype than x");
}

}  // namespace
}  // namespace te_fl::cuda::norm_choice_test
