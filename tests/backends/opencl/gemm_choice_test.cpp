// The choice of the OpenCL GEMM kernel, a pure function. Needs no device.
#include <gtest/gtest.h>

#include "backends/opencl/gemm_choice.hpp"

namespace te_fl::opencl {
namespace {

constexpr GemmDevice kGpu{.gpu = true,
                          .compute_units = 132,
                          .largest_group = 1024,
                          .local_memory = 48 << 10,
                          .clblast = true};

GemmProblem f32(int64_t m, int64_t n, int64_t k) {
  return {.m = m, .n = n, .k = k, .f32 = true, .plain = true};
}
GemmProblem bf16(int64_t m, int64_t n, int64_t k) { return {.m = m, .n = n, .k = k}; }
GemmKernel with(GemmDevice device, GemmKernel wanted, const GemmProblem& p) {
  device.wanted = wanted;
  return choose_gemm(device, p);
}

// The fastest kernel for each row of the table in bench/README.md.
TEST(OpenclGemmChoice, MeasuredOnAGpu) {
  EXPECT_EQ(choose_gemm(kGpu, f32(512, 512, 512)), GemmKernel::kClblast);
  EXPECT_EQ(choose_gemm(kGpu, f32(7, 4096, 1024)), GemmKernel::kClblast);
  EXPECT_EQ(choose_gemm(kGpu, f32(256, 256, 8192)), GemmKernel::kClblast);
  EXPECT_EQ(choose_gemm(kGpu, f32(777, 333, 555)), GemmKernel::kClblast);
  EXPECT_EQ(choose_gemm(kGpu, f32(1024, 1024, 1024)), GemmKernel::kTiles64);
  EXPECT_EQ(choose_gemm(kGpu, f32(256, 4096, 1024)), GemmKernel::kTiles64);
  EXPECT_EQ(choose_gemm(kGpu, f32(1023, 1025, 1021)), GemmKernel::kTiles128);
  EXPECT_EQ(choose_gemm(kGpu, f32(2048, 2048, 2048)), GemmKernel::kTiles128);
  EXPECT_EQ(choose_gemm(kGpu, f32(8192, 256, 512)), GemmKernel::kTiles128);
  EXPECT_EQ(choose_gemm(kGpu, bf16(1024, 1024, 1024)), GemmKernel::kTiles128);
  EXPECT_EQ(choose_gemm(kGpu, bf16(7, 4096, 1024)), GemmKernel::kTiles128);
}

TEST(OpenclGemmChoice, TheLibraryMultipliesAndNothingElse) {
  GemmProblem p = f32(512, 512, 512);
  p.plain = false;  // has an epilogue
  EXPECT_EQ(choose_gemm(kGpu, p), GemmKernel::kTiles64);
  for (const GemmProblem& empty : {f32(0, 5, 3), f32(5, 0, 3), f32(5, 3, 0)}) {
    EXPECT_NE(choose_gemm(kGpu, empty), GemmKernel::kClblast);
    EXPECT_NE(with(kGpu, GemmKernel::kClblast, empty), GemmKernel::kClblast);
  }
  GemmDevice without = kGpu;
  without.clblast = false;
  EXPECT_EQ(choose_gemm(without, f32(512, 512, 512)), GemmKernel::kTiles64);
  EXPECT_EQ(with(without, GemmKernel::kClblast, f32(2048, 2048, 2048)), GemmKernel::kTiles128);
}

TEST(OpenclGemmChoice, CpusHaveTheirOwn) {
  GemmDevice cpu = kGpu;
  cpu.gpu = false;
  EXPECT_EQ(choose_gemm(cpu, f32(512, 512, 512)), GemmKernel::kRows);
  EXPECT_EQ(choose_gemm(cpu, bf16(2048, 2048, 2048)), GemmKernel::kRows);
  EXPECT_EQ(with(cpu, GemmKernel::kClblast, f32(512, 512, 512)), GemmKernel::kClblast);
  EXPECT_EQ(with(cpu, GemmKernel::kClblast, bf16(512, 512, 512)), GemmKernel::kRows);
}

TEST(OpenclGemmChoice, SmallGroupsAndLittleLocalMemory) {
  GemmDevice small = kGpu;
  small.largest_group = 128;
  EXPECT_EQ(choose_gemm(small, f32(2048, 2048, 2048)), GemmKernel::kTiles64);
  EXPECT_EQ(with(small, GemmKernel::kTiles128, f32(2048, 2048, 2048)), GemmKernel::kTiles64);
  small.largest_group = 1024, small.local_memory = 16 << 10;
  EXPECT_EQ(choose_gemm(small, bf16(2048, 2048, 2048)), GemmKernel::kTiles64);
}

TEST(OpenclGemmChoice, TheSettingsNames) {
  EXPECT_EQ(find_gemm_kernel("rows"), GemmKernel::kRows);
  EXPECT_EQ(find_gemm_kernel("tiles64"), GemmKernel::kTiles64);
  EXPECT_EQ(find_gemm_kernel("tiles128"), GemmKernel::kTiles128);
  EXPECT_EQ(find_gemm_kernel("clblast"), GemmKernel::kClblast);
  EXPECT_EQ(find_gemm_kernel("auto"), GemmKernel::kAuto);
  EXPECT_EQ(find_gemm_kernel(""), GemmKernel::kAuto);
}

TEST(OpenclGemmChoice, SaysWhichKernelAndWhoChoseIt) {
  EXPECT_EQ(describe_choice(kGpu, f32(4096, 4096, 4096)),
            "gemm.cl, tiles128: by the device and the extents");
  GemmDevice asked = kGpu;
  asked.wanted = GemmKernel::kClblast;
  EXPECT_EQ(describe_choice(asked, f32(64, 64, 64)),
            "CLBlast's Sgemm: requested by TE_FL_OPENCL_GEMM");
  EXPECT_EQ(describe_choice(asked, bf16(4096, 4096, 4096)),
            "gemm.cl, tiles128: by the device and the extents");
}

}  // namespace
}  // namespace te_fl::opencl
