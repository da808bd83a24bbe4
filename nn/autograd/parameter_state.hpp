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

// Holds what te-fl keeps of a Parameter beside its public members.
struct ParameterState {
  // False after zero_grad() or clear_grad(): the next backward overwrites grad instead of adding to
  // it. But a backward in a captured graph always adds unless the same capture cleared: the graph
  // may be launched for any microbatch (a gradient cleared outside is filled with zeros before
  // GraphedStep launches it).
  bool grad_written = false;
  // True between clear_grad() and what writes grad.
  bool grad_stale = false;
  // True between clear_grad() or zero_grad() and what writes grad: a backward that finds it so
  // begins another step. False after take_grad().
  bool grad_cleared = false;
  uint64_t grad_cleared_in = 0;  // the capture that cleared it; 0: none
  // Counts the backwards that have left its gradient to Module::backward_dw(). The parts of a
  // JoinedParameter share the count of the whole.
  DelayedCount delayed_wgrads = std::make_shared<int64_t>(0);
  std::shared_ptr<Fp8Values> fp8_values;   // of an FP8-only parameter, else null
  std::optional<uint64_t> owners_version;  // of a borrowed value
  // The module's FP8 copy of the value, for an optimizer that writes it
  // (AdamOptions::write_fp8_weights).
  std::weak_ptr<WeightCopy> fp8_copy;
  // The list in which the last FP8 backward that wrote grad noted the scales to update. The
  // optimizer makes those updates if no one else has.
  std::shared_ptr<GradientUpdates> gradient_updates;
  GradientListener* listener = nullptr;  // knows the gradient by this number; null: nobody listens
  size_t listeners_number = 0;
  // The ranks divide the gradient (DataParallelOptions::zero): after the average each has the mean
  // of a part of it, which is for the optimizer that was created with the same listener.
  bool grad_divided = false;
};

}  // namespace te_fl::nn::detail
