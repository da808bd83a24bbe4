#include "quant_store.hpp"

#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "te_fl/numeric.hpp"

namespace te_fl::cpu {
namespace {

using backend::Matrix;

// The maximum of non-negative floats from several threads. It is kept as an integer, because the
// bits of such floats have the same order as the floats.
class AtomicMax {
 public:
  void raise(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    uint32_t seen = bits_.load(std::memory_order_relaxed);
    while (bits > seen && !bits_.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
    }
  }
  float value() const { return std::bit_cast<float>(bits_.load(std::memory_order_relaxed)); }

 private:
  std::atomic<uint32_t> bits_{0};
};

// Divides the matrix into pieces, each of at most kChunk elements of one row, and calls f(piece) on
// the thread pool.
template <class F>
void for_each_piece(Matrix matrix, ColumnSums* sums, F&& f) {
  const int64_t chunks = ceil_div(matrix.cols, kChunk);
  const int64_t units = matrix.rows * chunks;
  if (units == 0) {
    if (sums != nullptr) sums->start(1);
    return;
  }
  const Parts parts(units, ceil_div(kGrain, std::min(matrix.cols, kChunk)));
  if (sums != nullptr) sums->start(parts.count());
  parts.run([&](int64_t part, int64_t begin, int64_t end) {
    int64_t row = begin / chunks, chunk = begin % chunks;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t col = chunk * kChunk;
      f(Piece{row, col, std::min(kChunk, matrix.cols - col), part});
      if (++chunk == chunks) chunk = 0, ++row;
    }
    store_fence();
  });
}

using BeginRow = FunctionRef<void(int64_t row, int64_t part)>;

// Like for_each_piece(), but one thread processes all pieces of a row, after it has called
// begin_row for the row.
template <class F>
void for_each_piece_of_rows(Matrix matrix, const BeginRow& begin_row, F&& f) {
  const Parts parts(matrix.rows, grain_of_rows(matrix.cols));
  parts.run([&](int64_t part, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      begin_row(row, part);
      for (int64_t col = 0; col < matrix.cols; col += kChunk) {
        f(Piece{row, col, std::min(kChunk, matrix.cols - col), part});
      }
    }
    store_fence();
  });
}

struct Tile {
  int64_t row, col, rows, cols;
  int64_t part;
};

// Divides the matrix into tiles of at most tile_rows x tile_cols and calls f(tile) on the pool.
template <class F>
void for_each_tile(Matrix matrix, int64_t tile_rows, int64_t tile_cols, ColumnSums* sums, F&& f) {
  const int64_t down = ceil_div(matrix.rows, tile_rows), across = ceil_div(matrix.cols, tile_cols);
  if (down * across == 0) {
    if (sums != nullptr) sums->start(1);
    return;
  }
  const int64_t size = std::min(tile_rows, matrix.rows) * std::min(tile_cols, matrix.cols);
  const Parts parts(down * across, ceil_div(kGrain, size));
  if (sums != nullptr) sums->start(parts.count());
  parts.run([&](int64_t part, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = t / across * tile_rows, col = t % across * tile_cols;
      f(Tile{row, col, std::min(tile_rows, matrix.rows - row),
             std::min(tile_cols, matrix.cols - col), part});
    }
    store_fence();
  });
}

// Writes one output.
class Store {
 public:
  Store(const te_fl_tensor& out, const Produce& produce, const StoreOptions& options)
      : out_(out),
        dtype_(dtype_of(out)),
        matrix_(backend::as_matrix(out)),
        rows_(backend::data<char>(out)),
        bytes_(element_bytes(out)),
        stream_(exceeds_cache(matrix_.rows * matrix_.cols * bytes_)),
        produce_(produce),
        options_(options),
        pending_sums_(options.sums),
        pending_rows_(options.begin_row) {}

  void run() {
    switch (backend::scaling(out_)) {
      case TE_FL_SCALING_NONE:
        return plain();
      case TE_FL_SCALING_TENSOR:
        return per_tensor();
      default:
        return blocks();
    }
  }

 private:
  // Extents of a tile of FP8 data. The row pitch is a power of two plus one cache line, so that the
  // rows map to different cache sets.
  static constexpr int64_t kTileRows = 64, kTileCols = 256, kTilePitch = kTileCols + 64;
  static constexpr int64_t kBlock = 128, kBlockTileCols = 256, kPitch = kBlockTileCols + 64;

  // take_sums() returns options.sums, and take_rows() options.begin_row, in the first pass; in
  // later passes they return nullptr.
  ColumnSums* take_sums() { return std::exchange(pending_sums_, nullptr); }

