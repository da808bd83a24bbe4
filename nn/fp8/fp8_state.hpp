#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "te_fl/nn/fp8/recipe.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// Says what a quantised tensor holds; decides its FP8 type and block shape.
enum class Role : uint8_t { kInput, kWeight, kGradient };

// Delayed-scaling state of one direction of one site: amax history F32 [length, slots] and scale
// F32 [slots]. Undefined until delayed scaling is first used there, and never undefined again.
// Loading and resetting write into the same memory, which captured graphs may use. Several objects
// may share one state (share()), which then lives as long as the last of them. Not thread-safe.
class Fp8State {
 public:
  Fp8State(int64_t slots, const Device& device)
      : shared_(std::make_shared<Shared>()), slots_(slots), device_(device) {}
  int64_t slots() const noexcept { return slots_; }
  const Device& device() const noexcept { return device_; }
  // From now on this object stands for `other`'s state, which has as many slots and the same
  // device. What this one's was is dropped.
  void share(const Fp8State& other) { shared_ = other.shared_; }
  // Names the state without keeping it. lock(): another object for it; null if it has gone.
  class Weak;
  // True if the two stand for one state.
  bool same(const Fp8State& other) const noexcept { return shared_ == other.shared_; }
  bool defined() const noexcept { return shared_->tensors != nullptr; }
  // These need defined().
  const Tensor& history() const noexcept { return shared_->tensors->history; }
  const Tensor& scale() const noexcept { return shared_->tensors->scale; }
  // True if the scales come from amaxes: an update has set them, or they were loaded with a history
  // that is not all zero. Otherwise they are the initial 1.
  bool calibrated() const noexcept { return shared_->calibrated; }
  // Counts the changes of the scales and the drops of amaxes: what was quantised in another
  // generation may have had another scale, and its amax may be in the history no more.
  uint64_t generation() const noexcept { return shared_->generation; }
  // Counts load() and reset(): amaxes that were collected before one have no update after it.
  uint64_t loads() const noexcept { return shared_->loads; }
  // True if amaxes were collected whose update is still to come; of gradients' states only.
  bool pending() const noexcept { return shared_->pending; }
  void set_pending(bool pending) noexcept { shared_->pending = pending; }
  // True if a forward with the initial scales still looks for saturation: the first some do, since
  // a look waits for the device, and none after a warning.
  bool looks_on() noexcept { return shared_->looks < kLooks && ++shared_->looks <= kLooks; }
  // True the first time: one warning for a state says enough.
  bool warns_now() noexcept { return shared_->looks.exchange(kLooks + 1) <= kLooks; }
  // Numbers of nn/fp8/runtime.cpp's: of the thread on which inferences' amaxes wait for an update,
  // and of the AmaxReduction that knows the state; 0: none.
  std::atomic<uint64_t>& waits_on() noexcept { return shared_->waits_on; }
  std::atomic<uint64_t>& reduced_by() noexcept { return shared_->reduced_by; }
  // Its module has another state from now on: an AmaxReduction leaves this one out.
  void retire() noexcept { shared_->retired = true; }
  bool retired() const noexcept { return shared_->retired; }
  // An update of the scales was enqueued.
  void scales_changed() noexcept {
    ++shared_->generation;
    shared_->calibrated = true;
  }
  // Allocates (scale 1, history 0) or, if the history has another length, keeps its newest rows.
  // FAILED_PRECONDITION while a graph is captured, which would repeat that, and for another length
  // while a graph uses the state.
  Status ensure(int64_t history_len);
  // The scales are for values of `dtype` from now on: those made for another FP8 type are
  // multiplied by the quotient of the largest values. FAILED_PRECONDITION as for ensure().
  Status retype(DType dtype);
  // F32 [1] of the host: the largest value of the FP8 type that the scales are for. Undefined if
  // that is not known, as before the first backward. Another type is another tensor.
  const Tensor& fp8_max() const noexcept { return shared_->fp8_max; }
  // FAILED_PRECONDITION if a graph uses the state and its history has another length.
  Status check_length(int64_t history_len) const;
  // Copies loaded state: history [length, slots], scale [slots], both on the state's device, and
  // the FP8 type that the scales are for, kF32 if that is not known.
  Status load(const Tensor& history, const Tensor& scale, bool calibrated, DType dtype);
  // Zeroes the running row of the history, and begins a generation: a copy of a weight whose amax
  // the row had is quantised again, which collects the amax again. Needs defined().
  Status drop_amaxes();
  // Scale 1, history 0, as after the first ensure(). Does nothing if undefined.
  Status reset();
  // The work enqueued now uses the state. If a graph captures it, the memory lives as long as that
  // graph and stays the state's. `foreign`: in_foreign_capture() of its device. Needs defined().
  void use(bool foreign);
  // F32 [1] views: the slot's scale and its entry in history row 0.
  const Tensor& scale_slot(int64_t slot) const { return shared_->tensors->scale_slots[slot]; }
  const Tensor& amax_slot(int64_t slot) const { return shared_->tensors->amax_slots[slot]; }
  // F32 [slots], a view: history row 0.
  const Tensor& amaxes() const { return shared_->tensors->amaxes; }

 private:
  // No update of amaxes from before waits for the state any more.
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
  // Flags are atomic since the end of an autocast sets them on whatever thread it runs.
  struct Shared {
    std::atomic<uint64_t> generation = 0;
    std::atomic<uint64_t> loads = 0;
    std::atomic<bool> calibrated = false;
    std::atomic<bool> pending = false;
    std::atomic<int> looks = 0;  // kLooks + 1: it has been warned
    std::atomic<bool> retired = false;
    std::atomic<uint64_t> waits_on = 0;
    std::atomic<uint64_t> reduced_by = 0;
    bool foreign_graph = false;
    DType dtype = DType::kF32;         // that the scales are for; F32: not known
    Tensor fp8_max;                    // of dtype
    std::shared_ptr<Tensors> tensors;  // shared with the graphs that use them
  };
  Status adopt(Tensor history, Tensor scale);
  Status set_dtype(DType dtype);
  // True if a captured graph uses the memory. Of a graph that nn did not capture the end is not
  // known, so it counts for ever.
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

// The largest value of an FP8 type, and the type that has it; kF32 for a value that none has.
float largest_of(DType dtype);
DType dtype_of_largest(float value);

// The FP8 type of a role under a recipe.
DType fp8_dtype(const Recipe& recipe, Role role);

// A new quantised tensor for values of this role. Delayed scaling reads state's scale at `slot`
// and collects the amax there (in a second run of a recomputed piece it reads the first run's scale
// and collects none); other recipes ignore state.
Result<Tensor> empty_quantized(const Recipe& recipe, Role role, std::span<const int64_t> shape,
                               Copies copies, const Device& device, const Fp8State& state,
                               int64_t slot);

// Logs a warning, once for a state, if `codes`, E4M3 quantised with the initial scale 1, saturate:
// with the share of them that have the largest value. `what` of `owner` they are. For forwards that
// compute with the initial scale; reads the amax on the host, and nothing while a graph is
// captured.
Status warn_if_saturated(Fp8State& state, int64_t slot, const Tensor& codes, const char* what,
                         const std::string& owner);

// A new tensor like `tensor`, scaled by tensor, with a copy of its scale as it is now; it collects
// the amax where `tensor` does.
Result<Tensor> with_own_scale(const Tensor& tensor);

}  // namespace te_fl::nn::detail
