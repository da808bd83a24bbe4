#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "te_fl/nn/recipe.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// What a quantised tensor holds; decides its FP8 type and block shape.
enum class Role : uint8_t { kInput, kWeight, kGradient };

// Delayed-scaling state of one direction of one site: amax history F32 [length, slots] and scale
// F32 [slots]. Undefined until delayed scaling is first used there, and never undefined again.
// Loading and resetting write into the same memory, which captured graphs may use. Not thread-safe.
class Fp8State {
 public:
  Fp8State(int64_t slots, const Device& device) : slots_(slots), device_(device) {}
  int64_t slots() const noexcept { return slots_; }
  const Device& device() const noexcept { return device_; }
  bool defined() const noexcept { return tensors_ != nullptr; }
  // These need defined().
  const Tensor& history() const noexcept { return tensors_->history; }
  const Tensor& scale() const noexcept { return tensors_->scale; }
  // Whether the scales come from amaxes: an update has set them, or they were loaded with a history
  // that is not all zero. Otherwise they are the initial 1.
  bool calibrated() const noexcept { return calibrated_; }
  // Counts the changes of the scales: what was quantised in another generation may have had another
  // scale.
  uint64_t generation() const noexcept { return generation_; }
  // Whether amaxes were collected whose update is still to come; of gradients' states only.
  bool pending() const noexcept { return pending_; }
  void set_pending(bool pending) noexcept { pending_ = pending; }
  // An update of the scales was enqueued.
  void scales_changed() noexcept {
    ++generation_;
    calibrated_ = true;
  }
  // Allocates (scale 1, history 0) or, if the history has another length, keeps its newest rows.
  // FAILED_PRECONDITION while a graph is captured, which would repeat that, and for another length
  // while a graph uses the state.
  Status ensure(int64_t history_len);
  // The scales are for values of `dtype` from now on: those made for another FP8 type are
  // multiplied by the quotient of the largest values. FAILED_PRECONDITION as for ensure().
  Status retype(DType dtype);
  // FAILED_PRECONDITION if a graph uses the state and its history has another length.
  Status check_length(int64_t history_len) const;
  // Copies loaded state: history [length, slots], scale [slots], both on the state's device.
  Status load(const Tensor& history, const Tensor& scale, bool calibrated);
  // Scale 1, history 0, as after the first ensure(). Does nothing if undefined.
  Status reset();
  // The work enqueued now uses the state. If a graph captures it, the memory lives as long as that
  // graph and stays the state's. `foreign`: in_foreign_capture() of its device. Needs defined().
  void use(bool foreign);
  // F32 [1] views: the slot's scale and its entry in history row 0.
  const Tensor& scale_slot(int64_t slot) const { return tensors_->scale_slots[slot]; }
  const Tensor& amax_slot(int64_t slot) const { return tensors_->amax_slots[slot]; }

 private:
  struct Tensors {
    Tensor history, scale;
    std::vector<Tensor> scale_slots, amax_slots;
  };
  Status adopt(Tensor history, Tensor scale);
  // Whether a captured graph uses the memory. Of a graph that nn did not capture the end is not
  // known, so it counts for ever.
  bool held() const noexcept { return foreign_graph_ || tensors_.use_count() > 1; }

  int64_t slots_;
  Device device_;
  uint64_t generation_ = 0;
  bool calibrated_ = false;
  bool pending_ = false;
  bool foreign_graph_ = false;
  DType dtype_ = DType::kF32;         // that the scales are for; F32: not known
  std::shared_ptr<Tensors> tensors_;  // shared with the graphs that use them
};

struct Copies {
  bool rowwise = true;
  bool columnwise = false;
};

// The FP8 type of a role under a recipe.
DType fp8_dtype(const Recipe& recipe, Role role);

// A new quantised tensor for values of this role. Delayed scaling reads state's scale at `slot`
// and, if `record`, collects the amax there (in a second run of a recomputed piece it reads the
// first run's scale and collects none); other recipes ignore state.
Result<Tensor> empty_quantized(const Recipe& recipe, Role role, std::span<const int64_t> shape,
                               Copies copies, const Device& device, const Fp8State& state,
                               int64_t slot, bool record);

// A new tensor like `tensor`, scaled by tensor, with a copy of its scale as it is now; it collects
// the amax where `tensor` does.
Result<Tensor> with_own_scale(const Tensor& tensor);

}  // namespace te_fl::nn::detail
