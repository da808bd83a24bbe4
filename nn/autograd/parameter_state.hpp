#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "nn/autograd/delayed_wgrad.hpp"
#include "nn/autograd/gradient_listener.hpp"
#include "nn/fp8/fp8_values.hpp"
#include "nn/fp8/scale_updates.hpp"
#include "nn/fp8/weight_copy.hpp"

namespace te_fl::nn::detail {

// The private state of a Parameter.
struct ParameterState {
  // False after zero_grad() or clear_grad(): the next backward pass then overwrites grad instead of
  // adding to it. A captured backward always adds, unless the same capture cleared the gradient,
  // since the graph may be launched for any microbatch. Before a launch, GraphedStep fills a
  // gradient that was cleared outside of the capture with zeros.
  bool grad_written = false;
  // True from clear_grad() until grad is written.
  bool grad_stale = false;
  // True from clear_grad() or zero_grad() until grad is written. A backward pass that finds it true
  // begins a new step. take_grad() sets it to false.
  bool grad_cleared = false;
  uint64_t grad_cleared_in = 0;  // the capture that cleared it; 0: none
  // The number of backward passes that have deferred this gradient to Module::backward_dw(). The
  // parts of a JoinedParameter share the count of the complete parameter.
  DelayedCount delayed_wgrads = std::make_shared<int64_t>(0);
  std::shared_ptr<Fp8Values> fp8_values;   // for a parameter that holds FP8 only; otherwise null
  std::optional<uint64_t> owners_version;  // the owner's version of a borrowed value
  // The module's FP8 copy of the value, which an optimizer may write
  // (AdamOptions::write_fp8_weights).
  std::weak_ptr<WeightCopy> fp8_copy;
  // The list of pending scale updates of the last FP8 backward that wrote grad. The optimizer runs
  // these updates if they were not run before.
  std::shared_ptr<GradientUpdates> gradient_updates;
  GradientListener* listener = nullptr;  // receives events with listeners_number; null: none
  size_t listeners_number = 0;
  // The gradient is sharded over the ranks (DataParallelOptions::zero). After the reduction each
  // rank has the mean of its shard, for the optimizer that was created with the same listener.
  bool grad_divided = false;
};

}  // namespace te_fl::nn::detail
