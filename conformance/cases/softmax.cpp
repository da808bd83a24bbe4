#include "conformance/huge/softmax.hpp"
#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "te_fl/ops/softmax.h"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};

enum class Mask { kNone, kGiven, kCausal, kBottomRight };

struct Op {
  const char* stem;
  Mask mask;
};
const Op kOps[] = {{"scaled_softmax", Mask::kNone},
                   {"scaled_masked_softmax", Mask::kGiven},
                   {"scaled_upper_triang_masked_softmax", Mask::kCausal},
                   {"scaled_aligned_causal_masked_softmax", Mask::kBottomRight}};

struct Variant {
  int dtype = TE_FL_F32;
  Dims shape = {};       // [B, H, Q, K], or [B, S, S] for the triangular op
  Dims mask_shape = {};  // shape of a given mask
  int mask_dtype = TE_FL_U8;
  double scale = 1, sigma = 1;
  bool in_place = false, minus_infinity = false, nan = false, large = false;
};

std::string variant_name(const Variant& v, bool masked) {
  std::string name = std::string(name_of(v.dtype)) + "/" + dims_name(v.shape);
  if (masked) name += "/mask=" + std::string(name_of(v.mask_dtype)) + "." + dims_name(v.mask_shape);
  if (v.scale != 1) name += v.scale < 0 ? "/scale=-1" : "/scale=0.125";
  if (v.sigma != 1) name += "/sigma=" + std::to_string(static_cast<int>(v.sigma));
  if (v.minus_infinity) name += "/minus_infinity";
  if (v.nan) name += "/nan";
  return name + (v.in_place ? "/in_place" : "");
}

bool masked_out(const Op& op, const Variant& v, Tensor* mask, int64_t row, int64_t j) {
  const int64_t k = v.shape.back(), q = v.shape[v.shape.size() - 2], i = row % q;
  if (op.mask == Mask::kCausal) return j > i;
  if (op.mask == Mask::kBottomRight) return j > i + (k - q);
  if (mask == nullptr) return false;
  const int64_t h = v.shape[1], head = row / q % h, batch = row / q / h;
  const int64_t mb = v.mask_shape[0] == 1 ? 0 : batch, mh = v.mask_shape[1] == 1 ? 0 : head;
  return mask->get(((mb * v.mask_shape[1] + mh) * q + i) * k + j) != 0;
}

// Masks about a third of the elements. The first row of each matrix is masked completely, one row
// not at all. Mask values other than 0 and 1 occur.
Fill mask_fill(const Variant& v) {
  const int64_t k = std::max<int64_t>(v.shape.back(), 1), q = std::max<int64_t>(v.shape[2], 1);
  return [=](Random& r, int64_t i) {
    const int64_t row = i / k % q;
    if (row == 0 && q > 1) return 1.0;
    if (row == 1) return 0.0;
    return r.uniform() < 0.3
               ? (v.mask_dtype == TE_FL_U8 ? static_cast<double>(1 + r.below(255)) : 1.0)
               : 0.0;
  };
}

void probabilities(Tensor* x, const std::function<bool(int64_t, int64_t)>& out, double scale,
                   std::vector<double>& y) {
  const int64_t k = x->cols(), rows = x->rows();
  y.assign(static_cast<size_t>(x->numel()), 0);
  for (int64_t i = 0; i < rows; ++i) {
    double top = -infinity(), sum = 0;
    for (int64_t j = 0; j < k; ++j)
      if (!out(i, j)) top = std::max(top, scale * x->get(i * k + j));
    for (int64_t j = 0; j < k; ++j)
      if (!out(i, j)) sum += y[i * k + j] = std::exp(scale * x->get(i * k + j) - top);
    for (int64_t j = 0; j < k && sum != 0; ++j)  // a visible NaN makes its row NaN
      if (!out(i, j)) y[i * k + j] /= sum;
  }
}

void forward(Problem& p, const Op& op, const Variant& v) {
  Tensor* x = p.in("input", v.dtype, v.shape, [v](Random& r, int64_t i) {
    // Puts NaN into half of the rows; the mask hides some of these elements.
    if (v.nan && i / v.shape.back() % 2 == 0 && i % 61 == 3) return std::nan("");
    return v.minus_infinity && i % v.shape.back() != 0 && i % 3 == 1 ? -infinity()
                                                                     : v.sigma * r.gaussian();
  });
  Tensor* mask =
      op.mask == Mask::kGiven ? p.in("mask", v.mask_dtype, v.mask_shape, mask_fill(v)) : nullptr;
  Tensor* y = v.in_place ? p.in_place("output", x) : p.out("output", v.dtype, v.shape);
  p.set("scale", v.scale);
  p.oracle([&p, op, v, x, mask, y] {
    std::vector<double> want, extra;
    probabilities(
        x, [&](int64_t i, int64_t j) { return masked_out(op, v, mask, i, j); }, v.scale, want);
    // exp converts a rounding error of its argument, relative to the argument's size, into a
    // relative error of the result.
    for (int64_t i = 0; i < x->numel(); ++i) {
      const double size = std::isfinite(x->get(i))
                              ? std::fabs(v.scale * x->get(i)) + 4 * v.sigma * std::fabs(v.scale)
                              : 0;
      extra.push_back(want[i] * 0x1p-22 * size);
    }
    p.expect(y, want, extra);
  });
}

