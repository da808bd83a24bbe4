#include <array>

#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/huge/rope.hpp"
#include "te_fl/ops/rope.h"

// Cases of rotary embedding. The two columns that are rotated together have equal angles, as in all
// known callers.
namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};

struct Variant {
  int dtype = TE_FL_F32;
  int layout = TE_FL_LAYOUT_SBHD;
  int64_t s = 0, b = 0, h = 0, d = 0, r = 0;  // thd: b sequences with s tokens in total
  bool interleaved = false, start = false, in_place = false;
  int cp_size = 1, cp_rank = 0;
  bool large = false;
  std::vector<int64_t> lengths = {};  // thd: lengths of the sequences
};

std::string variant_name(const Variant& v) {
  static const char* const layouts[] = {"sbhd", "bshd", "thd"};
  std::string name = std::string(name_of(v.dtype)) + "/" + layouts[v.layout] + "/" +
                     dims_name({v.s, v.b, v.h, v.d}) + "/R=" + std::to_string(v.r);
  if (v.interleaved) name += "/interleaved";
  if (v.start) name += "/start";
  if (v.cp_size != 1) name += "/cp=" + std::to_string(v.cp_rank) + "of" + std::to_string(v.cp_size);
  return name + (v.in_place ? "/in_place" : "");
}

// The global position of local token s in a local sequence of `length` tokens.
int64_t position(const Variant& v, int64_t s, int64_t length) {
  if (v.cp_size == 1) return s;
  const int64_t half = length / 2;
  return s < half ? v.cp_rank * half + s : (2 * v.cp_size - 1 - v.cp_rank) * half + s - half;
}

Fill angles(const Variant& v, int64_t r) {
  return [=](Random&, int64_t i) {
    const int64_t j = i % r, pair = v.interleaved ? j / 2 : j % (r / 2), pos = i / r;
    return static_cast<double>(pos) *
           std::pow(100.0, -2.0 * static_cast<double>(pair) / static_cast<double>(r));
  };
}

// Rotates one head's row x[0..d) by the angles f[0..r). With sign -1 rotates back.
std::vector<double> rotate(const std::vector<double>& x, const std::vector<double>& f,
                           bool interleaved, double sign) {
  std::vector<double> y = x;
  const size_t r = f.size();
  for (size_t j = 0; j < r; ++j) {
    const bool first = interleaved ? j % 2 == 0 : j < r / 2;
    const size_t partner = interleaved ? j ^ 1 : first ? j + r / 2 : j - r / 2;
    y[j] = x[j] * std::cos(f[j]) + sign * (first ? -x[partner] : x[partner]) * std::sin(f[j]);
  }
  return y;
}

std::vector<double> take_row(const std::vector<double>& x, int64_t at, int64_t n) {
  return {x.begin() + at, x.begin() + at + n};
}

void rope(Problem& p, const Variant& v, double sign) {
  const bool thd = v.layout == TE_FL_LAYOUT_THD;
  const Dims shape = thd                             ? Dims{v.s, v.h, v.d}
                     : v.layout == TE_FL_LAYOUT_SBHD ? Dims{v.s, v.b, v.h, v.d}
                                                     : Dims{v.b, v.s, v.h, v.d};
  Tensor* x = p.in("input", v.dtype, shape);
  Tensor* f = p.in("freqs", TE_FL_F32, {v.s * v.cp_size + 20, 1, 1, v.r}, angles(v, v.r));
  Tensor* y = v.in_place ? p.in_place("output", x) : p.out("output", v.dtype, shape);
  Tensor* start = v.start ? p.in("start_positions", TE_FL_I32, {v.b}, integers(19)) : nullptr;
  std::vector<int64_t> cu{0};
  for (int64_t n : v.lengths) cu.push_back(cu.back() + n);
  if (thd)
    p.in("cu_seqlens", TE_FL_I32, {v.b + 1},
         [cu](Random&, int64_t i) { return static_cast<double>(cu[i]); });
  p.set("layout", v.layout), p.set("interleaved", v.interleaved), p.set("cp_size", v.cp_size),
      p.set("cp_rank", v.cp_rank);
  p.oracle([&p, v, sign, thd, cu, x, f, y, start] {
    const std::vector<double> in = x->values(), freqs = f->values();
    std::vector<double> want(in.size());
    for (int64_t row = 0; row < x->rows(); ++row) {
      int64_t token = row / v.h, batch = 0, s = 0;
      if (thd) {
        while (token >= cu[batch + 1]) ++batch;
        s = token - cu[batch];
      } else {
        batch = v.layout == TE_FL_LAYOUT_SBHD ? token % v.b : token / v.s;
        s = v.layout == TE_FL_LAYOUT_SBHD ? token / v.b : token % v.s;
      }
      const int64_t pos =
          position(v, s, v.s) + (start == nullptr ? 0 : static_cast<int64_t>(start->get(batch)));
      const auto out = rotate(take_row(in, row * v.d, v.d), take_row(freqs, pos * v.r, v.r),
                              v.interleaved, sign);
      std::copy(out.begin(), out.end(), want.begin() + row * v.d);
    }
    p.expect(y, want);
  });
}

