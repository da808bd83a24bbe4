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
#include "dispatch/watch/choice_rows.hpp"
#include "dispatch/watch/elements.hpp"
#include "dispatch/watch/output_walk.hpp"
#include "dispatch/watch/tolerance.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::dispatch {
namespace {

// The magnitude that the rounding errors of an element's terms are a fraction of. A few large
// elements must not hide errors of the others, so it is the typical magnitude of the whole output
// (the root mean square without values above 32 times the median), or that of the element's row
// and column if both are larger: an error of an outlying row is a fraction of that row.
class Magnitudes {
 public:
  template <class Value>
  Magnitudes(const Walk& walk, const char* base, double huge, Value&& value) {
    columns_ = walk.columns();
    const int64_t rows = columns_ == 0 ? 0 : walk.count() / columns_;
    std::vector<double> row(static_cast<size_t>(rows)), column(static_cast<size_t>(columns_));
    std::vector<float> all;
    all.reserve(static_cast<size_t>(walk.count()));
    walk.each([&](int64_t n, int64_t at) {
      const double v = std::abs(value(base, n, at));
      if (!std::isfinite(v) || v == 0 || v >= huge) return;
      all.push_back(static_cast<float>(v));
      row[static_cast<size_t>(n / columns_)] += v * v;
      column[static_cast<size_t>(n % columns_)] += v * v;
    });
    for (double& r : row) r = std::sqrt(r / static_cast<double>(columns_));
    for (double& c : column) c = std::sqrt(c / static_cast<double>(rows));
    row_ = std::move(row), column_ = std::move(column);
    if (all.empty()) {  // infinities, or zeros
      typical_ = rms(walk, base, huge, value);
      return;
    }
    const auto middle = all.begin() + static_cast<ptrdiff_t>(all.size() / 2);
    std::nth_element(all.begin(), middle, all.end());
    const double limit = 32.0 * static_cast<double>(*middle);
    double sum = 0;
    for (const float v : all)
      if (static_cast<double>(v) <= limit) sum += static_cast<double>(v) * static_cast<double>(v);
    typical_ = std::sqrt(sum / static_cast<double>(walk.count()));
  }
  double of(int64_t n) const {
    const double local = std::min(row_[static_cast<size_t>(n / columns_)],
                                  column_[static_cast<size_t>(n % columns_)]);
    return std::max(local, typical_);
  }

 private:
  int64_t columns_ = 0;
  std::vector<double> row_, column_;
  double typical_ = 0;
};

// Two arrays with the same layout and dtype.
struct Pair {
  const char* got;
  const char* wanted;
  int dtype;
};

class Comparison {
 public:
  // `left_out`: rows that are not compared.
  Comparison(std::vector<OutputDifference>& out, int& compared, Tolerance tolerance,
             const std::vector<bool>& left_out)
      : out_(out), compared_(compared), tolerance_(tolerance), left_out_(left_out) {}

  // Compares elements without scales. Returns false if any elements differ, like run(). `before`:
  // the old elements of an argument that a step changes, else null. The error of such a step is a
  // fraction of the change.
  bool plain(const std::string& name, const Walk& walk, const Pair& p, const char* before) {
    if (!is_float(p.dtype) || tolerance_.kind == core::ErrorKind::kCopy)
      return exact(name, walk, p);
    if (is_code(p.dtype)) return codes(name, walk, p, nullptr);
    const auto value = [&](const char* base, int64_t, int64_t at) {
      return element(p.dtype, base, at);
    };
    const Magnitudes magnitudes(walk, p.wanted, huge_from(p.dtype), value);
    const double share = tolerance_.relative(p.dtype);
    // The step of F16's subnormals, of which the terms of a sum may have been rounded to some.
    const double subnormal_steps = tolerance_.kind == core::ErrorKind::kRoundedSum ? 8 : 1;
    const double least = p.dtype == TE_FL_F16 ? subnormal_steps * 0x1p-24 : 0;
    const bool narrow = bits(static_cast<DType>(p.dtype)) == 16;
    const bool steps = before != nullptr && tolerance_.kind == core::ErrorKind::kElement;
    return run(name, walk, false, [&](int64_t n, int64_t at) -> Found {
      const double got = element(p.dtype, p.got, at), wanted = element(p.dtype, p.wanted, at);
      double allowed = share * std::abs(wanted) + tolerance_.off(magnitudes.of(n));
      if (steps) {
        const double old = element(p.dtype, before, at);
        const double step = narrow ? 2 * unit_of(p.dtype) : 0x1p-21;
        if (std::isfinite(old))
          allowed = std::min(allowed, step * std::max(std::abs(wanted), std::abs(old)) +
                                          1e-4 * std::abs(wanted - old));
      }
      return {got, wanted, allowed + least, narrow};
    });
  }