void backward(Problem& p, const Op& op, const Variant& v) {
  Tensor* dy = p.in("output_grad", v.dtype, v.shape);
  // The input of a backward: probabilities of random scores under the op's mask.
  const int64_t k = v.shape.back();
  auto scores = std::make_shared<std::vector<double>>();
  if (p.fills) {
    Problem scratch(p.op_name, 7);
    Tensor* x = scratch.in("x", TE_FL_F32, v.shape, gaussian(v.sigma));
    probabilities(
        x,
        [&](int64_t i, int64_t j) {
          return op.mask == Mask::kGiven ? (i * 7 + j) % 5 == 0 : masked_out(op, v, nullptr, i, j);
        },
        v.scale, *scores);
  }
  Tensor* y = p.in("softmax_results", v.dtype, v.shape,
                   [scores](Random&, int64_t i) { return (*scores)[i]; });
  Tensor* dx = v.in_place ? p.in_place("input_grad", dy) : p.out("input_grad", v.dtype, v.shape);
  p.set("scale", v.scale);
  p.oracle([&p, op, v, k, dy, y, dx] {
    std::vector<double> want(static_cast<size_t>(dy->numel())), extra(want.size());
    std::vector<uint8_t> skip(want.size());
    for (int64_t i = 0; i < dy->rows(); ++i) {
      double dot = 0, magnitude = 0;
      for (int64_t j = 0; j < k; ++j) {
        const double term = dy->get(i * k + j) * y->get(i * k + j);
        dot += term, magnitude += std::fabs(term);
      }
      for (int64_t j = 0; j < k; ++j) {
        const double yj = y->get(i * k + j), d = dy->get(i * k + j);
        want[i * k + j] = v.scale * yj * (d - dot);
        extra[i * k + j] =
            std::fabs(v.scale) * yj *
            (sum_tolerance(static_cast<double>(k), magnitude) + 0x1p-22 * std::fabs(d));
        // This element is 0 times NaN. The op may treat a hidden key's result as 0, so the element
        // is not compared.
        const bool causal = op.mask == Mask::kCausal || op.mask == Mask::kBottomRight;
        skip[i * k + j] = std::isnan(dot) && causal && masked_out(op, v, nullptr, i, j);
      }
    }
    p.expect(dx, want, extra).skip = std::move(skip);
  });
}

