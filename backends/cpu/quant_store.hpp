// Writes FP32 values, produced piece by piece on the pool, into an output of any dtype and of the
// scaling modes none, per tensor and block: every copy that the output has, with its scales and
// amax.
#pragma once

#include <cfloat>
#include <cstdint>
#include <vector>

#include "convert.hpp"
#include "families.hpp"
#include "function_ref.hpp"
#include "tensor_view.hpp"

namespace te_fl::cpu {

// Elements of a dense tensor as FP32; FP8 codes as they are.
class Loader {
 public:
  explicit Loader(const te_fl_tensor& t)
      : dtype_(dtype_of(t)), bytes_(element_bytes(t)), data_(backend::data<const char>(t)) {}
  // out is padded.
  void operator()(int64_t index, int64_t n, float* out) const {
    load_f32(dtype_, data_ + index * bytes_, n, out);
  }

 private:
  int dtype_;
  int64_t bytes_;
  const char* data_;
};

// Values [col, col + n) of one row of the output's matrix view; n <= kChunk. `part` numbers the
// concurrent parts: pieces of one part are produced one after the other.
struct Piece {
  int64_t row, col, n;
  int64_t part;
};
// Fills out, a buffer padded for n. Called from several threads, possibly twice for one piece (a
// derived scale needs a pass of its own).
using Produce = FunctionRef<void(const Piece&, float* out)>;

// Sums over rows, in double, deterministic for a number of threads.
class ColumnSums {
 public:
  explicit ColumnSums(int64_t cols) : cols_(cols) {}
  void start(int64_t parts) { sums_.assign(static_cast<size_t>(parts * cols_), 0.0); }
  double* of_part(int64_t part) { return sums_.data() + part * cols_; }
  void add(int64_t part, int64_t col, int64_t n, const float* values) {
    add_to_sums(values, n, of_part(part) + col);
  }
  // Writes the sums times factor to a dense tensor of `cols` elements, F32, F16 or BF16; adds what
  // it holds if asked.
  void store(const te_fl_tensor& out, bool accumulate = false, double factor = 1.0) const;

 private:
  int64_t cols_;
  std::vector<double> sums_;
};

struct StoreOptions {
  // Replaces an infinite block scale: the input type's largest finite value.
  float inf_scale = FLT_MAX;
  // If not null, every value is added to its column's sum once.
  ColumnSums* sums = nullptr;
  // Values depend on the row-major index only, so that the output may be cut anywhere: pieces have
  // row 0 and the index as column.
  bool flat = false;
  // If not null, called once for every row before its first piece is produced, with the calling
  // part. Not with flat.
  const FunctionRef<void(int64_t row, int64_t part)>* begin_row = nullptr;
};

// The quantised outputs that store_output does not serve, as a reason for supports(); nullptr if it
// serves `out`. Reads metadata only.
Refusal refuse_output(const te_fl_tensor& out) noexcept;

// `out` is dense and passed both checks above. Writing a piece happens after it was produced, but
// other pieces may be written before.
void store_output(const te_fl_tensor& out, Produce produce, const StoreOptions& options = {});

// Largest finite value of F32, F16 or BF16.
float largest_finite_of(int dtype) noexcept;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace te_fl::cpu
