#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "conformance/case.hpp"

namespace te_fl::conformance {

// The sizes and types that a sweep prescribes. Everything else of a case is random.
struct Swept {
  int64_t rows = 0, columns = 0;
  bool large = false;     // more than 2^16 rows, or a long row, or more than 2^20 elements
  int dtype = TE_FL_F32;  // dtype of unquantised tensors, of all in three quarters of the cases
  const Spec* output = nullptr;  // spec of outputs that may be quantised; null: unquantised
};

// Random numbers for one case, with the values that a sweep prescribes, if any.
class Draw : public Random {
 public:
  explicit Draw(uint64_t seed, const Swept* s = nullptr)
      : Random(seed), swept(s), mixes(s != nullptr && !s->large && below(4) == 0) {}
  const Swept* const swept;
  const bool mixes;        // tensors of a sweep have dtypes of their own
  bool quantises = false;  // a quantised tensor was requested
};

// Draws variants of cases. Each op has its own random sequence, so that selecting one op does not
// change its cases.
class Drawn {
 public:
  // Random cases: `per_op` variants of each op, drawn from `seed`.
  Drawn(Table& table, uint64_t seed, int per_op) : table_(table), seed_(seed), per_op_(per_op) {}
  // The sweep of one op.
  Drawn(Table& table, std::string op, uint64_t seed, bool thorough)
      : table_(table), seed_(seed), sweep_of_(std::move(op)), thorough_(thorough) {}

  // Calls one(draw) for each case. The function returns the rest of the case's name and the
  // function that builds the case.
  template <class F>
  void cases(const std::string& family, const std::string& op, F&& one) {
    if (!sweep_of_.empty()) {
      if (op == sweep_of_) sweep(family, op, std::forward<F>(one));
      return;
    }
    Draw draw(seed_ ^ hash_text(op));
    for (int i = 0; i < per_op_; ++i) put(family, op, "fuzz/", one(draw));
  }

