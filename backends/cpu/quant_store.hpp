// Writes FP32 values, which are produced piece by piece on the pool, to an output of any dtype with
// no scaling, per-tensor or block scaling. Writes the output's row-wise and column-wise data,
// scales and amax.
#pragma once

#include <cfloat>
#include <cstdint>
#include <vector>

#include "convert.hpp"
#include "families.hpp"
#include "function_ref.hpp"
#include "tensor_view.hpp"

namespace te_fl::cpu {

// Reads elements of a dense tensor as FP32. For FP8, the scale is not applied.
class Loader {
 public:
  explicit Loader(const te_fl_tensor& t)
      : dtype_(dtype_of(t)), bytes_(element_bytes(t)), data_(backend::data<const char>(t)) {}
  // `out` must be padded.
  void operator()(int64_t index, int64_t n, float* out) const {
    load_f32(dtype_, data_ + index * bytes_, n, out);
  }

 private:
  int dtype_;
  int64_t bytes_;
  const char* data_;
};

// Columns [col, col + n) of one row of the output's matrix view; n <= kChunk. `part`: index of the
// part of the parallel loop; the pieces of one part are produced one after the other.
struct Piece {
  int64_t row, col, n;
  int64_t part;
};
// Computes the values of a piece into `out`, a padded buffer. Called from several threads, and
// twice per piece if the scale is computed, because finding the amax needs its own pass.
using Produce = FunctionRef<void(const Piece&, float* out)>;

// Column sums over the rows, in double. Deterministic for a given number of threads.
class ColumnSums {
 public:
  explicit ColumnSums(int64_t cols) : cols_(cols) {}
  void start(int64_t parts) { sums_.assign(static_cast<size_t>(parts * cols_), 0.0); }
  double* of_part(int64_t part) { return sums_.data() + part * cols_; }
  void add(int64_t part, int64_t col, int64_t n, const float* values) {
    add_to_sums(values, n, of_part(part) + col);
  }
  // Writes the sums times `factor` to a dense F32, F16 or BF16 tensor of `cols` elements.
  // `accumulate`: adds its previous values.
  void store(const te_fl_tensor& out, bool accumulate = false, double factor = 1.0) const;

 private:
  int64_t cols_;
  std::vector<double> sums_;
};

struct StoreOptions {
  // Replaces an infinite block scale. The input dtype's largest finite value.
  float inf_scale = FLT_MAX;
  // If not NULL, every value is added to its column's sum once.
  ColumnSums* sums = nullptr;
  // True if values depend only on the row-major index. The output is then divided regardless of
  // rows: pieces have row 0 and the index as col.
  bool flat = false;
  // If not NULL, called once per row, with the index of the calling part, before the row's first
  // piece is produced. Must not be used with `flat`.
  const FunctionRef<void(int64_t row, int64_t part)>* begin_row = nullptr;
};

// Returns why store_output() does not support `out`; nullptr if it does. Reads metadata only.
Refusal refuse_output(const te_fl_tensor& out) noexcept;

// Writes `out`, which must be dense and supported according to refuse_output(). Each piece is
// written after it has been produced, possibly before other pieces are produced.
void store_output(const te_fl_tensor& out, Produce produce, const StoreOptions& options = {});

// The largest finite value of F32, F16 or BF16.
float largest_finite_of(int dtype) noexcept;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace te_fl::cpu
