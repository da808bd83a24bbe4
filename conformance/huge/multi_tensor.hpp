// Scaling and norms of lists with a small tensor and one of more than 2^31 elements.
#pragma once

#include "conformance/huge/cases.hpp"

namespace te_fl::huge::multi_tensor_calls {

constexpr int64_t kSmall = 1000;

// Two tensors of one argument list, each with a pattern of its own.
struct List {
  Tensor tensors[2];
  const te_fl_tensor* views[2];

  List(Tensor small, Tensor large)
      : tensors{std::move(small), std::move(large)}, views{tensors[0], tensors[1]} {}
  List(Run& run, int64_t size, const Pattern& pattern, DType dtype)
      : List(run.input({kSmall}, pattern, dtype), run.input({size}, pattern, dtype)) {}
  List(const List&) = delete;
  List& operator=(const List&) = delete;
};

inline void scale(Run& run) {
  const Pattern pattern(1);
  const int64_t size = run.elements();
  const List in(run, size, pattern, DType::kBF16);
  const List out(run.output({kSmall}, DType::kF32), run.output({size}, DType::kF32));
  const Tensor flag = run.integers({0});
  te_fl_multi_tensor_scale_args args{};
  args.inputs = in.views, args.outputs = out.views, args.inputs_count = args.outputs_count = 2;
  args.noop_flag = flag, args.scale = 0.75f;
  run.call("multi_tensor_scale", &args);
  for (const Tensor& t : out.tensors) {
    run.expect(
        t, "output", [&](int64_t i) { return 0.75 * pattern.at(i); }, 1e-6, 0);
  }
  run.expect(
      flag, "noop_flag", [](int64_t) { return 0; }, 0, 0);
  // A non-finite element must be detected at any index.
  run.set(in.tensors[1], size - 2, INFINITY);
  run.call("multi_tensor_scale", &args);
  const std::vector<float> raised = run.read(flag, 0, 1);
  if (!run.failed() && raised[0] == 0) run.fail("noop_flag is 0 although an input is infinite");
}

inline double sum_of_squares(const Pattern& pattern, int64_t size) {
  double period = 0, rest = 0;
  for (float v : pattern.values()) period += double{v} * v;
  for (int64_t i = 0; i < size % Pattern::kPeriod; ++i)
    rest += double{pattern.at(i)} * pattern.at(i);
  return static_cast<double>(size / Pattern::kPeriod) * period + rest;
}

inline void norm(Run& run, bool unscale) {
  const Pattern pattern(1);
  const List in(run, run.elements(), pattern, DType::kBF16);
  const Tensor out = run.output({1}, DType::kF32), each = run.output({2}, DType::kF32);
  const Tensor inverse = run.output({1}, DType::kF32);
  run.set(inverse, 0, 0.125f);
  const double factor = unscale ? 0.125 : 1;
  if (unscale) {
    te_fl_multi_tensor_unscale_l2norm_args args{};
    args.inputs = in.views, args.inputs_count = 2, args.norm = out, args.per_tensor_norms = each;
    args.inv_scale = inverse;
    run.call("multi_tensor_unscale_l2norm", &args);
  } else {
    te_fl_multi_tensor_l2norm_args args{};
    args.inputs = in.views, args.inputs_count = 2, args.norm = out, args.per_tensor_norms = each;
    run.call("multi_tensor_l2norm", &args);
  }
  const double small = sum_of_squares(pattern, kSmall),
               large = sum_of_squares(pattern, run.elements());
  run.expect(
      out, "norm", [&](int64_t) { return factor * std::sqrt(small + large); }, 1e-5, 0);
  run.expect(
      each, "per_tensor_norms",
      [&](int64_t i) { return factor * std::sqrt(i == 0 ? small : large); }, 1e-5, 0);
}

}  // namespace te_fl::huge::multi_tensor_calls
