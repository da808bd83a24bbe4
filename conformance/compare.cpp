#include "conformance/compare.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <unordered_set>

#include "conformance/oracle_quantize.hpp"

namespace te_fl::conformance {
namespace {

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...) {
  char buffer[400];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  return buffer;
}

// The position of logical element i in a shape, such as "[2,5]"; empty for a scalar.
std::string place(const Dims& shape, int64_t i) {
  std::string at;
  for (size_t d = shape.size(); d-- > 0; i /= shape[d])
    at = std::to_string(i % shape[d]) + (at.empty() ? "" : ",") + at;
  return shape.empty() ? std::string() : "[" + at + "]";
}

// Collects the differences of an output: the text of the first one, and their number.
class Differences {
 public:
  // Adds a difference. `describe` returns its text and is called only for the first one.
  template <class F>
  void add(F&& describe) {
    if (wrong_++ == 0) first_ = describe();
  }
  // The complete text; empty if there is no difference.
  std::string text(int64_t elements, const char* of = "elements") const {
    if (wrong_ == 0 || elements < 2) return first_;
    return first_ + "; " + std::to_string(wrong_) + " of " + std::to_string(elements) + " " + of +
           (wrong_ == 1 ? " is" : " are") + " wrong";
  }
  bool any() const { return wrong_ != 0; }

 private:
  std::string first_;
  int64_t wrong_ = 0;
};

double fp32_tolerance(double v) { return 1e-6 + 5e-6 * std::fabs(v); }

// True if an element of an output still is the NaN that the case put there. FP8 formats have too
// few NaNs to tell it from a result.
bool poisoned(const Tensor& t, int64_t i) {
  const int width = storage_bits(t.spec.dtype) / 8;
  if (width < 2 || !is_float(t.spec.dtype) || t.role != Role::kOut) return false;
  const int64_t at = t.index(i) * width;
  const uint8_t* p = t.data->data() + at;
  return std::isnan(t.get(i)) && std::equal(p, p + width, t.data->initial() + at);
}

bool close(double got, double want, double tol, int dtype) {
  if (std::isnan(want)) return std::isnan(got);
  if (got == want) return true;
  if (std::isinf(got))
    return std::fabs(want) + tol >= largest(dtype) && std::signbit(got) == std::signbit(want);
  if (std::isinf(want)) return false;
  return std::fabs(got - want) <= tol;
}

// The mean error of results in F16 or BF16, in units in the last place, away from zero. Rounding to
// nearest gives a mean near 0, rounding towards zero one of -0.5, within the tolerance of every
// element.
class RoundingBias {
 public:
  explicit RoundingBias(int dtype) {
    if (dtype == TE_FL_F16) bits_ = 11, least_ = 0x1p-14;
    if (dtype == TE_FL_BF16) bits_ = 8, least_ = 0x1p-126;
  }
  // `extra`: the tolerance of the value before rounding; counts only if it is much less than a
  // unit. Equal values have equal errors, so each value counts once; a few thousand suffice.
  void add(double got, double want, double extra) {
    if (bits_ == 0 || seen_.size() >= 4000) return;
    if (!(std::fabs(want) >= least_) || !std::isfinite(got)) return;
    const double unit = std::ldexp(1.0, binary_exponent(std::fabs(want)) + 1 - bits_);
    if (extra > unit / 16 || !seen_.insert(std::fabs(want)).second) return;
    sum_ += (std::fabs(got) - std::fabs(want)) / unit;
  }
  std::string text(const std::string& name) const {
    const double mean = seen_.empty() ? 0 : sum_ / static_cast<double>(seen_.size());
    if (seen_.size() < 200 || std::fabs(mean) < 0.3) return {};
    return conformance::text(
        "%s: its elements are %.2g units in the last place %s on average; rounding to nearest "
        "leaves "
        "no such bias",
        name.c_str(), std::fabs(mean), mean < 0 ? "too small" : "too large");
  }

