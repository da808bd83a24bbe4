// The activation ops: forward, gradient, and gradient with the bias gradient.
#include "te_fl/ops/activation.h"

#include "families.hpp"
#include "overlap.hpp"
#include "store.hpp"

namespace te_fl::opencl {
namespace {

enum Act {
  kGelu,
  kQgelu,
  kRelu,
  kSrelu,
  kSilu,
  kSigmoid,
  kClamped
};  // same values as in activation.cl

std::string types(Act act, const te_fl_tensor* x, const te_fl_tensor* grad, const Output& out) {
  return define("ACT", act) + define("TX", x) + define("TG", grad) + define("TY", out.type());
}

template <Act kAct>
void forward(const DeviceCall& call, const te_fl_activation_act_fwd_args& args) {
  const Output out(*args.output, call.context.workspace);
  const int64_t n = backend::numel(*args.output);
  Launch(call.device, call.stream(), "activation",
         types(kAct, args.input, nullptr, out) + define("TB", TE_FL_F32), "act_forward")
      .data(args.input)
      .memory(out.data())
      .value(n)
      .items(n);
  out.write_codes(call);
}

template <Act kAct, class Args>
void write_gradient(const DeviceCall& call, const Args& args, const te_fl_tensor* dbias) {
  const Output out(*args.output, call.context.workspace);
  const int64_t n = backend::numel(*args.output);
  const std::string options = types(kAct, args.input, args.grad, out) + define("TB", dbias);
  if (dbias != nullptr) {
    const backend::Matrix matrix = backend::as_matrix(*args.output);
    Launch(call.device, call.stream(), "activation", options, "act_bias_gradient")
        .data(args.grad)
        .data(args.input)
        .data(dbias)
        .value(matrix.rows)
        .value(matrix.cols)
        .items(matrix.cols);
  }
  Launch(call.device, call.stream(), "activation", options, "act_backward")
      .data(args.grad)
      .data(args.input)
      .memory(out.data())
      .value(n)
      .items(n);
  out.write_codes(call);
}

template <Act kAct>
void backward(const DeviceCall& call, const te_fl_activation_act_bwd_args& args) {
  write_gradient<kAct>(call, args, nullptr);
}

template <Act kAct>
void backward_dbias(const DeviceCall& call, const te_fl_activation_dbias_act_args& args) {
  write_gradient<kAct>(call, args, args.dbias);
}

template <class Args>
void gated(const DeviceCall& call, Act act, const Args& args, float limit, float alpha,
           float offset) {
  const Output out(*args.output, call.context.workspace);
  const backend::Matrix matrix = backend::as_matrix(*args.output);
  Launch(call.device, call.stream(), "activation",
         types(act, args.input, nullptr, out) + define("TB", TE_FL_F32), "gated_forward")
      .data(args.input)
      .memory(out.data())
      .value(matrix.rows * matrix.cols)
      .value(matrix.cols)
      .value(limit)
      .value(alpha)
      .value(offset)
      .items(matrix.rows * matrix.cols);
  out.write_codes(call);
}

template <class Args>
void gated_gradient(const DeviceCall& call, Act act, const Args& args, float limit, float alpha,
                    float offset) {
  const Output out(*args.output, call.context.workspace);
  const backend::Matrix matrix = backend::as_matrix(*args.grad);
  Launch(call.device, call.stream(), "activation",
         types(act, args.input, args.grad, out) + define("TB", TE_FL_F32), "gated_backward")
      .data(args.grad)
      .data(args.input)
      .memory(out.data())
      .value(matrix.rows * matrix.cols)
      .value(matrix.cols)
      .value(limit)
      .value(alpha)
      .value(offset)
      .items(matrix.rows * matrix.cols);
  out.write_codes(call);
}

template <Act kAct>
void gated_forward(const DeviceCall& call, const te_fl_activation_glu_fwd_args& args) {
  gated(call, kAct, args, 0.0f, 1.0f, 0.0f);
}
template <Act kAct>
void gated_backward(const DeviceCall& call, const te_fl_activation_glu_bwd_args& args) {
  gated_gradient(call, kAct, args, 0.0f, 1.0f, 0.0f);
}
void clamped_forward(const DeviceCall& call, const te_fl_activation_clamped_fwd_args& args) {
  gated(call, kClamped, args, args.limit, args.alpha, args.glu_linear_offset);
}
void clamped_backward(const DeviceCall& call, const te_fl_activation_clamped_bwd_args& args) {
  gated_gradient(call, kClamped, args, args.limit, args.alpha, args.glu_linear_offset);
}

// ---- calls that are refused

Refusal refuse_forward(const Device& device, const te_fl_activation_act_fwd_args& args) {
  if (!all_dense(args.input)) return kNotContiguous;
  return overlaps_askew(*args.output, args.input) ? kOverlaps : refuse_output(device, *args.output);
}
template <class Args>
Refusal refuse_backward(const Device& device, const Args& args) {
  if (!all_dense(args.grad, args.input)) return kNotContiguous;
  const bool askew =
      overlaps_askew(*args.output, args.grad) || overlaps_askew(*args.output, args.input);
  return askew ? kOverlaps : refuse_output(device, *args.output);
}
Refusal refuse_dbias(const Device& device, const te_fl_activation_dbias_act_args& args) {
  return all_dense(args.dbias) ? refuse_backward(device, args) : kNotContiguous;
}
template <class Args>
Refusal refuse_gated(const Device& device, const Args& args) {
  if (!all_dense(args.input)) return kNotContiguous;
  return overlaps(*args.output, args.input) ? kOverlaps : refuse_output(device, *args.output);
}
// The output may share the input's memory, because a work-item reads and writes the same two
// elements.
template <class Args>
Refusal refuse_gated_backward(const Device& device, const Args& args) {
  if (!all_dense(args.grad, args.input)) return kNotContiguous;
  const bool meets = overlaps(*args.output, args.grad) || overlaps_askew(*args.output, args.input);
  return meets ? kOverlaps : refuse_output(device, *args.output);
}

template <class Args>
size_t required_workspace(const Args& args) {
  return output_workspace(*args.output);
}

template <class Args, auto F, auto Refuses>
void append(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses, required_workspace<Args>>(name));
}

template <Act kAct>
void append_plain(Ops& ops, const char* name, const char* gradient, const char* dbias) {
  using Backward = te_fl_activation_act_bwd_args;
  append<te_fl_activation_act_fwd_args, forward<kAct>, refuse_forward>(ops, name);
  append<Backward, backward<kAct>, refuse_backward<Backward>>(ops, gradient);
  append<te_fl_activation_dbias_act_args, backward_dbias<kAct>, refuse_dbias>(ops, dbias);
}
template <Act kAct>
void append_gated(Ops& ops, const char* name, const char* gradient) {
  using Forward = te_fl_activation_glu_fwd_args;
  using Backward = te_fl_activation_glu_bwd_args;
  append<Forward, gated_forward<kAct>, refuse_gated<Forward>>(ops, name);
  append<Backward, gated_backward<kAct>, refuse_gated_backward<Backward>>(ops, gradient);
}

}  // namespace