  // An extent: small, or next to a power of two, at most `largest`. In a sweep, the row length.
  static int64_t extent(Draw& r, int64_t largest) {
    int64_t n = 1 + r.below(9);
    if (r.below(3) != 0) n = (int64_t{1} << r.below(11)) + r.below(3) - 1;
    if (r.swept != nullptr) n = r.swept->columns;
    return std::max<int64_t>(1, std::min(n, largest));
  }
  // A random shape of up to four dimensions and 60000 elements; in a sweep {rows, columns}.
  static Dims shape(Draw& r, int min_rank = 1) {
    if (r.swept != nullptr) return {r.swept->rows, r.swept->columns};
    Dims dims(static_cast<size_t>(min_rank + r.below(5 - min_rank)));
    int64_t left = 60000;
    for (size_t d = dims.size(); d-- > 0;) {
      dims[d] = extent(r, std::min<int64_t>(left, 1025));
      left = std::max<int64_t>(1, left / dims[d]);
    }
    return dims;
  }
  static bool chance(Random& r, int one_in) { return r.below(one_in) == 0; }
  static int high(Draw& r) {
    static const int dtypes[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
    const int drawn = dtypes[r.below(3)];
    return r.swept != nullptr && !r.mixes ? r.swept->dtype : drawn;
  }
  // A random quantised format that `shape` allows: formats with two elements per byte need even
  // extents.
  static Spec quantised(Draw& r, const Dims& shape) {
    r.quantises = true;
    int64_t rows = 1;
    for (size_t d = 0; d + 1 < shape.size(); ++d) rows *= shape[d];
    const bool even = rows % 2 == 0 && shape.back() % 2 == 0;
    const auto& all = quantised_specs();
    Spec spec;
    if (r.swept != nullptr && r.swept->output != nullptr) {
      spec = even || r.swept->output->dtype != TE_FL_F4E2M1 ? *r.swept->output : all[3];
    } else {
      do spec = all[static_cast<size_t>(r.below(static_cast<int64_t>(all.size())))];
      while (!even && spec.dtype == TE_FL_F4E2M1);
    }
    // Scaled by a power of two, numbers of few bits are ties; see gaussian().
    static constexpr float kScales[] = {1, 0.5f, 64};
    if (chance(r, 2)) spec.scale = kScales[r.below(3)];
    return spec;
  }
  static Spec output(Draw& r, const Dims& shape) {
    if (r.swept != nullptr && r.swept->output == nullptr) return Spec(r.swept->dtype);
    return r.swept == nullptr && r.below(2) == 0 ? Spec(high(r)) : quantised(r, shape);
  }

 private:
  using Made = std::pair<std::string, std::function<void(Problem&)>>;

  void put(const std::string& family, const std::string& op, const std::string& kind, Made made,
           bool large = false) {
    const std::string name = kind + made.first;
    if (!names_.insert(op + "/" + name).second) return;  // duplicate
    add(table_, family, op, name, std::move(made.second), large);
    table_.back().seed ^= seed_ * 0x9e3779b97f4a7c15u;
  }

  // Kernels are selected by the row length, its divisors and the number of rows, and use separate
  // code for the remainder of a row and for the last rows. The sweep therefore has all lengths
  // below some vector widths, and powers of two, for which the code with the widest vectors runs.
  // Its large shapes exceed 2^16 rows, a launch's columns and 2^20 elements, in every dtype, since
  // a dtype may have a kernel of its own.
  template <class F>
  void sweep(const std::string& family, const std::string& op, F&& one) {
    const auto length = [&](int dtype, const Spec* output, int64_t columns, int64_t rows,
                            bool large = false) {
      const Swept swept{rows, columns, large, dtype, output};
      const auto place = static_cast<uint64_t>((columns * 64 + rows) * 32 + dtype);
      Draw draw(seed_ * 0x9e3779b97f4a7c15u ^ hash_text(op) ^ place, &swept);
      const int variants = thorough_ ? 4 : large && columns < 8 ? 3 : 1;
      for (int i = 0; i < variants; ++i)
        put(family, op, "sweep/" + dims_name({rows, columns}) + "/", one(draw), large);
      return draw.quantises;
    };
    const auto pass = [&](const auto& dtype_of, bool quantised) {
      const auto output = [&](int64_t n) {
        const auto& all = quantised_specs();
        return quantised ? &all[static_cast<size_t>(n) % all.size()] : nullptr;
      };
      if (quantised && !length(TE_FL_BF16, output(1), 1, 5)) return;
      for (int64_t n = 1; n <= 300; ++n)
        length(dtype_of(n), output(n), n, quantised ? 4 + n % 2 : 5);
      for (int p = 0; p <= 14; ++p)
        for (const int64_t rows : {1, 2, 3, 4, 8})
          if (p <= 12 || rows == 4)
            length(dtype_of(p * 27), output(p + rows), int64_t{1} << p, rows);
      // Every form with rows longer than a block of threads.
      for (int64_t n = 0; quantised && n < static_cast<int64_t>(quantised_specs().size()); ++n)
        length(dtype_of(n * 27), output(n), 1040 + 16 * n, 6);
      for (int64_t n = 0; n < (quantised ? 3 : 1); ++n)
        length(dtype_of(n * 27), output(3), 3, 70'003, true);
      length(dtype_of(0), output(7), 70'001, 3, true);
      length(dtype_of(0), output(12), 1027, 1031, true);
      if (thorough_) length(dtype_of(0), output(9), 1021, 16433, true);
    };
    for (const int dtype : {TE_FL_F32, TE_FL_BF16, TE_FL_F16})
      pass([dtype](int64_t) { return dtype; }, false);
    // The dtype changes after every form of quantised outputs.
    pass(
        [](int64_t n) {
          static constexpr int kDtypes[] = {TE_FL_BF16, TE_FL_F16, TE_FL_F32};
          return kDtypes[n / static_cast<int64_t>(quantised_specs().size()) % 3];
        },
        true);
  }

  Table& table_;
  uint64_t seed_;
  int per_op_ = 0;
  std::string sweep_of_;
  bool thorough_ = false;
  std::set<std::string> names_;
};

using DrawnCase = std::pair<std::string, std::function<void(Problem&)>>;

}  // namespace te_fl::conformance