  // Checks an argument that is read and written, such as an optimizer's parameter. One step may
  // change it by less than plain() tolerates, so a run that changes nothing would pass plain().
  // It therefore returns true, with a difference, if nearly all elements that the reference changes
  // are unchanged in `got`. Rounding may leave some elements unchanged, but all of them only if
  // they have equal values; the check is therefore skipped unless there are enough different
  // values. F32 changes in the last places are ignored: scales are recomputed in each call, and the
  // previous result of the other run may differ there.
  bool unchanged(const std::string& name, const Walk& walk, const Pair& p, const char* before) {
    constexpr int64_t kLeast = 64;
    if (!is_float(p.dtype) || is_code(p.dtype)) return false;
    OutputDifference d;
    d.name = name;
    d.kind = OutputDifference::Kind::kUnchanged;
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
    if (d.elements < kLeast || values.size() < kValues || 10 * d.wrong <= 9 * d.elements)
      return false;
    out_.push_back(std::move(d));
    return true;
  }

  // Compares scale, scale_inv and amax. Their relative tolerance follows from the tolerance of the
  // call for the output's largest value. Scales in FP8 may be neighbours.
  void scales(const std::string& name, const Walk& walk, const Pair& p, bool binades) {
    const bool copy = tolerance_.kind == core::ErrorKind::kCopy;
    const double share = copy ? 0x1p-22 : 1e-5 + 2 * tolerance_.of_scale;
    run(name, walk, false, [&](int64_t, int64_t at) -> Found {
      const double got = element(p.dtype, p.got, at), wanted = element(p.dtype, p.wanted, at);
      double near = wanted;
      if (!copy && binades && std::abs(got) > 1.5 * std::abs(wanted)) near = 2 * wanted;
      if (!copy && binades && std::abs(got) < 0.75 * std::abs(wanted)) near = wanted / 2;
      double allowed = share * std::abs(wanted) + std::abs(near - wanted);
      if (!copy && p.dtype == TE_FL_F8E4M3)
        allowed = std::max(allowed, 0x1p-3 * std::abs(wanted) + 0x1p-9);
      return {got, wanted, allowed, false};
    });
  }

  // Compares FP8 or FP4 codes. Adjacent codes count as equal, since a tie may be rounded either
  // way, but only a share of all codes may be such, and not all in one direction. Codes under
  // different scales are compared after decoding. scale(n) returns the scale factors of element n
  // in both arrays; a null function means the factors are 1.
  using Scale = std::function<std::pair<double, double>(int64_t)>;
  bool codes(const std::string& name, const Walk& walk, const Pair& p, const Scale& scale) {
    const auto factors = [&](int64_t n) { return scale ? scale(n) : std::pair{1.0, 1.0}; };
    const auto value = [&](const char* base, int64_t n, int64_t at) {
      return element(p.dtype, base, at) * factors(n).second;
    };
    const bool copy = tolerance_.kind == core::ErrorKind::kCopy;
    const Magnitudes magnitudes(walk, p.wanted, huge_from(p.dtype), value);
    const Steps steps = steps_of(p.dtype);
    Neighbours neighbours;
    const bool right = run(name, walk, true, [&](int64_t n, int64_t at) -> Found {
      const auto [of_got, of_wanted] = factors(n);
      const double got = element(p.dtype, p.got, at) * of_got;
      const double wanted = element(p.dtype, p.wanted, at) * of_wanted;
      if (of_got == of_wanted && std::isnan(got) == std::isnan(wanted)) {
        const int a = code_ordinal(p.dtype, p.got, at), b = code_ordinal(p.dtype, p.wanted, at);
        if (copy) return {got, wanted, 0, false};
        if (std::abs(a - b) <= 1) {
          neighbours.add(n, a, b);
          return {wanted, wanted, 0, false};
        }
      }
      const double coarse = std::max(std::abs(of_got), std::abs(of_wanted));
      const double size = coarse > 0 ? std::abs(wanted) / coarse : 0;
      const double step =
          coarse * (size > 0 && std::isfinite(size)
                        ? std::max(steps.least, std::ldexp(steps.relative, std::ilogb(size)))
                        : steps.least);
      return {got, wanted, step + tolerance_.off(magnitudes.of(n)), false};
    });
    return neighbours.judge(tolerance_.neighbour_share(), name, walk, out_) && right;
  }

