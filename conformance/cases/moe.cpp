#include <algorithm>
#include <cmath>
#include <numeric>

#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/huge/moe.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr int kRowTypes[] = {TE_FL_F32,    TE_FL_F16,    TE_FL_BF16,
                             TE_FL_F8E4M3, TE_FL_F8E5M2, TE_FL_U8};

// Values of rows that are only copied, with infinities and NaN where the dtype has them.
Fill row_values(int dtype) {
  if (dtype == TE_FL_U8) return integers(200);
  const bool special = dtype != TE_FL_F8E4M3 && dtype != TE_FL_F8E5M2;
  return [special, plain = gaussian(3)](Random& r, int64_t i) {
    const double x = plain(r, i);
    if (!special || i % 41 != 17) return x;
    return i % 2 == 0 ? nan_value() : std::copysign(infinity(), x);
  };
}
Fill listed(std::vector<double> values) {
  return
      [values = std::move(values)](Random&, int64_t i) { return values[static_cast<size_t>(i)]; };
}

// ---- cases of the permutation of rows

struct PermuteVariant {
  int dtype = TE_FL_F32, index = TE_FL_I32;
  int64_t tokens = 7, each = 2, width = 33, experts = 5;
  int64_t rows = -1;       // of the output; -1: one for each pair
  bool any_index = false;  // num_experts is absent, and indices are arbitrary numbers
  double bad_index = 0;    // not 0: an invalid index
  bool large = false;
  int64_t rows_out() const { return rows < 0 ? tokens * each : rows; }
};

std::string permute_name(const PermuteVariant& v) {
  std::string name = std::string(name_of(v.dtype)) + "/" + name_of(v.index) + "/" +
                     dims_name({v.tokens, v.each, v.width}) + "/E=" + std::to_string(v.experts);
  if (v.rows >= 0) name += "/rows=" + std::to_string(v.rows);
  if (v.any_index) name += "/any_index";
  if (v.bad_index != 0) name += "/index=" + std::to_string(static_cast<int64_t>(v.bad_index));
  return name;
}

void permute_forward(Problem& p, const PermuteVariant& v) {
  Tensor* x = p.in("input", v.dtype, {v.tokens, v.width}, row_values(v.dtype));
  Tensor* at = p.in("indices", v.index, {v.tokens, v.each}, [v](Random& r, int64_t i) {
    const auto expert = static_cast<double>(r.below(v.experts));
    if (v.bad_index != 0 && i == 3) return v.bad_index;
    return v.any_index ? (expert - 2) * 1000003 : expert;
  });
  Tensor* y = p.out("output", v.dtype, {v.rows_out(), v.width});
  Tensor* map = p.out("row_id_map", TE_FL_I32, {v.each, v.tokens});
  if (!v.any_index) p.set("num_experts", static_cast<double>(v.experts));
  if (v.bad_index != 0) {
    p.expect_error(TE_FL_INVALID_ARGUMENT, std::to_string(static_cast<int64_t>(v.bad_index)));
    p.late_error = true;
  }
  p.oracle([&p, v, x, at, y, map] {
    if (v.bad_index != 0) return p.expect_unchanged(y);
    const int64_t pairs = at->numel();
    std::vector<double> want(static_cast<size_t>(y->numel()), 0), want_map(map->numel());
    std::vector<int64_t> sorted(static_cast<size_t>(pairs));
    std::iota(sorted.begin(), sorted.end(), int64_t{0});
    std::stable_sort(sorted.begin(), sorted.end(),
                     [at](int64_t i, int64_t j) { return at->get(i) < at->get(j); });
    for (int64_t row = 0; row < pairs; ++row) {
      const int64_t i = sorted[row], token = i / v.each;
      want_map[i % v.each * v.tokens + token] = row < v.rows_out() ? static_cast<double>(row) : -1;
      for (int64_t c = 0; c < v.width && row < v.rows_out(); ++c)
        want[row * v.width + c] = x->get(token * v.width + c);
    }
    p.expect_exact(y, want, v.dtype);
    p.expect_exact(map, want_map, TE_FL_F32);
  });
}