 private:
  int bits_ = 0;
  double least_ = 0, sum_ = 0;
  std::unordered_set<double> seen_;
};

std::string compare_values(const Expectation& e) {
  const Tensor& t = *e.tensor;
  Differences wrong;
  RoundingBias bias(t.spec.dtype);
  for (int64_t i = 0; i < t.numel(); ++i) {
    if (!e.skip.empty() && e.skip[i]) continue;
    const double got = t.get(i);
    bias.add(got, e.want[i], e.extra.empty() ? 0 : e.extra[i]);
    if (got == e.want[i]) continue;
    const double tol = tolerance(e, t.spec.dtype, i);
    const double want = tol == 0 ? rounded(t.spec.dtype, e.want[i]) : e.want[i];
    const bool unwritten = poisoned(t, i);
    if (!unwritten && close(got, want, tol, t.spec.dtype)) continue;
    wrong.add([&] {
      const std::string at = t.name + place(t.shape, i);
      if (unwritten) return text("%s was not written, expected %.9g", at.c_str(), want);
      return text("%s: got %.9g, expected %.9g (off by %.3g, tolerance %.3g)", at.c_str(), got,
                  want, std::fabs(got - want), tol);
    });
  }
  return wrong.any() ? wrong.text(t.numel()) : bias.text(t.name);
}

// Compares the bytes of one array of a tensor (data, scales). `shape` is the shape of the array.
std::string compare_bytes(const std::string& part, const Dims& shape, const uint8_t* got,
                          const std::vector<uint8_t>& want, int width) {
  int64_t elements = 1;
  for (const int64_t n : shape) elements *= n;
  if (width >= 8 && std::equal(got, got + elements * (width / 8), want.begin())) return {};
  Differences wrong;
  for (int64_t i = 0; i < elements; ++i) {
    const int64_t bit = i * width, bytes = std::max(width / 8, 1);
    const auto element = [&](const uint8_t* data) {
      std::string hex;
      for (int64_t b = 0; b < bytes; ++b) {
        const uint8_t byte = data[bit / 8 + b];
        hex =
            width < 8 ? text("%x", byte >> bit % 8 & ((1 << width) - 1)) : text("%02x", byte) + hex;
      }
      return hex;
    };
    const bool same = width < 8 ? ((got[bit / 8] ^ want[static_cast<size_t>(bit / 8)]) >> bit % 8 &
                                   ((1 << width) - 1)) == 0
                                : std::equal(got + bit / 8, got + bit / 8 + bytes, &want[bit / 8]);
    if (same) continue;
    wrong.add([&] {
      return text("%s: got 0x%s, expected 0x%s (exact)", (part + place(shape, i)).c_str(),
                  element(got).c_str(), element(want.data()).c_str());
    });
  }
  return wrong.text(elements);
}

// Compares the bytes of an output without a meaningful shape: mask bits, or storage with gaps.
std::string compare_storage(const Expectation& e) {
  const Tensor& t = *e.tensor;
  const int width = storage_bits(t.spec.dtype);
  const auto size = static_cast<int64_t>(e.bytes.size());
  const bool compact = t.strides.empty() && t.offset == 0 &&
                       static_cast<int64_t>(bytes_for(t.spec.dtype, t.numel())) == size;
  if (compact) return compare_bytes(t.name, t.shape, t.data->data(), e.bytes, width);
  return compare_bytes(t.name + " (bytes)", {size}, t.data->data(), e.bytes, 8);
}

float f32(const std::shared_ptr<Buffer>& b) {
  return static_cast<float>(load(TE_FL_F32, b->data(), 0));
}

std::string exact_float(const std::string& name, float got, float want) {
  if (float_bits(got) == float_bits(want)) return {};
  return text("%s: got %.9g (0x%08x), expected %.9g (0x%08x) exactly", name.c_str(),
              static_cast<double>(got), float_bits(got), static_cast<double>(want),
              float_bits(want));
}

std::string compare_exact(const Expectation& e) {
  const Tensor& t = *e.tensor;
  const QuantImage want = quantise_exact(e.want, t.rows(), t.cols(), t.spec, e.input_dtype);
  const bool tensor_mode = t.spec.scaling == TE_FL_SCALING_TENSOR;
  const int scale_width = storage_bits(CopyLayout(t.spec.scaling, false, 1, 1).scale_dtype);
  std::string wrong;
  const auto check = [&](const char* part, const Dims& shape, const std::shared_ptr<Buffer>& got,
                         const std::vector<uint8_t>& bytes, int width) {
    if (wrong.empty() && got != nullptr)
      wrong = compare_bytes(t.name + "." + part, shape, got->data(), bytes, width);
  };
  const CopyLayout row(t.spec.scaling, false, t.rows(), t.cols()),
      col(t.spec.scaling, true, t.rows(), t.cols());
  const bool turned = t.spec.scaling != TE_FL_SCALING_MXFP8;
  if (t.amax != nullptr) wrong = exact_float(t.name + ".amax", f32(t.amax), want.amax);
  if (wrong.empty() && t.scale != nullptr)
    wrong = exact_float(t.name + ".scale", f32(t.scale), want.scale);
  check("scale_inv", {row.scale_rows, row.scale_cols}, t.scale_inv,
        t.spec.row || !tensor_mode ? want.scale_inv : want.col_scale_inv, scale_width);
  check("columnwise_scale_inv", {col.scale_rows, col.scale_cols}, t.col_scale_inv,
        want.col_scale_inv, scale_width);
  if (t.spec.row) check("data", t.shape, t.data, want.data, storage_bits(t.spec.dtype));
  check("columnwise_data", turned ? Dims{t.cols(), t.rows()} : Dims{t.rows(), t.cols()}, t.col_data,
        want.col_data, storage_bits(t.spec.dtype));
  return wrong;
}

// ---- comparison of quantised results of fused ops

struct Interval {
  float low, high;
};

float nudged(double x, bool up) {
  const auto f = static_cast<float>(x);
  if (!std::isfinite(f)) return f;
  if (up && static_cast<double>(f) < x)
    return std::nextafter(f, std::numeric_limits<float>::infinity());
  if (!up && static_cast<double>(f) > x)
    return std::nextafter(f, -std::numeric_limits<float>::infinity());
  return f;
}

Interval value_interval(const Expectation& e, size_t i) {
  const double t = tolerance(e, TE_FL_F32, i);
  return {nudged(e.want[i] - t, false), nudged(e.want[i] + t, true)};
}

void widen_amax(Interval& amax, const Interval& v) {
  if (std::isnan(v.low)) return;
  const bool across = v.low <= 0 && v.high >= 0;
  const float smallest = across ? 0 : std::min(std::fabs(v.low), std::fabs(v.high));
  amax.low = std::max(amax.low, smallest);
  amax.high = std::max({amax.high, std::fabs(v.low), std::fabs(v.high)});
}

// The interval of possible amaxes of these elements.
Interval amax_interval(const Expectation& e, int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                       int64_t columns) {
  Interval amax{0, 0};
  for (int64_t i = i0; i < i1; ++i) {
    for (int64_t n = i * columns + j0; n < i * columns + j1; ++n) {
      const auto at = static_cast<size_t>(n);
      const double a = std::fabs(e.want[at]), allowed = tolerance(e, TE_FL_F32, at);
      // Skips elements that cannot widen the interval (most elements). The factor 1 + 1e-6 covers
      // the FP32 rounding of the bounds.
      if (a - allowed >= static_cast<double>(amax.low) ||
          !((a + allowed) * (1 + 1e-6) < static_cast<double>(amax.high)))
        widen_amax(amax, value_interval(e, at));
    }
  }
  return amax;
}

// The value of an FP8 or FP4 code, and the midpoints to the neighbouring values. Numbers strictly
// between the midpoints round to the code. For a code that is not finite the range is empty.
struct Code {
  double value, down = infinity(), up = -infinity();
};

std::array<Code, 256> make_codes(const Format& f) {
  std::array<Code, 256> codes{};
  std::vector<double> values;
  for (uint32_t c = 0; c < codes.size(); ++c) {
    codes[c].value = decode_bits(f, c);
    if (std::isfinite(codes[c].value)) values.push_back(codes[c].value);
  }
  std::sort(values.begin(), values.end());
  for (Code& code : codes) {
    if (!std::isfinite(code.value)) continue;
    const auto [here, above] = std::equal_range(values.begin(), values.end(), code.value);
    code.down = here == values.begin() ? -infinity() : (here[-1] + code.value) / 2;
    code.up = above == values.end() ? infinity() : (code.value + *above) / 2;
  }
  return codes;
}

// The codes of an FP8 or FP4 format. For FP4 the upper bits of the index are ignored.
const std::array<Code, 256>& codes_of(int dtype) {
  static const auto e4m3 = make_codes(format_of(TE_FL_F8E4M3));
  static const auto e5m2 = make_codes(format_of(TE_FL_F8E5M2));
  static const auto e2m1 = make_codes(format_of(TE_FL_F4E2M1));
  return dtype == TE_FL_F8E4M3 ? e4m3 : dtype == TE_FL_F8E5M2 ? e5m2 : e2m1;
}

// A quick check that accepts most correct codes: the value times any possible factor rounds to the
// code, with a margin for FP32 rounding. compare_codes() checks the remaining codes exactly.
bool surely_right(const Code& code, double want, Interval factor) {
  if (!(std::fabs(want) < 0x1p100)) return false;
  const double a = want * static_cast<double>(factor.low),
               b = want * static_cast<double>(factor.high);
  const double low = std::min(a, b), high = std::max(a, b);
  return low - 1e-6 * std::fabs(low) > code.down && high + 1e-6 * std::fabs(high) < code.up;
}

// Compares the FP8 or FP4 codes of one block with the codes that are possible for the intervals of
// values and factors.
void compare_codes(const Expectation& e, const CopyLayout& at, const Buffer& data, int64_t bm,
                   int64_t bk, Interval factor, Differences& wrong) {
  const Tensor& t = *e.tensor;
  const Format& f = format_of(t.spec.dtype);
  const auto& codes = codes_of(t.spec.dtype);
  const bool halves = storage_bits(t.spec.dtype) == 4;
  const int64_t i1 = std::min(at.m, (bm + 1) * at.block_m),
                j1 = std::min(at.k, (bk + 1) * at.block_k);
  for (int64_t i = bm * at.block_m; i < i1; ++i) {
    for (int64_t j = bk * at.block_k; j < j1; ++j) {
      const size_t n = static_cast<size_t>(i * at.k + j);
      const int64_t where = at.data_index(i, j);
      const uint8_t byte = data.data()[halves ? where / 2 : where];
      const Code& code = codes[halves ? byte >> where % 2 * 4 & 0xf : byte];
      if (surely_right(code, e.want[n], factor)) continue;
      if (!e.skip.empty() && e.skip[n]) continue;
      const Interval v = value_interval(e, n);
      const double got = code.value;
      const double low = decode_bits(
          f, encode_bits(f, static_cast<double>(v.low * (v.low < 0 ? factor.high : factor.low))));
      const double high = decode_bits(
          f, encode_bits(f, static_cast<double>(v.high * (v.high < 0 ? factor.low : factor.high))));
      const bool right = std::isnan(e.want[n])
                             ? std::isnan(got) && data.data()[at.data_index(i, j)] == 0x7f
                             : got >= low && got <= high;
      if (right) continue;
      wrong.add([&] {
        return text(
            "%s.%s[%lld,%lld]: got code value %.9g, expected between %.9g and %.9g (%.9g before "
            "quantisation, factor %.9g)",
            t.name.c_str(), at.columnwise ? "columnwise_data" : "data", (long long)i, (long long)j,
            got, low, high, e.want[n], static_cast<double>(factor.low));
      });
    }
  }
}

std::string scale_out_of_range(const Tensor& t, const CopyLayout& at, int64_t where, double got,
                               double low, double high) {
  return text("%s.%s%s: got %.9g, expected between %.9g and %.9g", t.name.c_str(),
              at.columnwise ? "columnwise_scale_inv" : "scale_inv",
              place({at.scale_rows, at.scale_cols}, where).c_str(), got, low, high);
}

// Checks a block's scale. On success `factor` is the interval of factors with which codes may have
// been computed.
std::string check_block_scale(const Expectation& e, const CopyLayout& at, const Buffer& scales,
                              int64_t where, Interval amax, Interval& factor) {
  const Tensor& t = *e.tensor;
  const auto fp8_max = static_cast<float>(largest(t.spec.dtype));
  const double got = load(at.scale_dtype, scales.data(), where);
  if (at.scaling == TE_FL_SCALING_MXFP8) {
    const uint8_t code = scales.data()[where];
    const uint8_t low = e8m0_from_amax(std::max(amax.low, t.spec.epsilon), fp8_max),
                  high = e8m0_from_amax(std::max(amax.high, t.spec.epsilon), fp8_max);
    if (code < low || code > high) return scale_out_of_range(t, at, where, code, low, high);
    factor.low = factor.high = static_cast<float>(std::ldexp(1.0, 127 - code));
    return {};
  }
  if (at.scaling == TE_FL_SCALING_NVFP4) {
    // The tolerance is a few roundings, since computing the block scale takes a division and a
    // multiplication.
    const double global = nvfp4_global(f32(t.amax)), allowed = 4e-7;
    const double low = rounded(TE_FL_F8E4M3, amax.low / 6.0 * global * (1 - allowed));
    const double high = rounded(TE_FL_F8E4M3, amax.high / 6.0 * global * (1 + allowed));
    if (!(got >= low && got <= high)) return scale_out_of_range(t, at, where, got, low, high);
    const double exact = got == 0 ? 0 : global / got;
    factor = {static_cast<float>(exact * (1 - allowed)), static_cast<float>(exact * (1 + allowed))};
    return {};
  }
  const auto replaced = static_cast<float>(largest(e.input_dtype));
  const float low =
      1.0f / scale_from_amax(amax.low, fp8_max, t.spec.epsilon, t.spec.pow2(), replaced);
  const float high =
      1.0f / scale_from_amax(amax.high, fp8_max, t.spec.epsilon, t.spec.pow2(), replaced);
  bool in = got >= std::min(low, high) && got <= std::max(low, high);
  // Handles an amax that may be zero within the tolerance: an amax of exactly 0 gives scale 1, and
  // any larger amax gives a small scale_inv.
  if (amax.low == 0 && t.spec.epsilon == 0)
    in = got == 1 || (got > 0 && got <= static_cast<double>(high));
  int exponent = 0;  // also of subnormals: 2^-127 is the inverse of the largest power
  const bool power = !t.spec.pow2() || std::frexp(got, &exponent) == 0.5;
  if (!in || !power)
    return scale_out_of_range(t, at, where, got, static_cast<double>(low),
                              static_cast<double>(high));
  const double allowed =
      t.spec.pow2() ? 0 : 0x1p-23;  // 1 / (1 / scale) equals the scale up to one rounding
  factor = {nudged(1 / got * (1 - allowed), false), nudged(1 / got * (1 + allowed), true)};
  return {};
}

std::string check_padding(const Tensor& t, const CopyLayout& at, const Buffer& scales) {
  std::vector<uint8_t> used(static_cast<size_t>(at.scales()), 0);
  for (int64_t bm = 0; bm < at.blocks_m(); ++bm)
    for (int64_t bk = 0; bk < at.blocks_k(); ++bk) used[at.scale_index(bm, bk)] = 1;
  const int width = storage_bits(at.scale_dtype) / 8;
  Differences wrong;
  for (int64_t i = 0; i < at.scales(); ++i) {
    if (used[i]) continue;
    const uint8_t* bytes = scales.data() + i * width;
    const uint8_t* other = std::find_if(bytes, bytes + width, [](uint8_t b) { return b != 0; });
    if (other == bytes + width) continue;
    wrong.add([&] {
      return text("%s.%s%s is padding and must be zero, got 0x%02x in a byte", t.name.c_str(),
                  at.columnwise ? "columnwise_scale_inv" : "scale_inv",
                  place({at.scale_rows, at.scale_cols}, i).c_str(), *other);
    });
  }
  return wrong.text(at.scales(), "scales");
}

std::string compare_copy(const Expectation& e, bool columnwise, Interval known_factor) {
  const Tensor& t = *e.tensor;
  const CopyLayout at(t.spec.scaling, columnwise, t.rows(), t.cols());
  const Buffer& data = columnwise ? *t.col_data : *t.data;
  const bool tensor_mode = at.scaling == TE_FL_SCALING_TENSOR;
  const Buffer& scales = columnwise && !tensor_mode ? *t.col_scale_inv : *t.scale_inv;
  Differences wrong_scales, wrong_codes;
  for (int64_t bm = 0; bm < at.blocks_m(); ++bm) {
    for (int64_t bk = 0; bk < at.blocks_k(); ++bk) {
      Interval factor = known_factor;
      if (!tensor_mode) {
        const Interval amax =
            amax_interval(e, bm * at.block_m, std::min(at.m, (bm + 1) * at.block_m),
                          bk * at.block_k, std::min(at.k, (bk + 1) * at.block_k), at.k);
        const std::string wrong =
            check_block_scale(e, at, scales, at.scale_index(bm, bk), amax, factor);
        if (!wrong.empty()) {
          wrong_scales.add([&] { return wrong; });
          continue;
        }
      }
      compare_codes(e, at, data, bm, bk, factor, wrong_codes);
    }
  }
  if (wrong_scales.any()) return wrong_scales.text(at.blocks_m() * at.blocks_k(), "scales");
  if (wrong_codes.any()) return wrong_codes.text(t.numel());
  return tensor_mode ? std::string() : check_padding(t, at, scales);
}

// Checks amax and, in TENSOR mode, scale and scale_inv. `scale` receives the scale with which the
// codes were computed.
std::string check_tensor_scale(const Expectation& e, float& scale) {
  const Tensor& t = *e.tensor;
  const bool delayed = t.spec.scaling == TE_FL_SCALING_TENSOR && !t.spec.current();
  const auto elements = static_cast<int64_t>(e.want.size());
  Interval amax = amax_interval(e, 0, 1, 0, elements, elements);
  if (delayed)
    amax = {std::max(amax.low, t.spec.amax_before), std::max(amax.high, t.spec.amax_before)};
  if (t.amax != nullptr) {
    const float got = f32(t.amax);
    if (!(got >= amax.low && got <= amax.high))
      return text("%s.amax: got %.9g, expected between %.9g and %.9g", t.name.c_str(),
                  static_cast<double>(got), static_cast<double>(amax.low),
                  static_cast<double>(amax.high));
  }
  if (t.spec.scaling != TE_FL_SCALING_TENSOR) return {};
  scale = delayed
              ? t.spec.scale
              : scale_from_amax(f32(t.amax), static_cast<float>(largest(t.spec.dtype)),
                                t.spec.epsilon, t.spec.pow2(), std::numeric_limits<float>::max());
  std::string wrong = exact_float(t.name + ".scale", f32(t.scale), scale);
  return wrong.empty() ? exact_float(t.name + ".scale_inv", f32(t.scale_inv), 1.0f / scale) : wrong;
}

std::string compare_quantised(const Expectation& e) {
  const Tensor& t = *e.tensor;
  float scale = 1;
  std::string wrong = check_tensor_scale(e, scale);
  if (wrong.empty() && t.spec.row) wrong = compare_copy(e, false, {scale, scale});
  if (wrong.empty() && t.spec.col) wrong = compare_copy(e, true, {scale, scale});
  return wrong;
}

// The largest gap between neighbouring codes at a scaled value.
double code_step(const Format& f, double x) {
  const double a = std::clamp(std::fabs(x), power_of_two(1 - f.bias), f.max);
  return power_of_two(binary_exponent(a) - f.mantissa_bits);
}

std::string compare_dequantised(const Expectation& e) {
  const Tensor& t = *e.tensor;
  const float scale = t.spec.scale;
  float amax_before = t.spec.amax_before, largest_want = 0;
  std::string wrong = exact_float(t.name + ".scale", f32(t.scale), scale);
  if (wrong.empty()) wrong = exact_float(t.name + ".scale_inv", f32(t.scale_inv), 1.0f / scale);
  if (!wrong.empty()) return wrong;
  double allowed = 0;
  for (size_t i = 0; i < e.want.size(); ++i) {
    largest_want = amax_with(largest_want, e.want[i]);
    allowed = std::max(allowed, e.extra.empty() ? 0 : e.extra[i]);
  }
  if (t.amax != nullptr) {
    const double got = f32(t.amax), want = std::max(amax_before, largest_want),
                 tol = allowed + 1e-2 + 1e-2 * want;
    if (!(std::fabs(got - want) <= tol))
      return text("%s.amax: got %.9g, expected %.9g (tolerance %.3g)", t.name.c_str(), got, want,
                  tol);
  }
  const Format& f = format_of(t.spec.dtype);
  const double limit = f.max / static_cast<double>(scale);
  Differences differ;
  for (int64_t i = 0; i < static_cast<int64_t>(e.want.size()) && t.data != nullptr; ++i) {
    if (!e.skip.empty() && e.skip[i]) continue;
    const double want = std::clamp(e.want[i], -limit, limit),
                 got = t.get(i) / static_cast<double>(scale);
    const double tol = (e.extra.empty() ? 0 : e.extra[i]) + 1e-2 + 1e-2 * std::fabs(want) +
                       code_step(f, want * static_cast<double>(scale)) / static_cast<double>(scale);
    if (std::fabs(got - want) <= tol) continue;
    differ.add([&] {
      return text("%s: got %.9g, expected %.9g after dequantisation (off by %.3g, tolerance %.3g)",
                  (t.name + place(t.shape, i)).c_str(), got, want, std::fabs(got - want), tol);
    });
  }
  return differ.text(t.numel());
}

}  // namespace

