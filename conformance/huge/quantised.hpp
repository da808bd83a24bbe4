#pragma once

#include "conformance/huge/sampled.hpp"

namespace te_fl::huge {

// A quantised output, and what it must hold. FP8 in any scaling mode, row-wise and column-wise.
class Quantised {
 public:
  // `scale` is that of kTensor without compute_scale.
  Quantised(Run& run, const Shape& shape, const QuantSpec& spec, float scale = 16);

  operator const te_fl_tensor*() const { return tensor_; }  // NOLINT: as Tensor does
  const Tensor& tensor() const { return tensor_; }

  // Compares sampled codes, the scales that belong to them, and amax. value(i): what is quantised
  // at logical element i; `exact`: to the last bit, so codes and scales are compared exactly, else
  // a code may be the next one, or be off by `slack` in value. amax is the largest magnitude of
  // all, which windows do not show; NaN: unknown, so not compared.
  void expect(Run& run, const Value& value, double amax, bool exact = true, double slack = 0) const;

 private:
  struct Copy;
  void expect_copy(Run& run, const Copy& copy, const Value& value, bool exact) const;
  void expect_scale_inv(Run& run, const Copy& copy, int64_t at, double scale, bool exact) const;

  Tensor tensor_;
  QuantSpec spec_;
  float scale_;
  mutable double amax_ = 0, slack_ = 0;
};

// The contents of an input of FP8 codes: random ones of values up to `largest`.
class Codes {
 public:
  explicit Codes(uint32_t seed, double largest = 448, DType dtype = DType::kF8E4M3);
  double at(int64_t i) const { return values_[static_cast<size_t>(i % Pattern::kPeriod)]; }
  uint8_t code(int64_t i) const { return codes_[static_cast<size_t>(i % Pattern::kPeriod)]; }
  // Writes them to a tensor of 8-bit codes.
  void fill(Run& run, const Tensor& codes) const { run.repeat(codes, codes_); }

 private:
  std::vector<uint8_t> codes_;
  std::vector<double> values_;
};

// Element of scale_inv (te_fl_quant in plugin.h) that belongs to logical element (row, col) of an
// [m, k] matrix.
int64_t scale_index(Scaling scaling, bool columnwise, int64_t m, int64_t k, int64_t row,
                    int64_t col);

}  // namespace te_fl::huge
