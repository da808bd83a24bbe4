#pragma once

#include <cstdint>
#include <memory>

#include "nn/fp8/fp8_state.hpp"

namespace te_fl::nn::detail {

// The FP8 copy of a weight between the optimizer that writes it with the new values
// (AdamOptions::write_fp8_weights) and the module that reads it. Only delayed scaling has a scale
// before the values: the one that the next forward would use, unless an update comes between, which
// changes the state's generation and makes the copy stale. Not thread-safe, like its module.
class WeightCopy {
 public:
  WeightCopy(std::shared_ptr<Fp8State> state, int64_t slot)
      : state_(std::move(state)), slot_(slot) {}

  // Told by each training forward: its recipe if it quantises the weight by delayed scaling, else
  // null.
  void wanted_by(std::shared_ptr<const Recipe> recipe) { recipe_ = std::move(recipe); }

  // For the optimizer: a tensor to write, with the scale in force, whose amax goes to the history
  // as a forward's would; undefined if the last training forward had no use for it. The copy is
  // stale until commit().
  Result<Tensor> open(const Tensor& value);
  // The tensor holds the weight's version `version`.
  void commit(uint64_t version);

  // Returns what quantising the weight now would make, or an undefined tensor.
  Tensor fresh(uint64_t version, const Recipe& recipe) const;

 private:
  std::shared_ptr<Fp8State> state_;
  int64_t slot_;
  std::shared_ptr<const Recipe> recipe_;  // of the last training forward
  Tensor tensor_;
  std::shared_ptr<const Recipe> written_recipe_;
  uint64_t version_ = 0;
  uint64_t generation_ = 0;
  bool written_ = false;
};

}  // namespace te_fl::nn::detail
