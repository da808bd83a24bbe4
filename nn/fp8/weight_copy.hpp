#pragma once

#include <cstdint>
#include <memory>

#include "nn/fp8/fp8_state.hpp"

namespace te_fl::nn::detail {

// The FP8 copy of a weight, which an optimizer writes together with the new weight
// (AdamOptions::write_fp8_weights) and the module reads. Works for delayed scaling only, where the
// scale is known before the weight: it is the scale of the next forward, unless an update changes
// it first. Such an update changes Fp8State::generation() and makes the copy stale. Not
// thread-safe, like its module.
class WeightCopy {
 public:
  WeightCopy(std::shared_ptr<Fp8State> state, int64_t slot)
      : state_(std::move(state)), slot_(slot) {}

  // Called by each training forward with its recipe if it quantises the weight by delayed scaling,
  // otherwise with null.
  void wanted_by(std::shared_ptr<const Recipe> recipe) { recipe_ = std::move(recipe); }

  // For the optimizer: returns a tensor to write. It has the current scale, and its amax goes into
  // the history as in a forward. Undefined if the last training forward did not need the copy. The
  // copy is stale until commit().
  Result<Tensor> open(const Tensor& value);
  // Marks the tensor as containing the weight's version `version`.
  void commit(uint64_t version);

  // The copy, if quantising the weight now would give the same data; otherwise undefined.
  Tensor fresh(uint64_t version, const Recipe& recipe) const;

 private:
  std::shared_ptr<Fp8State> state_;
  int64_t slot_;
  std::shared_ptr<const Recipe> recipe_;  // recipe of the last training forward
  Tensor tensor_;
  std::shared_ptr<const Recipe> written_recipe_;
  uint64_t version_ = 0;
  uint64_t generation_ = 0;
  bool written_ = false;
};

}  // namespace te_fl::nn::detail
