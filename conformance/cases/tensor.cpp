#include "conformance/huge/tensor.hpp"
#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "te_fl/ops/tensor.h"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr int kConvertible[] = {TE_FL_F64,  TE_FL_F32,    TE_FL_F16,
                                TE_FL_BF16, TE_FL_F8E4M3, TE_FL_F8E5M2};
constexpr int kIntegers[] = {TE_FL_I8, TE_FL_I16, TE_FL_I32, TE_FL_I64,
                             TE_FL_U8, TE_FL_U16, TE_FL_U32, TE_FL_U64};

// A shape with its layout in memory.
struct Strided {
  std::string name;
  Dims shape, strides;
  int64_t offset = 0, storage = 0;
};
std::vector<Strided> layouts() {
  return {{"transposed", {13, 7}, {1, 13}, 0, 91},
          {"gaps", {5, 9}, {23, 2}, 3, 4 * 23 + 8 * 2 + 4 + 3},
          {"permuted", {3, 4, 5, 2}, {2, 30, 6, 1}, 0, 120},
          {"middle", {4, 3, 8}, {96, 8, 1}, 24, 4 * 96}};
}

// Values for all rounding situations: small, large, ties, special values.
double spread(Random& r, int64_t i) {
  static const double special[] = {
      0,       -0.0,         1e-300,      65519.99,      65520,        448,
      463.9,   464,          480,         57344,         61440,        1.0e39,
      -3.4e38, 0.0009765625, 0.001953125, 1.0 + 0x1p-11, 1.0 + 0x1p-8, 1.0625,
      1.1875,  -1e6,         5.9e-8,      1.5e-5,        1e-40,        -1e-39};
  if (i % 3 == 0) return special[i / 3 % 24];
  return std::ldexp(r.gaussian(), static_cast<int>(r.below(40)) - 24);
}
double spread_special(Random& r, int64_t i) {
  if (i % 11 == 4) return infinity();
  if (i % 11 == 5) return -infinity();
  if (i % 11 == 6) return nan_value();
  return spread(r, i);
}

Fill any_value(int dtype) {
  if (dtype == TE_FL_BOOL) return integers(2);
  if (dtype == TE_FL_F8E8M0)
    return [](Random& r, int64_t) { return std::ldexp(1.0, static_cast<int>(r.below(200)) - 100); };
  if (is_float(dtype)) return gaussian(3);
  return integers(100);
}

void copy(Problem& p, int from, int to, const Strided& in, const Strided& out, const Fill& fill) {
  Tensor* x = p.strided("input", Role::kIn, from, in.shape, in.strides, fill, nullptr, in.offset,
                        in.storage);
  Tensor* y = p.strided("output", Role::kOut, to, out.shape, out.strides, fill, nullptr, out.offset,
                        out.storage);
  p.oracle([&p, x, y] { p.expect_exact(y, x->values(), TE_FL_F32); });
}

