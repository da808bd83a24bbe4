#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "te_fl/nn/fp8/recipe.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// The kind of a quantised tensor. Determines its FP8 type and block shape.
enum class Role : uint8_t { kInput, kWeight, kGradient };

// The delayed-scaling state for one direction of one module: the amax history F32 [length, slots]
// and the scales F32 [slots]. Undefined until delayed scaling is first used; once defined, it stays
// defined. Loading and resetting write into the same memory, since captured graphs may use it.
// Several objects may share one state (share()); the last of them frees it. Not thread-safe.
class Fp8State {
 public:
  Fp8State(int64_t slots, const Device& device)
      : shared_(std::make_shared<Shared>()), slots_(slots), device_(device) {}
  int64_t slots() const noexcept { return slots_; }
  const Device& device() const noexcept { return device_; }
  // Makes this object refer to the state of `other`, which must have the same device and number of
  // slots. Drops the previous state.
  void share(const Fp8State& other) { shared_ = other.shared_; }
  // A weak reference. lock() returns a new object for the state, or null if the state was freed.
  class Weak;
  // True if both objects share one state.
  bool same(const Fp8State& other) const noexcept { return shared_ == other.shared_; }
  bool defined() const noexcept { return shared_->tensors != nullptr; }
  // The tensors. Both functions require defined().
  const Tensor& history() const noexcept { return shared_->tensors->history; }
  const Tensor& scale() const noexcept { return shared_->tensors->scale; }
  // True if the scales were computed from amaxes: by an update, or loaded with a history that is
  // not all zero. False while they have the initial value 1.
  bool calibrated() const noexcept { return shared_->calibrated; }
  // Counts the changes of the scales and the drops of amaxes. If the count has changed since a
  // tensor was quantised, the tensor may have an outdated scale, and its amax may no longer be in
  // the history.
  uint64_t generation() const noexcept { return shared_->generation; }
  // Increases with each load() and reset(). Amaxes collected before are not used by later updates.
  uint64_t loads() const noexcept { return shared_->loads; }
  // True if amaxes were collected and not yet used for an update. For states of gradients only.
  bool pending() const noexcept { return shared_->pending; }
  void set_pending(bool pending) noexcept { shared_->pending = pending; }
  // True if a forward with the initial scales should check for saturation. Only the first few
  // forwards check, since a check waits for the device. No forward checks after a warning.
  bool looks_on() noexcept { return shared_->looks < kLooks && ++shared_->looks <= kLooks; }
  // True on the first call: each state logs at most one warning.
  bool warns_now() noexcept { return shared_->looks.exchange(kLooks + 1) <= kLooks; }
  // Ids from next_number(); 0: none. waits_on: the thread on which an update for amaxes of
  // inference passes is deferred. reduced_by: the AmaxReduction that contains the state.
  std::atomic<uint64_t>& waits_on() noexcept { return shared_->waits_on; }
  std::atomic<uint64_t>& reduced_by() noexcept { return shared_->reduced_by; }
  // Marks the state as no longer used by its module; an AmaxReduction then ignores it.
  void retire() noexcept { shared_->retired = true; }
  bool retired() const noexcept { return shared_->retired; }
  // Call this after enqueueing an update of the scales.
  void scales_changed() noexcept {
    ++shared_->generation;
    shared_->calibrated = true;
  }
  // Allocates the state (scale 1, history 0), or changes the history's length and keeps its newest
  // rows. FAILED_PRECONDITION during a capture, since each launch would repeat the change.
  // FAILED_PRECONDITION also if a captured graph uses the state and the length differs.
  Status ensure(int64_t history_len);
  // Changes the FP8 type that the scales are for: multiplies them by the ratio of the types'
  // largest values. FAILED_PRECONDITION as for ensure().
  Status retype(DType dtype);
  // The largest value of the FP8 type that the scales are for, F32 [1] in host memory. Undefined if
  // the type is unknown, as before the first backward. A change of the type creates a new tensor.
  const Tensor& fp8_max() const noexcept { return shared_->fp8_max; }
  // FAILED_PRECONDITION if a captured graph uses the state and its history has another length.
  Status check_length(int64_t history_len) const;
  // Copies a loaded state: history [length, slots] and scale [slots], both on the state's device.
  // `dtype` is the FP8 type that the scales are for; kF32: unknown.
  Status load(const Tensor& history, const Tensor& scale, bool calibrated, DType dtype);
  // Zeroes row 0 of the history, in which the current step collects amaxes, and increments
  // generation(). FP8 copies of weights that were made before are then quantised again, which
  // collects their amaxes again. Requires defined().
  Status drop_amaxes();
  // Resets to scale 1 and history 0, as after the first ensure(). Does nothing if undefined.
  Status reset();
  // Records that work enqueued now uses the state. If the work is captured, the graph keeps the
  // memory alive, and the state keeps using it. `foreign`: in_foreign_capture() of the device.
  // Requires defined().
  void use(bool foreign);
  // Views F32 [1] of the slot's scale and of its entry in row 0 of the history.
  const Tensor& scale_slot(int64_t slot) const { return shared_->tensors->scale_slots[slot]; }
  const Tensor& amax_slot(int64_t slot) const { return shared_->tensors->amax_slots[slot]; }
  // View F32 [slots] of row 0 of the history.
  const Tensor& amaxes() const { return shared_->tensors->amaxes; }

