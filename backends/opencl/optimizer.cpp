// Adam over lists of tensors, and the delayed-scaling update.
#include "te_fl/ops/optimizer.h"

#include <cmath>

#include "families.hpp"
#include "launch.hpp"
#include "overlap.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/ops/quantize.h"

namespace te_fl::opencl {
namespace {

using AdamArgs = te_fl_multi_tensor_adam_args;
using UpdateArgs = te_fl_fused_amax_and_scale_update_after_reduction_args;

enum : uint32_t {  // same values as in optimizer.cl
  kHasMaster = 1,
  kHasNoop = 2,
  kAdamW = 4,
  kCorrect = 8,
  kHasStep = 16,
  kHasLr = 32,
  kMostRecent = 1,
  kHasReduced = 2,
};

uint32_t pack_flags(const AdamArgs& a) {
  uint32_t flags = 0;
  const auto set = [&](bool when, uint32_t flag) { flags |= when ? flag : 0; };
  set(a.master_params_count != 0, kHasMaster);
  set(a.noop_flag != nullptr, kHasNoop);
  set(a.mode == TE_FL_ADAM_MODE_ADAMW, kAdamW);
  set(a.bias_correction != 0, kCorrect);
  set(a.step_tensor != nullptr, kHasStep);
  set(a.lr_tensor != nullptr, kHasLr);
  return flags;
}

float correction(const AdamArgs& a, float beta) {
  if (!a.bias_correction) return 1.0f;
  return static_cast<float>(1.0 - std::pow(double{beta}, static_cast<double>(a.step)));
}

void adam(const DeviceCall& call, const AdamArgs& a) {
  const uint32_t flags = pack_flags(a);
  for (int64_t t = 0; t < a.grads_count; ++t) {
    const int64_t n = backend::numel(*a.grads[t]);
    Launch(call.device, call.stream(), "optimizer",
           define("TG", a.grads[t]) + define("TP", a.params[t]), "adam")
        .data(a.grads[t])
        .data(a.params[t])
        .data(a.exp_avgs[t])
        .data(a.exp_avg_sqs[t])
        .data(a.master_params_count != 0 ? a.master_params[t] : nullptr)
        .data(a.noop_flag)
        .data(a.lr_tensor)
        .data(a.step_tensor)
        .value(n)
        .value(a.lr)
        .value(a.beta1)
        .value(a.beta2)
        .value(a.epsilon)
        .value(a.weight_decay)
        .value(correction(a, a.beta1))
        .value(correction(a, a.beta2))
        .value(flags)
        .items(n);
  }
}

bool all_compact(const te_fl_tensor* const* list, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!all_dense(list[i])) return false;
  }
  return true;
}

Refusal refuse_adam(const AdamArgs& a) {
  const bool all = all_compact(a.grads, a.grads_count) && all_compact(a.params, a.params_count) &&
                   all_compact(a.exp_avgs, a.exp_avgs_count) &&
                   all_compact(a.exp_avg_sqs, a.exp_avg_sqs_count) &&
                   all_compact(a.master_params, a.master_params_count);
  return all ? nullptr : kNotContiguous;
}

// ---- delayed scaling

void update_scales(const DeviceCall& call, const UpdateArgs& a) {
  const float largest =
      numeric::delayed_scaling_numerator(a.fp8_dtype == TE_FL_FP8_FORMAT_E5M2, a.margin);
  const uint32_t flags = (a.algo == TE_FL_AMAX_ALGO_MOST_RECENT ? kMostRecent : 0u) |
                         (a.amax_reduction_buffer != nullptr ? uint32_t{kHasReduced} : 0u);
  int64_t position = 0;
  for (int64_t i = 0; i < a.amax_histories_count; ++i) {
    const int64_t length = a.amax_histories[i]->dl.shape[0];
    const int64_t tensors = a.amax_histories[i]->dl.shape[1];
    Launch(call.device, call.stream(), "optimizer",
           define("TG", TE_FL_F32) + define("TP", TE_FL_F32), "update_scales")
        .data(a.amax_histories[i])
        .data(a.scales[i])
        .data(a.amax_reduction_buffer)
        .value(position)
        .value(length)
        .value(tensors)
        .value(largest)
        .value(flags)
        .items(tensors);
    position += tensors;
  }
}

Refusal refuse_update(const Device& device, const UpdateArgs& a) {
  if (!device.exact) return "this device does not divide with one rounding, which FP8 scales need";
  const bool all = all_compact(a.amax_histories, a.amax_histories_count) &&
                   all_compact(a.scales, a.scales_count) && all_dense(a.amax_reduction_buffer);
  return all ? nullptr : kNotContiguous;
}

}  // namespace

void append_optimizer(Ops& ops) {
  ops.push_back(descriptor<AdamArgs, adam, refuse_adam>("multi_tensor_adam"));
  ops.back().later_args = "lr_tensor step_tensor";
  ops.push_back(descriptor<UpdateArgs, update_scales, refuse_update>(
      "fused_amax_and_scale_update_after_reduction"));
}

}  // namespace te_fl::opencl
