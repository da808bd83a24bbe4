// The choice of the CUDA plugin's quantisation kernels and its stated reason. Needs no GPU.
#include "backends/cuda/quantize/quantize_choice.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace te_fl::cuda::quantize_choice_test {
namespace {

alignas(16) char quantize_memory[64];

// Metadata of a compact tensor; its elements are never read.
struct CodesTensor {
  std::vector<int64_t> shape;
  te_fl_quant quant{};
  te_fl_tensor t{};

  CodesTensor(int dtype, std::vector<int64_t> extents) : shape(std::move(extents)) {
    t.struct_size = sizeof t;
    t.dl.data = quantize_memory;
    t.dl.ndim = static_cast<int32_t>(shape.size());
    t.dl.dtype = to_c(static_cast<DType>(dtype));
    t.dl.shape = shape.data();
  }
  CodesTensor(const CodesTensor&) = delete;
  void quantise(uint32_t scaling, bool columns = false, bool compute_scale = false) {
    quant.scaling = scaling;
    quant.columnwise_data = columns ? quantize_memory : nullptr;
    quant.flags = compute_scale ? TE_FL_QUANT_COMPUTE_SCALE : 0;
    t.quant = &quant;
  }
  void move(uint64_t bytes) { t.dl.byte_offset = bytes; }
};

// The arguments of a quantize and a bgrad_quantize on [rows, cols], initially with a given scale.
struct QuantizeCall {
  CodesTensor input, output, bias;