  const BeginRow* take_rows() { return std::exchange(pending_rows_, nullptr); }

  Matrix pieces_matrix(bool has_sums) const {
    if (!options_.flat || has_sums) return matrix_;
    return {1, matrix_.rows * matrix_.cols};
  }

  // Produces all values piece by piece and calls f(piece, values). With options.flat, a piece has
  // row 0 and its element index as col.
  template <class F>
  void for_each_produced(F&& f) {
    if (pending_rows_ != nullptr) {
      for_each_piece_of_rows(matrix_, *take_rows(), [&](const Piece& piece) {
        Chunk values;
        produce_(piece, values.data);
        f(piece.row * matrix_.cols + piece.col, piece.n, values.data);
      });
      return;
    }
    ColumnSums* sums = take_sums();
    const Matrix matrix = pieces_matrix(sums != nullptr);
    const bool flat_rows = options_.flat && sums != nullptr;
    for_each_piece(matrix, sums, [&](const Piece& piece) {
      Chunk values;
      const int64_t index = piece.row * matrix.cols + piece.col;
      produce_(flat_rows ? Piece{0, index, piece.n, piece.part} : piece, values.data);
      if (sums != nullptr) sums->add(piece.part, piece.col, piece.n, values.data);
      f(index, piece.n, values.data);
    });
  }

