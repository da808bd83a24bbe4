// Optimizers over lists of tensors. State is stored in FP32; the arithmetic is in double.
#include "te_fl/ops/optimizer.h"

#include <cmath>
#include <string>
#include <vector>

#include "element.hpp"
#include "families.hpp"

namespace te_fl::reference {
namespace {

using TensorList = const te_fl_tensor* const*;

bool is_noop(const te_fl_tensor* flag) {
  return flag != nullptr && *backend::data<const int32_t>(*flag) != 0;
}

// The learning rate and the step: the tensor's value if there is one, else the scalar argument.
template <class Args>
float lr_of(const Args& a) {
  return a.lr_tensor != nullptr ? scalar_f32(*a.lr_tensor) : a.lr;
}
int64_t step_of(const te_fl_multi_tensor_adam_args& a) {
  return a.step_tensor != nullptr ? *backend::data<const int64_t>(*a.step_tensor) : a.step;
}

bool all_finite(const std::vector<double>& values) {
  for (double v : values) {
    if (!std::isfinite(v)) return false;
  }
  return true;
}

void scale(const te_fl_context&, const te_fl_multi_tensor_scale_args& a) {
  bool finite = true;
  double factor = a.scale;
  if (a.norm != nullptr) {
    const float norm = scalar_f32(*a.norm);
    finite = std::isfinite(norm);
    if (finite && norm > a.max_norm) factor = a.scale * (a.max_norm / norm);  // computed in FP32
  }
  for (int64_t t = 0; t < a.inputs_count; ++t) {
    std::vector<double> x = Reader(*a.inputs[t]).all_double();
    finite = finite && all_finite(x);
    for (double& v : x) v *= factor;
    Writer(*a.outputs[t]).write(0, static_cast<int64_t>(x.size()), x.data());
    // Reads the output back, because a finite product may overflow the output's dtype.
    finite = finite && all_finite(Reader(*a.outputs[t]).all_double());
  }
  if (!finite) *backend::data<int32_t>(*a.noop_flag) = 1;
}

// Writes sqrt(sum (factor x)^2) over all tensors, and per tensor if requested.
void norms(TensorList inputs, int64_t count, double factor, const te_fl_tensor& norm,
           const te_fl_tensor* per_tensor) {
  std::vector<double> each;
  double total = 0;
  for (int64_t t = 0; t < count; ++t) {
    double sum = 0;
    for (double x : Reader(*inputs[t]).all_double()) sum += factor * x * (factor * x);
    each.push_back(std::sqrt(sum));
    total += sum;
  }
  total = std::sqrt(total);
  Writer(norm).write(0, 1, &total);
  if (per_tensor != nullptr) Writer(*per_tensor).write(0, count, each.data());
}

void l2norm(const te_fl_context&, const te_fl_multi_tensor_l2norm_args& a) {
  norms(a.inputs, a.inputs_count, 1.0, *a.norm, a.per_tensor_norms);
}

void unscale_l2norm(const te_fl_context&, const te_fl_multi_tensor_unscale_l2norm_args& a) {
  norms(a.inputs, a.inputs_count, scalar_f32(*a.inv_scale), *a.norm, a.per_tensor_norms);
}

struct Adam {
  explicit Adam(const te_fl_multi_tensor_adam_args& a)
      : args(a),
        lr(lr_of(a)),
        correction1(a.bias_correction ? 1.0 - std::pow(double{a.beta1}, double(step_of(a))) : 1.0),
        correction2(a.bias_correction ? 1.0 - std::pow(double{a.beta2}, double(step_of(a))) : 1.0) {
  }

  // Updates m, v and p of one element with gradient g.
  void operator()(double g, float& m, float& v, double& p) const {
    const double wd = args.weight_decay;
    if (args.mode == TE_FL_ADAM_MODE_L2) g += wd * p;
    m = static_cast<float>(args.beta1 * double{m} + (1.0 - args.beta1) * g);
    v = static_cast<float>(args.beta2 * double{v} + (1.0 - args.beta2) * g * g);
    double update = (m / correction1) / (std::sqrt(v / correction2) + args.epsilon);
    if (args.mode == TE_FL_ADAM_MODE_ADAMW) update += wd * p;
    p -= lr * update;
  }