  explicit QuantizeCall(int dtype, int64_t rows = 256, int64_t cols = 1024, int bias_dtype = -1)
      : input(dtype, {rows, cols}),
        output(TE_FL_F8E4M3, {rows, cols}),
        bias(bias_dtype < 0 ? dtype : bias_dtype, {cols}) {
    output.quantise(TE_FL_SCALING_TENSOR);
  }
  std::string chosen() const {
    te_fl_quantize_args a;
    a.input = &input.t, a.output = &output.t;
    return choose_quantize(a).text();
  }
  std::string with_bias() const {
    te_fl_bgrad_quantize_args a;
    a.input = &input.t, a.output = &output.t, a.bias_grad = &bias.t;
    return choose_quantize(a).text();
  }
};

constexpr const char* kOneScale = "tensor_kernel: one scale, and memory for accesses of 16 bytes";

TEST(CudaQuantizeChoice, AlignedTensorsTakeTilesByTheirScaling) {
  for (const int dtype : {TE_FL_F32, TE_FL_BF16, TE_FL_F16}) {
    QuantizeCall call(dtype);
    EXPECT_EQ(call.chosen(), kOneScale);
    call.output.quantise(TE_FL_SCALING_TENSOR, true);
    EXPECT_EQ(call.chosen(), kOneScale);
    call.output.quantise(TE_FL_SCALING_TENSOR, true, true);
    EXPECT_EQ(call.chosen(),
              "amax by measure_kernel, result by tensor_kernel: one scale, and memory for accesses "
              "of 16 bytes");
    for (const uint32_t scaling : {TE_FL_SCALING_BLOCK_1X128, TE_FL_SCALING_BLOCK_128X128}) {
      call.output.quantise(scaling, true, true);
      EXPECT_EQ(call.chosen(),
                "block_kernel: scales of 128 blocks, and memory for accesses of 16 bytes");
    }
  }
}

TEST(CudaQuantizeChoice, Mxfp8TakesTilesOfItsOwn) {
  constexpr const char* kTiles =
      "mxfp8_kernel: scales of MXFP8 blocks, and memory for accesses of 16 bytes";
  for (const int dtype : {TE_FL_F32, TE_FL_BF16, TE_FL_F16}) {
    QuantizeCall call(dtype, 250);  // no column-wise data is written, so any number of rows is
                                    // allowed
    for (const bool columns : {false, true}) {
      call.output.quantise(TE_FL_SCALING_MXFP8, columns);
      EXPECT_EQ(call.chosen(), kTiles);
    }
    EXPECT_EQ(call.with_bias(),
              "mxfp8_kernel and column_totals, which sum the columns: scales of MXFP8 blocks, and "
              "memory for accesses of 16 bytes");
  }
  QuantizeCall few(TE_FL_BF16, 32);
  few.output.quantise(TE_FL_SCALING_MXFP8);
  EXPECT_EQ(few.with_bias(),
            "mxfp8_kernel and column_totals, which sum the columns: scales of MXFP8 blocks, and "
            "memory for accesses of 16 bytes")
      << "also of a few rows";
}

TEST(CudaQuantizeChoice, Mxfp8ThatIsNotAlignedTakesTheGeneralKernel) {
  const auto chosen = [](auto&& change) {
    QuantizeCall call(TE_FL_BF16);
    call.output.quantise(TE_FL_SCALING_MXFP8, true);
    change(call);
    return call.chosen();
  };
  EXPECT_EQ(chosen([](QuantizeCall& c) { c.output.move(4); }),
            "quantise_kernel: codes that are not aligned to 8 bytes");
  EXPECT_EQ(chosen([](QuantizeCall& c) { c.output.quant.columnwise_data = quantize_memory + 4; }),
            "quantise_kernel: codes that are not aligned to 8 bytes");
  for (const bool columns : {false, true}) {
    EXPECT_EQ(chosen([&](QuantizeCall& c) {
                te_fl_quant& quant = c.output.quant;
                (columns ? quant.columnwise_scale_inv : quant.scale_inv) = quantize_memory + 4;
              }),
              "quantise_kernel: scales that are not aligned to 8 bytes");
  }
  EXPECT_EQ(chosen([](QuantizeCall& c) { c.input.move(2); }),
            "quantise_kernel: an input that is not aligned to 16 bytes");
  QuantizeCall odd(TE_FL_F32, 64, 33);
  odd.output.quantise(TE_FL_SCALING_MXFP8);
  EXPECT_EQ(odd.chosen(), "quantise_kernel: rows that are not whole pieces of 16 bytes");
  QuantizeCall narrow(TE_FL_BF16, int64_t{1} << 36, 8);
  narrow.output.quantise(TE_FL_SCALING_MXFP8);
  EXPECT_EQ(narrow.chosen(), "quantise_kernel: more than 2^31 tiles") << "of 32 rows";
}

TEST(CudaQuantizeChoice, FewElementsFindTheirScaleInOneLaunch) {
  constexpr const char* kOne =
      "self_scaled_kernel: one scale of few elements, and memory for accesses of 16 bytes";
  constexpr const char* kTwo =
      "amax by measure_kernel, result by tensor_kernel: one scale, and memory for accesses of 16 "
      "bytes";
  // The FP8 output lies inside the input's memory.
  const auto chosen = [](int dtype, int64_t rows, int64_t cols, uint64_t codes_at) {
    QuantizeCall call(dtype, rows, cols);
    call.output.quantise(TE_FL_SCALING_TENSOR, false, true);
    call.output.move(codes_at);
    return call.chosen();
  };
  constexpr uint64_t kFar = uint64_t{1} << 30;
  EXPECT_EQ(chosen(TE_FL_BF16, 64, 768, kFar), kOne);
  EXPECT_EQ(chosen(TE_FL_BF16, 64, 1024, kFar), kOne);
  EXPECT_EQ(chosen(TE_FL_BF16, 65, 1024, kFar), kTwo) << "more than 128 KiB";
  EXPECT_EQ(chosen(TE_FL_F32, 32, 1024, kFar), kOne);
  EXPECT_EQ(chosen(TE_FL_F32, 33, 1024, kFar), kTwo);
  EXPECT_EQ(chosen(TE_FL_BF16, 4, 16384, kFar), kTwo) << "256 blocks read 32 MiB";
  EXPECT_EQ(chosen(TE_FL_BF16, 2, 16384, kFar), kOne);
  EXPECT_EQ(chosen(TE_FL_BF16, 64, 1024, 0), kTwo) << "codes are written while others read";
  EXPECT_EQ(chosen(TE_FL_BF16, 64, 1024, 64 * 1024 * 2 - 16), kTwo);
  EXPECT_EQ(chosen(TE_FL_BF16, 64, 1024, 64 * 1024 * 2), kOne);
  QuantizeCall bias(TE_FL_BF16, 64, 768), delayed(TE_FL_BF16, 64, 768);
  bias.output.quantise(TE_FL_SCALING_TENSOR, false, true);
  bias.output.move(kFar);
  EXPECT_EQ(bias.with_bias(),
            "amax by measure_kernel, result by tensor_kernel, which sums the columns: one scale, "
            "and memory for accesses of 16 bytes");
  delayed.output.move(kFar);
  EXPECT_EQ(delayed.chosen(), kOneScale) << "under a given scale";
}

TEST(CudaQuantizeChoice, WhatIsNotAlignedTakesTheGeneralKernelsAndSaysWhy) {
  EXPECT_EQ(QuantizeCall(TE_FL_BF16, 256, 1001).chosen(),
            "quantise_kernel: rows that are not whole pieces of 16 bytes");
  EXPECT_EQ(QuantizeCall(TE_FL_BF16, 8, 16392).chosen(),
            "quantise_kernel: fewer than 16 rows of more than 16384 elements");
  EXPECT_EQ(QuantizeCall(TE_FL_BF16, 8, 16384).chosen(), kOneScale);
  EXPECT_EQ(QuantizeCall(TE_FL_BF16, 0, 64).chosen(), "none: there are no elements");
  QuantizeCall askew(TE_FL_BF16);
  askew.input.move(2);
  EXPECT_EQ(askew.chosen(), "quantise_kernel: an input that is not aligned to 16 bytes");
  QuantizeCall codes(TE_FL_BF16);
  codes.output.move(4);
  EXPECT_EQ(codes.chosen(), "quantise_kernel: codes that are not aligned to 8 bytes");
  QuantizeCall columns(TE_FL_BF16, 250, 1024);
  EXPECT_EQ(columns.chosen(), kOneScale);
  columns.output.quantise(TE_FL_SCALING_TENSOR, true, true);
  EXPECT_EQ(columns.chosen(),
            "amax by amax_kernel, result by quantise_kernel: column-wise codes of rows that are no "
            "multiple of 16");
}

TEST(CudaQuantizeChoice, BiasGradientsOfAFewRowsNeedNoSecondLaunch) {
  EXPECT_EQ(
      QuantizeCall(TE_FL_BF16, 128).with_bias(),
      "tensor_kernel, which sums the columns: one scale, and memory for accesses of 16 bytes");
  EXPECT_EQ(QuantizeCall(TE_FL_BF16, 129).with_bias(),
            "tensor_kernel and column_totals, which sum the columns: one scale, and memory for "
            "accesses of 16 bytes");
  QuantizeCall blocks(TE_FL_BF16, 128);
  blocks.output.quantise(TE_FL_SCALING_BLOCK_1X128);
  EXPECT_EQ(blocks.with_bias(),
            "block_kernel and column_totals, which sum the columns: scales of 128 blocks, and "
            "memory for accesses of 16 bytes")
      << "kernels of blocks write FP32 sums only";
  EXPECT_EQ(QuantizeCall(TE_FL_BF16, 128, 1001).with_bias(),
            "quantise_kernel, the columns summed by column_partials: rows that are not whole "
            "pieces of 16 bytes");
}

// Tests ops that read several inputs per output element, such as gated activations.
TEST(CudaStoreChoice, HalvesOfRowsAreMeasuredByTiles) {
  const CodesTensor input(TE_FL_BF16, {64, 512});
  CodesTensor output(TE_FL_F8E4M3, {64, 256});
  output.quantise(TE_FL_SCALING_TENSOR, false, true);
  const StoreSource halves[] = {{TE_FL_BF16, quantize_memory, 512},
                                {TE_FL_BF16, quantize_memory, 512}};
  StoreCall call{halves, &output.t};
  const auto amax = [&] { return choose_store(call).amax; };
  EXPECT_EQ(amax(), StoreKernel::kTensor);
  call.measures = true;
  EXPECT_EQ(amax(), StoreKernel::kTensor) << "the sources are not compact";
  const StoreSource whole[] = {{TE_FL_BF16, quantize_memory, 256},
                               {TE_FL_BF16, quantize_memory, 256}};
  call.sources = whole;
  EXPECT_EQ(amax(), StoreKernel::kMeasure);
  call.measures = false;
  EXPECT_EQ(amax(), StoreKernel::kTensor);
  call.measured = true;
  EXPECT_EQ(amax(), StoreKernel::kNone);
}

TEST(CudaStoreChoice, PlainResultsAndMixedSources) {
  const CodesTensor output(TE_FL_F32, {64, 256});
  StoreSource sources[] = {{TE_FL_BF16, quantize_memory, 256}, {TE_FL_BF16, quantize_memory, 256}};
  const StoreCall call{sources, &output.t};
  EXPECT_EQ(choose_store(call).text(),
            "plain_kernel: no codes, and memory for accesses of 16 bytes");
  sources[1].dtype = TE_FL_F16;
  EXPECT_EQ(choose_store(call).text(), "store_kernel: inputs of two dtypes");
  sources[0].dtype = TE_FL_F8E4M3;
  EXPECT_EQ(choose_store(call).text(), "store_kernel: an input that is neither FP32, BF16 nor F16");
}

TEST(CudaStoreChoice, HalvesOfAResultShareNoBlock) {
  CodesTensor output(TE_FL_F8E4M3, {64, 512}), narrow(TE_FL_F8E4M3, {64, 192});
  output.quantise(TE_FL_SCALING_BLOCK_1X128), narrow.quantise(TE_FL_SCALING_BLOCK_1X128);
  const StoreSource source{TE_FL_BF16, quantize_memory, 256};
  StoreCall call{{&source, 1}, &output.t, 2};
  EXPECT_EQ(choose_store(call).result, StoreKernel::kBlock);
  call.out = &narrow.t;
  EXPECT_EQ(choose_store(call).text(),
            "quantise_kernel: blocks of 128 that hold parts of both halves");
  output.quantise(TE_FL_SCALING_MXFP8);
  call.out = &output.t;
  EXPECT_EQ(choose_store(call).text(), "quantise_kernel: MXFP8 of results that are no copies");
}

TEST(CudaQuantizeChoice, BareCodesGoLikeATensorUnderAGivenScale) {
  const CodesTensor input(TE_FL_F32, {256, 1024}), scale(TE_FL_F32, {1});
  CodesTensor output(TE_FL_F8E5M2, {256, 1024});
  te_fl_cast_to_fp8_args a;
  a.input = &input.t, a.output = &output.t, a.scale = &scale.t;
  EXPECT_EQ(choose_quantize(a).text(), kOneScale);
  output.move(4);
  EXPECT_EQ(choose_quantize(a).text(), "quantise_kernel: codes that are not aligned to 8 bytes");
}

TEST(CudaQuantizeChoice, ListsBatchTensorsThatUseTiles) {
  const QuantizeCall a(TE_FL_BF16), b(TE_FL_F16, 64, 512), c(TE_FL_F32), odd(TE_FL_BF16, 3, 1001);
  QuantizeCall blocks(TE_FL_BF16), mxfp8(TE_FL_BF16, 40, 96), mxfp8_f32(TE_FL_F32, 40, 96);
  blocks.output.quantise(TE_FL_SCALING_BLOCK_128X128);
  mxfp8.output.quantise(TE_FL_SCALING_MXFP8), mxfp8_f32.output.quantise(TE_FL_SCALING_MXFP8);
  std::vector<const te_fl_tensor*> inputs, outputs;
  te_fl_multi_tensor_quantize_args args;
  const auto chosen = [&](std::vector<const QuantizeCall*> calls) {
    inputs.clear(), outputs.clear();
    for (const QuantizeCall* call : calls) {
      inputs.push_back(&call->input.t), outputs.push_back(&call->output.t);
    }
    args.inputs = inputs.data(), args.outputs = outputs.data();
    args.inputs_count = args.outputs_count = static_cast<int64_t>(calls.size());
    return choose_quantize(args).text();
  };
  EXPECT_EQ(chosen({}), "none: the list is empty");
  EXPECT_EQ(chosen({&a, &b}),
            "list_kernel for 2 of 2 tensors, of 1 kind: memory for accesses of 16 bytes");
  EXPECT_EQ(chosen({&a, &odd, &c, &blocks}),
            "list_kernel for 3 of 4 tensors, of 3 kinds: memory for accesses of 16 bytes; 1 by "
            "themselves, the first by quantise_kernel: rows that are not whole pieces of 16 bytes");
  EXPECT_EQ(chosen({&mxfp8, &a, &mxfp8, &mxfp8_f32, &blocks}),
            "list_kernel for 5 of 5 tensors, of 4 kinds: memory for accesses of 16 bytes");
  EXPECT_EQ(chosen({&odd}),
            "1 by themselves, the first by quantise_kernel: rows that are not whole pieces of 16 "
            "bytes");
}

// Each part of a split tensor starts where the previous part ends.
TEST(CudaQuantizeChoice, PartsOfASplitAreJudgedWhereTheyBegin) {
  const CodesTensor input(TE_FL_BF16, {5, 8});
  CodesTensor first(TE_FL_F8E4M3, {2, 8}), none(TE_FL_F8E4M3, {0, 8}), last(TE_FL_F8E4M3, {3, 8});
  for (CodesTensor* t : {&first, &none, &last}) t->quantise(TE_FL_SCALING_TENSOR);
  const std::vector<const te_fl_tensor*> outputs{&first.t, &none.t, &last.t};
  te_fl_split_quantize_args args;
  args.input = &input.t, args.outputs = outputs.data(), args.outputs_count = 3;
  auto pairs = make_pairs(args);
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(pairs(0).first_row, 0);
    EXPECT_EQ(pairs(2).first_row, 2);
  }
  EXPECT_EQ(choose_quantize(args).text(),
            "list_kernel for 2 of 3 tensors, of 1 kind: memory for accesses of 16 bytes; 1 by "
            "themselves, the first by none: there are no elements");
}