  // Calls begin_row for all rows, unless an earlier pass has done so.
  void begin_rows() {
    const BeginRow* begin_row = take_rows();
    if (begin_row == nullptr) return;
    const Parts parts(matrix_.rows, grain_of_rows(matrix_.cols));
    parts.run([&](int64_t part, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) (*begin_row)(row, part);
    });
  }

  void plain() {
    for_each_produced([&](int64_t index, int64_t n, const float* values) {
      store_f32(dtype_, values, n, rows_ + index * bytes_, stream_);
    });
  }

  void per_tensor() {
    const te_fl_quant& quant = *out_.quant;
    const bool derive = (quant.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
    AtomicMax amax;
    float scale;
    if (derive) {
      for_each_produced(
          [&](int64_t, int64_t n, const float* values) { amax.raise(amax_f32(values, n)); });
      scale = numeric::scale_from_amax(amax.value(), fp8_max(), quant.amax_epsilon,
                                       (quant.flags & TE_FL_QUANT_POW2_SCALE) != 0, FLT_MAX);
      if (quant.scale != nullptr) *quant.scale = scale;
    } else {
      scale = *quant.scale;
    }
    if (quant.columnwise_data == nullptr) {
      for_each_produced([&](int64_t index, int64_t n, const float* values) {
        amax.raise(quantize_f32(dtype_, values, n, scale, rows_ + index, stream_));
      });
    } else {
      cast_and_transpose(scale, amax);
    }
    if (quant.amax != nullptr) {
      *quant.amax = derive ? amax.value() : numeric::amax_accumulate(*quant.amax, amax.value());
    }
    const float scale_inv = 1.0f / scale;
    if (quant.scale_inv != nullptr) *static_cast<float*>(quant.scale_inv) = scale_inv;
    if (quant.columnwise_scale_inv != nullptr) {
      *static_cast<float*>(quant.columnwise_scale_inv) = scale_inv;
    }
  }

  void cast_and_transpose(float scale, AtomicMax& amax) {
    auto* columnwise = static_cast<uint8_t*>(out_.quant->columnwise_data);
    begin_rows();
    ColumnSums* sums = take_sums();
    for_each_tile(matrix_, kTileRows, kTileCols, sums, [&](const Tile& tile) {
      alignas(64) uint8_t codes[kTileRows * kTilePitch];
      float tile_amax = 0.0f;
      Chunk values;
      for (int64_t r = 0; r < tile.rows; ++r) {
        produce_at(tile, r, sums, values.data);
        uint8_t* row = codes + r * kTilePitch;
        tile_amax = std::max(tile_amax, quantize_f32(dtype_, values.data, tile.cols, scale, row));
        if (rows_ != nullptr) {
          std::memcpy(row_codes(tile.row + r, tile.col), row, static_cast<size_t>(tile.cols));
        }
      }
      amax.raise(tile_amax);
      transpose_bytes(codes, kTilePitch, tile.rows, tile.cols,
                      columnwise + tile.col * matrix_.rows + tile.row, matrix_.rows, stream_);
    });
  }

  void produce_at(const Tile& tile, int64_t r, ColumnSums* sums, float* values) {
    const int64_t row = tile.row + r;
    if (options_.flat) {
      produce_(Piece{0, row * matrix_.cols + tile.col, tile.cols, tile.part}, values);
    } else {
      produce_(Piece{row, tile.col, tile.cols, tile.part}, values);
    }
    if (sums != nullptr) sums->add(tile.part, tile.col, tile.cols, values);
  }

  float fp8_max() const { return dtype_ == TE_FL_F8E4M3 ? numeric::kE4m3Max : numeric::kE5m2Max; }

  // ---- block scaling

  void blocks() {
    clear_scales();
    begin_rows();
    ColumnSums* sums = take_sums();
    AtomicMax amax;
    // Per tile, two buffers: the FP32 values, and the FP8 data to be transposed.
    for_each_tile(matrix_, kBlock, kBlockTileCols, sums, [&](const Tile& tile) {
      const auto values = std::make_unique_for_overwrite<float[]>(kBlock * kPitch);
      const auto codes = std::make_unique_for_overwrite<uint8_t[]>(kBlock * kPitch);
      for (int64_t r = 0; r < tile.rows; ++r) {
        produce_at(tile, r, sums, values.get() + r * kPitch);
      }
      amax.raise(backend::scaling(out_) == TE_FL_SCALING_BLOCK_128X128
                     ? square_blocks(tile, values.get(), codes.get())
                     : vector_blocks(tile, values.get(), codes.get()));
    });
    if (out_.quant->amax != nullptr) *out_.quant->amax = amax.value();
  }

  float block_scale(float amax) const {
    return numeric::scale_from_amax(amax, fp8_max(), out_.quant->amax_epsilon,
                                    (out_.quant->flags & TE_FL_QUANT_POW2_SCALE) != 0,
                                    options_.inf_scale);
  }
  float* scales(bool columnwise) const {
    return static_cast<float*>(columnwise ? out_.quant->columnwise_scale_inv
                                          : out_.quant->scale_inv);
  }
  uint8_t* row_codes(int64_t row, int64_t col) const {
    return reinterpret_cast<uint8_t*>(rows_) + row * matrix_.cols + col;
  }
  uint8_t* column_codes(int64_t row, int64_t col) const {
    return static_cast<uint8_t*>(out_.quant->columnwise_data) + col * matrix_.rows + row;
  }

  // Zeroes the scales, including their padding.
  void clear_scales() const {
    const bool square = backend::scaling(out_) == TE_FL_SCALING_BLOCK_128X128;
    for (const bool columnwise : {false, true}) {
      if (scales(columnwise) == nullptr) continue;
      const int64_t m = columnwise ? matrix_.cols : matrix_.rows;
      const int64_t k = columnwise ? matrix_.rows : matrix_.cols;
      const int64_t count = square ? ceil_div(m, kBlock) * round_up(ceil_div(k, kBlock), 4)
                                   : ceil_div(k, kBlock) * round_up(m, 4);
      std::memset(scales(columnwise), 0, static_cast<size_t>(count) * sizeof(float));
    }
  }

  float square_blocks(const Tile& tile, const float* values, uint8_t* codes) const {
    float tile_amax = 0.0f;
    const bool columnwise = out_.quant->columnwise_data != nullptr;
    for (int64_t c = 0; c < tile.cols; c += kBlock) {
      const int64_t cols = std::min(kBlock, tile.cols - c);
      float amax = 0.0f;
      for (int64_t r = 0; r < tile.rows; ++r) {
        amax = std::max(amax, amax_f32(values + r * kPitch + c, cols));
      }
      tile_amax = std::max(tile_amax, amax);
      const float scale = block_scale(amax);
      const int64_t i = tile.row / kBlock, j = (tile.col + c) / kBlock;
      if (rows_ != nullptr) {
        scales(false)[i * round_up(ceil_div(matrix_.cols, kBlock), 4) + j] = 1.0f / scale;
      }
      if (columnwise) {
        scales(true)[j * round_up(ceil_div(matrix_.rows, kBlock), 4) + i] = 1.0f / scale;
      }
      for (int64_t r = 0; r < tile.rows; ++r) {
        quantize_f32(dtype_, values + r * kPitch + c, cols, scale, codes + r * kPitch + c);
        if (rows_ != nullptr) {
          std::memcpy(row_codes(tile.row + r, tile.col + c), codes + r * kPitch + c,
                      static_cast<size_t>(cols));
        }
      }
    }
    if (columnwise) {
      transpose_bytes(codes, kPitch, tile.rows, tile.cols, column_codes(tile.row, tile.col),
                      matrix_.rows);
    }
    return tile_amax;
  }

  float vector_blocks(const Tile& tile, const float* values, uint8_t* codes) const {
    float tile_amax = 0.0f;
    if (rows_ != nullptr) tile_amax = row_vectors(tile, values);
    if (out_.quant->columnwise_data == nullptr) return tile_amax;
    // Each column of the tile is one scaling block: the tile has 128 rows, or fewer at the end of
    // the matrix.
    Chunk amax, factor;
    std::fill_n(amax.data, tile.cols, 0.0f);
    for (int64_t r = 0; r < tile.rows; ++r) {
      accumulate_amax(values + r * kPitch, tile.cols, amax.data);
    }
    float* inverse = scales(true) + tile.row / kBlock * round_up(matrix_.cols, 4) + tile.col;
    for (int64_t c = 0; c < tile.cols; ++c) {
      tile_amax = std::max(tile_amax, amax.data[c]);
      factor.data[c] = block_scale(amax.data[c]);
      inverse[c] = 1.0f / factor.data[c];
    }
    for (int64_t r = 0; r < tile.rows; ++r) {
      Chunk scaled;
      multiply(values + r * kPitch, factor.data, tile.cols, scaled.data);
      store_f32(dtype_, scaled.data, tile.cols, codes + r * kPitch);
    }
    transpose_bytes(codes, kPitch, tile.rows, tile.cols, column_codes(tile.row, tile.col),
                    matrix_.rows);
    return tile_amax;
  }

  float row_vectors(const Tile& tile, const float* values) const {
    float tile_amax = 0.0f;
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < tile.cols; c += kBlock) {
        const int64_t cols = std::min(kBlock, tile.cols - c);
        const float* block = values + r * kPitch + c;
        const float amax = amax_f32(block, cols);
        const float scale = block_scale(amax);
        tile_amax = std::max(tile_amax, amax);
        scales(false)[(tile.col + c) / kBlock * round_up(matrix_.rows, 4) + tile.row + r] =
            1.0f / scale;
        quantize_f32(dtype_, block, cols, scale, row_codes(tile.row + r, tile.col + c));
      }
    }
    return tile_amax;
  }

  static void accumulate_amax(const float* values, int64_t n, float* amax) {
    for (int64_t c = 0; c < n; ++c) amax[c] = numeric::amax_accumulate(amax[c], values[c]);
  }
  static void multiply(const float* a, const float* b, int64_t n, float* out) {
    for (int64_t c = 0; c < n; ++c) out[c] = a[c] * b[c];
  }

  const te_fl_tensor& out_;
  const int dtype_;
  const Matrix matrix_;
  char* const rows_;
  const int64_t bytes_;
  const bool stream_;
  const Produce& produce_;
  const StoreOptions& options_;
  ColumnSums* pending_sums_;
  const BeginRow* pending_rows_;
};

}  // namespace