void add_permute(Table& table) {
  std::vector<PermuteVariant> all;
  for (int dtype : kRowTypes)
    for (int index : {TE_FL_I32, TE_FL_I64}) all.push_back({.dtype = dtype, .index = index});
  for (int64_t width : {1, 8, 16, 64, 1024, 4100})
    all.push_back({.dtype = TE_FL_BF16, .width = width});
  for (int64_t rows : {0, 1, 9, 13, 14, 20})
    all.push_back({.dtype = TE_FL_BF16, .width = 16, .rows = rows});
  all.push_back({.tokens = 0}), all.push_back({.width = 0}), all.push_back({.each = 0, .rows = 3});
  all.push_back({.tokens = 1, .each = 1, .experts = 1});
  all.push_back({.tokens = 40, .each = 8, .experts = 64});
  all.push_back({.tokens = 40, .each = 3, .experts = 1});
  for (int index : {TE_FL_I32, TE_FL_I64})
    all.push_back({.index = index, .tokens = 30, .any_index = true});
  // Enough (token, expert) pairs for many warps, with expert indices of one, two and four digits of
  // the radix sort.
  for (int64_t experts : {64, 300, 2000})
    all.push_back({.dtype = TE_FL_BF16,
                   .tokens = 5000,
                   .each = 4,
                   .width = 8,
                   .experts = experts,
                   .large = true});
  all.push_back({.dtype = TE_FL_BF16,
                 .tokens = 5000,
                 .width = 8,
                 .experts = 2100,
                 .rows = 9000,
                 .any_index = true,
                 .large = true});
  for (double bad : {5.0, -1.0}) all.push_back({.bad_index = bad});
  all.push_back({.index = TE_FL_I64, .bad_index = 4294967297.0});
  all.push_back({.index = TE_FL_I64, .any_index = true, .bad_index = 4294967297.0});
  for (const PermuteVariant& v : all)
    add(
        table, "moe", "moe_permute_fwd", permute_name(v),
        [v](Problem& p) { permute_forward(p, v); }, v.large);
}

// ---- cases of sums of a token's rows, and of their gradient

struct RowsVariant {
  int dtype = TE_FL_F32;
  int64_t tokens = 7, each = 2, width = 33;
  int64_t rows = -1;  // permuted rows; -1: the number of pairs
  bool probs = true, grad_probs = true;
  int64_t bad_row = 0;  // not 0: an invalid entry of the map
  bool twice = false;   // two pairs share a row
  int64_t rows_in() const { return rows < 0 ? tokens * each : rows; }
};

std::string rows_name(const RowsVariant& v) {
  std::string name = std::string(name_of(v.dtype)) + "/" + dims_name({v.tokens, v.each, v.width});
  if (v.rows >= 0) name += "/rows=" + std::to_string(v.rows);
  if (!v.probs) name += "/no_probs";
  if (!v.grad_probs) name += "/no_grad_probs";
  if (v.bad_row != 0) name += "/row=" + std::to_string(v.bad_row);
  return name + (v.twice ? "/twice" : "");
}

Tensor* map_in(Problem& p, const RowsVariant& v) {
  const int64_t pairs = v.tokens * v.each;
  std::vector<double> map(static_cast<size_t>(pairs));
  std::iota(map.begin(), map.end(), 0.0);
  for (int64_t i = pairs - 1; i > 0; --i) std::swap(map[i], map[p.random.below(i + 1)]);
  for (double& row : map) row = row < static_cast<double>(v.rows_in()) ? row : -1;
  if (v.bad_row != 0) map[3] = static_cast<double>(v.bad_row);
  if (v.twice) map[3] = map[5];
  return p.in("row_id_map", TE_FL_I32, {v.each, v.tokens}, listed(map));
}

void expect_bad_row(Problem& p, const RowsVariant& v) {
  if (v.bad_row == 0) return;
  p.expect_error(TE_FL_INVALID_ARGUMENT, std::to_string(v.bad_row));
  p.late_error = true;
}