std::vector<Variant> list_variants(const Op& op) {
  std::vector<Variant> all;
  const bool square = op.mask == Mask::kCausal;
  auto shape = [&](int64_t b, int64_t h, int64_t q, int64_t k) {
    return square ? Dims{b * h, k, k} : Dims{b, h, q, k};
  };
  for (int d : kHigh) {
    all.push_back({.dtype = d, .shape = shape(2, 3, 7, 33)});
    all.push_back({.dtype = d, .shape = shape(1, 2, 64, 64), .scale = 0.125});
  }
  const Dims shapes[] = {shape(0, 2, 3, 4), shape(1, 1, 1, 1), shape(2, 2, 5, 17),
                         shape(1, 1, 3, 1021), shape(1, 2, 13, 257)};
  for (const Dims& s : shapes) all.push_back({.shape = s});
  if (!square) all.push_back({.shape = {2, 2, 0, 5}});
  all.push_back({.shape = shape(1, 2, 9, 40), .scale = -1});
  all.push_back({.shape = shape(1, 2, 9, 40), .sigma = 50});
  all.push_back({.shape = shape(1, 2, 9, 40), .in_place = true});
  all.push_back({.shape = shape(1, 2, 9, 41), .minus_infinity = true});
  all.push_back({.dtype = TE_FL_BF16,
                 .shape = square ? Dims{4, 256, 256} : Dims{2, 4, 128, 256},
                 .large = true});
  // Row lengths, even and odd, from rows that a few threads hold to rows that exceed a thread
  // block.
  const std::pair<int, int64_t> widths[] = {
      {TE_FL_F16, 200},   {TE_FL_BF16, 512},  {TE_FL_F16, 1000},   {TE_FL_F32, 2047},
      {TE_FL_BF16, 2048}, {TE_FL_F16, 4001},  {TE_FL_BF16, 8192},  {TE_FL_BF16, 8195},
      {TE_FL_F16, 16368}, {TE_FL_F32, 16383}, {TE_FL_BF16, 20003}, {TE_FL_F16, 20480},
      {TE_FL_F32, 16384}, {TE_FL_F16, 32768}, {TE_FL_F32, 33001},  {TE_FL_BF16, 60001}};
  for (const auto& [dtype, width] : widths)
    if (!square) all.push_back({.dtype = dtype, .shape = {1, 1, 3, width}});
  // More wide rows than a GPU processes in three waves of blocks.
  if (!square) {
    all.push_back({.dtype = TE_FL_BF16, .shape = {2, 2, 150, 16392}, .large = true});
  }
  if (square) all.push_back({.dtype = TE_FL_BF16, .shape = {1, 520, 520}, .large = true});
  // A visible NaN makes its row NaN except for the masked elements, which are 0. The shapes cover
  // every kind of row.
  if (op.mask != Mask::kNone) {
    all.push_back({.shape = shape(1, 2, 9, 41), .nan = true});
    all.push_back({.dtype = TE_FL_BF16, .shape = shape(1, 2, 96, 96), .nan = true});
    for (const auto& [dtype, width] : widths)
      if (!square) all.push_back({.dtype = dtype, .shape = {1, 2, 3, width}, .nan = true});
  }
  for (Variant& v : all) {
    if (op.mask == Mask::kGiven) v.mask_shape = {v.shape[0], 1, v.shape[2], v.shape[3]};
    // A visible key before the diagonal keeps each row from being completely -infinity.
    if (op.mask == Mask::kGiven && v.minus_infinity) v.minus_infinity = false, v.sigma = 3;
  }
  return all;
}

void add_cases(Table& table) {
  for (const Op& op : kOps) {
    auto variants = list_variants(op);
    for (const Variant& v : variants) {
      if (!v.minus_infinity && !v.nan)
        add(
            table, "softmax", std::string(op.stem) + "_backward", variant_name(v, false),
            [op, v](Problem& p) { backward(p, op, v); }, v.large);
    }
    if (op.mask == Mask::kGiven) {
      for (const Dims& m : {Dims{1, 1, 9, 40}, {3, 2, 9, 40}, {1, 2, 9, 40}, {3, 1, 9, 40}})
        for (int d : {TE_FL_U8, TE_FL_BOOL})
          variants.push_back({.shape = {3, 2, 9, 40}, .mask_shape = m, .mask_dtype = d});
    }
    for (const Variant& v : variants)
      add(
          table, "softmax", std::string(op.stem) + "_forward",
          variant_name(v, op.mask == Mask::kGiven), [op, v](Problem& p) { forward(p, op, v); },
          v.large);
  }
}

