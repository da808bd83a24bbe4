// Chooses the kernels that write the result of an elementwise op (common/elementwise.cuh): the tile
// kernels, which use 16-byte accesses, or those of common/store.cuh, which accept every call. The
// choice is a pure function of metadata, so tests run without a GPU. The kernel names are those
// that a profiler shows.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "common/dtype_bytes.hpp"
#include "common/mxfp8.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::cuda {

inline bool aligned(const void* p, int64_t bytes) noexcept {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

// An input of the op as a matrix: the address of its first element, and the row stride in elements.
struct StoreSource {
  int dtype;
  const void* first;
  int64_t stride;
};

struct StoreCall {
  std::span<const StoreSource> sources;
  const te_fl_tensor* out;
  int outputs = 1;                     // 2: the op writes the left and the right half of each row
                                       // of `out`
  const te_fl_tensor* bias = nullptr;  // receives the column sums of the result
  // True if measure_kernel supports the op: its sources are compact and have the shape of the
  // result.
  bool measures = false;
  bool measured = false;  // the workspace begins with the amax of the results
  // True if self_scaled_kernel supports the op. Then measure_kernel supports it too.
  bool self_scales = false;
  bool copies = false;  // the op copies its source's elements unchanged, as mxfp8_kernel requires
};

enum class StoreKernel {
  kNone,
  kPlain,
  kTensor,
  kSelfScaled,
  kBlock,
  kMxfp8,
  kMeasure,
  kStore,
  kQuantise,
  kAmax
};
constexpr const char* name_of(StoreKernel kernel) noexcept {
  constexpr const char* kNames[] = {
      "none",         "plain_kernel",   "tensor_kernel", "self_scaled_kernel", "block_kernel",
      "mxfp8_kernel", "measure_kernel", "store_kernel",  "quantise_kernel",    "amax_kernel"};
  return kNames[static_cast<int>(kernel)];
}

// The kernels that compute the column sums for a bias gradient.
enum class StoreSums {
  kNone,
  kResult,    // the result's kernel alone computes the sums
  kPartials,  // the result's kernel writes partial sums, and column_totals adds them
  kColumns,   // column_partials, which computes the results again, and column_totals
};

struct StoreChoice {
  StoreKernel result = StoreKernel::kNone;  // kNone: there are no elements
  StoreKernel amax = StoreKernel::kNone;    // the kernel that finds the amax for current scaling;
                                            // may be `result`
  StoreSums sums = StoreSums::kNone;
  const char* reason = "";  // reason for `result`; static text

  bool tiles() const noexcept {
    return result == StoreKernel::kPlain || result == StoreKernel::kTensor ||
           result == StoreKernel::kSelfScaled || result == StoreKernel::kBlock ||
           result == StoreKernel::kMxfp8;
  }
  std::string text() const {
    std::string t;
    if (amax != StoreKernel::kNone && amax != result)
      t = std::string("amax by ") + name_of(amax) + ", result by ";
    t += name_of(result);
    if (sums == StoreSums::kResult) t += ", which sums the columns";
    if (sums == StoreSums::kPartials) t += " and column_totals, which sum the columns";
    if (sums == StoreSums::kColumns) t += ", the columns summed by column_partials";
    return t + ": " + reason;
  }
};

namespace store_choice {

// Constants of tile.cuh, tile_block128.cuh and tile_mxfp8.cuh. elementwise.cuh asserts that they
// agree.
constexpr int64_t kTileRows = 128, kTileCols = 64, kBlockTile = 128;
constexpr int64_t kMxfp8Rows = 32, kMxfp8Cols = 512;
constexpr int64_t kFewCols = 16384;
// Limits of self_scaled_kernel, in which every block reads the entire input. kSelfScaledBytes: the
// bytes of the input. kSelfScaledReads: the bytes that all blocks read together. A multiprocessor
// reads kSelfScaledBytes, and the GPU reads kSelfScaledReads from its L2 cache, in about 3 us. The
// two launches that the kernel saves cost about as much on host and device.
constexpr int64_t kSelfScaledBytes = int64_t{128} << 10, kSelfScaledReads = int64_t{16} << 20;

inline const void* columns(const te_fl_tensor& t) noexcept {
  return t.quant != nullptr ? t.quant->columnwise_data : nullptr;
}

// Returns why the sources cannot be read with 16-byte accesses as one dtype; nullptr if they can.
inline const char* refuse_sources(const StoreCall& c, int64_t cols) noexcept {
  const int dtype = c.sources[0].dtype;
  if (dtype != TE_FL_F32 && dtype != TE_FL_BF16 && dtype != TE_FL_F16) {
    return "an input that is neither FP32, BF16 nor F16";
  }
  const int64_t bytes = bytes_of(dtype);
  if (cols * bytes % 16 != 0) return "rows that are not whole pieces of 16 bytes";
  for (const StoreSource& in : c.sources) {
    if (in.dtype != dtype) return "inputs of two dtypes";
    if (in.stride * bytes % 16 != 0) return "rows that are not whole pieces of 16 bytes";
    if (!aligned(in.first, 16)) return "an input that is not aligned to 16 bytes";
  }
  return nullptr;
}
// Returns why mxfp8_kernel cannot compute the call; nullptr if it can.
inline const char* refuse_mxfp8(const StoreCall& c, const backend::Matrix& m) noexcept {
  if (!c.copies) return "MXFP8 of results that are no copies";
  const te_fl_quant& quant = *c.out->quant;
  if (!aligned(backend::data<const void>(*c.out), 8) || !aligned(columns(*c.out), 8)) {
    return "codes that are not aligned to 8 bytes";
  }
  if (!aligned(quant.scale_inv, 8) || !aligned(quant.columnwise_scale_inv, 8)) {
    return "scales that are not aligned to 8 bytes";
  }
  return mxfp8_padded_rows(m.rows) / kMxfp8Rows * ((m.cols + kMxfp8Cols - 1) / kMxfp8Cols) >
                 INT32_MAX
             ? "more than 2^31 tiles"
             : nullptr;
}
// Returns why the tile kernels cannot write the FP8 output with aligned vector stores; nullptr if
// they can.
inline const char* refuse_codes(const StoreCall& c, const backend::Matrix& m) noexcept {
  if (backend::scaling(*c.out) == TE_FL_SCALING_MXFP8) return refuse_mxfp8(c, m);
  if (const void* rows = backend::data<const void>(*c.out); rows != nullptr) {
    if (!aligned(rows, 8)) return "codes that are not aligned to 8 bytes";
    if (m.cols * bytes_of(c.sources[0].dtype) % 16 != 0) {
      return "rows that are not whole pieces of 16 bytes";
    }
  }
  if (columns(*c.out) != nullptr) {
    if (!aligned(columns(*c.out), 16)) return "column-wise codes that are not aligned to 16 bytes";
    if (m.rows % 16 != 0) return "column-wise codes of rows that are no multiple of 16";
  }
  const bool blocks = backend::scaling(*c.out) != TE_FL_SCALING_TENSOR;
  if (blocks && c.outputs != 1 && m.cols / 2 % kBlockTile != 0) {
    return "blocks of 128 that hold parts of both halves";
  }
  return nullptr;
}

// Returns why the tile kernels cannot compute the call; nullptr if they can.
inline const char* refuse_tiles(const StoreCall& c) noexcept {
  const backend::Matrix m = backend::as_matrix(*c.out);
  const int64_t cols = m.cols / c.outputs;
  if (m.rows == 0 || m.cols == 0) return "there are no elements";
  // Most of each tile would lie outside the matrix.
  if (m.rows < 16 && cols > kFewCols) return "fewer than 16 rows of more than 16384 elements";
  if (const char* why = refuse_sources(c, cols)) return why;
  if ((m.rows + kTileRows - 1) / kTileRows * ((cols + kTileCols - 1) / kTileCols) > INT32_MAX) {
    return "more than 2^31 tiles";
  }
  if (backend::scaling(*c.out) != TE_FL_SCALING_NONE) return refuse_codes(c, m);
  return aligned(backend::data<const void>(*c.out), 16)
             ? nullptr
             : "an output that is not aligned to 16 bytes";
}

// Returns how the tile kernels compute the sums for a bias gradient. The block-scaling kernels
// write sums in FP32 only, and the MXFP8 kernel writes only partial sums.
inline StoreSums tile_sums(const StoreCall& c, uint32_t scaling) noexcept {
  if (c.bias == nullptr) return StoreSums::kNone;
  if (scaling == TE_FL_SCALING_MXFP8) return StoreSums::kPartials;
  const bool blocks = scaling != TE_FL_SCALING_NONE && scaling != TE_FL_SCALING_TENSOR;
  const bool one_step = backend::as_matrix(*c.out).rows <= kTileRows;
  const bool writes = !blocks || dtype_index(c.bias->dl.dtype) == TE_FL_F32;
  return one_step && writes ? StoreSums::kResult : StoreSums::kPartials;
}
inline StoreKernel tile_amax(const StoreCall& c, int64_t cols) noexcept {
  for (const StoreSource& in : c.sources) {
    if (in.stride != cols) return StoreKernel::kTensor;
  }
  return c.measures ? StoreKernel::kMeasure : StoreKernel::kTensor;
}

// True if [p, p + bytes) and [q, q + more) overlap.
inline bool meet(const void* p, int64_t bytes, const void* q, int64_t more) noexcept {
  const auto a = reinterpret_cast<uintptr_t>(p), b = reinterpret_cast<uintptr_t>(q);
  return a < b + static_cast<uintptr_t>(more) && b < a + static_cast<uintptr_t>(bytes);
}
// True if self_scaled_kernel may be used: the input is small, and the output does not share its
// memory.
inline bool few_elements(const StoreCall& c, const backend::Matrix& m) noexcept {
  const StoreSource& in = c.sources[0];
  const int64_t codes = m.rows * m.cols, bytes = codes * bytes_of(in.dtype);
  const int64_t tiles =
      (m.rows + kTileRows - 1) / kTileRows * ((m.cols + kTileCols - 1) / kTileCols);
  return c.self_scales && c.bias == nullptr && in.stride == m.cols && bytes <= kSelfScaledBytes &&
         tiles * bytes <= kSelfScaledReads &&
         !meet(in.first, bytes, backend::data<const void>(*c.out), codes) &&
         !meet(in.first, bytes, columns(*c.out), codes);
}

}  // namespace store_choice

// Chooses the kernels of a call that has passed its op's checks and refuse_output().
inline StoreChoice choose_store(const StoreCall& c) noexcept {
  using namespace store_choice;
  const uint32_t scaling = backend::scaling(*c.out);
  const bool finds_scale =
      scaling == TE_FL_SCALING_TENSOR && (c.out->quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
  const backend::Matrix m = backend::as_matrix(*c.out);
  StoreChoice choice;
  if (const char* why = refuse_tiles(c)) {
    choice.reason = why;
    if (c.bias != nullptr) choice.sums = StoreSums::kColumns;
    if (m.rows == 0 || m.cols == 0) return choice;
    choice.result = scaling == TE_FL_SCALING_NONE ? StoreKernel::kStore : StoreKernel::kQuantise;
    if (finds_scale) choice.amax = StoreKernel::kAmax;
    return choice;
  }
  choice.sums = tile_sums(c, scaling);
  if (scaling == TE_FL_SCALING_NONE) {
    choice.result = StoreKernel::kPlain;
    choice.reason = "no codes, and memory for accesses of 16 bytes";
  } else if (scaling == TE_FL_SCALING_TENSOR) {
    choice.result = StoreKernel::kTensor;
    choice.reason = "one scale, and memory for accesses of 16 bytes";
    if (finds_scale && !c.measured) choice.amax = tile_amax(c, m.cols / c.outputs);
    if (choice.amax == StoreKernel::kMeasure && few_elements(c, m)) {
      choice.result = choice.amax = StoreKernel::kSelfScaled;
      choice.reason = "one scale of few elements, and memory for accesses of 16 bytes";
    }
  } else if (scaling == TE_FL_SCALING_MXFP8) {
    choice.result = StoreKernel::kMxfp8;
    choice.reason = "scales of MXFP8 blocks, and memory for accesses of 16 bytes";
  } else {
    choice.result = StoreKernel::kBlock;
    choice.reason = "scales of 128 blocks, and memory for accesses of 16 bytes";
  }
  return choice;
}

}  // namespace te_fl::cuda