void ColumnSums::store(const te_fl_tensor& out, bool accumulate, double factor) const {
  const int dtype = dtype_of(out);
  const auto parts = static_cast<int64_t>(sums_.size()) / std::max<int64_t>(cols_, 1);
  for (int64_t col = 0; col < cols_; col += kChunk) {
    Chunk values;
    const int64_t n = std::min(kChunk, cols_ - col);
    char* place = backend::data<char>(out) + col * element_bytes(out);
    if (accumulate) {
      load_f32(dtype, place, n, values.data);
    } else {
      std::fill_n(values.data, n, 0.0f);
    }
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0.0;
      for (int64_t part = 0; part < parts; ++part) {
        sum += sums_[static_cast<size_t>(part * cols_ + col + i)];
      }
      values.data[i] = static_cast<float>(values.data[i] + factor * sum);
    }
    store_f32(dtype, values.data, n, place);
  }
}

float largest_finite_of(int dtype) noexcept {
  switch (dtype) {
    case TE_FL_F16:
      return numeric::largest_finite<numeric::half>;
    case TE_FL_BF16:
      return numeric::largest_finite<numeric::bfloat16>;
    default:
      return FLT_MAX;
  }
}

Refusal refuse_output(const te_fl_tensor& out) noexcept {
  if (!dense(&out)) return kNotContiguous;
  const uint32_t scaling = backend::scaling(out);
  if (scaling == TE_FL_SCALING_MXFP8 || scaling == TE_FL_SCALING_NVFP4) {
    return "does not write MXFP8 and NVFP4";
  }
  if (scaling != TE_FL_SCALING_NONE ? !is_fp8(out) : !is_high(out)) {
    return "writes F32, F16, BF16 and quantised FP8 only";
  }
  return nullptr;
}

void store_output(const te_fl_tensor& out, Produce produce, const StoreOptions& options) {
  Store(out, produce, options).run();
}

}  // namespace te_fl::cpu
