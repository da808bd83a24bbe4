#include "conformance/huge/quantised.hpp"

#include <algorithm>
#include <limits>
#include <random>
#include <unordered_map>

#include "conformance/format.hpp"
#include "conformance/oracle_quantize.hpp"

namespace te_fl::huge {
namespace {

using conformance::bits_float;
using conformance::decode_bits;
using conformance::encode_bits;
using conformance::float_bits;
using conformance::Format;
using conformance::format_of;
using conformance::largest;

constexpr int64_t kBlock = 128;

int64_t blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }
int64_t up_to_4(int64_t n) { return (n + 3) / 4 * 4; }

int abi(DType dtype) { return dtype == DType::kF8E5M2 ? TE_FL_F8E5M2 : TE_FL_F8E4M3; }

// "Scale from amax" in docs/numerics.md, for finite amaxes other than 0.
float scale_from(double amax, int dtype, bool pow2) {
  const float scale = static_cast<float>(largest(dtype)) / static_cast<float>(amax);
  return pow2 ? bits_float(float_bits(scale) & 0xff800000u) : scale;
}

// The scale of MXFP8: a power of two whose inverse is stored as an E8M0 code.
double mxfp8_scale_from(double amax, int dtype) {
  const uint8_t code =
      conformance::e8m0_from_amax(static_cast<float>(amax), static_cast<float>(largest(dtype)));
  return std::ldexp(1.0, 127 - code);
}

}  // namespace

int64_t scale_index(Scaling scaling, bool columnwise, int64_t m, int64_t k, int64_t row,
                    int64_t col) {
  if (scaling == Scaling::kTensor) return 0;
  if (scaling == Scaling::kMXFP8) {
    const conformance::CopyLayout at(TE_FL_SCALING_MXFP8, columnwise, m, k);
    return at.scale_index(row / at.block_m, col / at.block_k);
  }
  // The column-wise layout is the row-wise one of the transposed matrix.
  if (columnwise) std::swap(m, k), std::swap(row, col);
  return scaling == Scaling::kBlock1x128 ? col / kBlock * up_to_4(m) + row
                                         : row / kBlock * up_to_4(blocks(k)) + col / kBlock;
}

Codes::Codes(uint32_t seed, double largest, DType dtype) {
  std::mt19937 engine(seed);
  const Format& format = format_of(abi(dtype));
  while (static_cast<int64_t>(codes_.size()) < Pattern::kPeriod) {
    const auto code = static_cast<uint8_t>(engine() & 0xff);
    const double value = decode_bits(format, code);
    if (!(std::fabs(value) <= largest)) continue;
    codes_.push_back(code), values_.push_back(value);
  }
}

Quantised::Quantised(Run& run, const Shape& shape, const QuantSpec& spec, float scale)
    : spec_(spec), scale_(scale) {
  const bool has_scale = spec.scaling == Scaling::kTensor && !spec.compute_scale;
  const Tensor state = run.output({1}, DType::kF32);
  run.set(state, 0, scale);
  if (run.failed()) return;
  auto made = Tensor::empty_quantized(shape, spec, run.device(), has_scale ? &state : nullptr);
  if (made.ok()) {
    tensor_ = std::move(made).value();
  } else {
    run.fail(made.status().to_string());
  }
}

// The row-wise or column-wise data as a matrix. The column-wise data of MXFP8 are not transposed.
struct Quantised::Copy {
  bool columnwise, transposed;
  int64_t m, k;
  Tensor codes, scale_inv;
  const char* name;

  int64_t row(int64_t i) const { return transposed ? i % m : i / k; }
  int64_t col(int64_t i) const { return transposed ? i / m : i % k; }
};

void Quantised::expect_scale_inv(Run& run, const Copy& copy, int64_t at, double scale,
                                 bool exact) const {
  const std::vector<float> got = run.read(copy.scale_inv, at, 1);
  const float want = spec_.scaling == Scaling::kMXFP8 ? static_cast<float>(127 - std::ilogb(scale))
                                                      : 1.0f / static_cast<float>(scale);
  if (run.failed()) return;
  const bool fine = exact ? got[0] == want : std::fabs(got[0] - want) <= 1e-4f * want;
  if (!fine) {
    run.fail(std::string(copy.name) + " scale_inv[" + std::to_string(at) + "] is " +
             std::to_string(got[0]) + ", expected " + std::to_string(want));
  }
}

