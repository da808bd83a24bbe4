// Scaling and norms of lists of tensors; part of the optimizer family.
#include "conformance/huge/multi_tensor.hpp"
#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/tensor_lists.hpp"
#include "te_fl/ops/optimizer.h"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};

struct ScaleVariant {
  int in, out;
  Shapes shapes;
  double scale;
  double bad;  // 0: all values finite; otherwise stored in the last tensor
  int flag_before;
  bool in_place = false;
  bool large = false;
  double norm = 0, max_norm = 0;  // clipping only if max_norm is set
  int64_t shift = 0;
};

std::string scale_name(const ScaleVariant& v) {
  std::string name =
      std::string(name_of(v.in)) + "/" + shapes_name(v.shapes) + "/out=" + name_of(v.out);
  if (v.bad != 0)
    name += std::isnan(v.bad)   ? "/nan"
            : std::isinf(v.bad) ? (v.bad < 0 ? "/minus_infinity" : "/infinity")
                                : "/overflow";
  if (v.flag_before != 0) name += "/flag_set";
  if (v.in_place) name += "/in_place";
  if (v.max_norm != 0) {
    name += std::isfinite(v.norm) ? "/norm=" + std::to_string(v.norm).substr(0, 3)
            : std::isnan(v.norm)  ? "/norm=nan"
                                  : "/norm=inf";
  }
  return name + shift_name(v.shift);
}

void scale(Problem& p, const ScaleVariant& v) {
  auto inputs = list_in(p, "inputs", v.in, v.shapes, gaussian(), v.shift);
  if (v.bad != 0) {
    inputs.back()->put(inputs.back()->numel() - 1, v.bad);
    inputs.back()->data->freeze();
  }
  const auto over = [&](const std::string& n, const Dims&, size_t i) {
    return p.in_place(n, inputs[i]);
  };
  auto outputs = v.in_place ? make_list(p, "outputs", v.shapes, over)
                            : list_out(p, "outputs", v.out, v.shapes, 3 * v.shift);
  Tensor* flag = p.inout("noop_flag", TE_FL_I32, {1}, constant(v.flag_before));
  p.set("scale", v.scale);
  if (v.max_norm != 0) {
    p.in("norm", TE_FL_F32, {1}, constant(v.norm));
    p.set("max_norm", v.max_norm);
  }
  p.oracle([&p, v, inputs, outputs, flag] {
    double s = static_cast<double>(static_cast<float>(v.scale));
    bool bad = v.max_norm != 0 && !std::isfinite(v.norm);
    if (v.max_norm != 0 && std::isfinite(v.norm) && v.norm > v.max_norm) s *= v.max_norm / v.norm;
    for (size_t i = 0; i < inputs.size(); ++i) {
      auto want = inputs[i]->values();
      for (double& x : want) {
        bad = bad || !std::isfinite(x) || !std::isfinite(static_cast<float>(x * s));
        x *= s;
        if (std::fabs(x) > largest(TE_FL_F32) && std::isfinite(x)) x = std::copysign(infinity(), x);
      }
      p.expect(outputs[i], want);
    }
    p.expect_exact(flag, {bad ? 1.0 : static_cast<double>(v.flag_before)}, TE_FL_I32);
  });
}

void norm(Problem& p, int dtype, const Shapes& shapes, bool per_tensor, bool unscale, double sigma,
          int64_t shift = 0) {
  auto inputs = list_in(p, "inputs", dtype, shapes, gaussian(sigma), shift);
  Tensor* inv = unscale ? p.in("inv_scale", TE_FL_F32, {1}, constant(0.037)) : nullptr;
  Tensor* out = p.out("norm", TE_FL_F32, {1});
  Tensor* each = per_tensor
                     ? p.out("per_tensor_norms", TE_FL_F32, {static_cast<int64_t>(shapes.size())})
                     : nullptr;
  p.oracle([&p, inputs, inv, out, each] {
    double total = 0, n = 0;
    std::vector<double> norms, tolerance;
    for (Tensor* t : inputs) {
      double sum = 0;
      for (double x : t->values()) sum += std::pow(x * (inv == nullptr ? 1 : inv->get(0)), 2);
      norms.push_back(std::sqrt(sum)),
          tolerance.push_back(sum_tolerance(static_cast<double>(t->numel()), std::sqrt(sum)));
      total += sum, n += static_cast<double>(t->numel());
    }
    p.expect(out, {std::sqrt(total)}, {sum_tolerance(n, std::sqrt(total))});
    if (each != nullptr) p.expect(each, norms, tolerance);
  });
}