void append_activation(Ops& ops) {
  append_plain<kGelu>(ops, "gelu", "dgelu", "dbias_dgelu");
  append_plain<kQgelu>(ops, "qgelu", "dqgelu", "dbias_dqgelu");
  append_plain<kRelu>(ops, "relu", "drelu", "dbias_drelu");
  append_plain<kSrelu>(ops, "srelu", "dsrelu", "dbias_dsrelu");
  append_plain<kSilu>(ops, "silu", "dsilu", "dbias_dsilu");
  append_gated<kGelu>(ops, "geglu", "dgeglu");
  append_gated<kQgelu>(ops, "qgeglu", "dqgeglu");
  append_gated<kRelu>(ops, "reglu", "dreglu");
  append_gated<kSrelu>(ops, "sreglu", "dsreglu");
  append_gated<kSilu>(ops, "swiglu", "dswiglu");
  append_gated<kSigmoid>(ops, "glu", "dglu");
  using Forward = te_fl_activation_clamped_fwd_args;
  using Backward = te_fl_activation_clamped_bwd_args;
  append<Forward, clamped_forward, refuse_gated<Forward>>(ops, "clamped_swiglu");
  ops.back().later_args = "glu_linear_offset";
  append<Backward, clamped_backward, refuse_gated_backward<Backward>>(ops, "clamped_dswiglu");
  ops.back().later_args = "glu_linear_offset";
}

}  // namespace te_fl::opencl