void add_copy(Table& table) {
  auto one = [&](const std::string& name, int from, int to, const Strided& in, const Strided& out,
                 const Fill& fill, bool large = false) {
    add(
        table, "tensor", "strided_copy",
        std::string(name_of(from)) + "->" + name_of(to) + "/" + name,
        [=](Problem& p) { copy(p, from, to, in, out, fill); }, large);
  };
  const Strided flat{"", {7, 33}, {}, 0, 0};
  for (int a : kConvertible)
    for (int b : kConvertible) {
      one("7x33", a, b, flat, flat, spread);
      one("7x33/special", a, b, flat, flat, spread_special);
    }
  for (int d : kIntegers) one("7x33", d, d, flat, flat, any_value(d));
  for (int d : {TE_FL_BOOL, TE_FL_F8E8M0, TE_FL_F4E2M1})
    one("7x33", d, d, flat, flat, any_value(d));
  for (const Strided& s : layouts()) {
    const Strided plain{"", s.shape, {}, 0, 0};
    for (int d : {TE_FL_F32, TE_FL_BF16, TE_FL_U8, TE_FL_F64}) {
      one("from_" + s.name, d, d, s, plain, any_value(d));
      one("to_" + s.name, d, d, plain, s, any_value(d));
      one("both_" + s.name, d, d, s, s, any_value(d));
    }
    one("from_" + s.name, TE_FL_F32, TE_FL_BF16, s, plain, spread);
    one("to_" + s.name, TE_FL_F16, TE_FL_F32, plain, s, spread);
  }
  one("broadcast_rows", TE_FL_F32, TE_FL_F32, {"", {5, 6}, {0, 1}, 0, 6}, {"", {5, 6}, {}, 0, 0},
      gaussian());
  one("broadcast_all", TE_FL_F32, TE_FL_BF16, {"", {5, 6}, {0, 0}, 0, 1}, {"", {5, 6}, {}, 0, 0},
      gaussian());
  for (const Dims& shape : {Dims{}, Dims{0, 4}, Dims{1}, Dims{2, 1, 2, 1, 2, 1, 2, 2}})
    one(dims_name(shape), TE_FL_F32, TE_FL_F32, {"", shape, {}, 0, 0}, {"", shape, {}, 0, 0},
        gaussian());
  for (int d : {TE_FL_U8, TE_FL_BF16, TE_FL_F32, TE_FL_F64}) {
    one("tiles_odd", d, d, {"", {131, 259}, {1, 131}, 0, 131 * 259}, {"", {131, 259}, {}, 0, 0},
        any_value(d));
    one("tiles_even", d, d, {"", {3, 128, 256}, {128 * 256, 1, 128}, 0, 3 * 128 * 256},
        {"", {3, 128, 256}, {}, 0, 0}, any_value(d));
    one("swapped_middle", d, d, {"", {4, 6, 5, 16}, {16, 320, 64, 1}, 0, 4 * 6 * 5 * 16},
        {"", {4, 6, 5, 16}, {}, 0, 0}, any_value(d));
  }
  one("rows_apart", TE_FL_F32, TE_FL_BF16, {"", {6, 43}, {64, 1}, 0, 384}, {"", {6, 43}, {}, 0, 0},
      gaussian());
  one("rows_apart", TE_FL_BF16, TE_FL_F32, {"", {6, 40}, {64, 1}, 8, 392},
      {"", {6, 40}, {48, 1}, 0, 288}, gaussian());
  one("large_transposed", TE_FL_F32, TE_FL_F32, {"", {515, 509}, {1, 515}, 0, 515 * 509},
      {"", {515, 509}, {}, 0, 0}, gaussian(), true);
}

void fill_case(Table& table, const std::string& name, int dtype, const Strided& at, double value,
               bool fails = false) {
  add(table, "tensor", "fill", std::string(name_of(dtype)) + "/" + name, [=](Problem& p) {
    Tensor* y = p.strided("output", Role::kOut, dtype, at.shape, at.strides, constant(0), nullptr,
                          at.offset, at.storage);
    // Changes the initial contents of an 8-bit output: the usual pattern is NaN, so elements that
    // the op did not write would pass.
    if (std::isnan(value) && storage_bits(dtype) == 8) {
      std::fill_n(y->data->data(), y->data->size(), uint8_t{0x2a});
      y->data->freeze();
    }
    p.set("value", value);
    if (fails) {
      p.expect_error(TE_FL_INVALID_ARGUMENT, "");
      return p.oracle([&p, y] { p.expect_unchanged(y); });
    }
    if (std::isnan(value)) p.may_refuse = "NaN";  // a dispatcher may require scalars to be numbers
    const double stored = rounded(dtype, value);
    p.oracle([&p, y, stored] {
      p.expect_exact(y, std::vector<double>(static_cast<size_t>(y->numel()), stored), TE_FL_F32);
    });
  });
}