struct QkvVariant {
  int dtype = TE_FL_F32;
  int layout = TE_FL_LAYOUT_SBHD;
  int64_t s = 5, b = 2, g = 3, q = 32, k = 16, v = 16, r = 16;
  bool interleaved = false, start = false;
  int cp_size = 1, cp_rank = 0;
};

std::string qkv_name(const QkvVariant& v) {
  std::string name = std::string(name_of(v.dtype)) +
                     (v.layout == TE_FL_LAYOUT_SBHD ? "/sbhd/" : "/bshd/") +
                     dims_name({v.s, v.b, v.g}) + "/qkv=" + dims_name({v.q, v.k, v.v}) +
                     "/R=" + std::to_string(v.r);
  if (v.interleaved) name += "/interleaved";
  if (v.start) name += "/start";
  if (v.cp_size != 1) name += "/cp=" + std::to_string(v.cp_rank) + "of" + std::to_string(v.cp_size);
  return name;
}

void qkv_rope(Problem& p, const QkvVariant& v, bool backward) {
  const bool sbhd = v.layout == TE_FL_LAYOUT_SBHD;
  const int64_t a = sbhd ? v.s : v.b, b = sbhd ? v.b : v.s, e = v.q + v.k + v.v, heads = v.q / v.k;
  Variant plain{.s = v.s, .interleaved = v.interleaved, .cp_size = v.cp_size, .cp_rank = v.cp_rank};
  auto parts = [&](bool out, const char* qn, const char* kn, const char* vn) {
    auto make = [&](const char* n, const Dims& d) {
      return out ? p.out(n, v.dtype, d) : p.in(n, v.dtype, d);
    };
    return std::array<Tensor*, 3>{make(qn, {a, b, v.g * heads, v.k}), make(kn, {a, b, v.g, v.k}),
                                  make(vn, {a, b, v.g, v.v})};
  };
  Tensor* packed = backward ? nullptr : p.in("qkv_input", v.dtype, {a, b, v.g, e});
  const auto qkv = backward ? parts(false, "q_grad", "k_grad", "v_grad")
                            : parts(true, "q_out", "k_out", "v_out");
  if (backward) packed = p.out("qkv_grad", v.dtype, {a, b, v.g, e});
  const int64_t positions = v.s * v.cp_size + 20;
  Tensor* qf = p.in("q_freqs", TE_FL_F32, {positions, 1, 1, v.r}, angles(plain, v.r));
  Tensor* kf = p.in("k_freqs", TE_FL_F32, {positions, 1, 1, v.r},
                    [f = angles(plain, v.r)](Random& r, int64_t i) { return 0.5 * f(r, i); });
  Tensor* start = v.start ? p.in("start_positions", TE_FL_I32, {v.b}, integers(19)) : nullptr;
  p.set("q_dim", static_cast<double>(v.q)), p.set("k_dim", static_cast<double>(v.k)),
      p.set("v_dim", static_cast<double>(v.v));
  p.set("layout", v.layout), p.set("interleaved", v.interleaved), p.set("cp_size", v.cp_size),
      p.set("cp_rank", v.cp_rank);
  p.oracle([&p, v, plain, backward, sbhd, b, e, heads, packed, qkv, qf, kf, start] {
    std::array<std::vector<double>, 3> part;
    for (int i = 0; i < 3; ++i)
      part[i] =
          backward ? qkv[i]->values() : std::vector<double>(static_cast<size_t>(qkv[i]->numel()));
    std::vector<double> whole =
        backward ? std::vector<double>(static_cast<size_t>(packed->numel())) : packed->values();
    const auto fq = qf->values(), fk = kf->values();
    for (int64_t n = 0; n < packed->rows(); ++n) {
      const int64_t group = n % v.g, token = n / v.g, batch = sbhd ? token % b : token / b,
                    s = sbhd ? token / b : token % b;
      const int64_t pos = position(plain, s, v.s) +
                          (start == nullptr ? 0 : static_cast<int64_t>(start->get(batch)));
      auto move = [&](std::vector<double>& small, int64_t at, int64_t in_group, int64_t width,
                      const std::vector<double>* f) {
        auto row = backward ? take_row(small, at, width) : take_row(whole, n * e + in_group, width);
        if (f != nullptr)
          row = rotate(row, take_row(*f, pos * v.r, v.r), v.interleaved, backward ? -1 : 1);
        std::copy(row.begin(), row.end(),
                  backward ? whole.begin() + n * e + in_group : small.begin() + at);
      };
      for (int64_t i = 0; i < heads; ++i)
        move(part[0], ((token * v.g + group) * heads + i) * v.k, i * v.k, v.k, &fq);
      move(part[1], n * v.k, v.q, v.k, &fk);
      move(part[2], n * v.v, v.q + v.k, v.v, nullptr);
    }
    if (backward) {
      p.expect(packed, whole);
    } else {
      for (int i = 0; i < 3; ++i) p.expect(qkv[i], part[i]);
    }
  });
}

