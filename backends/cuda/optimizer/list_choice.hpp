// Chooses the kernels for lists of tensors and the number of tensors per launch: pure functions of
// metadata, so tests run without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "te_fl/ops/optimizer.h"
#include "te_fl/ops/quantize.h"

namespace te_fl::cuda {

struct ListChoice {
  const char* kernel;
  int capacity;  // maximum number of tensors per launch
  int64_t tensors;

  std::string text() const {
    return std::string(kernel) + ": " + std::to_string(tensors) +
           (tensors == 1 ? " tensor" : " tensors") + ", up to " + std::to_string(capacity) +
           " in a launch";
  }
};

namespace list_choice {

constexpr int kTensors = 56;  // tensors per launch; they need nearly 4 KB of kernel parameters
// Items per launch: kFew... items fit in 4 KB of kernel parameters, kMany... items in nearly 32 KB,
// the maximum.
constexpr int kFewHistories = 80, kManyHistories = 660;
constexpr int kFewCodes = 32, kManyCodes = 280;

}  // namespace list_choice

inline ListChoice choose_list(const te_fl_multi_tensor_scale_args& a) noexcept {
  return {"scale", list_choice::kTensors, a.inputs_count};
}
inline ListChoice choose_list(const te_fl_multi_tensor_l2norm_args& a) noexcept {
  return {"squares, norm", list_choice::kTensors, a.inputs_count};
}
inline ListChoice choose_list(const te_fl_multi_tensor_unscale_l2norm_args& a) noexcept {
  return {"squares, norm", list_choice::kTensors, a.inputs_count};
}
inline ListChoice choose_list(const te_fl_multi_tensor_adam_args& a) noexcept {
  using namespace list_choice;
  if (a.fp8_params_count == 0) return {"adam", kTensors, a.grads_count};
  return {"adam_fp8", a.grads_count <= kFewCodes ? kFewCodes : kManyCodes, a.grads_count};
}
inline ListChoice choose_list(const te_fl_multi_tensor_sgd_args& a) noexcept {
  return {"sgd", list_choice::kTensors, a.grads_count};
}
inline ListChoice choose_list(
    const te_fl_fused_amax_and_scale_update_after_reduction_args& a) noexcept {
  using namespace list_choice;
  const int64_t count = a.amax_histories_count;
  return {"scale_update", count <= kFewHistories ? kFewHistories : kManyHistories, count};
}

}  // namespace te_fl::cuda
