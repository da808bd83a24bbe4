#include "dispatch/watch/choice_rows.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string_view>

#include "dispatch/watch/elements.hpp"
#include "dispatch/watch/output_walk.hpp"
#include "dispatch/watch/tolerance.hpp"

namespace te_fl::dispatch {
namespace {

// The elements of an argument in both runs.
struct Both {
  std::vector<double> got, wanted;
  int64_t columns = 1;
  int dtype = 0;
  bool there() const { return !wanted.empty(); }
};

Both read(const core::CompiledOp& op, const void* args, const char* name, ptrdiff_t distance) {
  Both both;
  if (name == nullptr) return both;
  for_each_tensor(
      op, args, [&](const te_fl_arg_desc& arg, const std::string&, const te_fl_tensor& t) {
        if (std::string_view(arg.name) != name || t.dl.data == nullptr) return;
        const char* base = static_cast<const char*>(t.dl.data) + t.dl.byte_offset;
        const Walk walk = plan_walk(t);
        both.dtype = dtype_index(t.dl.dtype), both.columns = walk.columns();
        walk.each([&](int64_t, int64_t at) {
          both.wanted.push_back(element(both.dtype, base, at));
          both.got.push_back(arg.role == TE_FL_IN ? both.wanted.back()
                                                  : element(both.dtype, base + distance, at));
        });
      });
  return both;
}

using Row = std::vector<double>;

Row row_of(const std::vector<double>& all, int64_t row, int64_t columns) {
  const auto begin = all.begin() + static_cast<ptrdiff_t>(row * columns);
  return {begin, begin + static_cast<ptrdiff_t>(columns)};
}

bool near(const Row& a, const Row& b, double relative, double least) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](double x, double y) {
    return x == y || std::abs(x - y) <= relative * std::max(std::abs(x), std::abs(y)) + least;
  });
}

Row sorted(Row row) {
  std::sort(row.begin(), row.end(), std::greater<>());
  return row;
}

}  // namespace

std::vector<bool> equal_choices(const core::CompiledOp& op, const core::OutputChoice& choice,
                                const void* args, ptrdiff_t distance) {
  const Both keys = read(op, args, choice.keys, distance);
  const Both bias = read(op, args, choice.bias, distance);
  const Both values = read(op, args, choice.values, distance);
  const Both map = read(op, args, choice.map, distance);
  const Both bits = read(op, args, choice.bits, distance);
  const Both indices = read(op, args, choice.indices, distance);
  const int64_t columns = std::max<int64_t>(keys.columns, 1);
  const auto rows = static_cast<int64_t>(keys.wanted.size()) / columns;
  std::vector<bool> equal(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    // Returns the keys of the columns that a run has chosen. The keys are read from the reference
    // run, also for the columns that the other run has chosen.
    const auto chosen = [&](std::vector<double> Both::*run) {
      Row found;
      const auto add = [&](int64_t c) {
        if (c < 0 || c >= columns) return found.push_back(NAN);
        found.push_back(keys.wanted[static_cast<size_t>(r * columns + c)] +
                        (bias.there() ? bias.wanted[static_cast<size_t>(c)] : 0));
      };
      if (indices.there()) {
        for (const double c : row_of(indices.*run, r, indices.columns))
          add(static_cast<int64_t>(c));
        return found;
      }
      for (int64_t c = 0; c < columns; ++c) {
        const bool in =
            map.there() ? (map.*run)[static_cast<size_t>(r * columns + c)] != 0
            : bits.there()
                ? (static_cast<int>((bits.*run)[static_cast<size_t>(r * bits.columns + c / 8)]) >>
                       c % 8 &
                   1) != 0
                : (values.*run)[static_cast<size_t>(r * columns + c)] != 0;
        if (in) add(c);
      }
      return sorted(std::move(found));
    };
    if (!map.there() && !bits.there() && !indices.there() && !values.there()) break;
    const auto differs = [&](const Both& b) {
      return b.there() && row_of(b.got, r, b.columns) != row_of(b.wanted, r, b.columns);
    };
    if (!differs(map) && !differs(bits) && !differs(indices) && !differs(values)) continue;
    equal[static_cast<size_t>(r)] =
        near(chosen(&Both::got), chosen(&Both::wanted), 0x1p-20, 0x1p-22) &&
        (!values.there() ||
         near(sorted(row_of(values.got, r, columns)), sorted(row_of(values.wanted, r, columns)),
              Tolerance{}.relative(values.dtype), 0x1p-20));
  }
  return equal;
}

}  // namespace te_fl::dispatch