std::vector<Variant> variants() {
  std::vector<Variant> all;
  constexpr int kS = TE_FL_LAYOUT_SBHD, kB = TE_FL_LAYOUT_BSHD, kT = TE_FL_LAYOUT_THD;
  for (int d : kHigh) {
    for (int layout : {kS, kB})
      all.push_back({.dtype = d, .layout = layout, .s = 7, .b = 2, .h = 3, .d = 16, .r = 16});
    all.push_back({.dtype = d,
                   .layout = kT,
                   .s = 14,
                   .b = 3,
                   .h = 2,
                   .d = 16,
                   .r = 16,
                   .lengths = {5, 2, 7}});
  }
  for (int layout : {kS, kB}) {
    all.push_back({.layout = layout, .s = 9, .b = 2, .h = 3, .d = 20, .r = 12});
    all.push_back(
        {.layout = layout, .s = 9, .b = 2, .h = 3, .d = 20, .r = 12, .interleaved = true});
    all.push_back({.layout = layout, .s = 5, .b = 3, .h = 1, .d = 8, .r = 8, .start = true});
    all.push_back({.layout = layout, .s = 9, .b = 2, .h = 2, .d = 16, .r = 16, .in_place = true});
    all.push_back({.layout = layout, .s = 0, .b = 2, .h = 2, .d = 16, .r = 16});
    all.push_back({.layout = layout, .s = 1, .b = 1, .h = 1, .d = 2, .r = 2});
    all.push_back({.layout = layout, .s = 3, .b = 2, .h = 1, .d = 7, .r = 4});  // odd head size
    for (int rank : {0, 1, 2})
      all.push_back({.layout = layout,
                     .s = 8,
                     .b = 2,
                     .h = 2,
                     .d = 16,
                     .r = 16,
                     .cp_size = 3,
                     .cp_rank = rank});
  }
  all.push_back({.layout = kT,
                 .s = 14,
                 .b = 4,
                 .h = 2,
                 .d = 18,
                 .r = 10,
                 .interleaved = true,
                 .lengths = {5, 0, 2, 7}});
  all.push_back({.layout = kT,
                 .s = 14,
                 .b = 3,
                 .h = 2,
                 .d = 16,
                 .r = 16,
                 .start = true,
                 .lengths = {5, 2, 7}});
  for (int d : kHigh) {
    // Head sizes that allow wide memory accesses, and a head whose angles do not fit into shared
    // memory.
    all.push_back({.dtype = d, .layout = kS, .s = 5, .b = 2, .h = 9, .d = 128, .r = 128});
    all.push_back(
        {.dtype = d, .layout = kB, .s = 5, .b = 2, .h = 3, .d = 96, .r = 64, .interleaved = true});
    all.push_back({.dtype = d, .layout = kB, .s = 5, .b = 2, .h = 3, .d = 72, .r = 32});
    all.push_back({.dtype = d, .layout = kS, .s = 2, .b = 1, .h = 2, .d = 6200, .r = 6200});
  }
  all.push_back({.dtype = TE_FL_BF16,
                 .layout = kS,
                 .s = 9,
                 .b = 2,
                 .h = 2,
                 .d = 64,
                 .r = 32,
                 .interleaved = true,
                 .in_place = true});
  all.push_back({.dtype = TE_FL_BF16,
                 .layout = kS,
                 .s = 257,
                 .b = 2,
                 .h = 8,
                 .d = 64,
                 .r = 64,
                 .large = true});
  return all;
}

