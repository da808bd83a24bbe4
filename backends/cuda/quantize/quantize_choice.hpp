// Chooses the kernels of the quantisation ops: pure functions of metadata, so tests run without a
// GPU. run() and describe() both use them. The kernels that write FP8 are chosen by choose_store()
// (common/store_choice.hpp). Kernel names are those that a profiler shows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/dtype_bytes.hpp"
#include "common/store_choice.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/ops/quantize.h"

namespace te_fl::cuda {

// Chooses the kernels that quantise the rows of `input` from first_row on to `output` and write
// their column sums to `bias`.
inline StoreChoice choose_quantize(const te_fl_tensor& input, int64_t first_row,
                                   const te_fl_tensor& output,
                                   const te_fl_tensor* bias = nullptr) noexcept {
  const int dtype = dtype_index(input.dl.dtype);
  const int64_t cols = backend::as_matrix(output).cols;
  const StoreSource source{
      dtype, backend::data<const char>(input) + first_row * cols * bytes_of(dtype), cols};
  return choose_store({{&source, 1}, &output, 1, bias, true, false, true, true});
}
inline StoreChoice choose_quantize(const te_fl_quantize_args& a) noexcept {
  return choose_quantize(*a.input, 0, *a.output);
}
inline StoreChoice choose_quantize(const te_fl_bgrad_quantize_args& a) noexcept {
  return choose_quantize(*a.input, 0, *a.output, a.bias_grad);
}

// The output of cast_to_fp8, described as a quantised tensor.
struct BareCodes {
  te_fl_quant quant{};
  te_fl_tensor tensor;

  explicit BareCodes(const te_fl_cast_to_fp8_args& a) noexcept : tensor(*a.output) {
    quant.scaling = TE_FL_SCALING_TENSOR;
    quant.scale = backend::data<float>(*a.scale);
    if (a.amax != nullptr) quant.amax = backend::data<float>(*a.amax);
    if (a.scale_inv != nullptr) quant.scale_inv = backend::data<float>(*a.scale_inv);
    tensor.quant = &quant;
  }
  BareCodes(const BareCodes&) = delete;
};
inline StoreChoice choose_quantize(const te_fl_cast_to_fp8_args& a) noexcept {
  return choose_quantize(*a.input, 0, BareCodes(a).tensor);
}

// ---- lists

// One tensor of a list.
struct QuantizePair {
  const te_fl_tensor *input, *output;
  int64_t first_row;
};
inline StoreChoice choose_quantize(const QuantizePair& pair) noexcept {
  return choose_quantize(*pair.input, pair.first_row, *pair.output);
}
inline auto make_pairs(const te_fl_multi_tensor_quantize_args& a) {
  return [&a](int64_t i) { return QuantizePair{a.inputs[i], a.outputs[i], 0}; };
}
// Returns a function that returns the i-th QuantizePair. Call it with ascending i; a call with 0
// starts again.
inline auto make_pairs(const te_fl_split_quantize_args& a) {
  return [&a, at = int64_t{0}, first = int64_t{0}](int64_t i) mutable {
    if (i == 0) at = 0, first = 0;
    for (; at < i; ++at) first += backend::as_matrix(*a.outputs[at]).rows;
    return QuantizePair{a.input, a.outputs[i], first};
  };
}

// One launch of list_kernel processes all tensors of the same kind.
enum class QuantizeCodes { kTensor, kBlock, kMxfp8 };
struct QuantizeKind {
  bool is_f32;
  QuantizeCodes codes;
  bool compute_scale;
  bool operator==(const QuantizeKind&) const = default;
};
inline constexpr std::array<QuantizeKind, 8> kQuantizeKinds{{{false, QuantizeCodes::kTensor, false},
                                                             {false, QuantizeCodes::kTensor, true},
                                                             {false, QuantizeCodes::kBlock, false},
                                                             {false, QuantizeCodes::kMxfp8, false},
                                                             {true, QuantizeCodes::kTensor, false},
                                                             {true, QuantizeCodes::kTensor, true},
                                                             {true, QuantizeCodes::kBlock, false},
                                                             {true, QuantizeCodes::kMxfp8, false}}};
// Returns the index of the tensor's kind in kQuantizeKinds, or kQuantizeKinds.size() if list_kernel
// does not support the tensor, which then has its own launches.
inline size_t quantize_kind(const QuantizePair& pair) noexcept {
  const StoreChoice choice = choose_quantize(pair);
  if (!choice.tiles()) return kQuantizeKinds.size();
  const QuantizeKind kind{dtype_index(pair.input->dl.dtype) == TE_FL_F32,
                          choice.result == StoreKernel::kBlock   ? QuantizeCodes::kBlock
                          : choice.result == StoreKernel::kMxfp8 ? QuantizeCodes::kMxfp8
                                                                 : QuantizeCodes::kTensor,
                          choice.amax != StoreKernel::kNone};
  size_t k = 0;
  while (!(kQuantizeKinds[k] == kind)) ++k;
  return k;
}

struct QuantizeListChoice {
  std::array<int64_t, kQuantizeKinds.size()> members{};  // number of tensors by kind
  int64_t alone = 0;                                     // tensors with their own launches
  StoreChoice first_alone;                               // the kernels of the first such tensor