  const te_fl_multi_tensor_adam_args& args;
  double lr;
  double correction1;
  double correction2;
};

void update_params(const te_fl_multi_tensor_adam_args& a) {
  const Adam update(a);
  for (int64_t t = 0; t < a.grads_count; ++t) {
    const te_fl_tensor& weights = a.master_params_count != 0 ? *a.master_params[t] : *a.params[t];
    const std::vector<double> g = Reader(*a.grads[t]).all_double();
    std::vector<float> m = Reader(*a.exp_avgs[t]).all();
    std::vector<float> v = Reader(*a.exp_avg_sqs[t]).all();
    std::vector<double> p = Reader(weights).all_double();
    const auto n = static_cast<int64_t>(g.size());
    for (int64_t i = 0; i < n; ++i) update(g[i], m[i], v[i], p[i]);
    Writer(*a.exp_avgs[t]).write(0, n, m.data());
    Writer(*a.exp_avg_sqs[t]).write(0, n, v.data());
    Writer(weights).write(0, n, p.data());
    if (a.master_params_count != 0) {
      Writer(*a.params[t]).write(0, n, Reader(weights).all().data());
    }
  }
}

void adam(const te_fl_context&, const te_fl_multi_tensor_adam_args& a) {
  if (!is_noop(a.noop_flag)) update_params(a);
  for (int64_t t = 0; t < a.fp8_params_count; ++t) {
    store_output(*a.fp8_params[t], Reader(*a.params[t]).all().data());
  }
}

struct Sgd {
  const te_fl_multi_tensor_sgd_args& args;
  double lr;

  void operator()(double g, float& m, double& p) const {
    const double wd = args.weight_decay;
    g *= args.scale;
    if (!args.wd_after_momentum) g += wd * p;
    if (args.momentum != 0) {
      m = static_cast<float>(
          args.first_run ? g : args.momentum * double{m} + (1.0 - args.dampening) * g);
      g = args.nesterov ? g + args.momentum * double{m} : double{m};
    }
    if (args.wd_after_momentum) g += wd * p;
    p -= lr * g;
  }
};

void sgd(const te_fl_context&, const te_fl_multi_tensor_sgd_args& a) {
  if (is_noop(a.noop_flag)) return;
  const Sgd update{a, lr_of(a)};
  for (int64_t t = 0; t < a.grads_count; ++t) {
    const std::vector<double> g = Reader(*a.grads[t]).all_double();
    std::vector<double> p = Reader(*a.params[t]).all_double();
    std::vector<float> m(g.size(), 0.0f);
    if (a.momentum != 0) m = Reader(*a.momentums[t]).all();
    const auto n = static_cast<int64_t>(g.size());
    for (int64_t i = 0; i < n; ++i) update(g[i], m[i], p[i]);
    if (a.momentum != 0) Writer(*a.momentums[t]).write(0, n, m.data());
    Writer(*a.params[t]).write(0, n, p.data());
    if (a.param_copies_count != 0) {
      Writer(*a.param_copies[t]).write(0, n, Reader(*a.params[t]).all().data());
    }
  }
}

}  // namespace

void append_optimizer(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_multi_tensor_scale_args, scale>("multi_tensor_scale"));
  ops.back().later_args = "norm max_norm";
  ops.push_back(descriptor<te_fl_multi_tensor_l2norm_args, l2norm>("multi_tensor_l2norm"));
  ops.push_back(descriptor<te_fl_multi_tensor_unscale_l2norm_args, unscale_l2norm>(
      "multi_tensor_unscale_l2norm"));
  ops.push_back(descriptor<te_fl_multi_tensor_adam_args, adam>("multi_tensor_adam"));
  ops.back().later_args = "lr_tensor step_tensor fp8_params";
  ops.push_back(descriptor<te_fl_multi_tensor_sgd_args, sgd>("multi_tensor_sgd"));
  ops.back().later_args = "lr_tensor";
}

}  // namespace te_fl::reference