// Invalid calls that the schema's shape rules cannot detect. They must be refused without writing
// anything.
void add_mistakes(Table& table) {
  auto refused = [](Problem& p) {
    p.oracles.clear();
    p.expect_error(-1, "");
    for (const auto& t : p.tensors)
      if (t->role != Role::kIn) p.expect_unchanged(t.get());
  };
  const Variant plain{.s = 4, .b = 2, .h = 2, .d = 16, .r = 16};
  auto wrong = [&](const char* name, const Variant& v, std::function<void(Problem&)> spoil) {
    add(table, "rope", "fused_rope_forward", std::string("mistake/") + name,
        [=](Problem& p) { rope(p, v, 1), spoil(p), refused(p); });
  };
  wrong("cp_rank", plain, [](Problem& p) { p.set("cp_size", 2), p.set("cp_rank", 2); });
  wrong("angles_wider_than_head", plain, [](Problem& p) {
    p.in("freqs", TE_FL_F32, {24, 1, 1, 18});
  });
  wrong("odd_angles", plain, [](Problem& p) { p.in("freqs", TE_FL_F32, {24, 1, 1, 15}); });
  wrong("too_few_positions", plain, [](Problem& p) { p.in("freqs", TE_FL_F32, {3, 1, 1, 16}); });
  wrong("thd_without_lengths",
        {.layout = TE_FL_LAYOUT_THD, .s = 5, .b = 1, .h = 2, .d = 16, .r = 16, .lengths = {5}},
        [](Problem& p) { p.singles.erase("cu_seqlens"); });
  for (bool backward : {false, true})
    add(table, "rope", backward ? "fused_qkv_rope_backward" : "fused_qkv_rope_forward",
        "mistake/thd", [=](Problem& p) {
          qkv_rope(p, {}, backward), p.set("layout", TE_FL_LAYOUT_THD), refused(p);
        });
}

// A random even number of rotated columns, at most `width` (which is at least 2); in half of the
// cases the maximum.
int64_t draw_rotated(Draw& r, int64_t width) {
  return Drawn::chance(r, 2) ? width / 2 * 2 : 2 + r.below(width / 2) * 2;
}

// Draws random context parallelism in a quarter of the cases: a rank whose `s` tokens are two
// chunks of equal length.
void draw_share(Draw& r, int64_t& s, int& size, int& rank) {
  if (!Drawn::chance(r, 4)) return;
  size = 2 + static_cast<int>(r.below(3)), rank = static_cast<int>(r.below(size));
  s = std::max<int64_t>(2, s / 2 * 2);
}

