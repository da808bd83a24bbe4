// Reads and writes tensor elements as FP32 values, for every dtype, strides and scaling mode.
//
// Elements are addressed by their row-major logical index, or by (row, column) of the matrix view
// [M, K] of te_fl_quant, in which K is the last extent and M the product of the others.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::reference {

// The name of a te_fl_dtype_index: "f32", "bf16", ...
const char* dtype_name(int dtype) noexcept;
inline int dtype_of(const te_fl_tensor& t) noexcept { return dtype_index(t.dl.dtype); }

// Returns the offset of the element with logical index i, in elements, relative to data +
// byte_offset.
int64_t element_offset(const te_fl_tensor& t, int64_t i) noexcept;

// Calls f(offset, stride, count) for each run along the last dimension in the logical range [begin,
// begin + n). Offset and stride are in elements.
template <class F>
void for_each_run(const te_fl_tensor& t, int64_t begin, int64_t n, F&& f) {
  if (backend::is_contiguous(t)) {
    if (n > 0) f(begin, int64_t{1}, n);
    return;
  }
  const int last = t.dl.ndim - 1;  // a tensor of rank 0 is contiguous
  const int64_t extent = t.dl.shape[last];
  for (int64_t i = begin; i < begin + n;) {
    const int64_t count = std::min(extent - i % extent, begin + n - i);
    f(element_offset(t, i), backend::stride(t, last), count);
    i += count;
  }
}

// Selects row-wise or column-wise data of a quantised tensor that has both.
enum class Copy { kRowwise, kColumnwise };

// Reads F32, F16, BF16, F64, FP8, FP4 and E8M0 tensors as numbers. A quantised tensor is
// dequantised (code * scale_inv) from the preferred data, row-wise or column-wise, if it exists,
// else from the other. Unquantised FP8 and FP4 tensors are read without a scale. Keeps a reference
// to the tensor.
class Reader {
 public:
  explicit Reader(const te_fl_tensor& tensor, Copy preferred = Copy::kRowwise);

  int64_t size() const noexcept { return size_; }
  // Reads elements [begin, begin + n). The double overload computes code * scale_inv exactly; the
  // float overload rounds it once.
  void read(int64_t begin, int64_t n, float* out) const;
  void read(int64_t begin, int64_t n, double* out) const;
  float operator[](int64_t i) const {
    float value;
    read(i, 1, &value);
    return value;
  }
  // Both functions return all elements in row-major order.
  std::vector<float> all() const;
  std::vector<double> all_double() const;

 private:
  template <class Out>
  void read_as(int64_t begin, int64_t n, Out* out) const;
  template <class Code, class Out>
  void decode(int64_t begin, int64_t n, Out* out) const;
  double scale_of(int64_t row, int64_t col) const;

  const te_fl_tensor& tensor_;
  int64_t size_;
  bool columnwise_ = false;
  double nvfp4_amax_ = 0.0;
};

// Writes FP32 values to an unquantised tensor with any strides (F64, F32, F16, BF16, or FP8, FP4 or
// E8M0 without scales). Rounds each value once.
class Writer {
 public:
  explicit Writer(const te_fl_tensor& tensor) : tensor_(tensor) {}
  void write(int64_t begin, int64_t n, const float* values) const;
  void write(int64_t begin, int64_t n, const double* values) const;
  void set(int64_t i, float value) const { write(i, 1, &value); }

 private:
  const te_fl_tensor& tensor_;
};

// Describes how an output element depends on inputs that share the output's memory.
enum class Access {
  kSamePosition,  // only on elements with the same logical index
  kAnywhere
};

// Computes values [col, col + n) of one row of the output's matrix view, in FP32. May be called
// more than once for an element. A call never crosses a row.
using Produce = std::function<void(int64_t row, int64_t col, int64_t n, float* values)>;

// Writes an output of any dtype and scaling mode, row-wise and column-wise, from FP32 values that
// are computed piece by piece. `inputs`: the tensors that `produce` reads. If they share memory
// with the output so that writing a piece could change inputs that are still needed, all values are
// computed before the first is written. inf_scale: the input dtype's largest finite value, which
// replaces an infinite block scale.
void store_output(const te_fl_tensor& out, std::initializer_list<const te_fl_tensor*> inputs,
                  const Produce& produce, Access access = Access::kSamePosition,
                  float inf_scale = FLT_MAX);
// Writes an output from an array of all its values in row-major order.
void store_output(const te_fl_tensor& out, const float* values, float inf_scale = FLT_MAX);

// The largest finite value of a float dtype.
float largest_finite_of(int dtype) noexcept;

// Returns the value of an F32 tensor with one element.
inline float scalar_f32(const te_fl_tensor& t) noexcept { return *backend::data<const float>(t); }

}  // namespace te_fl::reference