void rows_sum(Problem& p, const RowsVariant& v, const char* input, const char* output) {
  Tensor* x = p.in(input, v.dtype, {v.rows_in(), v.width});
  Tensor* map = map_in(p, v);
  Tensor* probs = v.probs ? p.in("probs", TE_FL_F32, {v.tokens, v.each}) : nullptr;
  Tensor* y = p.out(output, v.dtype, {v.tokens, v.width});
  expect_bad_row(p, v);
  p.oracle([&p, v, x, map, probs, y] {
    if (v.bad_row != 0) return p.expect_unchanged(y);
    std::vector<double> want(static_cast<size_t>(y->numel()), 0), tolerance(want.size(), 0);
    for (int64_t s = 0; s < v.each; ++s)
      for (int64_t i = 0; i < y->numel(); ++i) {
        const int64_t t = i / v.width;
        const auto row = static_cast<int64_t>(map->get(s * v.tokens + t));
        if (row < 0) continue;
        const double term = (probs != nullptr ? probs->get(t * v.each + s) : 1.0) *
                            x->get(row * v.width + i % v.width);
        want[i] += term, tolerance[i] += std::fabs(term);
      }
    for (double& s : tolerance) s = sum_tolerance(static_cast<double>(v.each), s);
    p.expect(y, want, tolerance);
  });
}

void rows_gradient(Problem& p, const RowsVariant& v) {
  Tensor* dy = p.in("grad_output", v.dtype, {v.tokens, v.width});
  Tensor* x = p.in("fwd_input", v.dtype, {v.rows_in(), v.width});
  Tensor* map = map_in(p, v);
  Tensor* probs = v.probs ? p.in("probs", TE_FL_F32, {v.tokens, v.each}) : nullptr;
  Tensor* dx = p.out("grad_input", v.dtype, {v.rows_in(), v.width});
  Tensor* dp = v.grad_probs ? p.out("grad_probs", TE_FL_F32, {v.tokens, v.each}) : nullptr;
  expect_bad_row(p, v);
  if (v.twice) {
    p.expect_error(TE_FL_INVALID_ARGUMENT, "a row belongs to one pair");
    p.late_error = true;
  }
  p.oracle([&p, v, dy, x, map, probs, dx, dp] {
    if (v.bad_row != 0 || v.twice) return p.expect_unchanged(dx);
    std::vector<double> want(static_cast<size_t>(dx->numel()), 0), dots(v.tokens * v.each, 0),
        tolerance(dots.size(), 0);
    for (int64_t i = 0; i < v.tokens * v.each; ++i) {
      const int64_t t = i / v.each, s = i % v.each;
      const auto row = static_cast<int64_t>(map->get(s * v.tokens + t));
      for (int64_t c = 0; c < v.width && row >= 0; ++c) {
        const double g = dy->get(t * v.width + c);
        want[row * v.width + c] = (probs != nullptr ? probs->get(i) : 1.0) * g;
        dots[i] += g * x->get(row * v.width + c);
        tolerance[i] += std::fabs(g * x->get(row * v.width + c));
      }
    }
    for (double& s : tolerance) s = sum_tolerance(static_cast<double>(v.width), s);
    p.expect(dx, want);
    if (dp != nullptr) p.expect(dp, dots, tolerance);
  });
}

void add_rows_ops(Table& table, const RowsVariant& v) {
  add(table, "moe", "moe_permute_bwd", rows_name(v),
      [v](Problem& p) { rows_sum(p, v, "grad_output", "grad_input"); });
  add(table, "moe", "moe_unpermute_fwd", rows_name(v),
      [v](Problem& p) { rows_sum(p, v, "input", "output"); });
  add(table, "moe", "moe_unpermute_bwd", rows_name(v), [v](Problem& p) { rows_gradient(p, v); });
}

