#include "dispatch/watch/compare_outputs.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <set>

#include "core/op/op_finder.hpp"
#include "core/tensor/tensor_access.hpp"
#include "dispatch/watch/elements.hpp"
#include "registry/arguments.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::dispatch {
namespace {

template <class F>
void for_each_tensor(const core::CompiledOp& op, const void* args, F&& f) {
  const te_fl_op_schema& schema = op.schema();
  for (uint32_t a = 0; a < schema.arg_count; ++a) {
    const te_fl_arg_desc& arg = *schema.args[a];
    if (arg.type == TE_FL_ARG_TENSOR) {
      if (const te_fl_tensor* t = registry::tensor_argument(arg, args))
        f(arg, std::string(arg.name), *t);
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const registry::TensorList list = registry::list_argument(arg, args);
      for (int64_t i = 0; i < list.count; ++i) {
        f(arg, std::string(arg.name) + "[" + std::to_string(i) + "]", *list.data[i]);
      }
    }
  }
}

// Iterates over an array's elements as (index, offset from the base), both counted in elements.
class Walk {
 public:
  Walk(std::vector<int64_t> shape, std::vector<int64_t> strides)
      : shape_(std::move(shape)), strides_(std::move(strides)) {
    count_ = 1;
    for (const int64_t n : shape_) count_ *= n;
  }
  static Walk compact(std::vector<int64_t> shape) {
    std::vector<int64_t> strides = core::compact_strides(shape);
    return {std::move(shape), std::move(strides)};
  }
  int64_t count() const { return count_; }
  template <class F>
  void each(F&& f) const {
    std::array<int64_t, kMaxRank> index{};
    int64_t at = 0;
    for (int64_t n = 0; n < count_; ++n) {
      f(n, at);
      for (size_t d = shape_.size(); d-- > 0;) {
        at += strides_[d];
        if (++index[d] < shape_[d]) break;
        at -= strides_[d] * shape_[d];
        index[d] = 0;
      }
    }
  }
  std::vector<int64_t> index(int64_t n) const {
    std::vector<int64_t> out(shape_);
    for (size_t d = shape_.size(); d-- > 0;) {
      out[d] = n % shape_[d];
      n /= shape_[d];
    }
    return out;
  }

 private:
  std::vector<int64_t> shape_, strides_;
  int64_t count_ = 0;
};

Walk plan_walk(const te_fl_tensor& t) {
  std::vector<int64_t> shape(t.dl.shape, t.dl.shape + t.dl.ndim);
  std::vector<int64_t> strides = t.dl.strides == nullptr
                                     ? core::compact_strides(shape)
                                     : std::vector<int64_t>(t.dl.strides, t.dl.strides + t.dl.ndim);
  return {std::move(shape), std::move(strides)};
}

// The magnitude from which on values are treated as infinities: many masks use the largest value of
// a dtype. Including such values in a root mean square would make every error of the other elements
// acceptable.
double huge_from(int dtype) { return dtype == TE_FL_F16 ? 65504.0 : 0x1p96; }

// The root mean square of the values with magnitude below `huge`. If there is no such value, that
// of all finite values. The function value(base, number, offset) returns one value.
template <class Value>
double rms(const Walk& walk, const char* base, double huge, Value&& value) {
  double sums[2] = {};  // of values below huge, and of the others
  int64_t counts[2] = {};
  walk.each([&](int64_t n, int64_t at) {
    const double v = value(base, n, at);
    if (!std::isfinite(v)) return;
    const int which = std::abs(v) < huge ? 0 : 1;
    sums[which] += v * v;
    ++counts[which];
  });
  const int which = counts[0] > 0 ? 0 : 1;
  return counts[which] == 0 ? 0 : std::sqrt(sums[which] / static_cast<double>(counts[which]));
}

// Two arrays with the same layout and dtype.
struct Pair {
  const char* got;
  const char* wanted;
  int dtype;
};

class Comparison {
 public:
  Comparison(std::vector<OutputDifference>& out, int& compared, Tolerance tolerance)
      : out_(out), compared_(compared), tolerance_(tolerance) {}

