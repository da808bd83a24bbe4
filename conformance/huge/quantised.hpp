#pragma once

#include "conformance/huge/sampled.hpp"

namespace te_fl::huge {

// A quantised output and its comparison with expected values: FP8 in all scaling modes, row-wise
// and column-wise.
class Quantised {
 public:
  // `scale` applies to kTensor without compute_scale.
  Quantised(Run& run, const Shape& shape, const QuantSpec& spec, float scale = 16);

  operator const te_fl_tensor*() const { return tensor_; }  // NOLINT: as Tensor does
  const Tensor& tensor() const { return tensor_; }

  // Compares sampled elements, their scales, and amax. value(i) is logical element i before
  // quantisation. `exact`: value() is exact, so codes and scales must be equal. Otherwise a code
  // may be an adjacent one, or differ by up to `tolerance` in value. `amax` is the
  // largest magnitude of all elements, which samples may miss; NaN: unknown, not compared.
  void expect(Run& run, const Value& value, double amax, bool exact = true,
              double tolerance = 0) const;

 private:
  struct Copy;
  void expect_copy(Run& run, const Copy& copy, const Value& value, bool exact) const;
  void expect_scale_inv(Run& run, const Copy& copy, int64_t at, double scale, bool exact) const;

  Tensor tensor_;
  QuantSpec spec_;
  float scale_;
  mutable double amax_ = 0, tolerance_ = 0;
};

// Random FP8 data for an input, with values up to `largest`.
class Codes {
 public:
  explicit Codes(uint32_t seed, double largest = 448, DType dtype = DType::kF8E4M3);
  double at(int64_t i) const { return values_[static_cast<size_t>(i % Pattern::kPeriod)]; }
  uint8_t code(int64_t i) const { return codes_[static_cast<size_t>(i % Pattern::kPeriod)]; }
  // Writes the data to a tensor of 8-bit codes.
  void fill(Run& run, const Tensor& codes) const { run.repeat(codes, codes_); }

 private:
  std::vector<uint8_t> codes_;
  std::vector<double> values_;
};

// The index in scale_inv for logical element (row, col) of an [m, k] matrix (see te_fl_quant in
// plugin.h).
int64_t scale_index(Scaling scaling, bool columnwise, int64_t m, int64_t k, int64_t row,
                    int64_t col);

}  // namespace te_fl::huge