// Cases with values whose squares are outside of FP32's range. Their tolerance is relative, since
// with an absolute tolerance of 1e-6 all small norms would pass.
struct RangeVariant {
  const char* name;
  int dtype;
  double unit;        // unit of the norms, a power of 2
  double factor = 1;  // of multi_tensor_unscale_l2norm, a power of 2
};

void norm_in_range(Problem& p, const RangeVariant& v, bool per_tensor, bool unscale) {
  const auto tensor = [&](const std::string& n, const Dims& d, const Fill& fill) {
    return p.unnamed(p.in(n, v.dtype, d, fill));
  };
  const double unit = v.unit / v.factor;
  Tensor* legs =
      tensor("inputs[0]", {2}, [unit](Random&, int64_t i) { return (3 + double(i)) * unit; });
  Tensor* one = tensor("inputs[1]", {1}, constant(-12 * unit));
  Tensor* same = tensor("inputs[2]", {64, 64}, constant(unit / 4));  // 4096 values: norm 16
  p.list("inputs", {legs, one, same});
  if (unscale) p.in("inv_scale", TE_FL_F32, {1}, constant(v.factor));
  Tensor* out = p.out("norm", TE_FL_F32, {1});
  Tensor* each = per_tensor ? p.out("per_tensor_norms", TE_FL_F32, {3}) : nullptr;
  p.oracle([&p, v, out, each] {
    p.expect(out, {std::sqrt(425.0) * v.unit}).relative = 1e-6;  // 25 + 144 + 256
    if (each != nullptr) p.expect(each, {5 * v.unit, 12 * v.unit, 16 * v.unit}).relative = 1e-6;
  });
}

void add_scale(Table& table) {
  std::vector<ScaleVariant> all;
  for (int in : kHigh)
    for (int out : kHigh) all.push_back({in, out, kFew, 0.37, 0, 0});
  for (double bad : {infinity(), -infinity(), nan_value()})
    all.push_back({TE_FL_F32, TE_FL_F32, kFew, 2, bad, 0});
  all.push_back({TE_FL_F32, TE_FL_F32, kFew, 4, 3e38, 0});  // finite input, overflow in the result
  all.push_back({TE_FL_F32, TE_FL_F32, kFew, 0.5, 0, 1});   // the op never clears the flag
  all.push_back({TE_FL_F32, TE_FL_F32, {}, 0.5, 0, 0});
  all.push_back({TE_FL_F32, TE_FL_F32, {{130, 257}}, 0.5, 0, 0});
  all.push_back({TE_FL_BF16, TE_FL_F32, many(), 0.5, 0, 0});
  all.push_back({TE_FL_F32, TE_FL_F32, kFew, 3, 0, 0, true});
  for (double norm : {0.0, 1.0, 1.5, 8.0, infinity(), nan_value()})
    for (bool in_place : {false, true})
      all.push_back({TE_FL_F32, TE_FL_F32, kFew, 1, 0, 0, in_place, false, norm, 1.5});
  all.push_back({TE_FL_BF16, TE_FL_F32, kFew, 0.5, 0, 0, false, false, 6.0, 1.5});
  all.push_back({TE_FL_F32, TE_FL_F32, kFew, 1, 0, 1, true, false, 6.0, 1.5});
  // The norm, which is a separate argument, is finite and requires no clipping, although the inputs
  // are not finite.
  for (int dtype : kHigh)
    for (double bad : {infinity(), nan_value()})
      all.push_back({dtype, dtype, kFew, 1, bad, 0, true, false, 0.5, 1});
  for (const ScaleVariant& v : all)
    add(
        table, "optimizer", "multi_tensor_scale", scale_name(v), [v](Problem& p) { scale(p, v); },
        v.large);
}

ScaleVariant draw_scale(Draw& r) {
  ScaleVariant v{Drawn::high(r), Drawn::high(r), draw_shapes(r), 0.37, 0, 0};
  v.in_place = Drawn::chance(r, 3), v.flag_before = static_cast<int>(r.below(2));
  if (v.in_place) v.out = v.in;
  if (!v.shapes.empty() && v.shapes.back() != Dims{0} && Drawn::chance(r, 4)) v.bad = infinity();
  if (Drawn::chance(r, 3)) v.norm = static_cast<double>(r.below(4)), v.max_norm = 1.5;
  v.shift = draw_shift(r);
  return v;
}

