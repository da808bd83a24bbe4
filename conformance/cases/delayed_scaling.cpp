#include <limits>

#include "conformance/case_file.hpp"
#include "conformance/drawn.hpp"
#include "te_fl/ops/quantize.h"

// Cases of fused_amax_and_scale_update_after_reduction, compared exactly.
namespace te_fl::conformance {
namespace {

struct UpdateVariant {
  std::vector<std::pair<int64_t, int64_t>> histories;  // (length, number of tensors)
  int algo, format;
  double margin;
  bool reduced;
};

// The amaxes of a column of the history. The kind depends on the column's number: ordinary; zero
// (not used in this step); infinite; NaN; tiny (the scale overflows).
double make_amax(int64_t column, int64_t row, bool most_recent, Random& r) {
  const double ordinary = (row == 0 ? 2 : row == 1 ? 0.1 : 0.5) + 0.25 * r.uniform();
  if (row != 0) return column % 6 == 1 && row > 1 ? 0 : column % 6 == 4 ? 1e-40 : ordinary;
  switch (column % 6) {
    case 1:
      return 0;
    case 2:
      return infinity();
    case 3:
      return most_recent ? nan_value() : ordinary;
    case 4:
      return 1e-40;
    default:
      return ordinary;
  }
}

void update_oracle(Problem& p, const UpdateVariant& v, Tensor* reduced, Tensor* history,
                   Tensor* scale, int64_t first) {
  const int64_t length = history->shape[0], n = history->shape[1];
  std::vector<double> rolled = history->values(), scales = scale->values();
  const auto fp8_max = static_cast<float>(v.format == TE_FL_FP8_FORMAT_E4M3 ? 448.0 : 57344.0);
  for (int64_t c = 0; c < n; ++c) {
    double last = reduced == nullptr ? 0 : reduced->get(first + c);
    if (last == 0) last = history->get(c);
    if (last == 0) continue;  // no amax in this step: no change
    double top = last;
    // Rows from 1 on remain in the history; `last` is the value of row 0, the current step.
    for (int64_t i = 1; i < length && v.algo == TE_FL_AMAX_ALGO_MAX; ++i)
      top = std::fmax(top, history->get(i * n + c));
    for (int64_t i = 0; i + 1 < length; ++i) rolled[i * n + c] = history->get((i + 1) * n + c);
    rolled[(length - 1) * n + c] = last;
    rolled[c] = 0;
    const auto amax = static_cast<float>(top);
    if (amax == 0 || !std::isfinite(amax)) continue;
    float s = static_cast<float>(fp8_max * std::exp2(-v.margin)) / amax;
    if (std::isinf(s)) s = std::numeric_limits<float>::max();
    scales[c] = static_cast<double>(s);
  }
  p.expect_exact(history, rolled, TE_FL_F32);
  p.expect_exact(scale, scales, TE_FL_F32);
}

void update(Problem& p, const UpdateVariant& v) {
  std::vector<Tensor*> histories, scales;
  int64_t total = 0;
  for (size_t i = 0; i < v.histories.size(); ++i) {
    const int64_t length = v.histories[i].first, n = v.histories[i].second;
    const std::string at = "[" + std::to_string(i) + "]";
    const bool recent = v.algo == TE_FL_AMAX_ALGO_MOST_RECENT;
    histories.push_back(p.unnamed(
        p.inout("amax_histories" + at, TE_FL_F32, {length, n},
                [n, recent](Random& r, int64_t j) { return make_amax(j % n, j / n, recent, r); })));
    scales.push_back(p.unnamed(p.inout("scales" + at, TE_FL_F32, {n}, constant(17.25))));
    total += n;
  }
  p.list("amax_histories", histories), p.list("scales", scales);
  // Amaxes after a reduction over ranks are at least as large as the local ones; every third is
  // missing (zero).
  Tensor* reduced =
      v.reduced ? p.in("amax_reduction_buffer", TE_FL_F32, {total},
                       [](Random& r, int64_t i) { return i % 3 == 0 ? 0 : 3 + r.uniform(); })
                : nullptr;
  p.set("algo", v.algo), p.set("fp8_dtype", v.format), p.set("margin", v.margin);
  p.oracle([&p, v, reduced, histories, scales] {
    int64_t first = 0;
    for (size_t i = 0; i < histories.size(); first += histories[i]->shape[1], ++i)
      update_oracle(p, v, reduced, histories[i], scales[i], first);
  });
}

void draw_cases(Drawn& drawn) {
  drawn.cases("quantize", "fused_amax_and_scale_update_after_reduction", [](Draw& r) -> DrawnCase {
    static constexpr double kMargins[] = {0, 2, -1, 90, -110};
    UpdateVariant v{.histories = {},
                    .algo = static_cast<int>(r.below(2)),
                    .format = static_cast<int>(r.below(2)),
                    .margin = kMargins[Drawn::chance(r, 2) ? 0 : r.below(5)],
                    .reduced = Drawn::chance(r, 2)};
    const auto lists = static_cast<size_t>(r.swept != nullptr ? 1 : 1 + r.below(5));
    while (v.histories.size() < lists) {
      const Dims shape = Drawn::shape(r, 2);
      v.histories.emplace_back(shape[0], shape.back());
    }
    const auto& [length, n] = v.histories[0];
    const std::string name = dims_name({length, n}) + (v.algo == 0 ? "/max" : "/most_recent") +
                             (v.format == 0 ? "/e4m3" : "/e5m2") + (v.reduced ? "/reduced" : "") +
                             "/margin=" + std::to_string(static_cast<int>(v.margin));
    return {name + "/" + std::to_string(lists) + "_lists", [v](Problem& p) { update(p, v); }};
  });
}

void add_cases(Table& table) {
  using Set = std::vector<std::pair<int64_t, int64_t>>;
  const std::vector<Set> sets = {{},
                                 {{1, 7}},
                                 {{2, 6}},
                                 {{16, 1}},
                                 {{3, 12}, {1, 2}, {17, 9}},
                                 {{1024, 24}},
                                 {{40, 70}, {600, 36}},
                                 Set(800, {3, 2})};
  for (const auto& h : sets)
    for (int algo : {TE_FL_AMAX_ALGO_MAX, TE_FL_AMAX_ALGO_MOST_RECENT})
      for (int format : {TE_FL_FP8_FORMAT_E4M3, TE_FL_FP8_FORMAT_E5M2})
        for (bool reduced : {false, true}) {
          std::string name;
          if (h.size() == 800) name = "800_of_3x2";
          for (size_t i = 0; i < h.size() && h.size() < 10; ++i) {
            const auto& [l, n] = h[i];
            name += (name.empty() ? "" : ",") + std::to_string(l) + "x" + std::to_string(n);
          }
          name = (h.empty() ? "none" : name) +
                 (algo == TE_FL_AMAX_ALGO_MAX ? "/max" : "/most_recent") +
                 (format == TE_FL_FP8_FORMAT_E4M3 ? "/e4m3" : "/e5m2") +
                 (reduced ? "/reduced" : "");
          add(table, "quantize", "fused_amax_and_scale_update_after_reduction", name,
              [=](Problem& p) {
                update(p, {h, algo, format, 0, reduced});
              });
          if (h.size() != 3) continue;
          for (double margin : {2.0, -1.0})
            add(table, "quantize", "fused_amax_and_scale_update_after_reduction",
                name + (margin > 0 ? "/margin=2" : "/margin=-1"), [=](Problem& p) {
                  update(p, {h, algo, format, margin, reduced});
                });
        }
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  cases.push_back({"fused_amax_and_scale_update_after_reduction",
                   "64 histories of 1024",
                   [](Case& c, int64_t) {
                     auto& a = c.args<te_fl_fused_amax_and_scale_update_after_reduction_args>();
                     a.amax_reduction_buffer = c.in({256}, TE_FL_F32);
                     std::vector<const te_fl_tensor*> histories, scales;
                     for (int i = 0; i < 64; ++i) {
                       histories.push_back(c.inout({1024, 4}, TE_FL_F32));
                       scales.push_back(c.inout({4}, TE_FL_F32));
                     }
                     a.amax_histories = c.list(histories), a.amax_histories_count = 64;
                     a.scales = c.list(scales), a.scales_count = 64;
                   },
                   false,
                   1,
                   "",
                   {1},
                   {1}});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile delayed_scaling_cases{
    .cases = add_cases, .drawn = draw_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
