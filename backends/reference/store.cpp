// store_output: writes FP32 values to a tensor of any dtype and scaling mode.
#include <array>
#include <cstring>

#include "dispatch.hpp"
#include "element.hpp"
#include "scaling.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::reference {
namespace {

using backend::Matrix;

// Tile extents are multiples of the block extents of every scaling mode.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileCols = 2048;

struct Tile {
  int64_t row, col, rows, cols;
  const float* values;  // shape [rows, cols]
};

template <class F>
void for_each_tile(Matrix matrix, const Produce& produce, F&& f) {
  if (matrix.rows == 0 || matrix.cols == 0) return;
  std::vector<float> values(
      static_cast<size_t>(std::min(matrix.rows, kTileRows) * std::min(matrix.cols, kTileCols)));
  for (int64_t row = 0; row < matrix.rows; row += kTileRows) {
    for (int64_t col = 0; col < matrix.cols; col += kTileCols) {
      const Tile tile{row, col, std::min(kTileRows, matrix.rows - row),
                      std::min(kTileCols, matrix.cols - col), values.data()};
      for (int64_t r = 0; r < tile.rows; ++r) {
        produce(row + r, col, tile.cols, values.data() + r * tile.cols);
      }
      f(tile);
    }
  }
}

float compute_amax(Matrix matrix, const Produce& produce) {
  float amax = 0.0f;
  for_each_tile(matrix, produce, [&](const Tile& tile) {
    for (int64_t i = 0; i < tile.rows * tile.cols; ++i) {
      amax = numeric::amax_accumulate(amax, tile.values[i]);
    }
  });
  return amax;
}

// Writes a quantised output. Code is the element type.
template <class Code>
class Quantizer {
 public:
  Quantizer(const te_fl_tensor& out, const Produce& produce, float inf_scale)
      : out_(out),
        quant_(*out.quant),
        matrix_(backend::as_matrix(out)),
        rowwise_(out.dl.data != nullptr),
        compact_(backend::is_contiguous(out)),
        produce_(produce),
        inf_scale_(inf_scale) {}

  void run() {
    if (quant_.scaling == TE_FL_SCALING_TENSOR) return per_tensor();
    if (quant_.scaling == TE_FL_SCALING_NVFP4) {
      amax_ = std::max(compute_amax(matrix_, produce_), quant_.amax_epsilon);
      second_level_ = numeric::scale_from_amax(amax_, numeric::kE4m3Max * numeric::kE2m1Max, 0.0f,
                                               false, FLT_MAX);
    }
    clear_padding();
    for_each_tile(matrix_, produce_, [&](const Tile& tile) {
      if (rowwise_) blocks(tile, false);
      if (quant_.columnwise_data != nullptr) blocks(tile, true);
    });
    if (quant_.amax != nullptr) *quant_.amax = amax_;
    if (quant_.columnwise_amax != nullptr) *quant_.columnwise_amax = amax_;
  }

 private:
  static constexpr float kMax = numeric::largest_finite<Code>;

  void put(bool columnwise, int64_t row, int64_t col, Code code) {
    if (columnwise) {
      save(quant_.columnwise_data, columnwise_index(quant_.scaling, matrix_, row, col), code);
    } else {
      const int64_t i = row * matrix_.cols + col;
      save(backend::data<char>(out_), compact_ ? i : element_offset(out_, i), code);
    }
  }