Variant draw_variant(Draw& r) {
  Variant v{.dtype = Drawn::high(r), .layout = static_cast<int>(r.below(3))};
  v.b = 1 + r.below(4), v.h = 1 + r.below(9), v.d = std::max<int64_t>(2, Drawn::extent(r, 300));
  if (r.swept != nullptr && r.swept->large) v.b = v.h = 2;
  v.r = draw_rotated(r, v.d);
  v.s = r.swept != nullptr ? r.swept->rows
                           : Drawn::extent(r, std::max<int64_t>(1, 30000 / (v.b * v.h * v.d)));
  v.interleaved = Drawn::chance(r, 2), v.start = Drawn::chance(r, 4);
  v.in_place = Drawn::chance(r, 4);
  if (v.layout != TE_FL_LAYOUT_THD) {
    draw_share(r, v.s, v.cp_size, v.cp_rank);
    return v;
  }
  int64_t left = v.s;
  for (int64_t n = 1; n < v.b; ++n)
    v.lengths.push_back(r.below(left + 1)), left -= v.lengths.back();
  v.lengths.push_back(left);
  return v;
}

QkvVariant draw_qkv(Draw& r) {
  QkvVariant v{.dtype = Drawn::high(r)};
  v.layout = Drawn::chance(r, 2) ? TE_FL_LAYOUT_SBHD : TE_FL_LAYOUT_BSHD;
  v.b = 1 + r.below(3), v.g = 1 + r.below(4), v.k = std::max<int64_t>(2, Drawn::extent(r, 160));
  v.q = v.k * (1 + r.below(4)), v.v = Drawn::chance(r, 2) ? v.k : Drawn::extent(r, 160);
  if (r.swept != nullptr && r.swept->large) v.b = v.g = 1;
  v.r = draw_rotated(r, v.k);
  v.s = r.swept != nullptr
            ? r.swept->rows
            : Drawn::extent(r, std::max<int64_t>(1, 30000 / (v.b * v.g * (v.q + v.k + v.v))));
  v.interleaved = Drawn::chance(r, 2), v.start = Drawn::chance(r, 4);
  draw_share(r, v.s, v.cp_size, v.cp_rank);
  return v;
}

void draw_cases(Drawn& drawn) {
  for (const double sign : {1.0, -1.0}) {
    const char* op = sign > 0 ? "fused_rope_forward" : "fused_rope_backward";
    drawn.cases("rope", op, [sign](Draw& r) -> DrawnCase {
      const Variant v = draw_variant(r);
      return {variant_name(v), [v, sign](Problem& p) { rope(p, v, sign); }};
    });
  }
  for (const bool back : {false, true}) {
    const char* op = back ? "fused_qkv_rope_backward" : "fused_qkv_rope_forward";
    drawn.cases("rope", op, [back](Draw& r) -> DrawnCase {
      const QkvVariant v = draw_qkv(r);
      return {qkv_name(v), [v, back](Problem& p) { qkv_rope(p, v, back); }};
    });
  }
}