void add_fill(Table& table) {
  const Strided flat{"", {7, 33}, {}, 0, 0};
  for (int d : kConvertible) {
    fill_case(table, "zero", d, flat, 0);
    fill_case(table, "rounded", d, flat, -1.0 / 3);
    fill_case(table, "large", d, flat, 1e39);
    fill_case(table, "infinity", d, flat, -infinity());
    fill_case(table, "nan", d, flat, nan_value());
  }
  for (int d : kIntegers) {
    fill_case(table, "zero", d, flat, 0);
    fill_case(table, "largest", d, flat, d == TE_FL_I8 ? 127 : d == TE_FL_U8 ? 255 : 30000);
    fill_case(table, "out_of_range", d, flat, 1e20, true);
    fill_case(table, "nan", d, flat, nan_value(), true);
    const bool is_signed = d <= TE_FL_I64;
    fill_case(table, "minus_one", d, flat, -1, !is_signed);
  }
  for (double v : {0.0, 1.0}) fill_case(table, v == 0 ? "false" : "true", TE_FL_BOOL, flat, v);
  fill_case(table, "value", TE_FL_F4E2M1, flat, 1.5);
  fill_case(table, "value", TE_FL_F8E8M0, flat, 0.25);
  for (const Strided& s : layouts())
    for (int d : {TE_FL_F32, TE_FL_U8}) fill_case(table, s.name, d, s, 3);
  for (int d : {TE_FL_U8, TE_FL_BF16, TE_FL_F64})
    fill_case(table, "rows_apart", d, {"", {6, 40}, {64, 1}, 0, 384}, 3);
  for (const Dims& shape : {Dims{}, Dims{0, 4}, Dims{1}, Dims{130, 257}})
    fill_case(table, dims_name(shape), TE_FL_F32, {"", shape, {}, 0, 0}, 2.5);
}

// ---- cases of embedding

struct EmbeddingVariant {
  int index = TE_FL_I64, in = TE_FL_F32, out = TE_FL_F32;
  Dims shape = {};
  int64_t vocabulary = 11, width = 33;
  bool accumulate = false, large = false;
  int64_t bad_index = 0;  // not 0: an invalid index
};

std::string embedding_name(const EmbeddingVariant& v) {
  std::string name = std::string(name_of(v.index)) + "/" + name_of(v.in) + "->" + name_of(v.out) +
                     "/" + dims_name(v.shape) + "/table=" + dims_name({v.vocabulary, v.width});
  if (v.accumulate) name += "/accumulate";
  if (v.bad_index != 0) name += "/index=" + std::to_string(v.bad_index);
  return name;
}

Dims with(Dims d, int64_t last) {
  d.push_back(last);
  return d;
}
Fill indices(const EmbeddingVariant& v) {
  return [v](Random& r, int64_t i) {
    return static_cast<double>(v.bad_index != 0 && i == 3 ? v.bad_index : r.below(v.vocabulary));
  };
}

void embedding_forward(Problem& p, const EmbeddingVariant& v) {
  Tensor* at = p.in("indices", v.index, v.shape, indices(v));
  Tensor* weight = p.in("weight", v.in, {v.vocabulary, v.width});
  Tensor* y = p.out("output", v.out, with(v.shape, v.width));
  if (v.bad_index != 0) {
    p.expect_error(TE_FL_INVALID_ARGUMENT, std::to_string(v.bad_index));
    p.late_error = true;
  }
  p.oracle([&p, v, at, weight, y] {
    if (v.bad_index != 0) return p.expect_unchanged(y);
    std::vector<double> want(static_cast<size_t>(y->numel()));
    for (int64_t i = 0; i < y->numel(); ++i)
      want[i] = weight->get(static_cast<int64_t>(at->get(i / v.width)) * v.width + i % v.width);
    p.expect_exact(y, want, v.in);
  });
}

void embedding_backward(Problem& p, const EmbeddingVariant& v) {
  Tensor* at = p.in("indices", v.index, v.shape, indices(v));
  Tensor* dy = p.in("grad_output", v.in, with(v.shape, v.width));
  Tensor* dw = v.accumulate ? p.inout("grad_weight", v.out, {v.vocabulary, v.width})
                            : p.out("grad_weight", v.out, {v.vocabulary, v.width});
  p.set("accumulate", v.accumulate);
  p.oracle([&p, v, at, dy, dw] {
    std::vector<double> want(static_cast<size_t>(dw->numel())), size(want.size()),
        count(want.size());
    for (int64_t i = 0; i < dy->numel(); ++i) {
      const int64_t w = static_cast<int64_t>(at->get(i / v.width)) * v.width + i % v.width;
      want[w] += dy->get(i), size[w] += std::fabs(dy->get(i)), count[w] += 1;
    }
    for (int64_t i = 0; i < dw->numel(); ++i) {
      if (v.accumulate) want[i] += dw->get(i), size[i] += std::fabs(dw->get(i));
      size[i] = sum_tolerance(count[i], size[i]);
    }
    p.expect(dw, want, size);
  });
}