 private:
  // Makes pending updates of earlier amaxes ineffective.
  void forget_updates() noexcept {
    ++shared_->loads;
    shared_->pending = false;
    shared_->waits_on = 0;
  }
  static constexpr int kLooks = 16;
  struct Tensors {
    Tensor history, scale, amaxes;
    std::vector<Tensor> scale_slots, amax_slots;
  };
  // The flags are atomic, since the end of an autocast may set them on any thread.
  struct Shared {
    std::atomic<uint64_t> generation = 0;
    std::atomic<uint64_t> loads = 0;
    std::atomic<bool> calibrated = false;
    std::atomic<bool> pending = false;
    std::atomic<int> looks = 0;  // kLooks + 1: a warning was logged
    std::atomic<bool> retired = false;
    std::atomic<uint64_t> waits_on = 0;
    std::atomic<uint64_t> reduced_by = 0;
    bool foreign_graph = false;
    DType dtype = DType::kF32;         // FP8 type of the scales; F32: unknown
    Tensor fp8_max;                    // largest value of dtype
    std::shared_ptr<Tensors> tensors;  // shared with graphs that use them
  };
  Status adopt(Tensor history, Tensor scale);
  Status set_dtype(DType dtype);
  // True if a captured graph uses the memory. For a graph that nn did not capture, its end is
  // unknown, so the result stays true.
  bool held() const noexcept { return shared_->foreign_graph || shared_->tensors.use_count() > 1; }

  std::shared_ptr<Shared> shared_;
  int64_t slots_;
  Device device_;
};

class Fp8State::Weak {
 public:
  explicit Weak(const Fp8State& state)
      : shared_(state.shared_), slots_(state.slots_), device_(state.device_) {}
  std::shared_ptr<Fp8State> lock() const;

 private:
  std::weak_ptr<Shared> shared_;
  int64_t slots_;
  Device device_;
};

struct Copies {
  bool rowwise = true;
  bool columnwise = false;
};

// Convert an FP8 type to its largest value, and a largest value to its type (kF32 if no type has
// it).
float largest_finite(DType dtype);
DType dtype_of_largest(float value);

// The FP8 type for a role under a recipe.
DType fp8_dtype(const Recipe& recipe, Role role);

// Allocates a quantised tensor for data of this role. With delayed scaling the tensor uses the
// state's scale at `slot` and collects its amax there. In the second run of an activation
// recomputation it uses the first run's scale and collects no amax. Other recipes ignore `state`.
Result<Tensor> empty_quantized(const Recipe& recipe, Role role, std::span<const int64_t> shape,
                               Copies copies, const Device& device, const Fp8State& state,
                               int64_t slot);

// Logs a warning, once per state, if the FP8 data `codes` saturate; the text contains the fraction
// of elements with the largest magnitude. `codes` are E4M3, quantised with the initial scale 1.
// `what` and `owner` name the tensor and its module. Reads the amax on the host; does nothing
// during a capture.
Status warn_if_saturated(Fp8State& state, int64_t slot, const Tensor& codes, const char* what,
                         const std::string& owner);

// Allocates a per-tensor scaled tensor like `tensor`, with a copy of its current scale. The amax is
// collected at the same address.
Result<Tensor> with_own_scale(const Tensor& tensor);

}  // namespace te_fl::nn::detail