  void per_tensor() {
    float scale;
    if ((quant_.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0) {
      amax_ = compute_amax(matrix_, produce_);
      scale = numeric::scale_from_amax(amax_, kMax, quant_.amax_epsilon,
                                       (quant_.flags & TE_FL_QUANT_POW2_SCALE) != 0, FLT_MAX);
      if (quant_.amax != nullptr) *quant_.amax = amax_;
      if (quant_.scale != nullptr) *quant_.scale = scale;
      for_each_tile(matrix_, produce_, [&](const Tile& tile) { cast(tile, scale); });
    } else {
      scale = *quant_.scale;
      for_each_tile(matrix_, produce_, [&](const Tile& tile) { cast(tile, scale); });
      if (quant_.amax != nullptr) *quant_.amax = numeric::amax_accumulate(*quant_.amax, amax_);
    }
    const float scale_inv = 1.0f / scale;
    if (quant_.scale_inv != nullptr) *static_cast<float*>(quant_.scale_inv) = scale_inv;
    if (quant_.columnwise_scale_inv != nullptr) {
      *static_cast<float*>(quant_.columnwise_scale_inv) = scale_inv;
    }
  }

  void cast(const Tile& tile, float scale) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < tile.cols; ++c) {
        const float value = tile.values[r * tile.cols + c];
        amax_ = numeric::amax_accumulate(amax_, value);
        const Code code = numeric::quantize<Code>(value, scale);
        if (rowwise_) put(false, tile.row + r, tile.col + c, code);
        if (quant_.columnwise_data != nullptr) put(true, tile.row + r, tile.col + c, code);
      }
    }
  }

  // Clears the padding of scale_inv, and the unused nibble after an odd number of FP4 elements.
  void clear_padding() {
    const size_t scale_bytes =
        quant_.scaling == TE_FL_SCALING_MXFP8 || quant_.scaling == TE_FL_SCALING_NVFP4
            ? 1
            : sizeof(float);
    for (const bool columnwise : {false, true}) {
      void* scales = columnwise ? quant_.columnwise_scale_inv : quant_.scale_inv;
      if (scales == nullptr) continue;
      const Extents e = scale_extents(quant_.scaling, columnwise, matrix_);
      std::memset(scales, 0, static_cast<size_t>(e.rows * e.cols) * scale_bytes);
    }
    const int64_t size = matrix_.rows * matrix_.cols;
    if (is_fp4<Code> && size % 2 != 0) {
      if (rowwise_ && compact_) {
        save(backend::data<char>(out_), size, Code::from_bits(0));
      }
      if (quant_.columnwise_data != nullptr) {
        save(quant_.columnwise_data, size, Code::from_bits(0));
      }
    }
  }

  void blocks(const Tile& tile, bool columnwise) {
    const Extents block = block_extents(quant_.scaling, columnwise);
    for (int64_t r = 0; r < tile.rows; r += block.rows) {
      for (int64_t c = 0; c < tile.cols; c += block.cols) {
        const Extents e{std::min(block.rows, tile.rows - r), std::min(block.cols, tile.cols - c)};
        one_block(tile, r, c, e, columnwise);
      }
    }
  }

  void one_block(const Tile& tile, int64_t r0, int64_t c0, Extents extents, bool columnwise) {
    float amax = 0.0f;
    for (int64_t r = r0; r < r0 + extents.rows; ++r) {
      for (int64_t c = c0; c < c0 + extents.cols; ++c) {
        amax = numeric::amax_accumulate(amax, tile.values[r * tile.cols + c]);
      }
    }
    if (quant_.scaling != TE_FL_SCALING_NVFP4) amax_ = std::max(amax_, amax);
    const float scale = block_scale(amax, tile.row + r0, tile.col + c0, columnwise);
    for (int64_t r = r0; r < r0 + extents.rows; ++r) {
      for (int64_t c = c0; c < c0 + extents.cols; ++c) {
        put(columnwise, tile.row + r, tile.col + c,
            numeric::quantize<Code>(tile.values[r * tile.cols + c], scale));
      }
    }
  }

  // Stores the block's scale_inv. Returns the factor by which its elements are multiplied before
  // rounding.
  float block_scale(float amax, int64_t row, int64_t col, bool columnwise) {
    void* scales = columnwise ? quant_.columnwise_scale_inv : quant_.scale_inv;
    const int64_t index = scale_index(quant_.scaling, columnwise, matrix_, row, col);
    if (quant_.scaling == TE_FL_SCALING_MXFP8) {
      const auto code = numeric::mxfp8_scale(std::max(amax, quant_.amax_epsilon), kMax);
      save(scales, index, code);
      return numeric::e8m0_reciprocal(code);
    }
    if (quant_.scaling == TE_FL_SCALING_NVFP4) {
      // Computes the block's scale relative to the tensor's scale, rounded to E4M3, and then the
      // factor that makes |x| at most 6. A block whose scale underflows becomes zeros. Factors are
      // multiplied in the same order as in Transformer Engine, because another order would round
      // some elements differently.
      const numeric::fp8e4m3 code(
          std::min(amax * (second_level_ * (1.0f / kMax)), numeric::kE4m3Max));
      save(scales, index, code);
      const float units = numeric::to_float(code);
      return units == 0.0f ? 0.0f : std::min(1.0f / (units * (1.0f / second_level_)), FLT_MAX);
    }
    const float scale = numeric::scale_from_amax(
        amax, kMax, quant_.amax_epsilon, (quant_.flags & TE_FL_QUANT_POW2_SCALE) != 0, inf_scale_);
    save(scales, index, 1.0f / scale);
    return scale;
  }

  const te_fl_tensor& out_;
  const te_fl_quant& quant_;
  const Matrix matrix_;
  const bool rowwise_, compact_;
  const Produce& produce_;
  const float inf_scale_;
  float amax_ = 0.0f;
  float second_level_ = 1.0f;
};