  // Compares elements without scales. Returns false if any elements differ, like run().
  bool plain(const std::string& name, const Walk& walk, const Pair& p) {
    if (!is_float(p.dtype)) return exact(name, walk, p);
    if (is_code(p.dtype)) return codes(name, walk, p, nullptr);
    const auto value = [&](const char* base, int64_t, int64_t at) {
      return element(p.dtype, base, at);
    };
    const double floor =
        tolerance_.floor + tolerance_.of_rms * rms(walk, p.wanted, huge_from(p.dtype), value);
    const double share = Tolerance::relative(p.dtype);
    const double least = p.dtype == TE_FL_F16 ? 0x1p-24 : 0;  // the step of subnormals
    return run(name, walk, false, [&](int64_t, int64_t at) -> Found {
      const double got = element(p.dtype, p.got, at), wanted = element(p.dtype, p.wanted, at);
      return {got, wanted, share * std::abs(wanted) + floor + least};
    });
  }

  // Checks an argument that is read and written, such as an optimizer's parameter. One step may
  // change it by less than plain() tolerates, so a run that changes nothing would pass plain().
  // This check therefore fails if nearly all elements that the reference changes are unchanged in
  // `got`. Rounding may leave some elements unchanged, but all of them only if they have equal
  // values; the check is therefore skipped unless there are enough different values. F32 changes in
  // the last places are ignored: scales are recomputed in each call, and the previous result of the
  // other run may differ there.
  void changed(const std::string& name, const Walk& walk, const Pair& p, const char* before) {
    constexpr int64_t kLeast = 64;
    constexpr size_t kValues = 16;
    if (!is_float(p.dtype) || is_code(p.dtype)) return;
    OutputDifference d;
    d.name = name;
    d.left = true;
    double furthest = -1;
    std::set<uint64_t> values;
    walk.each([&](int64_t n, int64_t at) {
      const uint64_t old = raw(p.dtype, before, at);
      if (raw(p.dtype, p.wanted, at) == old) return;
      const double wanted = element(p.dtype, p.wanted, at);
      const double change = std::abs(wanted - element(p.dtype, before, at));
      if (bits(static_cast<DType>(p.dtype)) > 16 && change <= 0x1p-20 * std::abs(wanted)) return;
      ++d.elements;
      if (values.size() < kValues) values.insert(old);
      if (raw(p.dtype, p.got, at) != old) return;
      if (d.wrong++ == 0) d.first = walk.index(n);
      const double got = element(p.dtype, p.got, at);
      if (std::abs(got - wanted) <= furthest) return;
      furthest = std::abs(got - wanted);
      d.got = got, d.wanted = wanted;
    });
    if (d.elements < kLeast || values.size() < kValues || 10 * d.wrong <= 9 * d.elements) return;
    out_.push_back(std::move(d));
  }

  // Compares scale, scale_inv and amax. Their relative tolerance follows from the tolerance of the
  // call for the output's largest value.
  void scales(const std::string& name, const Walk& walk, const Pair& p, bool binades) {
    const double share = Tolerance::relative(TE_FL_F32) + 2 * tolerance_.of_rms;
    run(name, walk, false, [&](int64_t, int64_t at) -> Found {
      const double got = element(p.dtype, p.got, at), wanted = element(p.dtype, p.wanted, at);
      double near = wanted;
      if (binades && std::abs(got) > 1.5 * std::abs(wanted)) near = 2 * wanted;
      if (binades && std::abs(got) < 0.75 * std::abs(wanted)) near = wanted / 2;
      const double allowed = share * std::abs(wanted) + std::abs(near - wanted);
      return {got, wanted, allowed};
    });
  }

