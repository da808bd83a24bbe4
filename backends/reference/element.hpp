// Tensor elements as FP32 values, whatever the dtype, the strides and the scaling mode; and back.
//
// Elements are addressed by their row-major logical index, or by (row, column) of the matrix view
// [M, K] of te_fl_quant (K: last extent, M: product of the others).
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

// "f32", "bf16", ... of a te_fl_dtype_index.
const char* dtype_name(int dtype) noexcept;
inline int dtype_of(const te_fl_tensor& t) noexcept { return dtype_index(t.dl.dtype); }

// Offset, in elements from data + byte_offset, of the element with logical index i.
int64_t element_offset(const te_fl_tensor& t, int64_t i) noexcept;

// Calls f(offset, stride, count) for each run along the last dimension that the logical indices
// [begin, begin + n) consist of; offset and stride in elements.
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

// The copy of a quantised tensor to read when it has both.
enum class Copy { kRowwise, kColumnwise };

// Reads any F32, F16, BF16, F64, FP8, FP4 or E8M0 tensor as numbers: quantised ones dequantised
// (code * scale_inv) from the preferred copy if it exists, else from the other; bare FP8 and FP4
// codes as they are. Keeps a reference to the tensor.
class Reader {
 public:
  explicit Reader(const te_fl_tensor& tensor, Copy preferred = Copy::kRowwise);

  int64_t size() const noexcept { return size_; }
  // Elements [begin, begin + n). As double the product with scale_inv is exact; as float it is
  // rounded once.
  void read(int64_t begin, int64_t n, float* out) const;
  void read(int64_t begin, int64_t n, double* out) const;
  float operator[](int64_t i) const {
    float value;
    read(i, 1, &value);
    return value;
  }
  // All elements, compact row-major.
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

// Writes FP32 values to a tensor that is not quantised (F64, F32, F16, BF16, or bare FP8, FP4, E8M0
// codes), each rounded once; any strides.
class Writer {
 public:
  explicit Writer(const te_fl_tensor& tensor) : tensor_(tensor) {}
  void write(int64_t begin, int64_t n, const float* values) const;
  void write(int64_t begin, int64_t n, const double* values) const;
  void set(int64_t i, float value) const { write(i, 1, &value); }

 private:
  const te_fl_tensor& tensor_;
};

// Marks outputs whose values may depend on the inputs that share its memory.
enum class Access {
  kSamePosition,  // on elements at the same logical index only
  kAnywhere
};

// Computes values [col, col + n) of one row of the output's matrix view, in FP32. May be called
// more than once for one element; a call never crosses a row.
using Produce = std::function<void(int64_t row, int64_t col, int64_t n, float* values)>;

// Writes an output of any dtype and scaling mode, every copy that it has, from FP32 values computed
// piece by piece. `inputs` are the tensors that `produce` reads: where they share memory with the
// output in a way that piecewise writing would disturb, all values are computed before the first is
// written. inf_scale replaces an infinite block scale: the input type's largest finite value.
void store_output(const te_fl_tensor& out, std::initializer_list<const te_fl_tensor*> inputs,
                  const Produce& produce, Access access = Access::kSamePosition,
                  float inf_scale = FLT_MAX);
// Writes them from an array with the values of all elements, compact row-major.
void store_output(const te_fl_tensor& out, const float* values, float inf_scale = FLT_MAX);

// Largest finite value of a float dtype.
float largest_finite_of(int dtype) noexcept;

// The value of an F32 tensor with one element.
inline float scalar_f32(const te_fl_tensor& t) noexcept { return *backend::data<const float>(t); }

}  // namespace te_fl::reference