 private:
  struct Found {
    double got, wanted, allowed;
    bool counts;  // among the elements whose direction is examined
  };

  // The codes that are one step off, by direction.
  struct Neighbours {
    int64_t elements = 0, up = 0, down = 0;  // in magnitude
    int64_t first = -1;
    std::set<int> values;
    void add(int64_t n, int got, int wanted) {
      ++elements;
      if (got == wanted || (got == 0 && wanted == 0)) return;
      if (first < 0) first = n;
      ++(std::abs(got) > std::abs(wanted) ? up : down);
      if (values.size() < 8) values.insert(wanted);
    }
    // Equal values are rounded alike, so few different ones say nothing.
    bool judge(double share, const std::string& name, const Walk& walk,
               std::vector<OutputDifference>& out) const {
      const auto allowed = static_cast<int64_t>(share * static_cast<double>(elements)) + 8;
      if (elements < 32 || values.size() < 4 || up + down <= allowed) return true;
      OutputDifference d;
      d.kind = OutputDifference::Kind::kOneStep;
      d.name = name, d.elements = elements, d.wrong = up + down, d.allowed_count = allowed;
      d.first = walk.index(first), d.codes = true;
      out.push_back(std::move(d));
      return false;
    }
  };

  bool exact(const std::string& name, const Walk& walk, const Pair& p) {
    return run(name, walk, false, [&](int64_t, int64_t at) -> Found {
      const double got = element(p.dtype, p.got, at), wanted = element(p.dtype, p.wanted, at);
      if (is_float(p.dtype)) return {got, wanted, 0, false};
      const bool same = raw(p.dtype, p.got, at) == raw(p.dtype, p.wanted, at);
      return {same ? wanted : got, wanted, same ? 0.0 : -1.0, false};
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
    int64_t up = 0, down = 0, first = -1;  // differing 16-bit elements, by direction in magnitude
    std::set<double> values;
    const int64_t columns = walk.columns();
    walk.each([&](int64_t n, int64_t at) {
      if (!left_out_.empty() && left_out_[static_cast<size_t>(n / columns)]) return;
      const Found e = f(n, at);
      if (std::isnan(e.got) && std::isnan(e.wanted)) return;
      if (e.got == e.wanted && !(e.allowed < 0)) return;  // allowed is NaN for infinities
      if (e.counts) {
        if (first < 0) first = n;
        ++(std::abs(e.got) > std::abs(e.wanted) ? up : down);
        if (values.size() < kValues) values.insert(std::abs(e.wanted));
      }
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
    if (d.wrong == 0) {
      // Values that were rounded towards zero, say, are within the tolerance one by one. Rounding
      // to nearest has no direction, whatever came before it.
      const auto count = static_cast<double>(d.elements);
      d.allowed_count = static_cast<int64_t>(count / 4 + 3 * std::sqrt(count));
      if (values.size() < kValues || std::abs(up - down) <= d.allowed_count) return true;
      d.kind = OutputDifference::Kind::kLeaning;
      d.wrong = std::max(up, down), d.to_zero = down > up;
      d.first = walk.index(first);
    }
    out_.push_back(std::move(d));
    return false;
  }

  static constexpr size_t kValues = 16;
  std::vector<OutputDifference>& out_;
  int& compared_;
  Tolerance tolerance_;
  const std::vector<bool>& left_out_;
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
    case TE_FL_SCALING_NVFP4:
      return columnwise ? c * up(blocks(m, 16), 4) + r / 16 : r * up(blocks(k, 16), 4) + c / 16;
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

  // The factors of NVFP4's amax for the codes of both runs, 1 in the other modes.
  std::pair<double, double> second_level(bool columnwise) const {
    const void* const at =
        columnwise && q_.columnwise_amax != nullptr ? q_.columnwise_amax : q_.amax;
    if (q_.scaling != TE_FL_SCALING_NVFP4 || at == nullptr) return {1, 1};
    const auto factor = [&](ptrdiff_t distance) {
      const double amax = element(TE_FL_F32, static_cast<const char*>(at) + distance, 0);
      return amax > 0 && std::isfinite(amax) ? amax / (6.0 * 448.0) : 1.0;
    };
    return {factor(distance_), factor(0)};
  }

  void copy(bool columnwise, const char* wanted) {
    if (wanted == nullptr || m_ * k_ == 0) return;
    const Pair pair{wanted + distance_, wanted, dtype_};
    const bool turned = columnwise && q_.scaling != TE_FL_SCALING_MXFP8;
    const auto scales = static_cast<const char*>(
        columnwise && q_.columnwise_scale_inv != nullptr ? q_.columnwise_scale_inv : q_.scale_inv);
    Comparison::Scale scale;
    if (scales != nullptr) {
      const int dtype = static_cast<int>(core::scale_inv_dtype(static_cast<Scaling>(q_.scaling)));
      const auto [level_got, level_wanted] = second_level(columnwise);
      scale = [=, this, distance = distance_, of_got = level_got,
               of_wanted = level_wanted](int64_t n) {
        const int64_t r = turned ? n % m_ : n / k_, c = turned ? n / m_ : n % k_;
        const int64_t i = scale_index(q_.scaling, columnwise, m_, k_, r, c);
        return std::pair{of_got * element(dtype, scales + distance, i),
                         of_wanted * element(dtype, scales, i)};
      };
    }
    const Walk walk = columnwise ? Walk::compact(turned ? std::vector{k_, m_} : std::vector{m_, k_})
                                 : plan_walk(t_);
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
  const char* const before = arg.role == TE_FL_INOUT ? wanted + distances.before : nullptr;
  if (before == nullptr || !to.unchanged(name, walk, pair, before))
    to.plain(name, walk, pair, before);
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
  const std::string what =
      "'" + name + "': " + std::to_string(wrong) + " of " + std::to_string(elements) + " elements ";
  switch (kind) {
    case Kind::kUnchanged:
      return what + "that the call changes are as before, the first at [" + at + "], " +
             number(got) + " instead of " + number(wanted);
    case Kind::kOneStep:
      return what + "are a neighbouring code, the first at [" + at + "]; " +
             std::to_string(allowed_count) + " may be";
    case Kind::kLeaning:
      return what + "differ in one direction, " + (to_zero ? "towards" : "away from") +
             " zero, the first at [" + at + "]; rounding to nearest has none, " +
             std::to_string(allowed_count) + " more than in the other direction may";
    case Kind::kTooFar:
      break;
  }
  return what + "differ, the first at [" + at + "]; at the worst " + number(got) + " instead of " +
         number(wanted) + (codes ? " (decoded)" : "") + ", " + number(allowed) + " off is allowed";
}

std::vector<OutputDifference> compare_outputs(const core::CompiledOp& op, const void* args,
                                              const CallDistances& distances, int& compared) {
  std::vector<OutputDifference> out;
  const core::OutputChoice* const choice = core::choice_of(op.schema().name);
  const std::vector<bool> none,
      equal = choice == nullptr ? none : equal_choices(op, *choice, args, distances.other);
  const auto depends_on_choice = [&](const char* argument) {
    if (choice == nullptr) return false;
    for (const char* name : {choice->values, choice->map, choice->bits, choice->indices})
      if (name != nullptr && std::string_view(name) == argument) return true;
    return false;
  };
  for_each_tensor(
      op, args, [&](const te_fl_arg_desc& arg, const std::string& name, const te_fl_tensor& t) {
        if (arg.role == TE_FL_IN || (arg.flags & TE_FL_ARG_OPAQUE) != 0) return;
        Comparison comparison(out, compared, Tolerance::of(op, args, arg, dtype_index(t.dl.dtype)),
                              depends_on_choice(arg.name) ? equal : none);
        compare_tensor(comparison, arg, name, t, distances);
      });
  return out;
}

}  // namespace te_fl::dispatch