void add_rows(Table& table) {
  for (int dtype : kHigh) {
    add_rows_ops(table, {.dtype = dtype});
    add_rows_ops(table, {.dtype = dtype, .width = 64, .probs = false});
    add_rows_ops(table, {.dtype = dtype, .tokens = 5, .each = 8, .width = 2056});
  }
  for (int64_t width : {1, 8, 1024, 8200})
    add_rows_ops(table, {.dtype = TE_FL_BF16, .width = width});
  for (int64_t rows : {0, 1, 9, 20})
    add_rows_ops(table, {.dtype = TE_FL_BF16, .width = 40, .rows = rows});
  add_rows_ops(table, {.tokens = 0}), add_rows_ops(table, {.width = 0});
  add_rows_ops(table, {.each = 0, .rows = 3});
  add_rows_ops(table, {.tokens = 3, .each = 1}), add_rows_ops(table, {.tokens = 3, .each = 33});
  // Row maps like those made from routing masks: many slots per token, few of which have a row.
  add_rows_ops(table, {.dtype = TE_FL_BF16, .tokens = 6, .each = 70, .width = 2080, .rows = 30});
  add_rows_ops(table, {.tokens = 5, .each = 40, .width = 19, .rows = 44, .probs = false});
  add_rows_ops(table, {.dtype = TE_FL_BF16, .tokens = 9, .each = 130, .width = 72, .rows = 50});
  add(
      table, "moe", "moe_unpermute_fwd", "many/700x2x8200",
      [](Problem& p) {
        const RowsVariant many{.dtype = TE_FL_BF16, .tokens = 700, .width = 8200, .rows = 1300};
        rows_sum(p, many, "input", "output");
      },
      true);
  add(table, "moe", "moe_unpermute_fwd", "wide/2x1100x8",
      [](Problem& p) { rows_sum(p, {.tokens = 2, .each = 1100, .width = 8}, "input", "output"); });
  for (int64_t bad : {-2, 14, 2147483647}) add_rows_ops(table, {.bad_row = bad});
  add_rows_ops(table, {.tokens = 3, .each = 12, .bad_row = 900});
  for (const RowsVariant& v :
       {RowsVariant{.probs = false, .grad_probs = false},
        RowsVariant{.dtype = TE_FL_BF16,
        .tokens = 6,
        .each = 70,
        .width = 2088,
        .rows = 30,
        .probs = false,
        .grad_probs = false},
        RowsVariant{.width = 64, .grad_probs = false}, RowsVariant{.twice = true}})
    add(table, "moe", "moe_unpermute_bwd", "alone/" + rows_name(v),
        [v](Problem& p) { rows_gradient(p, v); });
}

// ---- cases of groups

using Lengths = std::vector<int64_t>;
int64_t total(const Lengths& l) { return std::accumulate(l.begin(), l.end(), int64_t{0}); }

struct GroupsVariant {
  int dtype = TE_FL_F32;
  Lengths plain = {}, padded = {};
  int64_t width = 33;
};
std::string groups_name(const GroupsVariant& v) {
  return std::string(name_of(v.dtype)) + "/" + dims_name(v.plain) + "->" + dims_name(v.padded) +
         "/H=" + std::to_string(v.width);
}

void groups(Problem& p, const GroupsVariant& v, bool pads) {
  const Lengths &from = pads ? v.plain : v.padded, &to = pads ? v.padded : v.plain;
  Tensor* x = p.in("input", v.dtype, {total(from), v.width}, row_values(v.dtype));
  Tensor* y = p.out("output", v.dtype, {total(to), v.width});
  p.list("input_rows", from), p.list(pads ? "padded_rows" : "unpadded_rows", to);
  p.oracle([&p, v, x, y, from, to] {
    std::vector<double> want;
    int64_t first = 0;
    for (size_t g = 0; g < from.size(); first += from[g++] * v.width)
      for (int64_t i = 0; i < to[g] * v.width; ++i)
        want.push_back(i < from[g] * v.width ? x->get(first + i) : 0.0);
    p.expect_exact(y, want, v.dtype);
  });
}

void wrong_groups(Table& table, const std::string& name, const Lengths& from, const Lengths& to,
                  int64_t rows, const std::string& text) {
  for (const bool pads : {true, false})
    add(table, "moe", pads ? "fused_multi_row_padding" : "fused_multi_row_unpadding",
        "mistake/" + name, [=](Problem& p) {
          Tensor* x = p.in("input", TE_FL_F32, {pads ? rows : total(to), 4});
          Tensor* y = p.out("output", TE_FL_F32, {pads ? total(to) : rows, 4});
          p.list("input_rows", pads ? from : to);
          p.list(pads ? "padded_rows" : "unpadded_rows", pads ? to : from);
          p.expect_error(TE_FL_INVALID_ARGUMENT, text);
          p.oracle([&p, x, y] { (void)x, p.expect_unchanged(y); });
        });
}

