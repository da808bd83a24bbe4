// Tests GEMM and quantize of the CPU backend with output memory that overlaps an operand's, called
// through the dispatcher.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "support/expect.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::gemm_test {
namespace {

constexpr int64_t kRows = 5, kCols = 64, kDepth = 7;

Tensor filled(std::initializer_list<int64_t> shape, DType dtype, float first) {
  int64_t n = 1;
  for (const int64_t extent : shape) n *= extent;
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i % 13) / 8;
  return Tensor::from_values(shape, values, dtype).value();
}

std::vector<char> bytes_of(const Tensor& t) {
  const auto* data = t.data<char>();
  return {data, data + bytes_for(t.dtype(), t.numel())};
}

// gemm.h allows d to alias residual even if their dtypes differ.
TEST(CpuGemmInPlace, AResidualOfAnotherWidthIsReadBeforeItIsOverwritten) {
  const Tensor a = filled({kRows, kDepth}, DType::kF32, -1),
               b = filled({kCols, kDepth}, DType::kF32, 0);
  for (const auto& dtypes : {std::pair{DType::kBF16, DType::kF32}, {DType::kF32, DType::kBF16}}) {
    // Clang 14 cannot capture structured bindings.
    const DType from = dtypes.first, to = dtypes.second;
    const Tensor residual = filled({kRows, kCols}, from, 2);
    const Tensor wanted = Tensor::empty({kRows, kCols}, to).value();
    te_fl_generic_gemm_args args{};
    args.a = a;
    args.b = b;
    args.trans_b = 1;
    args.residual = residual;
    args.d = wanted;
    ASSERT_OK(ops::generic_gemm(args));

    const Tensor memory = Tensor::empty({4 * kRows * kCols}, DType::kU8).value();
    const int64_t shape[] = {kRows, kCols};
    const auto view = [&](DType dtype) {
      return Tensor::wrap(memory.raw_data(), shape, {}, dtype, {}, nullptr).value();
    };
    const Tensor shared = view(from), result = view(to);
    const std::vector<char> values = bytes_of(residual);
    std::memcpy(shared.raw_data(), values.data(), values.size());
    args.residual = shared;
    args.d = result;
    ASSERT_OK(ops::generic_gemm(args));
    for (int64_t i = 0; i < wanted.numel(); ++i) {
      const auto at = [&](const Tensor& t) {
        return to == DType::kF32 ? t.data<float>()[i]
                                 : numeric::bf16_to_float(t.data<uint16_t>()[i]);
      };
      ASSERT_NEAR(at(result), at(wanted), to == DType::kF32 ? 1e-4 : 0.1) << i;
    }
  }
}

// The CPU backend would write the column-wise data while it still reads the input, so it refuses
// this call. The call falls back to a backend that computes all FP8 data before it writes any.
TEST(CpuQuantizeInPlace, AColumnwiseCopyMayLieInTheInput) {
  constexpr int64_t kSize = 320, kCodes = kSize * kSize;
  const int64_t shape[] = {kSize, kSize};
  for (const int64_t offset : {int64_t{0}, kCodes}) {
    const Tensor x = filled({kSize, kSize}, DType::kF32, -1);
    const Tensor wanted = Tensor::empty_quantized(shape, {.columnwise = true}).value();
    const Tensor got = Tensor::empty_quantized(shape, {.columnwise = true}).value();
    te_fl_quantize_args args{};
    args.input = x;
    args.output = wanted;
    ASSERT_OK(ops::quantize(args));
    te_fl_tensor output = *got.c();
    te_fl_quant parts = *output.quant;
    parts.columnwise_data = x.data<char>() + offset;
    output.quant = &parts;
    args.output = &output;
    ASSERT_OK(ops::quantize(args));
    EXPECT_EQ(std::memcmp(output.dl.data, wanted.c()->dl.data, kCodes), 0) << offset;
    EXPECT_EQ(std::memcmp(parts.columnwise_data, wanted.c()->quant->columnwise_data, kCodes), 0)
        << offset;
  }
}

}  // namespace
}  // namespace te_fl::gemm_test
