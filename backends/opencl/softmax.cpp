// The scaled softmax ops: unmasked, with a mask tensor, upper-triangular and aligned causal.
#include "te_fl/ops/softmax.h"

#include "families.hpp"
#include "overlap.hpp"
#include "store.hpp"

namespace te_fl::opencl {
namespace {

enum class Mask { kNone, kCausal, kTensor };

std::string options(const te_fl_tensor* x, Mask mask) {
  return define("GROUP", kGroup) + define("TX", x) + define("CAUSAL", mask == Mask::kCausal) +
         define("MASKED", mask == Mask::kTensor);
}

// Returns the stride of a dimension of the mask, in elements; 0 for a broadcast dimension.
int64_t mask_stride(const te_fl_tensor* mask, int dim) {
  return mask == nullptr || mask->dl.shape[dim] == 1 ? 0 : backend::stride(*mask, dim);
}

void forward(const DeviceCall& call, const te_fl_tensor* x, const te_fl_tensor* mask,
             const te_fl_tensor* y, float scale, Mask kind) {
  const backend::Matrix m = backend::as_matrix(*x);
  if (m.cols == 0) return;
  const int rank = x->dl.ndim;
  Launch(call.device, call.stream(), "softmax", options(x, kind), "softmax_forward")
      .data(x)
      .data(mask)
      .data(y)
      .value<int64_t>(rank == 4 ? x->dl.shape[1] : 1)
      .value<int64_t>(x->dl.shape[rank - 2])
      .value(m.cols)
      .value(scale)
      .value(mask_stride(mask, 0))
      .value(mask_stride(mask, 1))
      .value(mask_stride(mask, 2))
      .value(mask_stride(mask, 3))
      .groups(m.rows, kGroup);
}

template <Mask kMask, class Args>
void launch_forward(const DeviceCall& call, const Args& a) {
  forward(call, a.input, nullptr, a.output, a.scale, kMask);
}
void masked_forward(const DeviceCall& call, const te_fl_scaled_masked_softmax_forward_args& a) {
  forward(call, a.input, a.mask, a.output, a.scale, Mask::kTensor);
}

template <Mask kMask, class Args>
void launch_backward(const DeviceCall& call, const Args& a) {
  const backend::Matrix m = backend::as_matrix(*a.output_grad);
  if (m.cols == 0) return;
  Launch(call.device, call.stream(), "softmax", options(a.output_grad, kMask), "softmax_backward")
      .data(a.output_grad)
      .data(a.softmax_results)
      .data(a.input_grad)
      .value(a.output_grad->dl.shape[a.output_grad->dl.ndim - 2])
      .value(m.cols)
      .value(a.scale)
      .groups(m.rows, kGroup);
}

template <class Args>
Refusal refuse_forward(const Args& a) {
  if (!all_dense(a.input, a.output)) return kNotContiguous;
  return overlaps_askew(*a.output, a.input) ? kOverlaps : nullptr;
}
Refusal refuse_masked(const te_fl_scaled_masked_softmax_forward_args& a) {
  return overlaps(*a.output, a.mask) ? kOverlaps : refuse_forward(a);
}
template <class Args>
Refusal refuse_backward(const Args& a) {
  if (!all_dense(a.output_grad, a.softmax_results, a.input_grad)) return kNotContiguous;
  const bool askew = overlaps_askew(*a.input_grad, a.output_grad) ||
                     overlaps_askew(*a.input_grad, a.softmax_results);
  return askew ? kOverlaps : nullptr;
}

template <class Args, Mask kMask>
void append_forward(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, launch_forward<kMask, Args>, refuse_forward<Args>>(name));
}
template <class Args, Mask kMask>
void append_backward(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, launch_backward<kMask, Args>, refuse_backward<Args>>(name));
}

}  // namespace

void append_softmax(Ops& ops) {
  using Forward4 = te_fl_softmax_fwd4_args;
  using Forward3 = te_fl_scaled_upper_triang_masked_softmax_forward_args;
  using Masked = te_fl_scaled_masked_softmax_forward_args;
  using Backward4 = te_fl_softmax_bwd4_args;
  using Backward3 = te_fl_scaled_upper_triang_masked_softmax_backward_args;
  append_forward<Forward4, Mask::kNone>(ops, "scaled_softmax_forward");
  append_backward<Backward4, Mask::kNone>(ops, "scaled_softmax_backward");
  ops.push_back(descriptor<Masked, masked_forward, refuse_masked>("scaled_masked_softmax_forward"));
  append_backward<Backward4, Mask::kNone>(ops, "scaled_masked_softmax_backward");
  append_forward<Forward3, Mask::kCausal>(ops, "scaled_upper_triang_masked_softmax_forward");
  append_backward<Backward3, Mask::kCausal>(ops, "scaled_upper_triang_masked_softmax_backward");
  append_forward<Forward4, Mask::kCausal>(ops, "scaled_aligned_causal_masked_softmax_forward");
  append_backward<Backward4, Mask::kCausal>(ops, "scaled_aligned_causal_masked_softmax_backward");
}

}  // namespace te_fl::opencl