  // Compares FP8 or FP4 codes. Adjacent codes count as equal, since a tie may be rounded either
  // way. Other codes are compared after decoding. scale(n) returns the scale factors of element n
  // in both arrays; a null function means the factors are 1.
  using Scale = std::function<std::pair<double, double>(int64_t)>;
  bool codes(const std::string& name, const Walk& walk, const Pair& p, const Scale& scale) {
    const auto factors = [&](int64_t n) { return scale ? scale(n) : std::pair{1.0, 1.0}; };
    const auto value = [&](const char* base, int64_t n, int64_t at) {
      return element(p.dtype, base, at) * factors(n).second;
    };
    const double floor =
        tolerance_.floor + tolerance_.of_rms * rms(walk, p.wanted, huge_from(p.dtype), value);
    const Steps steps = steps_of(p.dtype);
    return run(name, walk, true, [&](int64_t n, int64_t at) -> Found {
      const auto [of_got, of_wanted] = factors(n);
      const double got = element(p.dtype, p.got, at) * of_got;
      const double wanted = element(p.dtype, p.wanted, at) * of_wanted;
      const bool next =
          of_got == of_wanted && std::isnan(got) == std::isnan(wanted) &&
          std::abs(code_ordinal(p.dtype, p.got, at) - code_ordinal(p.dtype, p.wanted, at)) <= 1;
      if (next) return {wanted, wanted, 0};
      const double coarse = std::max(std::abs(of_got), std::abs(of_wanted));
      return {got, wanted, steps.relative * std::abs(wanted) + steps.least * coarse + floor};
    });
  }

 private:
  struct Found {
    double got, wanted, allowed;
  };

  bool exact(const std::string& name, const Walk& walk, const Pair& p) {
    return run(name, walk, false, [&](int64_t, int64_t at) -> Found {
      const double got = element(p.dtype, p.got, at), wanted = element(p.dtype, p.wanted, at);
      const bool same = raw(p.dtype, p.got, at) == raw(p.dtype, p.wanted, at);
      return {same ? wanted : got, wanted, same ? 0.0 : -1.0};
    });
  }

  template <class F>
  bool run(const std::string& name, const Walk& walk, bool codes, F&& f) {
    ++compared_;
    OutputDifference d;
    d.name = name;
    d.elements = walk.count();
    d.codes = codes;
    double worst = -1;
    walk.each([&](int64_t n, int64_t at) {
      const Found e = f(n, at);
      if (std::isnan(e.got) && std::isnan(e.wanted)) return;
      if (e.got == e.wanted && !(e.allowed < 0)) return;  // allowed is NaN for infinities
      const double error = std::abs(e.got - e.wanted);
      // The error of an infinity is infinite or NaN, so it always counts as wrong; a NaN element
      // does too.
      if (std::isfinite(error) && error <= e.allowed) return;
      if (d.wrong++ == 0) d.first = walk.index(n);
      const double excess = std::isnan(error) ? std::numeric_limits<double>::infinity()
                                              : error - std::max(e.allowed, 0.0);
      if (excess <= worst) return;
      worst = excess;
      d.got = e.got, d.wanted = e.wanted, d.allowed = std::max(e.allowed, 0.0);
    });
    if (d.wrong == 0) return true;
    out_.push_back(std::move(d));
    return false;
  }