  int64_t together() const noexcept {
    int64_t sum = 0;
    for (const int64_t n : members) sum += n;
    return sum;
  }
  std::string text() const {
    if (together() + alone == 0) return "none: the list is empty";
    std::string t;
    if (together() > 0) {
      int kinds = 0;
      for (const int64_t n : members) kinds += n > 0 ? 1 : 0;
      t = "list_kernel for " + std::to_string(together()) + " of " +
          std::to_string(together() + alone) + " tensors, of " + std::to_string(kinds) +
          (kinds == 1 ? " kind" : " kinds") + ": memory for accesses of 16 bytes";
    }
    if (alone == 0) return t;
    if (!t.empty()) t += "; ";
    return t + std::to_string(alone) + " by themselves, the first by " + first_alone.text();
  }
};

template <class Pairs>
QuantizeListChoice choose_quantize_list(int64_t count, Pairs& pair_of) {
  QuantizeListChoice list;
  for (int64_t i = 0; i < count; ++i) {
    const QuantizePair pair = pair_of(i);
    if (const size_t kind = quantize_kind(pair); kind < kQuantizeKinds.size()) {
      ++list.members[kind];
    } else if (list.alone++ == 0) {
      list.first_alone = choose_quantize(pair);
    }
  }
  return list;
}
inline QuantizeListChoice choose_quantize(const te_fl_multi_tensor_quantize_args& a) {
  auto pairs = make_pairs(a);
  return choose_quantize_list(a.outputs_count, pairs);
}
inline QuantizeListChoice choose_quantize(const te_fl_split_quantize_args& a) {
  auto pairs = make_pairs(a);
  return choose_quantize_list(a.outputs_count, pairs);
}

// ---- ops that have one kernel for aligned memory and a general one

struct CodesChoice {
  bool whole;  // the kernel for aligned memory
  const char *kernel, *reason;

  std::string text() const { return std::string(kernel) + ": " + reason; }
};

inline CodesChoice choose_quantize(const te_fl_compute_amax_args& a) noexcept {
  const int64_t n = backend::numel(*a.input), bytes = bytes_of(dtype_index(a.input->dl.dtype));
  if (n == 0) return {false, "none", "there are no elements"};
  if (!aligned(backend::data<const void>(*a.input), 16)) {
    return {false, "amax_kernel", "an input that is not aligned to 16 bytes"};
  }
  if (n * bytes % 16 != 0) {
    return {false, "amax_kernel", "elements that are not whole pieces of 16 bytes"};
  }
  return {true, "flat_amax_kernel", "memory for accesses of 16 bytes"};
}

inline constexpr int kDecodeRows = 64, kDecodeCols = 128;  // elements per block of decode_kernel

inline CodesChoice choose_quantize(const te_fl_dequantize_args& a) noexcept {
  const backend::Matrix m = backend::as_matrix(*a.input);
  const auto general = [](const char* why) { return CodesChoice{false, "store_kernel", why}; };
  if (m.rows == 0 || m.cols == 0) return {false, "none", "there are no elements"};
  const te_fl_quant& quant = *a.input->quant;
  if (quant.scaling == TE_FL_SCALING_NVFP4) return general("the codes are NVFP4");
  const bool columns = a.input->dl.data == nullptr && quant.columnwise_data != nullptr;
  if (columns && quant.scaling != TE_FL_SCALING_MXFP8) {
    return general("the codes are those of the column-wise copy");
  }
  if (m.cols % 8 != 0) return general("rows of no multiple of 8 elements");
  if (!aligned(columns ? quant.columnwise_data : backend::data<const void>(*a.input), 8)) {
    return general("codes that are not aligned to 8 bytes");
  }
  if (columns && !aligned(quant.columnwise_scale_inv, 8)) {
    return general("scales that are not aligned to 8 bytes");
  }
  if (!aligned(backend::data<const void>(*a.output), 16)) {
    return general("an output that is not aligned to 16 bytes");
  }
  if ((m.rows + kDecodeRows - 1) / kDecodeRows * ((m.cols + kDecodeCols - 1) / kDecodeCols) >
      INT32_MAX) {
    return general("more than 2^31 tiles");
  }
  return {true, "decode_kernel",
          columns ? "column-wise codes that are not transposed, and memory for accesses of 8 codes"
                  : "row-wise codes, and memory for accesses of 8 codes"};
}

inline CodesChoice choose_quantize(const te_fl_fp8_transpose_args& a) noexcept {
  const backend::Matrix m = backend::as_matrix(*a.input);
  const bool sums = a.column_sums != nullptr;
  const char* const kernel =
      sums ? "transpose_kernel, the columns summed by column_partials" : "transpose_kernel";
  if (m.rows == 0 || m.cols == 0) return {false, "none", "there are no elements"};
  if (m.rows % 16 != 0 || m.cols % 16 != 0) {
    return {false, kernel, "extents that are no multiples of 16"};
  }
  if (!aligned(backend::data<const void>(*a.input), 16) ||
      !aligned(backend::data<const void>(*a.output), 16)) {
    return {false, kernel, "codes that are not aligned to 16 bytes"};
  }
  if ((m.rows + 127) / 128 * ((m.cols + 127) / 128) > INT32_MAX) {
    return {false, kernel, "more than 2^31 tiles"};
  }
  return {true,
          sums ? "transpose_tiles_kernel and column_totals, which sum the columns"
               : "transpose_tiles_kernel",
          "extents and memory for pieces of 16 codes"};
}

}  // namespace te_fl::cuda