void add_groups(Table& table) {
  std::vector<GroupsVariant> all;
  for (int dtype : kRowTypes) {
    all.push_back({dtype, {3, 0, 5}, {4, 4, 8}});
    all.push_back({dtype, {17, 1}, {32, 16}, 64});
  }
  all.push_back({TE_FL_BF16, {0}, {16}, 1040});
  all.push_back({TE_FL_BF16, {16, 16}, {16, 16}, 24});
  all.push_back({TE_FL_F32, {3}, {4}, 0});
  Lengths many, padded;
  for (int64_t g = 0; g < 300; ++g)
    many.push_back(g * 7 % 5), padded.push_back((g * 7 % 5 + 3) / 4 * 4);
  all.push_back({TE_FL_BF16, many, padded, 9});
  all.push_back({TE_FL_F32, many, padded, 16});
  for (size_t i = 0; i < all.size(); ++i) {
    const GroupsVariant& v = all[i];
    const std::string name =
        v.plain.size() > 99 ? std::string(name_of(v.dtype)) + "/300_groups" : groups_name(v);
    add(table, "moe", "fused_multi_row_padding", name, [v](Problem& p) { groups(p, v, true); });
    add(table, "moe", "fused_multi_row_unpadding", name, [v](Problem& p) { groups(p, v, false); });
  }
  wrong_groups(table, "less", {4, 4}, {4, 3}, 8, "_rows'[1] is 3");
  wrong_groups(table, "sum", {4, 3}, {4, 4}, 8, "_rows' is 7");
  wrong_groups(table, "count", {4}, {4, 4}, 4, "_rows' is a list of 2");
}

struct OffsetsVariant {
  int in = TE_FL_I64, out = TE_FL_I64;
  int64_t size = 9, stride = 1;
  bool leading_zero = true;
  double bad = 0;
};

void offsets(Problem& p, const OffsetsVariant& v) {
  Tensor* x = p.in("splits", v.in, {v.size}, [v](Random& r, int64_t i) {
    return v.bad != 0 && i == 3 ? v.bad : static_cast<double>(r.below(100) * r.below(2));
  });
  Tensor* y = p.out("offsets", v.out, {v.size + (v.leading_zero ? 1 : 0)});
  p.set("stride", static_cast<double>(v.stride)), p.set("leading_zero", v.leading_zero);
  if (v.bad != 0) {
    p.expect_error(TE_FL_INVALID_ARGUMENT, "splits[3] is -7");
    p.late_error = true;
  }
  p.oracle([&p, v, x, y] {
    if (v.bad != 0) return p.expect_unchanged(y);
    std::vector<double> want;
    if (v.leading_zero) want.push_back(0);
    double sum = 0;
    for (int64_t i = 0; i < v.size; ++i)
      want.push_back(sum += x->get(i) * static_cast<double>(v.stride));
    p.expect_exact(y, want, TE_FL_F32);
  });
}

void add_offsets(Table& table) {
  std::vector<OffsetsVariant> all;
  for (int in : {TE_FL_I32, TE_FL_I64})
    for (int out : {TE_FL_I32, TE_FL_I64})
      for (bool zero : {true, false}) all.push_back({in, out, 9, 3, zero});
  for (int64_t size : {0, 1, 31, 64, 1025, 5000}) all.push_back({.size = size});
  all.push_back({.stride = int64_t{1} << 36});
  all.push_back({.bad = -7});
  for (const OffsetsVariant& v : all)
    add(table, "moe", "splits_to_offsets",
        std::string(name_of(v.in)) + "->" + name_of(v.out) + "/" + std::to_string(v.size) +
            "/stride=" + std::to_string(v.stride) + (v.leading_zero ? "" : "/no_zero") +
            (v.bad != 0 ? "/negative" : ""),
        [v](Problem& p) { offsets(p, v); });
}

void add_cases(Table& table) {
  add_permute(table);
  add_rows(table);
  add_groups(table);
  add_offsets(table);
}

