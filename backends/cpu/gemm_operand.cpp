#include "gemm_operand.hpp"

#include <bit>
#include <string>

#include "convert.hpp"
#include "quant_store.hpp"

namespace te_fl::cpu {
namespace {

// Calls f(index, n, scale) for ranges that cover all elements. The elements of a range share a
// scale; a range has at most kChunk elements.
template <class F>
void for_each_run(const StoredMatrix& m, F&& f) {
  if (m.size() == 0) return;
  if (!m.is_block()) {
    ThreadPool::instance().parallel_for(m.size(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += kChunk) f(i, std::min(kChunk, end - i), 1.0f);
    });
    return;
  }
  const bool square = m.scaling == TE_FL_SCALING_BLOCK_128X128;
  const int64_t pitch = square ? round_up(ceil_div(m.cols, 128), 4) : round_up(m.rows, 4);
  ThreadPool::instance().parallel_for(
      m.rows, grain_of_rows(m.cols), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          for (int64_t col = 0; col < m.cols; col += 128) {
            const float scale = square ? m.scales[row / 128 * pitch + col / 128]
                                       : m.scales[col / 128 * pitch + row];
            f(row * m.cols + col, std::min<int64_t>(128, m.cols - col), scale);
          }
        }
      });
}

bool is_block(uint32_t scaling) {
  return scaling == TE_FL_SCALING_BLOCK_1X128 || scaling == TE_FL_SCALING_BLOCK_128X128;
}

void load_scaled(const StoredMatrix& m, int64_t index, int64_t n, float scale, float* out) {
  load_f32(m.dtype,
           m.data + index * (m.dtype == TE_FL_F32    ? 4
                             : is_fp8_dtype(m.dtype) ? 1
                                                     : 2),
           n, out);
  if (scale != 1.0f) scale_f32(out, n, scale);
}

}  // namespace

const char* refuse_operand(const te_fl_tensor& t) noexcept {
  if (!dense(&t)) return kNotContiguous;
  const uint32_t scaling = backend::scaling(t);
  if (scaling == TE_FL_SCALING_NONE)
    return is_high(t) ? nullptr : "multiplies F32, F16, BF16 and quantised FP8 only";
  if (scaling != TE_FL_SCALING_TENSOR && !is_block(scaling)) {
    return "does not read MXFP8 and NVFP4 operands";
  }
  return is_fp8(t) ? nullptr : "quantised operands must be FP8";
}

StoredMatrix stored_matrix(const te_fl_tensor& t, bool trans, bool rowwise_contracts) {
  const backend::Matrix matrix = backend::as_matrix(t);
  StoredMatrix m{backend::data<const char>(t),
                 nullptr,
                 dtype_of(t),
                 backend::scaling(t),
                 matrix.rows,
                 matrix.cols,
                 trans,
                 1.0f};
  if (m.scaling == TE_FL_SCALING_NONE) return m;
  const te_fl_quant& quant = *t.quant;
  bool columnwise = is_block(m.scaling) && !rowwise_contracts;
  if ((columnwise ? quant.columnwise_data : t.dl.data) == nullptr) columnwise = !columnwise;
  const void* scale_inv = columnwise ? quant.columnwise_scale_inv : quant.scale_inv;
  if (columnwise) {
    m.data = static_cast<const char*>(quant.columnwise_data);
    std::swap(m.rows, m.cols);
    m.transposed = !trans;
  }
  if (m.scaling == TE_FL_SCALING_TENSOR && scale_inv == nullptr) scale_inv = quant.scale_inv;
  if (is_block(m.scaling)) {
    m.scales = static_cast<const float*>(scale_inv);
  } else if (scale_inv != nullptr) {
    m.factor = *static_cast<const float*>(scale_inv);
  }
  return m;
}

bool is_exact_in_bf16(const StoredMatrix& m) {
  if (m.dtype == TE_FL_BF16) return true;
  if (!is_fp8_dtype(m.dtype)) return false;
  if (!m.is_block()) return true;
  const bool square = m.scaling == TE_FL_SCALING_BLOCK_128X128;
  const int64_t count = square ? ceil_div(m.rows, 128) * round_up(ceil_div(m.cols, 128), 4)
                               : ceil_div(m.cols, 128) * round_up(m.rows, 4);
  // A scale permits BF16 if it is a power of two that keeps every scaled FP8 number in BF16's
  // normal range, or if it is 0, as in the padding.
  uint32_t fits = 1;
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(m.scales[i]);
    fits &= static_cast<uint32_t>((bits & 0x807FFFFFu) == 0 &&
                                  (bits == 0 || (bits - (20u << 23)) < (210u << 23)));
  }
  return fits != 0;
}

void convert_to_f32(const StoredMatrix& m, float* out) {
  for_each_run(m, [&](int64_t index, int64_t n, float scale) {
    // Uses a temporary chunk: load_f32 also writes the padding, which here is the next run's
    // memory.
    Chunk values;
    load_scaled(m, index, n, scale, values.data);
    std::copy_n(values.data, n, out + index);
  });
}

void convert_to_bf16(const StoredMatrix& m, uint16_t* out) {
  for_each_run(m, [&](int64_t index, int64_t n, float scale) {
    if (scale == 1.0f) return fp8_to_bf16(m.dtype, m.data + index, n, out + index);
    Chunk values;
    load_scaled(m, index, n, scale, values.data);
    store_f32(TE_FL_BF16, values.data, n, out + index);
  });
}

}  // namespace te_fl::cpu
