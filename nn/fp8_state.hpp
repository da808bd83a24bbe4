#pragma once

#include <cstdint>
#include <vector>

#include "te_fl/nn/recipe.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// What a quantised tensor holds; decides its FP8 type and block shape.
enum class Role : uint8_t { kInput, kWeight, kGradient };

// Delayed-scaling state of one direction of one site: amax history F32 [length, slots] and scale
// F32 [slots]. Empty until delayed scaling is first used there.
class Fp8State {
 public:
  explicit Fp8State(int64_t slots) : slots_(slots) {}
  int64_t slots() const noexcept { return slots_; }
  bool defined() const noexcept { return scale_.defined(); }
  const Tensor& history() const noexcept { return history_; }
  const Tensor& scale() const noexcept { return scale_; }
  // Counts the changes of the scales: what was quantised in another generation may have had another
  // scale.
  uint64_t generation() const noexcept { return generation_; }
  void scales_changed() noexcept { ++generation_; }
  // Allocates (scale 1, history 0) or, if the history has another length, keeps its newest rows.
  Status ensure(int64_t history_len, const Device& device);
  // Takes over loaded state: history [length, slots], scale [slots]; undefined tensors empty the
  // state.
  Status assign(Tensor history, Tensor scale);
  // F32 [1] views: the slot's scale and its entry in history row 0.
  const Tensor& scale_slot(int64_t slot) const { return scale_slots_[slot]; }
  const Tensor& amax_slot(int64_t slot) const { return amax_slots_[slot]; }

 private:
  Status make_slots();

  int64_t slots_;
  uint64_t generation_ = 0;
  Tensor history_;
  Tensor scale_;
  std::vector<Tensor> scale_slots_;
  std::vector<Tensor> amax_slots_;
};

struct Copies {
  bool rowwise = true;
  bool columnwise = false;
};

// The FP8 type of a role under a recipe.
DType fp8_dtype(const Recipe& recipe, Role role);

// A new quantised tensor for values of this role. Delayed scaling reads state's scale at `slot`
// and, if `record`, collects the amax there; other recipes ignore state.
Result<Tensor> empty_quantized(const Recipe& recipe, Role role, std::span<const int64_t> shape,
                               Copies copies, const Device& device, const Fp8State& state,
                               int64_t slot, bool record);

}  // namespace te_fl::nn::detail