  std::vector<OutputDifference>& out_;
  int& compared_;
  Tolerance tolerance_;
};

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
int64_t blocks(int64_t n, int64_t of) { return (n + of - 1) / of; }

// The index in the scale_inv array for the code at row r and column c of the logical matrix.
int64_t scale_index(uint32_t scaling, bool columnwise, int64_t m, int64_t k, int64_t r, int64_t c) {
  switch (scaling) {
    case TE_FL_SCALING_BLOCK_1X128:
      return columnwise ? r / 128 * up(k, 4) + c : c / 128 * up(m, 4) + r;
    case TE_FL_SCALING_BLOCK_128X128:
      return columnwise ? c / 128 * up(blocks(m, 128), 4) + r / 128
                        : r / 128 * up(blocks(k, 128), 4) + c / 128;
    case TE_FL_SCALING_MXFP8:
      return columnwise ? r / 32 * up(k, 128) + c : r * up(blocks(k, 32), 4) + c / 32;
    default:
      return 0;
  }
}

class QuantComparison {
 public:
  QuantComparison(Comparison& to, const std::string& name, const te_fl_tensor& t,
                  const te_fl_quant& q, ptrdiff_t distance)
      : to_(to), name_(name), t_(t), q_(q), distance_(distance) {
    const std::span<const int64_t> shape(t.dl.shape, static_cast<size_t>(t.dl.ndim));
    const auto matrix = core::logical_matrix(shape);
    m_ = matrix[0], k_ = matrix[1];
    dtype_ = dtype_index(t.dl.dtype);
  }