// The number of tokens for which a case of `each` elements for a token takes little time.
int64_t most_tokens(const Draw& r, int64_t usual, int64_t each) {
  const bool large = r.swept != nullptr && r.swept->large;
  return std::min(large ? INT64_MAX : usual, 1 + (large ? 3'000'000 : 600'000) / each);
}

void draw_cases(Drawn& drawn) {
  drawn.cases("moe", "moe_permute_fwd", [](Draw& r) -> DrawnCase {
    const Dims shape = Drawn::shape(r, 2);
    PermuteVariant v{.dtype = Drawn::high(r), .index = Drawn::chance(r, 2) ? TE_FL_I32 : TE_FL_I64};
    v.width = shape.back(), v.each = 1 + r.below(6), v.experts = 1 + r.below(70);
    v.tokens = std::min(shape[0], most_tokens(r, 300, v.each * v.width));
    if (Drawn::chance(r, 3)) v.rows = r.below(v.tokens * v.each + 9);
    v.any_index = Drawn::chance(r, 4);
    return {permute_name(v), [v](Problem& p) { permute_forward(p, v); }};
  });
  const auto rows = [](Draw& r) {
    const Dims shape = Drawn::shape(r, 2);
    RowsVariant v{.dtype = Drawn::high(r)};
    v.width = shape.back(), v.each = 1 + r.below(6);
    v.tokens = std::min(shape[0], most_tokens(r, shape[0], v.each * v.width));
    if (Drawn::chance(r, 3)) v.rows = r.below(v.tokens * v.each + 9);
    v.probs = !Drawn::chance(r, 4), v.grad_probs = v.probs || Drawn::chance(r, 2);
    return v;
  };
  drawn.cases("moe", "moe_permute_bwd", [&](Draw& r) -> DrawnCase {
    const RowsVariant v = rows(r);
    return {rows_name(v), [v](Problem& p) { rows_sum(p, v, "grad_output", "grad_input"); }};
  });
  drawn.cases("moe", "moe_unpermute_fwd", [&](Draw& r) -> DrawnCase {
    const RowsVariant v = rows(r);
    return {rows_name(v), [v](Problem& p) { rows_sum(p, v, "input", "output"); }};
  });
  drawn.cases("moe", "moe_unpermute_bwd", [&](Draw& r) -> DrawnCase {
    const RowsVariant v = rows(r);
    return {rows_name(v), [v](Problem& p) { rows_gradient(p, v); }};
  });
  for (const bool pads : {true, false})
    drawn.cases("moe", pads ? "fused_multi_row_padding" : "fused_multi_row_unpadding",
                [pads](Draw& r) -> DrawnCase {
                  const Dims shape = Drawn::shape(r, 2);
                  GroupsVariant v{.dtype = Drawn::high(r), .width = shape.back()};
                  const int64_t multiple = 1 + r.below(9);
                  for (int64_t left = shape[0]; left > 0; left -= v.plain.back()) {
                    v.plain.push_back(r.below(left + 1) + (left < 4 ? 1 : 0));
                    v.plain.back() = std::min(v.plain.back(), left);
                    v.padded.push_back((v.plain.back() + multiple - 1) / multiple * multiple);
                  }
                  return {groups_name(v), [v, pads](Problem& p) { groups(p, v, pads); }};
                });
  drawn.cases("moe", "splits_to_offsets", [](Draw& r) -> DrawnCase {
    OffsetsVariant v{.size = Drawn::shape(r).back(), .stride = 1 + r.below(5000)};
    v.in = Drawn::chance(r, 2) ? TE_FL_I32 : TE_FL_I64, v.leading_zero = Drawn::chance(r, 2);
    if (Drawn::chance(r, 4)) v.stride = (int64_t{1} << 30) + 1;
    if (v.size < 1000 && v.stride < 2000) v.out = Drawn::chance(r, 2) ? TE_FL_I32 : TE_FL_I64;
    return {std::string(name_of(v.in)) + "->" + name_of(v.out) + "/" + std::to_string(v.size) +
                "/stride=" + std::to_string(v.stride) + (v.leading_zero ? "" : "/no_zero"),
            [v](Problem& p) { offsets(p, v); }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace moe_calls;
  const Cases all = {
      {"moe_permute_fwd", "", [](Run& r) { permute(r, kCols, 8); }},
      {"moe_permute_fwd", "odd rows, dropped", [](Run& r) { permute(r, kOddCols, 0); }},
      {"moe_permute_bwd", "", [](Run& r) { sums(r, kCols, "moe_permute_bwd"); }},
      {"moe_unpermute_fwd", "", [](Run& r) { sums(r, kCols, "moe_unpermute_fwd"); }},
      {"moe_unpermute_fwd", "odd rows", [](Run& r) { sums(r, kOddCols, "moe_unpermute_fwd"); }},
      {"moe_unpermute_bwd", "", [](Run& r) { gradient(r, kCols); }},
      {"moe_unpermute_bwd", "odd rows", [](Run& r) { gradient(r, kOddCols); }},
      {"fused_multi_row_padding", "", [](Run& r) { pad(r, kCols, true); }},
      {"fused_multi_row_padding", "odd rows", [](Run& r) { pad(r, kOddCols, true); }},
      {"fused_multi_row_unpadding", "", [](Run& r) { pad(r, kCols, false); }},
      {"fused_multi_row_unpadding", "odd rows", [](Run& r) { pad(r, kOddCols, false); }},
      {"splits_to_offsets", "", offsets},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

constexpr int64_t kTop = 2, kExperts = 64;

// Fills the map with the row of each (token, expert) pair. The pattern is like that of routing to
// all experts.
void fill_map(BenchTensor& map, int64_t pairs) {
  auto* rows = map.data<int32_t>();
  for (int64_t i = 0; i < pairs; ++i) rows[i] = static_cast<int32_t>(i * 7919 % pairs);
}
int64_t count_pairs(int64_t rows) {
  int64_t tokens = rows;
  while (tokens * kTop % 7919 == 0) ++tokens;  // coprime to 7919: permutation
  return tokens * kTop;
}

void add_cases(Cases& cases) {
  both_dtypes(cases, "moe_permute_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_moe_permute_fwd_args>();
    BenchTensor& indices = c.in({rows, kTop}, TE_FL_I32);
    for (int64_t i = 0; i < rows * kTop; ++i) {
      indices.data<int32_t>()[i] = static_cast<int32_t>(i * 37 % kExperts);
    }
    a.input = c.in({rows, c.cols()}, dtype), a.indices = indices;
    a.output = c.out({rows * kTop, c.cols()}, dtype), a.num_experts = kExperts;
    a.row_id_map = c.out({kTop, rows}, TE_FL_I32);
  });
  both_dtypes(cases, "moe_permute_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_moe_permute_bwd_args>();
    const int64_t pairs = count_pairs(rows);
    BenchTensor& map = c.in({kTop, pairs / kTop}, TE_FL_I32);
    fill_map(map, pairs);
    a.grad_output = c.in({pairs, c.cols()}, dtype), a.row_id_map = map;
    a.grad_input = c.out({pairs / kTop, c.cols()}, dtype);
  });
  both_dtypes(cases, "moe_unpermute_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_moe_unpermute_fwd_args>();
    const int64_t pairs = count_pairs(rows);
    BenchTensor& map = c.in({kTop, pairs / kTop}, TE_FL_I32);
    fill_map(map, pairs);
    a.input = c.in({pairs, c.cols()}, dtype), a.row_id_map = map;
    a.probs = c.in({pairs / kTop, kTop}, TE_FL_F32);
    a.output = c.out({pairs / kTop, c.cols()}, dtype);
  });
  both_dtypes(cases, "moe_unpermute_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_moe_unpermute_bwd_args>();
    const int64_t pairs = count_pairs(rows);
    BenchTensor& map = c.in({kTop, pairs / kTop}, TE_FL_I32);
    fill_map(map, pairs);
    a.grad_output = c.in({pairs / kTop, c.cols()}, dtype), a.row_id_map = map;
    a.fwd_input = c.in({pairs, c.cols()}, dtype);
    a.probs = c.in({pairs / kTop, kTop}, TE_FL_F32);
    a.grad_input = c.out({pairs, c.cols()}, dtype);
    a.grad_probs = c.out({pairs / kTop, kTop}, TE_FL_F32);
  });
  static int64_t plain[kExperts], padded[kExperts];
  const auto lengths = [](int64_t rows) {
    int64_t all = 0;
    for (int64_t g = 0; g < kExperts; ++g) {
      plain[g] = rows * (g + 1) / kExperts - rows * g / kExperts;
      all += padded[g] = (plain[g] + 31) / 32 * 32;
    }
    return all;
  };
  both_dtypes(cases, "fused_multi_row_padding", [lengths](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_multi_row_padding_args>();
    a.output = c.out({lengths(rows), c.cols()}, dtype), a.input = c.in({rows, c.cols()}, dtype);
    a.input_rows = plain, a.padded_rows = padded;
    a.input_rows_count = a.padded_rows_count = kExperts;
  });
  both_dtypes(cases, "fused_multi_row_unpadding", [lengths](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_multi_row_unpadding_args>();
    a.input = c.in({lengths(rows), c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
    a.input_rows = padded, a.unpadded_rows = plain;
    a.input_rows_count = a.unpadded_rows_count = kExperts;
  });
  cases.push_back({"splits_to_offsets", "i64", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_splits_to_offsets_args>();
                     a.splits = c.in({rows}, TE_FL_I64), a.offsets = c.out({rows + 1}, TE_FL_I64);
                     a.stride = c.cols();
                   }});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile moe_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