void Quantised::expect_copy(Run& run, const Copy& copy, const Value& value, bool exact) const {
  const int dtype = abi(spec_.dtype);
  const Format& format = format_of(dtype);
  const double step = std::ldexp(1.0, -format.mantissa_bits);
  const bool wide = spec_.scaling == Scaling::kBlock128x128,
             micro = spec_.scaling == Scaling::kMXFP8;
  const int64_t block = micro ? 32 : kBlock;
  std::unordered_map<int64_t, double> scales;  // key: index in scale_inv
  const auto scale_of = [&](int64_t row, int64_t col) {
    if (spec_.scaling == Scaling::kTensor) {
      return double{spec_.compute_scale ? scale_from(amax_, dtype, spec_.pow2_scale) : scale_};
    }
    const int64_t at = scale_index(spec_.scaling, copy.columnwise, copy.m, copy.k, row, col);
    const auto known = scales.find(at);
    if (known != scales.end()) return known->second;
    const bool down = wide || copy.columnwise, right = wide || !copy.columnwise;
    const int64_t row0 = down ? row / block * block : row, rows = down ? block : 1;
    const int64_t col0 = right ? col / block * block : col, cols = right ? block : 1;
    double amax = 0;
    for (int64_t r = row0; r < std::min(row0 + rows, copy.m); ++r) {
      for (int64_t c = col0; c < std::min(col0 + cols, copy.k); ++c) {
        amax = std::max(amax, std::fabs(value(r * copy.k + c)));
      }
    }
    const double scale =
        micro ? mxfp8_scale_from(amax, dtype) : double{scale_from(amax, dtype, spec_.pow2_scale)};
    expect_scale_inv(run, copy, at, scale, exact);
    return scales[at] = scale;
  };
  if (spec_.scaling == Scaling::kTensor) {
    expect_scale_inv(run, copy, 0, scale_of(0, 0), exact || !spec_.compute_scale);
  }
  const int64_t total = copy.m * copy.k, length = wide || copy.columnwise ? 512 : Run::kWindow;
  for (int64_t begin : run.windows(total, length)) {
    const int64_t count = std::min(length, total - begin);
    const std::vector<float> got = run.read(copy.codes, begin, count);
    for (int64_t i = begin; i < begin + count && !run.failed(); ++i) {
      const int64_t row = copy.row(i), col = copy.col(i);
      const double x = value(row * copy.k + col), scale = scale_of(row, col);
      const auto code = static_cast<uint8_t>(got[static_cast<size_t>(i - begin)]);
      const auto want = static_cast<uint8_t>(
          encode_bits(format, double{static_cast<float>(x) * static_cast<float>(scale)}));
      const double found = decode_bits(format, code), meant = decode_bits(format, want);
      const bool fine =
          exact ? code == want
                : std::fabs(found - meant) <= step * std::fabs(meant) + 0.002 + tolerance_ * scale;
      if (!fine) {
        run.fail(std::string(copy.name) + " codes[" + std::to_string(i) + "] is " +
                 std::to_string(found) + ", expected " + std::to_string(meant) + " (" +
                 std::to_string(x) + " times " + std::to_string(scale) + ")");
      }
    }
  }
}

void Quantised::expect(Run& run, const Value& value, double amax, bool exact,
                       double tolerance) const {
  if (run.failed()) return;
  amax_ = amax, tolerance_ = tolerance;
  const int64_t k = tensor_.size(-1), m = tensor_.numel() / k;
  const bool one_scale = spec_.scaling == Scaling::kTensor;
  if (spec_.rowwise) {
    expect_copy(run, {false, false, m, k, tensor_.rowwise_codes(), tensor_.scale_inv(), "row-wise"},
                value, exact);
  }
  if (spec_.columnwise) {
    const Tensor own = tensor_.columnwise_scale_inv();
    expect_copy(run,
                {true, spec_.scaling != Scaling::kMXFP8, m, k, tensor_.columnwise_codes(),
                 one_scale && !own.defined() ? tensor_.scale_inv() : own, "column-wise"},
                value, exact);
  }
  if (!one_scale || std::isnan(amax)) return;
  const std::vector<float> found = run.read(tensor_.amax(), 0, 1);
  if (!run.failed() && std::fabs(double{found[0]} - amax) > (exact ? 0 : 1e-5 * amax)) {
    run.fail("amax is " + std::to_string(found[0]) + ", expected " + std::to_string(amax));
  }
}

}  // namespace te_fl::huge