void add_embedding(Table& table) {
  std::vector<EmbeddingVariant> all;
  for (int index : {TE_FL_I32, TE_FL_I64})
    for (int in : kHigh)
      for (int out : kHigh) all.push_back({.index = index, .in = in, .out = out, .shape = {4, 5}});
  for (const Dims& s : {Dims{}, Dims{0}, Dims{1}, Dims{2, 3, 7}}) all.push_back({.shape = s});
  all.push_back({.shape = {9}, .vocabulary = 1, .width = 1});
  all.push_back({.shape = {9}, .width = 0});
  all.push_back({.index = TE_FL_I32,
                 .in = TE_FL_BF16,
                 .shape = {513},
                 .vocabulary = 257,
                 .width = 256,
                 .large = true});
  // Rows that many positions look up, and wide rows.
  for (int64_t vocabulary : {3, 40})
    all.push_back({.in = TE_FL_BF16, .shape = {1200}, .vocabulary = vocabulary, .width = 40});
  all.push_back(
      {.index = TE_FL_I32, .in = TE_FL_BF16, .out = TE_FL_BF16, .shape = {3, 5}, .width = 2200});
  // More rows than one kernel launch covers.
  all.push_back({.shape = {7}, .vocabulary = (1 << 20) + 3, .width = 1, .large = true});
  for (const EmbeddingVariant& v : all) {
    add(
        table, "tensor", "embedding_fwd", embedding_name(v),
        [v](Problem& p) { embedding_forward(p, v); }, v.large);
    add(
        table, "tensor", "embedding_bwd", embedding_name(v),
        [v](Problem& p) { embedding_backward(p, v); }, v.large);
    if (v.in != v.out || v.shape.size() != 2) continue;
    EmbeddingVariant a = v;
    a.accumulate = true;
    add(table, "tensor", "embedding_bwd", embedding_name(a),
        [a](Problem& p) { embedding_backward(p, a); });
  }
  for (int64_t bad : {11, -1}) {
    const EmbeddingVariant v{.shape = {4, 5}, .bad_index = bad};
    add(table, "tensor", "embedding_fwd", embedding_name(v),
        [v](Problem& p) { embedding_forward(p, v); });
  }
}

// ---- cases of cross-entropy

struct LossVariant {
  int dtype = TE_FL_F32, index = TE_FL_I64;
  Dims shape = {};  // extents of the rows
  int64_t vocabulary = 33;
  double smoothing = 0;
  int64_t ignore = -100;
  double sigma = 1;
  bool in_place = false, large = false;
};

std::string loss_name(const LossVariant& v) {
  std::string name = std::string(name_of(v.dtype)) + "/" + name_of(v.index) + "/" +
                     dims_name(v.shape) + "/V=" + std::to_string(v.vocabulary);
  if (v.smoothing != 0) name += v.smoothing == 1 ? "/smoothing=1" : "/smoothing=0.1";
  if (v.ignore != -100) name += "/ignore=" + std::to_string(v.ignore);
  if (v.sigma != 1) name += "/sigma=" + std::to_string(static_cast<int>(v.sigma));
  return name + (v.in_place ? "/in_place" : "");
}

Fill targets(const LossVariant& v) {
  return [v](Random& r, int64_t i) {
    return static_cast<double>(i % 4 == 2 ? v.ignore : r.below(v.vocabulary));
  };
}

