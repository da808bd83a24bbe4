// The dropout ops, with a saved mask of one bit per element.
#include "te_fl/ops/dropout.h"

#include "families.hpp"
#include "overlap.hpp"
#include "random.hpp"

namespace te_fl::opencl {
namespace {

void dropout_fwd(const DeviceCall& call, const te_fl_dropout_fwd_args& a) {
  const int64_t n = backend::numel(*a.input);
  Launch launch(call.device, call.stream(), "dropout", define("TX", a.input), "dropout_forward");
  launch.data(a.input).data(a.output).data(a.mask).value(n).value(kept(a.p));
  random(launch, *call.context.rng, a.p).items((n + 7) / 8);
}

void dropout_bwd(const DeviceCall& call, const te_fl_dropout_bwd_args& a) {
  const int64_t n = backend::numel(*a.grad_output);
  Launch(call.device, call.stream(), "dropout", define("TX", a.grad_output), "dropout_backward")
      .data(a.grad_output)
      .data(a.mask)
      .data(a.grad_input)
      .value(n)
      .value(kept(a.p))
      .items((n + 7) / 8);
}

Refusal refuse_fwd(const te_fl_dropout_fwd_args& a) {
  if (!all_dense(a.input, a.output, a.mask)) return kNotContiguous;
  return overlaps_askew(*a.output, a.input) ? kOverlaps : nullptr;
}
Refusal refuse_bwd(const te_fl_dropout_bwd_args& a) {
  if (!all_dense(a.grad_output, a.grad_input, a.mask)) return kNotContiguous;
  return overlaps_askew(*a.grad_input, a.grad_output) ? kOverlaps : nullptr;
}

}  // namespace

void append_dropout(Ops& ops) {
  ops.push_back(descriptor<te_fl_dropout_fwd_args, dropout_fwd, refuse_fwd>("dropout_fwd"));
  ops.push_back(descriptor<te_fl_dropout_bwd_args, dropout_bwd, refuse_bwd>("dropout_bwd"));
}

}  // namespace te_fl::opencl