void add_cases(Table& table) {
  for (const Variant& v : variants()) {
    add(
        table, "rope", "fused_rope_forward", variant_name(v), [v](Problem& p) { rope(p, v, 1); },
        v.large);
    add(
        table, "rope", "fused_rope_backward", variant_name(v), [v](Problem& p) { rope(p, v, -1); },
        v.large);
  }
  add_mistakes(table);
  std::vector<QkvVariant> all;
  for (int d : kHigh)
    for (int layout : {TE_FL_LAYOUT_SBHD, TE_FL_LAYOUT_BSHD})
      all.push_back({.dtype = d, .layout = layout});
  for (int layout : {TE_FL_LAYOUT_SBHD, TE_FL_LAYOUT_BSHD}) {
    all.push_back({.layout = layout, .q = 60, .k = 20, .v = 11, .r = 12, .interleaved = true});
    all.push_back({.layout = layout, .q = 16, .start = true});
    all.push_back({.layout = layout, .s = 0});
    all.push_back({.layout = layout, .s = 1, .b = 1, .g = 1, .q = 2, .k = 2, .v = 1, .r = 2});
    all.push_back({.layout = layout, .s = 8, .cp_size = 2, .cp_rank = 1});
  }
  for (int d : kHigh) {
    all.push_back({.dtype = d, .q = 256, .k = 128, .v = 128, .r = 128});
    all.push_back({.dtype = d, .q = 192, .k = 96, .v = 72, .r = 64, .interleaved = true});
  }
  for (const QkvVariant& v : all) {
    add(table, "rope", "fused_qkv_rope_forward", qkv_name(v),
        [v](Problem& p) { qkv_rope(p, v, false); });
    add(table, "rope", "fused_qkv_rope_backward", qkv_name(v),
        [v](Problem& p) { qkv_rope(p, v, true); });
  }
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace rope_calls;
  constexpr int kS = TE_FL_LAYOUT_SBHD, kB = TE_FL_LAYOUT_BSHD, kT = TE_FL_LAYOUT_THD;
  const Cases all = {
      {"fused_rope_forward", "sbhd", [](Run& r) { rope(r, kS, kAligned, false, false); }},
      {"fused_rope_forward", "thd", [](Run& r) { rope(r, kT, kAligned, false, false); }},
      {"fused_rope_forward", "odd heads", [](Run& r) { rope(r, kB, kOdd, false, false); }},
      {"fused_rope_backward", "bshd, interleaved",
       [](Run& r) { rope(r, kB, kAligned, true, true); }},
      {"fused_rope_backward", "thd, odd heads", [](Run& r) { rope(r, kT, kOdd, true, false); }},
      {"fused_qkv_rope_forward", "sbhd", [](Run& r) { qkv_forward(r, kS, kAlignedGroups); }},
      {"fused_qkv_rope_forward", "bshd, odd heads", [](Run& r) { qkv_forward(r, kB, kOddGroups); }},
      {"fused_qkv_rope_backward", "bshd", [](Run& r) { qkv_backward(r, kB, kAlignedGroups); }},
      {"fused_qkv_rope_backward", "sbhd, odd heads",
       [](Run& r) { qkv_backward(r, kS, kOddGroups); }},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  const size_t first = cases.size();
  const auto freqs = [](Case& c, int64_t positions) -> const te_fl_tensor* {
    return c.in({positions, 1, 1, c.extent(3)}, TE_FL_F32);
  };
  const auto sbhd = [](Case& c, int64_t rows) {
    return Shape{rows, c.extent(1), c.extent(2), c.extent(3)};
  };
  for (const char* op : {"fused_rope_forward", "fused_rope_backward"}) {
    both_dtypes(cases, op, [=](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_rope_rope_args>();
      const Shape shape = sbhd(c, rows);
      a.input = c.in(shape, dtype), a.output = c.out(shape, dtype);
      a.freqs = freqs(c, shape[0]);
    });
  }
  const auto packed = [freqs](auto& a, Case& c, int64_t rows) {
    a.q_freqs = a.k_freqs = freqs(c, rows);
    a.q_dim = a.k_dim = a.v_dim = c.extent(3);
  };
  both_dtypes(cases, "fused_qkv_rope_forward", [=](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_qkv_rope_forward_args>();
    packed(a, c, rows);
    const Shape shape = sbhd(c, rows);
    a.qkv_input = c.in({rows, c.extent(1), c.extent(2), 3 * c.extent(3)}, dtype);
    a.q_out = c.out(shape, dtype), a.k_out = c.out(shape, dtype), a.v_out = c.out(shape, dtype);
  });
  both_dtypes(cases, "fused_qkv_rope_backward", [=](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_qkv_rope_backward_args>();
    packed(a, c, rows);
    const Shape shape = sbhd(c, rows);
    a.q_grad = c.in(shape, dtype), a.k_grad = c.in(shape, dtype), a.v_grad = c.in(shape, dtype);
    a.qkv_grad = c.out({rows, c.extent(1), c.extent(2), 3 * c.extent(3)}, dtype);
  });
  describe(cases, first, "positions, batch, heads, dim", {1024, 2, 16, 64}, {2048, 4, 32, 128});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile rope_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
