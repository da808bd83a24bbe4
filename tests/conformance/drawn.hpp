#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "conformance/case.hpp"

namespace te_fl::conformance {

// Draws variants of cases. Every op has a sequence of its own, so that asking for one op alone
// gives the same cases.
class Drawn {
 public:
  Drawn(Table& table, uint64_t seed, int per_op) : table_(table), seed_(seed), per_op_(per_op) {}

  // Calls `one(random)` per_op times; it returns the rest of the case's name and the builder.
  template <class F>
  void cases(const std::string& family, const std::string& op, F&& one) {
    Random random(seed_ ^ hash_of(op));
    for (int i = 0; i < per_op_; ++i) {
      auto [rest, build] = one(random);
      const std::string name = "fuzz/" + rest;
      if (!names_.insert(op + "/" + name).second) continue;  // drawn before
      add(table_, family, op, name, std::move(build));
      table_.back().seed ^= seed_ * 0x9e3779b97f4a7c15u;
    }
  }

  // An extent: small, or beside a power of two, up to `largest`.
  static int64_t extent(Random& r, int64_t largest) {
    int64_t n = 1 + r.below(9);
    if (r.below(3) != 0) n = (int64_t{1} << r.below(11)) + r.below(3) - 1;
    return std::max<int64_t>(1, std::min(n, largest));
  }
  // Up to four dimensions and 60000 elements.
  static Dims shape(Random& r, int min_rank = 1) {
    Dims dims(static_cast<size_t>(min_rank + r.below(5 - min_rank)));
    int64_t left = 60000;
    for (size_t d = dims.size(); d-- > 0;) {
      dims[d] = extent(r, std::min<int64_t>(left, 1025));
      left = std::max<int64_t>(1, left / dims[d]);
    }
    return dims;
  }
  static bool chance(Random& r, int one_in) { return r.below(one_in) == 0; }
  static int high(Random& r) {
    static const int dtypes[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
    return dtypes[r.below(3)];
  }
  // A quantised form that `shape` can have: packed pairs want even extents.
  static Spec quantised(Random& r, const Dims& shape) {
    int64_t rows = 1;
    for (size_t d = 0; d + 1 < shape.size(); ++d) rows *= shape[d];
    const bool even = rows % 2 == 0 && shape.back() % 2 == 0;
    const auto& all = quantised_specs();
    for (;;) {
      const Spec& spec = all[static_cast<size_t>(r.below(static_cast<int64_t>(all.size())))];
      if (even || spec.dtype != TE_FL_F4E2M1) return spec;
    }
  }
  static Spec output(Random& r, const Dims& shape) {
    return r.below(2) == 0 ? Spec(high(r)) : quantised(r, shape);
  }

 private:
  Table& table_;
  uint64_t seed_;
  int per_op_;
  std::set<std::string> names_;
};

using DrawnCase = std::pair<std::string, std::function<void(Problem&)>>;

}  // namespace te_fl::conformance