double tolerance(const Expectation& e, int dtype, size_t i) {
  const double v = std::isfinite(e.want[i]) ? std::fabs(e.want[i]) : 0;
  const double extra = e.extra.empty() ? 0 : e.extra[i];
  if (e.relative > 0) return extra + e.relative * v;
  if (dtype == TE_FL_F16) return extra + (1e-5 + 1e-3 * v) * e.widen;
  if (dtype == TE_FL_BF16) return extra + (1e-5 + 1e-2 * v) * e.widen;
  return extra + fp32_tolerance(v) * e.widen;
}

double sum_tolerance(double n, double magnitude) {
  return (4 + std::sqrt(n)) * 0x1p-23 * magnitude;
}

std::string compare(const Expectation& e) {
  switch (e.kind) {
    case Expectation::Kind::kValues:
      return compare_values(e);
    case Expectation::Kind::kQuantised:
      return compare_quantised(e);
    case Expectation::Kind::kExactQuantised:
      return compare_exact(e);
    case Expectation::Kind::kDequantised:
      return compare_dequantised(e);
    case Expectation::Kind::kBytes:
      return compare_storage(e);
    case Expectation::Kind::kUnchanged:
      for (const Buffer* b : e.tensor->buffers())
        if (!b->unchanged()) return e.tensor->name + " must stay untouched, but was written";
      return {};
    case Expectation::Kind::kCustom:
      return e.check(*e.tensor);
  }
  return "unknown kind of expectation";
}

}  // namespace te_fl::conformance