double log_sum_exp(Tensor* x, int64_t row) {
  const int64_t n = x->cols();
  double top = -infinity(), sum = 0;
  for (int64_t j = 0; j < n; ++j) top = std::max(top, x->get(row * n + j));
  for (int64_t j = 0; j < n; ++j) sum += std::exp(x->get(row * n + j) - top);
  return top + std::log(sum);
}

void loss_forward(Problem& p, const LossVariant& v) {
  Tensor* x = p.in("logits", v.dtype, with(v.shape, v.vocabulary), gaussian(v.sigma));
  Tensor* t = p.in("targets", v.index, v.shape, targets(v));
  Tensor* loss = p.out("loss", TE_FL_F32, v.shape);
  Tensor* lse = p.out("lse", TE_FL_F32, v.shape);
  p.set("label_smoothing", v.smoothing), p.set("ignore_index", static_cast<double>(v.ignore));
  p.oracle([&p, v, x, t, loss, lse] {
    const double eps = static_cast<double>(static_cast<float>(v.smoothing));
    std::vector<double> want, all, extra;
    for (int64_t i = 0; i < x->rows() && v.vocabulary > 0; ++i) {
      double mean = 0, size = 0;
      for (int64_t j = 0; j < v.vocabulary; ++j) {
        mean += x->get(i * v.vocabulary + j) / static_cast<double>(v.vocabulary);
        size += std::fabs(x->get(i * v.vocabulary + j)) / static_cast<double>(v.vocabulary);
      }
      const double l = log_sum_exp(x, i);
      const bool ignored = t->get(i) == static_cast<double>(v.ignore);
      const double xt = ignored ? 0 : x->get(i * v.vocabulary + static_cast<int64_t>(t->get(i)));
      all.push_back(l), want.push_back(ignored ? 0 : l - (1 - eps) * xt - eps * mean);
      extra.push_back(ignored ? 0
                              : 0x1p-22 * (std::fabs(l) + std::fabs(xt)) +
                                    eps * sum_tolerance(static_cast<double>(v.vocabulary), size));
    }
    p.expect(lse, all), p.expect(loss, want, extra);
  });
}

void loss_backward(Problem& p, const LossVariant& v) {
  Tensor* g = p.in("grad_loss", TE_FL_F32, v.shape);
  Tensor* x = p.in("logits", v.dtype, with(v.shape, v.vocabulary), gaussian(v.sigma));
  Tensor* t = p.in("targets", v.index, v.shape, targets(v));
  Tensor* lse =
      p.in("lse", TE_FL_F32, v.shape, [x](Random&, int64_t i) { return log_sum_exp(x, i); });
  Tensor* dx = v.in_place ? p.in_place("grad_logits", x) : p.out("grad_logits", v.dtype, x->shape);
  p.set("label_smoothing", v.smoothing), p.set("ignore_index", static_cast<double>(v.ignore));
  p.oracle([&p, v, g, x, t, lse, dx] {
    const double eps = static_cast<double>(static_cast<float>(v.smoothing));
    std::vector<double> want(static_cast<size_t>(x->numel())), extra(want.size());
    for (int64_t i = 0; i < x->numel(); ++i) {
      const int64_t row = i / v.vocabulary, j = i % v.vocabulary;
      if (t->get(row) == static_cast<double>(v.ignore)) continue;
      const double y = std::exp(x->get(i) - lse->get(row));
      want[i] = g->get(row) * (y - (static_cast<double>(j) == t->get(row) ? 1 - eps : 0) -
                               eps / static_cast<double>(v.vocabulary));
      extra[i] = std::fabs(g->get(row)) * y * 0x1p-22 *
                 (std::fabs(x->get(i)) + std::fabs(lse->get(row)) + 2);
    }
    p.expect(dx, want, extra);
  });
}