TEST(CudaQuantizeChoice, AmaxesReadVectorsWhereAligned) {
  const CodesTensor amax(TE_FL_F32, {1}), odd(TE_FL_BF16, {9}), none(TE_FL_BF16, {0});
  CodesTensor input(TE_FL_BF16, {16});
  te_fl_compute_amax_args a;
  a.amax = &amax.t;
  const auto chosen = [&](const CodesTensor& t) {
    a.input = &t.t;
    return choose_quantize(a).text();
  };
  EXPECT_EQ(chosen(input), "flat_amax_kernel: memory for accesses of 16 bytes");
  EXPECT_EQ(chosen(odd), "amax_kernel: elements that are not whole pieces of 16 bytes");
  EXPECT_EQ(chosen(none), "none: there are no elements");
  input.move(2);
  EXPECT_EQ(chosen(input), "amax_kernel: an input that is not aligned to 16 bytes");
}

TEST(CudaQuantizeChoice, CodesAreReadAsVectorsWhereAligned) {
  CodesTensor codes(TE_FL_F8E4M3, {64, 32});
  const CodesTensor values(TE_FL_BF16, {64, 32});
  codes.quantise(TE_FL_SCALING_TENSOR, true);
  te_fl_dequantize_args a;
  a.input = &codes.t, a.output = &values.t;
  EXPECT_EQ(choose_quantize(a).text(),
            "decode_kernel: row-wise codes, and memory for accesses of 8 codes");
  codes.t.dl.data = nullptr;
  EXPECT_EQ(choose_quantize(a).text(), "store_kernel: the codes are those of the column-wise copy");
  codes.quantise(TE_FL_SCALING_MXFP8, true);
  EXPECT_EQ(choose_quantize(a).text(),
            "decode_kernel: column-wise codes that are not transposed, and memory for accesses of "
            "8 codes");
  codes.quant.columnwise_scale_inv = quantize_memory + 4;
  EXPECT_EQ(choose_quantize(a).text(), "store_kernel: scales that are not aligned to 8 bytes");
  codes.quant.columnwise_data = quantize_memory + 4;
  EXPECT_EQ(choose_quantize(a).text(), "store_kernel: codes that are not aligned to 8 bytes");
}

TEST(CudaQuantizeChoice, TranspositionsUseTilesOfWholeVectors) {
  const CodesTensor in(TE_FL_F8E4M3, {64, 32}), out(TE_FL_F8E4M3, {32, 64}), odd(TE_FL_U8, {8, 24});
  const CodesTensor sums(TE_FL_F32, {32});
  te_fl_fp8_transpose_args a;
  a.input = &in.t, a.output = &out.t;
  EXPECT_EQ(choose_quantize(a).text(),
            "transpose_tiles_kernel: extents and memory for pieces of 16 codes");
  a.column_sums = &sums.t;
  EXPECT_EQ(choose_quantize(a).text(),
            "transpose_tiles_kernel and column_totals, which sum the columns: extents and memory "
            "for pieces of 16 codes");
  a.input = &odd.t;
  EXPECT_EQ(choose_quantize(a).text(),
            "transpose_kernel, the columns summed by column_partials: extents that are no "
            "multiples of 16");
}

}  // namespace
}  // namespace te_fl::cuda::quantize_choice_test
