// The choice of scaled-softmax kernels for rows of any width and its stated reason. Needs no GPU.
#include "backends/cuda/softmax/softmax_choice.hpp"

#include <gtest/gtest.h>

#include <string>

#include "metadata_tensor.hpp"

namespace te_fl::cuda::softmax_choice_test {
namespace {

constexpr SoftmaxDevice kHopper{90, 227 << 10};
constexpr SoftmaxDevice kAmpere{80, 163 << 10};
constexpr SoftmaxDevice kConsumer{120, 99 << 10};

// Returns the choice for rows of `keys` elements at an address `offset` bytes past a multiple of
// 16.
std::string forward(int dtype, int64_t keys, const SoftmaxDevice& device = kHopper,
                    uint64_t offset = 0) {
  const MetadataTensor in(dtype, {2, 3, 5, keys}, offset), out(dtype, {2, 3, 5, keys});
  return choose_softmax(SoftmaxForward{&in.t, &out.t}, device).text();
}
std::string backward(int dtype, int64_t keys, const SoftmaxDevice& device = kHopper) {
  const MetadataTensor x(dtype, {2, 3, 5, keys});
  return choose_softmax(SoftmaxBackward{&x.t, &x.t, &x.t}, device).text();
}

TEST(CudaSoftmaxChoice, RowsInRegisters) {
  const std::string held = " elements each: the row stays in registers";
  EXPECT_EQ(forward(TE_FL_BF16, 1), "rows of 8 threads with 8" + held);
  EXPECT_EQ(forward(TE_FL_BF16, 64), "rows of 8 threads with 8" + held);
  EXPECT_EQ(forward(TE_FL_BF16, 72), "rows of 32 threads with 8" + held);
  EXPECT_EQ(forward(TE_FL_F16, 512), "rows of 32 threads with 16" + held);
  EXPECT_EQ(forward(TE_FL_F32, 1024), "rows of 32 threads with 32" + held);
  EXPECT_EQ(forward(TE_FL_BF16, 2048), "rows of 128 threads with 16" + held);
  EXPECT_EQ(forward(TE_FL_BF16, 4096), "rows of 128 threads with 32" + held);
  EXPECT_EQ(forward(TE_FL_F32, 8192, kAmpere), "rows of 256 threads with 32" + held);
  EXPECT_EQ(forward(TE_FL_BF16, 16384), "rows of 512 threads with 32" + held);
}

TEST(CudaSoftmaxChoice, RowsThatBeginBetweenPacksNeedOneMore) {
  const std::string held = " elements each: the row stays in registers";
  EXPECT_EQ(forward(TE_FL_BF16, 64, kHopper, 2), "rows of 32 threads with 8" + held);
  EXPECT_EQ(forward(TE_FL_BF16, 57, kHopper, 2), "rows of 8 threads with 8" + held);
  EXPECT_EQ(forward(TE_FL_BF16, 58, kHopper, 2), "rows of 32 threads with 8" + held);
}

TEST(CudaSoftmaxChoice, LongRows) {
  const std::string streamed = "streamed: rows of up to 64 KiB, loaded one row ahead";
  EXPECT_EQ(forward(TE_FL_BF16, 16392), streamed);
  EXPECT_EQ(forward(TE_FL_BF16, 32768), streamed);
  EXPECT_EQ(forward(TE_FL_BF16, 32776), "staged: rows of more than 64 KiB");
  EXPECT_EQ(forward(TE_FL_F32, 16388), "staged: rows of more than 64 KiB");
  EXPECT_EQ(forward(TE_FL_BF16, 20001), "staged: rows that are not aligned to 16 bytes");
  EXPECT_EQ(forward(TE_FL_BF16, 20000, kHopper, 8),
            "staged: rows that are not aligned to 16 bytes");
  EXPECT_EQ(forward(TE_FL_BF16, 20000, kAmpere), "staged: bulk copies need compute capability 9.0");
  EXPECT_EQ(forward(TE_FL_BF16, 20000, kConsumer),
            "staged: three rows do not fit this GPU's shared memory");
  EXPECT_EQ(forward(TE_FL_BF16, 49152), "staged: rows of more than 64 KiB");
  EXPECT_EQ(forward(TE_FL_BF16, 49160), "wide: rows of more than 64 KiB");
  EXPECT_EQ(forward(TE_FL_F32, 24584), "wide: rows of more than 64 KiB");
}

TEST(CudaSoftmaxChoice, Gradients) {
  const std::string held = " elements each: the row stays in registers";
  EXPECT_EQ(backward(TE_FL_F32, 16384), "rows of 512 threads with 32" + held);
  EXPECT_EQ(backward(TE_FL_F32, 16392), "wide: a row does not fit the registers of a block");
  EXPECT_EQ(backward(TE_FL_BF16, 16384), "rows of 512 threads with 32" + held);
  const std::string cluster =
      "cluster of 4 x 256 threads with 32 elements each: a row of more than 16384 elements stays "
      "in the registers of a cluster";
  EXPECT_EQ(backward(TE_FL_BF16, 16392), cluster);
  EXPECT_EQ(backward(TE_FL_F16, 32768), cluster);
  EXPECT_EQ(backward(TE_FL_BF16, 32768, kAmpere), "rows of 1024 threads with 32" + held);
  EXPECT_EQ(backward(TE_FL_BF16, 32776), "wide: a row does not fit the registers of a block");
}

TEST(CudaSoftmaxChoice, NothingToWrite) {
  EXPECT_EQ(forward(TE_FL_BF16, 0), "none: a tensor without elements");
  EXPECT_EQ(backward(TE_FL_BF16, 0), "none: a tensor without elements");
}

// Checks the choice for every row width, so that a changed boundary fails the test.
TEST(CudaSoftmaxChoice, EveryWidthHasTheNarrowestRowThatHoldsIt) {
  struct Boundary {
    int64_t keys;
    int threads, runs;
  };
  constexpr Boundary kAligned[] = {{64, 8, 1},     {256, 32, 1},   {512, 32, 2},   {1024, 32, 4},
                                   {2048, 128, 2}, {4096, 128, 4}, {8192, 256, 4}, {16384, 512, 4}};
  for (const int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16}) {
    int64_t keys = 8;
    for (const Boundary& b : kAligned) {
      for (; keys <= b.keys; keys += 8) {
        const MetadataTensor x(dtype, {1, 1, 1, keys});
        const SoftmaxRow row{b.threads, b.runs};
        EXPECT_TRUE(choose_softmax(SoftmaxForward{&x.t, &x.t}, kAmpere).row == row) << keys;
        EXPECT_TRUE(choose_softmax(SoftmaxBackward{&x.t, &x.t, &x.t}, kHopper).row == row) << keys;
      }
    }
  }
}

}  // namespace
}  // namespace te_fl::cuda::softmax_choice_test