void draw_cases(Drawn& drawn) {
  drawn.cases("optimizer", "multi_tensor_scale", [](Draw& r) -> DrawnCase {
    const ScaleVariant v = draw_scale(r);
    return {scale_name(v), [v](Problem& p) { scale(p, v); }};
  });
  for (const bool unscale : {false, true}) {
    const char* op = unscale ? "multi_tensor_unscale_l2norm" : "multi_tensor_l2norm";
    drawn.cases("optimizer", op, [unscale](Draw& r) -> DrawnCase {
      const int dtype = Drawn::high(r);
      const Shapes shapes = draw_shapes(r);
      const bool each = Drawn::chance(r, 2);
      const int64_t shift = draw_shift(r);
      return {std::string(name_of(dtype)) + "/" + shapes_name(shapes) + (each ? "/each" : "") +
                  shift_name(shift),
              [=](Problem& p) { norm(p, dtype, shapes, each, unscale, 1, shift); }};
    });
  }
}

void add_cases(Table& table) {
  add_scale(table);
  for (bool unscale : {false, true}) {
    const std::string op = unscale ? "multi_tensor_unscale_l2norm" : "multi_tensor_l2norm";
    auto one = [&](int dtype, const Shapes& shapes, bool each, double sigma, bool large) {
      std::string name =
          std::string(name_of(dtype)) + "/" + shapes_name(shapes) + (each ? "/each" : "");
      if (sigma != 1) name += "/sigma=" + std::to_string(static_cast<int>(sigma));
      add(
          table, "optimizer", op, name,
          [=](Problem& p) { norm(p, dtype, shapes, each, unscale, sigma); }, large);
    };
    for (int d : kHigh)
      for (bool each : {false, true}) one(d, kFew, each, 1, false);
    one(TE_FL_F32, {}, false, 1, false);
    one(TE_FL_F32, {}, true, 1, false);
    one(TE_FL_F32, {{1}}, true, 1, false);
    one(TE_FL_F32, {{0}}, true, 1, false);
    one(TE_FL_F16, {{64, 64}}, true, 1000, false);  // squares overflow FP16
    one(TE_FL_BF16, many(), true, 1, false);
    one(TE_FL_F32, {{512, 513}}, true, 1, true);
    std::vector<RangeVariant> ranges = {{"squares_overflow", TE_FL_F32, 0x1p+65},
                                        {"squares_overflow", TE_FL_BF16, 0x1p+65},
                                        {"squares_underflow", TE_FL_F32, 0x1p-77},
                                        {"squares_underflow", TE_FL_BF16, 0x1p-77}};
    if (unscale) {  // the factor moves the values into FP32's range, or out of it
      ranges = {{"products_overflow", TE_FL_F32, 0x1p+65, 0x1p+60},
                {"products_underflow", TE_FL_F32, 0x1p-77, 0x1p-70},
                {"inputs_overflow", TE_FL_F32, 1, 0x1p-100},
                {"inputs_underflow", TE_FL_BF16, 1, 0x1p+100}};
    }
    for (const RangeVariant& v : ranges)
      for (bool each : {false, true})
        add(table, "optimizer", op,
            std::string(name_of(v.dtype)) + "/" + v.name + (each ? "/each" : ""),
            [=](Problem& p) { norm_in_range(p, v, each, unscale); });
  }
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace multi_tensor_calls;
  cases.push_back({"multi_tensor_scale", "", scale});
  cases.push_back({"multi_tensor_l2norm", "", [](Run& r) { norm(r, false); }});
  cases.push_back({"multi_tensor_unscale_l2norm", "", [](Run& r) { norm(r, true); }});
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  constexpr int kTensors = 24;
  const auto many = [](Case& c, int64_t rows, int dtype) {
    std::vector<const te_fl_tensor*> list;
    for (int i = 0; i < kTensors; ++i) {
      list.push_back(c.in({rows_each(rows, kTensors), c.cols()}, dtype));
    }
    return c.list(list);
  };
  both_dtypes(cases, "multi_tensor_scale", [many](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_multi_tensor_scale_args>();
    a.inputs = many(c, rows, dtype), a.inputs_count = kTensors;
    a.outputs = many(c, rows, dtype), a.outputs_count = kTensors;
    a.noop_flag = c.inout({1}, TE_FL_I32), a.scale = 0.5f;
  });
  both_dtypes(cases, "multi_tensor_l2norm", [many](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_multi_tensor_l2norm_args>();
    a.inputs = many(c, rows, dtype), a.inputs_count = kTensors;
    a.norm = c.out({1}, TE_FL_F32), a.per_tensor_norms = c.out({kTensors}, TE_FL_F32);
  });
  both_dtypes(cases, "multi_tensor_unscale_l2norm", [many](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_multi_tensor_unscale_l2norm_args>();
    a.inputs = many(c, rows, dtype), a.inputs_count = kTensors;
    a.inv_scale = c.in({1}, TE_FL_F32), a.norm = c.out({1}, TE_FL_F32);
  });
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile multi_tensor_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
