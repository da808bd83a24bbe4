// Splits a tensor along its first dimension, as te_fl.Rows describes.
#pragma once

#include <string>
#include <vector>

#include "py/errors.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {

// Iterates over the slices of a tensor. All functions throw te_fl.InvalidArgument, naming the
// argument `name`.
class RowParts {
 public:
  // `whole` must outlive this object and the slices.
  RowParts(const te_fl_tensor& whole, const char* name) : whole_(whole), name_(name) {
    const int bits = te_fl::bits(static_cast<DType>(dtype_index(whole.dl.dtype)));
    if (whole.dl.ndim == 0 || bits % 8 != 0)
      fail("takes a tensor of one dimension or more, of whole bytes");
    row_bytes_ = bits / 8;
    for (int32_t d = 1; d < whole.dl.ndim && whole.dl.strides == nullptr; ++d)
      row_bytes_ *= whole.dl.shape[d];
    if (whole.dl.strides != nullptr) row_bytes_ *= whole.dl.strides[0];
  }
  // Returns the next `size` rows as a slice. Its extents are written to `shape`, which must outlive
  // the slice.
  te_fl_tensor next(int64_t size, std::vector<int64_t>& shape) {
    if (size < 0 || size > rows() - begin_) {
      fail("has a size " + std::to_string(size) + " behind " + std::to_string(begin_) + " of " +
           std::to_string(rows()) +
           " rows; sizes are 0 or more and their sum is the number of rows");
    }
    shape.assign(whole_.dl.shape, whole_.dl.shape + whole_.dl.ndim);
    shape[0] = size;
    te_fl_tensor part = whole_;
    part.dl.shape = shape.data();
    part.dl.byte_offset += static_cast<uint64_t>(begin_ * row_bytes_);
    begin_ += size;
    return part;
  }
  // Throws unless all rows were consumed.
  void end() const {
    if (begin_ == rows()) return;
    fail("has sizes whose sum is " + std::to_string(begin_) + "; the tensor has " +
         std::to_string(rows()) + " rows");
  }

 private:
  int64_t rows() const { return whole_.dl.shape[0]; }
  [[noreturn]] void fail(const std::string& text) const {
    throw_status(
        Status(StatusCode::kInvalidArgument, "'" + std::string(name_) + "': te_fl.Rows " + text));
  }

  const te_fl_tensor& whole_;
  const char* name_;
  int64_t row_bytes_ = 0, begin_ = 0;
};

}  // namespace te_fl::python