// The bytes [begin, end) that contain a tensor's data.
struct Range {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

std::array<Range, 2> ranges(const te_fl_tensor& t) {
  std::array<Range, 2> result;
  if (backend::numel(t) == 0) return result;
  if (const char* data = backend::data<const char>(t); data != nullptr) {
    int64_t low = 0, high = 0;
    for (int d = 0; d < t.dl.ndim; ++d) {
      const int64_t reach = (t.dl.shape[d] - 1) * backend::stride(t, d);
      (reach < 0 ? low : high) += reach;
    }
    const int64_t bits = t.dl.dtype.bits;
    result[0] = {data - (-low * bits + 7) / 8, data + ((high + 1) * bits + 7) / 8};
  }
  if (backend::scaling(t) != TE_FL_SCALING_NONE && t.quant->columnwise_data != nullptr) {
    const auto* data = static_cast<const char*>(t.quant->columnwise_data);
    result[1] = {data, data + (backend::numel(t) * t.dl.dtype.bits + 7) / 8};
  }
  return result;
}

bool overlap(const te_fl_tensor& a, const te_fl_tensor& b) {
  for (const Range& x : ranges(a)) {
    for (const Range& y : ranges(b)) {
      if (x.overlaps(y)) return true;
    }
  }
  return false;
}

// True if elements of a and b with the same index have the same address. If an input and an output
// satisfy this, each input element is read before the output element at its address is written.
bool same_view(const te_fl_tensor& a, const te_fl_tensor& b) {
  if (backend::data<char>(a) != backend::data<char>(b) || dtype_of(a) != dtype_of(b) ||
      a.dl.ndim != b.dl.ndim || backend::scaling(a) != backend::scaling(b)) {
    return false;
  }
  for (int d = 0; d < a.dl.ndim; ++d) {
    if (a.dl.shape[d] != b.dl.shape[d] || backend::stride(a, d) != backend::stride(b, d)) {
      return false;
    }
  }
  return true;
}

bool must_compute_first(const te_fl_tensor& out, std::initializer_list<const te_fl_tensor*> inputs,
                        Access access) {
  const bool quantised = backend::scaling(out) != TE_FL_SCALING_NONE;
  for (const te_fl_tensor* input : inputs) {
    if (input == nullptr || !overlap(out, *input)) continue;
    if (quantised || access == Access::kAnywhere || !same_view(out, *input)) return true;
  }
  return false;
}

void store(const te_fl_tensor& out, const Produce& produce, float inf_scale) {
  if (backend::scaling(out) == TE_FL_SCALING_NONE) {
    const Writer writer(out);
    const Matrix matrix = backend::as_matrix(out);
    std::vector<float> values(static_cast<size_t>(std::min(matrix.cols, kTileCols)));
    for (int64_t row = 0; row < matrix.rows; ++row) {
      for (int64_t col = 0; col < matrix.cols; col += kTileCols) {
        const int64_t n = std::min(kTileCols, matrix.cols - col);
        produce(row, col, n, values.data());
        writer.write(row * matrix.cols + col, n, values.data());
      }
    }
    return;
  }
  switch (dtype_of(out)) {
    case TE_FL_F8E4M3:
      return Quantizer<numeric::fp8e4m3>(out, produce, inf_scale).run();
    case TE_FL_F8E5M2:
      return Quantizer<numeric::fp8e5m2>(out, produce, inf_scale).run();
    default:
      return Quantizer<numeric::fp4e2m1>(out, produce, inf_scale).run();
  }
}

}  // namespace

void store_output(const te_fl_tensor& out, std::initializer_list<const te_fl_tensor*> inputs,
                  const Produce& produce, Access access, float inf_scale) {
  if (!must_compute_first(out, inputs, access)) return store(out, produce, inf_scale);
  const Matrix matrix = backend::as_matrix(out);
  std::vector<float> values(static_cast<size_t>(matrix.rows * matrix.cols));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    produce(row, 0, matrix.cols, values.data() + row * matrix.cols);
  }
  store_output(out, values.data(), inf_scale);
}

void store_output(const te_fl_tensor& out, const float* values, float inf_scale) {
  const int64_t cols = backend::as_matrix(out).cols;
  store(
      out,
      [=](int64_t row, int64_t col, int64_t n, float* piece) {
        std::copy_n(values + row * cols + col, n, piece);
      },
      inf_scale);
}

}  // namespace te_fl::reference