  void run(bool data) {
    if (data) copy(false, first_byte(t_.dl));
    copy(true, static_cast<const char*>(q_.columnwise_data));
    const bool binades =
        q_.scaling != TE_FL_SCALING_TENSOR || (q_.flags & TE_FL_QUANT_POW2_SCALE) != 0;
    const DType dtype = core::scale_inv_dtype(static_cast<Scaling>(q_.scaling));
    const core::QuantBytes bytes =
        core::quant_bytes(static_cast<DType>(dtype_), static_cast<Scaling>(q_.scaling), m_, k_);
    const int64_t width = bits(dtype) / 8;
    part(".scale_inv", q_.scale_inv, bytes.scale_inv / width, dtype, binades);
    if (q_.columnwise_scale_inv != q_.scale_inv) {
      part(".columnwise_scale_inv", q_.columnwise_scale_inv, bytes.columnwise_scale_inv / width,
           dtype, binades);
    }
    part(".amax", q_.amax, 1, DType::kF32, false);
    part(".columnwise_amax", q_.columnwise_amax, 1, DType::kF32, false);
    if ((q_.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0 && q_.scaling == TE_FL_SCALING_TENSOR) {
      part(".scale", q_.scale, 1, DType::kF32, binades);
    }
  }

 private:
  static const char* first_byte(const te_fl_dltensor& dl) {
    return dl.data == nullptr ? nullptr : static_cast<const char*>(dl.data) + dl.byte_offset;
  }

  void part(const char* what, const void* at, int64_t count, DType dtype, bool binades) {
    if (at == nullptr || count == 0) return;
    const auto* wanted = static_cast<const char*>(at);
    to_.scales(name_ + what, Walk::compact({count}),
               {wanted + distance_, wanted, static_cast<int>(dtype)}, binades);
  }

  void copy(bool columnwise, const char* wanted) {
    if (wanted == nullptr) return;
    const Pair pair{wanted + distance_, wanted, dtype_};
    const bool turned = columnwise && q_.scaling != TE_FL_SCALING_MXFP8;
    const auto scales = static_cast<const char*>(
        columnwise && q_.columnwise_scale_inv != nullptr ? q_.columnwise_scale_inv : q_.scale_inv);
    Comparison::Scale scale;
    if (scales != nullptr && q_.scaling != TE_FL_SCALING_NVFP4) {
      const int dtype = static_cast<int>(core::scale_inv_dtype(static_cast<Scaling>(q_.scaling)));
      scale = [=, this, distance = distance_](int64_t n) {
        const int64_t r = turned ? n % m_ : n / k_, c = turned ? n / m_ : n % k_;
        const int64_t i = scale_index(q_.scaling, columnwise, m_, k_, r, c);
        return std::pair{element(dtype, scales + distance, i), element(dtype, scales, i)};
      };
    }
    const Walk walk = Walk::compact(turned ? std::vector{k_, m_} : std::vector{m_, k_});
    to_.codes(name_ + (columnwise ? ".columnwise_data" : ""), walk, pair, scale);
  }

  Comparison& to_;
  const std::string& name_;
  const te_fl_tensor& t_;
  const te_fl_quant& q_;
  ptrdiff_t distance_;
  int64_t m_ = 1, k_ = 1;
  int dtype_ = 0;
};

void compare_tensor(Comparison& to, const te_fl_arg_desc& arg, const std::string& name,
                    const te_fl_tensor& t, const CallDistances& distances) {
  const bool data = (arg.flags & TE_FL_ARG_QUANT_ONLY) == 0;
  if (const te_fl_quant* q = core::quant_of(t)) {
    QuantComparison(to, name, t, *q, distances.other).run(data);
    return;
  }
  if (!data || t.dl.data == nullptr) return;
  const char* wanted = static_cast<const char*>(t.dl.data) + t.dl.byte_offset;
  const Walk walk = plan_walk(t);
  const Pair pair{wanted + distances.other, wanted, dtype_index(t.dl.dtype)};
  if (to.plain(name, walk, pair) && arg.role == TE_FL_INOUT)
    to.changed(name, walk, pair, wanted + distances.before);
}

std::string number(double v) {
  char text[40];
  std::snprintf(text, sizeof text, "%.7g", v);
  return text;
}

}  // namespace

std::string OutputDifference::text() const {
  std::string at;
  for (const int64_t i : first) at += (at.empty() ? "" : ",") + std::to_string(i);
  if (left) {
    return "'" + name + "': " + std::to_string(wrong) + " of " + std::to_string(elements) +
           " elements that the call changes are as before, the first at [" + at + "], " +
           number(got) + " instead of " + number(wanted);
  }
  return "'" + name + "': " + std::to_string(wrong) + " of " + std::to_string(elements) +
         " elements differ, the first at [" + at + "]; at the worst " + number(got) +
         " instead of " + number(wanted) + (codes ? " (decoded)" : "") + ", " + number(allowed) +
         " off is allowed";
}

double Tolerance::relative(int dtype) {
  switch (dtype) {
    case TE_FL_F16:
      return 2e-3;
    case TE_FL_BF16:
      return 0x1p-6;
    default:
      return 1e-5;
  }
}

Tolerance Tolerance::of(const core::CompiledOp& op, const void* args) {
  double unit = 0x1p-24;
  int64_t length = 1;
  double largest = 0;
  for_each_tensor(
      op, args, [&](const te_fl_arg_desc& arg, const std::string&, const te_fl_tensor& t) {
        const int dtype = dtype_index(t.dl.dtype);
        if (dtype != kInvalidDType && is_float(dtype)) unit = std::max(unit, unit_of(dtype));
        const std::span<const int64_t> shape(t.dl.shape, static_cast<size_t>(t.dl.ndim));
        const auto [m, k] = core::logical_matrix(shape);
        length = std::max({length, m, k});
        if (arg.role == TE_FL_OUT || dtype > TE_FL_BF16 || t.dl.data == nullptr) return;
        const char* base = static_cast<const char*>(t.dl.data) + t.dl.byte_offset;
        largest = std::max(largest, rms(plan_walk(t), base, huge_from(dtype),
                                        [&](const char* at, int64_t, int64_t i) {
                                          return element(dtype, at, i);
                                        }));
      });
  return {2 * unit + 0x1p-21 * std::sqrt(static_cast<double>(length)),
          0x1p-20 * std::min(largest, 1.0)};
}

std::vector<OutputDifference> compare_outputs(const core::CompiledOp& op, const void* args,
                                              const CallDistances& distances, int& compared) {
  std::vector<OutputDifference> out;
  Comparison comparison(out, compared, Tolerance::of(op, args));
  for_each_tensor(op, args,
                  [&](const te_fl_arg_desc& arg, const std::string& name, const te_fl_tensor& t) {
                    if (arg.role == TE_FL_IN || (arg.flags & TE_FL_ARG_OPAQUE) != 0) return;
                    compare_tensor(comparison, arg, name, t, distances);
                  });
  return out;
}

}  // namespace te_fl::dispatch