void add_loss(Table& table) {
  std::vector<LossVariant> all;
  for (int d : kHigh)
    for (int index : {TE_FL_I32, TE_FL_I64})
      for (double s : {0.0, 0.1})
        all.push_back({.dtype = d, .index = index, .shape = {4, 3}, .smoothing = s});
  all.push_back({.shape = {5}, .smoothing = 1});
  all.push_back({.shape = {5}, .ignore = 3});
  all.push_back({.shape = {0}});
  all.push_back({.shape = {}});
  all.push_back({.shape = {5}, .vocabulary = 1});
  all.push_back({.shape = {5}, .vocabulary = 1021, .sigma = 40});
  all.push_back(
      {.dtype = TE_FL_BF16, .shape = {128}, .vocabulary = 2048, .smoothing = 0.1, .large = true});
  for (int d : kHigh)
    for (double s : {0.0, 0.1})
      all.push_back({.dtype = d, .shape = {5}, .vocabulary = 3001, .smoothing = s});
  all.push_back({.dtype = TE_FL_BF16, .shape = {3}, .vocabulary = 8200, .in_place = true});
  // More rows, or more chunks of a row, than one kernel launch covers.
  all.push_back({.dtype = TE_FL_BF16, .shape = {(1 << 18) + 5}, .vocabulary = 3, .large = true});
  all.push_back({.shape = {2}, .vocabulary = (1 << 20) + 3, .large = true});
  for (const LossVariant& v : all) {
    add(
        table, "tensor", "cross_entropy_fwd", loss_name(v), [v](Problem& p) { loss_forward(p, v); },
        v.large);
    add(
        table, "tensor", "cross_entropy_bwd", loss_name(v),
        [v](Problem& p) { loss_backward(p, v); }, v.large);
  }
  const LossVariant in_place{.shape = {9}, .in_place = true};
  add(table, "tensor", "cross_entropy_bwd", loss_name(in_place),
      [in_place](Problem& p) { loss_backward(p, in_place); });
}

void add_cases(Table& table) {
  add_copy(table);
  add_fill(table);
  add_embedding(table);
  add_loss(table);
}

// A value that the dtype can represent after rounding. Integers of 32 and 64 bits have more bits
// than FP32 numbers.
double draw_value(Random& r, int dtype) {
  if (is_float(dtype)) return std::ldexp(r.gaussian(), static_cast<int>(r.below(20)) - 10);
  const int width = storage_bits(dtype);
  const bool is_signed = dtype <= TE_FL_I64;
  const int bits = std::min(width - (is_signed ? 1 : 0), 53);
  const double n = std::ldexp(1.0, bits) - 1 - static_cast<double>(r.below(7));
  return is_signed && Drawn::chance(r, 2) ? -n : n;
}