void draw_cases(Drawn& drawn) {
  const auto draw = [](const Op& op, Draw& r) {
    static constexpr double kScales[] = {1, 0.125, 2.5};
    Variant v{.dtype = Drawn::high(r), .scale = kScales[r.below(3)]};
    int64_t b = 1 + r.below(3), h = 1 + r.below(3), q = 1 + r.below(30);
    const int64_t k = Drawn::extent(r, r.swept != nullptr ? 1 << 14 : 1025);
    if (r.swept != nullptr) b = h = 1, q = r.swept->rows;
    const int64_t square = std::min<int64_t>(k, r.swept != nullptr ? 300 : 130);
    v.shape = op.mask == Mask::kCausal ? Dims{b, square, square} : Dims{b, h, q, k};
    if (op.mask == Mask::kGiven) v.mask_shape = {r.below(2) == 0 ? b : 1, 1, q, k};
    return v;
  };
  for (const Op& op : kOps) {
    const bool masked = op.mask == Mask::kGiven;
    drawn.cases("softmax", std::string(op.stem) + "_forward", [&](Draw& r) -> DrawnCase {
      const Variant v = draw(op, r);
      return {variant_name(v, masked), [op, v](Problem& p) { forward(p, op, v); }};
    });
    drawn.cases("softmax", std::string(op.stem) + "_backward", [&](Draw& r) -> DrawnCase {
      const Variant v = draw(op, r);
      return {variant_name(v, false), [op, v](Problem& p) { backward(p, op, v); }};
    });
  }
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace softmax_calls;
  const auto plain = [&](const char* what, int64_t queries, int64_t keys) {
    cases.push_back({"scaled_softmax_forward", what, [=](Run& r) {
                       forward(r, "scaled_softmax_forward", Mask::kNone, {r, queries, keys});
                     }});
    cases.push_back({"scaled_softmax_backward", what, [=](Run& r) {
                       backward(r, "scaled_softmax_backward", false, {r, queries, keys});
                     }});
  };
  plain("rows of 2048", 2048, 2048);
  plain("rows of 37", 64, 37);
  plain("rows of 1000", 64, 1000);
  plain("rows of 20001", 16, 20001);
  plain("rows of 32768", 16, 32768);
  plain("rows of 100003", 5, 100003);
  const char* const triangle = "scaled_upper_triang_masked_softmax_";
  const char* const aligned = "scaled_aligned_causal_masked_softmax_";
  const std::string names[] = {
      "scaled_masked_softmax_forward",   "scaled_masked_softmax_backward",
      std::string(triangle) + "forward", std::string(triangle) + "backward",
      std::string(aligned) + "forward",  std::string(aligned) + "backward",
  };
  const auto causal = [&](int which, const char* what, int64_t queries, int64_t keys) {
    const std::string fwd = names[which], bwd = names[which + 1];
    cases.push_back({fwd, what, [=](Run& r) {
                       forward(r, fwd.c_str(), Mask::kCausal, {r, queries, keys});
                     }});
    cases.push_back({bwd, what, [=](Run& r) {
                       backward(r, bwd.c_str(), true, {r, queries, keys});
                     }});
  };
  const std::string masked = names[0];
  const auto add_masked = [&](const char* what, int64_t queries, int64_t keys, bool broadcast) {
    cases.push_back({masked, what, [=](Run& r) {
                       forward(r, masked.c_str(), Mask::kGiven, {r, queries, keys}, broadcast);
                     }});
  };
  add_masked("rows of 1024", 1024, 1024, false);
  add_masked("rows of 1021, a mask for all heads", 64, 1021, true);
  add_masked("rows of 20001", 16, 20001, false);
  const std::string masked_backward = names[1];
  cases.push_back({masked_backward, "rows of 1024", [=](Run& r) {
                     backward(r, masked_backward.c_str(), false, {r, 1024, 1024});
                   }});
  causal(2, "rows of 1024", 1024, 1024);
  causal(2, "rows of 1021", 1021, 1021);
  causal(4, "rows of 1024", 512, 1024);
  causal(4, "rows of 20001", 16, 20001);
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  const size_t first = cases.size();
  const auto square = [](Case& c, int64_t rows) {
    return Shape{(rows + c.cols() - 1) / c.cols(), c.cols(), c.cols()};
  };
  const auto scores = [square](Case& c, int64_t rows) {
    Shape shape = square(c, rows);
    shape.insert(shape.begin(), 1);
    return shape;
  };
  const auto forward = [](auto& a, Case& c, const Shape& shape, int dtype) {
    a.input = c.in(shape, dtype), a.output = c.out(shape, dtype), a.scale = 0.125f;
  };
  const auto backward = [](auto& a, Case& c, const Shape& shape, int dtype) {
    a.output_grad = c.in(shape, dtype), a.softmax_results = c.in(shape, dtype);
    a.input_grad = c.out(shape, dtype), a.scale = 0.125f;
  };
  for (const char* op :
       {"scaled_softmax", "scaled_masked_softmax", "scaled_aligned_causal_masked_softmax"}) {
    const bool masked = std::string(op) == "scaled_masked_softmax";
    both_dtypes(cases, std::string(op) + "_forward", [=](Case& c, int64_t rows, int dtype) {
      if (!masked) return forward(c.args<te_fl_softmax_fwd4_args>(), c, scores(c, rows), dtype);
      auto& a = c.args<te_fl_softmax_masked_args>();
      forward(a, c, scores(c, rows), dtype);
      a.mask = c.in({1, 1, c.cols(), c.cols()}, TE_FL_U8);
    });
    both_dtypes(cases, std::string(op) + "_backward", [=](Case& c, int64_t rows, int dtype) {
      backward(c.args<te_fl_softmax_bwd4_args>(), c, scores(c, rows), dtype);
    });
  }
  const std::string triangular = "scaled_upper_triang_masked_softmax_";
  both_dtypes(cases, triangular + "forward", [=](Case& c, int64_t rows, int dtype) {
    forward(c.args<te_fl_softmax_fwd3_args>(), c, square(c, rows), dtype);
  });
  both_dtypes(cases, triangular + "backward", [=](Case& c, int64_t rows, int dtype) {
    backward(c.args<te_fl_softmax_bwd3_args>(), c, square(c, rows), dtype);
  });
  describe(cases, first, "rows of all matrices, cols", {4096, 512}, {131072, 2048});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile softmax_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
