// Splits a quantised matrix into row slices, as te_fl.Rows describes. Each slice is a separate
// quantised tensor. In each array of the full matrix (codes, scales, ..), the slices' data follow
// one another.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "ops/quantised.hpp"
#include "py/errors.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

// Iterates over the row slices of a quantised matrix. All functions throw te_fl.InvalidArgument,
// naming the argument `name`.
class QuantisedRows {
 public:
  // `whole` must outlive this object.
  QuantisedRows(const QuantisedTensor& whole, const char* name) : whole_(whole), name_(name) {
    const te_fl_dltensor& dl = whole.tensor.dl;
    if (dl.ndim != 2 || dl.strides != nullptr || dl.dtype.bits != 8)
      fail("takes a te_fl.Quantized that is a contiguous matrix of FP8 codes");
  }
  // Writes the next `size` rows to `part`.
  void next(int64_t size, QuantisedTensor& part) {
    const int64_t left = whole_.tensor.dl.shape[0] - begin_, cols = whole_.tensor.dl.shape[1];
    if (size < 0 || size > left) {
      fail("has a size " + std::to_string(size) + " behind " + std::to_string(begin_) + " of " +
           std::to_string(begin_ + left) +
           " rows; sizes are 0 or more and their sum is the number of rows");
    }
    part.tensor = whole_.tensor;
    part.quant = whole_.quant;
    part.shape = {size, cols};
    part.tensor.dl.shape = part.shape.data();
    part.tensor.quant = &part.quant;
    if (part.tensor.dl.data != nullptr) {
      part.tensor.dl.byte_offset += static_cast<uint64_t>(begin_ * cols);
    }
    const std::array<int64_t, kPartCount> bytes = {
        size * cols, scale_bytes(false, size, cols), scale_bytes(true, size, cols), 4, 4, 4};
    for (size_t i = 0; i < bytes.size(); ++i) {
      char** const at =
          reinterpret_cast<char**>(reinterpret_cast<char*>(&part.quant) + kParts[i].offset);
      if (*at == nullptr) continue;
      *at += used_[i];
      used_[i] += bytes[i];
      if (used_[i] <= whole_.part_bytes[i]) continue;
      fail(std::string("has parts of which ") + kParts[i].name + " is " + std::to_string(used_[i]) +
           " bytes or more; that of the te_fl.Quantized is " +
           std::to_string(whole_.part_bytes[i]));
    }
    begin_ += size;
  }
  // Throws unless all rows were consumed.
  void end() const {
    if (begin_ == whole_.tensor.dl.shape[0]) return;
    fail("has sizes whose sum is " + std::to_string(begin_) + "; the tensor has " +
         std::to_string(whole_.tensor.dl.shape[0]) + " rows");
  }

 private:
  int64_t scale_bytes(bool columnwise, int64_t m, int64_t k) const {
    const auto scaling = static_cast<Scaling>(whole_.quant.scaling);
    const auto [rows, cols] = scale_inv_shape(scaling, columnwise, m, k);
    return rows * cols * (scaling == Scaling::kMXFP8 ? 1 : 4);
  }
  [[noreturn]] void fail(const std::string& text) const {
    throw_status(
        Status(StatusCode::kInvalidArgument, "'" + std::string(name_) + "': te_fl.Rows " + text));
  }

  const QuantisedTensor& whole_;
  const char* name_;
  int64_t begin_ = 0;
  std::array<int64_t, kPartCount> used_{};
};

}  // namespace te_fl::python