void draw_cases(Drawn& drawn) {
  drawn.cases("tensor", "strided_copy", [](Draw& r) -> DrawnCase {
    int from = Drawn::high(r), to = Drawn::high(r);
    if (r.swept == nullptr || Drawn::chance(r, 2)) {
      from = kConvertible[r.below(6)], to = kConvertible[r.below(6)];
      if (Drawn::chance(r, 3)) from = to = kIntegers[r.below(8)];
    }
    const Strided flat{"", Drawn::shape(r), {}, 0, 0};
    const bool special = Drawn::chance(r, 2);
    const Fill fill = from >= TE_FL_I8 ? any_value(from) : special ? spread_special : spread;
    return {std::string(name_of(from)) + "->" + name_of(to) + "/" + dims_name(flat.shape),
            [=](Problem& p) { copy(p, from, to, flat, flat, fill); }};
  });
  drawn.cases("tensor", "fill", [](Draw& r) -> DrawnCase {
    int dtype = Drawn::high(r);
    if (r.swept == nullptr || Drawn::chance(r, 2))
      dtype = Drawn::chance(r, 2) ? kIntegers[r.below(8)] : kConvertible[r.below(6)];
    const Dims shape = Drawn::shape(r);
    const double value = draw_value(r, dtype);
    return {std::string(name_of(dtype)) + "/" + dims_name(shape), [=](Problem& p) {
              Tensor* y = p.out("output", dtype, shape);
              p.set("value", value);
              p.oracle([&p, y, dtype, value] {
                p.expect_exact(
                    y, std::vector<double>(static_cast<size_t>(y->numel()), rounded(dtype, value)),
                    TE_FL_F32);
              });
            }};
  });
  const auto embedding = [](Draw& r) {
    const Dims shape = Drawn::shape(r, 2);
    EmbeddingVariant v{.index = Drawn::chance(r, 2) ? TE_FL_I32 : TE_FL_I64,
                       .in = Drawn::high(r),
                       .out = Drawn::high(r),
                       .shape = {std::min<int64_t>(shape[0], 60000 / shape.back() + 1)},
                       .vocabulary = 1 + r.below(Drawn::chance(r, 2) ? 40 : 400),
                       .width = shape.back()};
    if (r.swept != nullptr && r.swept->large) v.shape = {shape[0]};
    if (Drawn::chance(r, 2))
      v.shape = Drawn::chance(r, 2) ? Dims{v.shape[0] / 3 + 1, 3} : Dims{v.shape[0], 1};
    return v;
  };
  drawn.cases("tensor", "embedding_fwd", [&](Draw& r) -> DrawnCase {
    const EmbeddingVariant v = embedding(r);
    return {embedding_name(v), [v](Problem& p) { embedding_forward(p, v); }};
  });
  drawn.cases("tensor", "embedding_bwd", [&](Draw& r) -> DrawnCase {
    EmbeddingVariant v = embedding(r);
    v.accumulate = Drawn::chance(r, 2);
    if (r.swept != nullptr && r.swept->large && v.width < 16) v.vocabulary = 70'003;
    return {embedding_name(v), [v](Problem& p) { embedding_backward(p, v); }};
  });
  const auto loss = [](Draw& r) {
    const Dims shape = Drawn::shape(r, 2);
    LossVariant v{.dtype = Drawn::high(r),
                  .index = Drawn::chance(r, 2) ? TE_FL_I32 : TE_FL_I64,
                  .shape = {std::min<int64_t>(shape[0], 60000 / shape.back() + 1)},
                  .vocabulary = shape.back(),
                  .smoothing = Drawn::chance(r, 2) ? 0 : 0.1};
    if (r.swept != nullptr && r.swept->large) v.shape = {shape[0]};
    if (Drawn::chance(r, 2))
      v.shape = Drawn::chance(r, 2) ? Dims{v.shape[0] / 3 + 1, 3} : Dims{v.shape[0], 1};
    static constexpr int64_t kIgnored[] = {-1, -1000, (1 << 24) + 1};
    if (Drawn::chance(r, 3))
      v.ignore = v.vocabulary > 3 && Drawn::chance(r, 2) ? 3 : kIgnored[r.below(3)];
    return v;
  };
  drawn.cases("tensor", "cross_entropy_fwd", [&](Draw& r) -> DrawnCase {
    const LossVariant v = loss(r);
    return {loss_name(v), [v](Problem& p) { loss_forward(p, v); }};
  });
  drawn.cases("tensor", "cross_entropy_bwd", [&](Draw& r) -> DrawnCase {
    LossVariant v = loss(r);
    v.in_place = Drawn::chance(r, 6);
    return {loss_name(v), [v](Problem& p) { loss_backward(p, v); }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace tensor_calls;
  const Cases all = {
      {"add", "", [](Run& r) { add(r, kCols, false); }},
      {"add", "odd rows", [](Run& r) { add(r, kOddCols, false); }},
      {"add", "dropout", [](Run& r) { add(r, kCols, true); }},
      {"add", "dropout, odd rows", [](Run& r) { add(r, kOddCols, true); }},
      {"add", "mixed dtypes", add_mixed},
      {"dropout_fwd", "", [](Run& r) { dropout(r, r.rows(16) * 16, false); }},
      {"dropout_fwd", "odd, in place", [](Run& r) { dropout(r, r.elements(), true); }},
      {"dropout_bwd", "", [](Run& r) { dropout_gradient(r, r.rows(16) * 16); }},
      {"dropout_bwd", "odd", [](Run& r) { dropout_gradient(r, r.elements()); }},
      {"strided_copy", "dense", dense_copy},
      {"strided_copy", "transposed", [](Run& r) { transposed_copy(r, kCols, DType::kBF16); }},
      {"strided_copy", "transposed, odd",
       [](Run& r) { transposed_copy(r, kOddCols, DType::kBF16); }},
      {"strided_copy", "transposed, short rows",
       [](Run& r) { transposed_copy(r, 16, DType::kBF16); }},
      {"strided_copy", "transposed, short odd rows",
       [](Run& r) { transposed_copy(r, 7, DType::kBF16); }},
      {"strided_copy", "transposed to F32", [](Run& r) { transposed_copy(r, kCols, DType::kF32); }},
      {"strided_copy", "permuted", [](Run& r) { permuted_copy(r, kCols, DType::kBF16); }},
      {"strided_copy", "permuted, odd", [](Run& r) { permuted_copy(r, 37, DType::kBF16); }},
      {"strided_copy", "permuted to F32", [](Run& r) { permuted_copy(r, 37, DType::kF32); }},
      {"strided_copy", "part of rows", [](Run& r) { part_of_rows(r, DType::kBF16); }},
      {"strided_copy", "part of rows from F32", [](Run& r) { part_of_rows(r, DType::kF32); }},
      {"fill", "dense", [](Run& r) { fill(r, false); }},
      {"fill", "part of rows", [](Run& r) { fill(r, true); }},
      {"embedding_fwd", "", [](Run& r) { embedding(r, kCols); }},
      {"embedding_fwd", "odd rows", [](Run& r) { embedding(r, kOddCols); }},
      {"embedding_bwd", "", [](Run& r) { embedding_gradient(r, kCols, false); }},
      {"embedding_bwd", "odd rows, accumulated",
       [](Run& r) { embedding_gradient(r, kOddCols, true); }},
      {"cross_entropy_fwd", "", [](Run& r) { cross_entropy(r, 32768); }},
      {"cross_entropy_fwd", "odd rows", [](Run& r) { cross_entropy(r, 50257); }},
      {"cross_entropy_bwd", "", [](Run& r) { cross_entropy_gradient(r, 32768); }},
      {"cross_entropy_bwd", "odd rows", [](Run& r) { cross_entropy_gradient(r, 50257); }},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  both_dtypes(cases, "add", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_add_args>();
    a.a = c.in({rows, c.cols()}, dtype), a.b = c.in({rows, c.cols()}, dtype);
    a.output = c.out({rows, c.cols()}, dtype);
  });
  both_dtypes(cases, "strided_copy", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_strided_copy_args>();
    BenchTensor& in = c.in({64, (rows + 63) / 64, c.cols()}, dtype);
    in.set_strides({c.cols(), 64 * c.cols(), 1});  // swaps two leading dimensions
    a.input = in, a.output = c.out({64, (rows + 63) / 64, c.cols()}, dtype);
  });
  both_dtypes(cases, "fill", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fill_args>();
    a.output = c.out({rows, c.cols()}, dtype), a.value = 1;
  });
  both_dtypes(cases, "embedding_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_embedding_fwd_args>();
    a.indices = c.in({rows}, TE_FL_I64), a.weight = c.in({256, c.cols()}, dtype);
    a.output = c.out({rows, c.cols()}, dtype);  // the table fits into the cache
  });
  both_dtypes(cases, "embedding_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_embedding_bwd_args>();
    a.indices = c.in({rows}, TE_FL_I64), a.grad_output = c.in({rows, c.cols()}, dtype);
    a.grad_weight = c.out({256, c.cols()}, TE_FL_F32);
  });
  both_dtypes(cases, "cross_entropy_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_cross_entropy_fwd_args>();
    a.logits = c.in({rows, c.cols()}, dtype), a.targets = c.in({rows}, TE_FL_I64);
    a.loss = c.out({rows}, TE_FL_F32), a.lse = c.out({rows}, TE_FL_F32);
  });
  both_dtypes(cases, "cross_entropy_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_cross_entropy_bwd_args>();
    a.grad_loss = c.in({rows}, TE_FL_F32), a.logits = c.in({rows, c.cols()}, dtype);
    a.targets = c.in({rows}, TE_FL_I64), a.lse = c.in({rows}, TE_FL_F32);
    a.grad_logits = c.out({rows, c.cols()}, dtype);
  });
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile tensor_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
