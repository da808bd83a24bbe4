#include "nn/fp8/weight_copy.hpp"

namespace te_fl::nn::detail {

Result<Tensor> WeightCopy::open(const Tensor& value) {
  written_ = false;
  tensor_ = Tensor();  // frees the memory for the new tensor, unless a Ctx uses it
  if (recipe_ == nullptr || !state_->defined()) return Tensor();
  TE_FL_ASSIGN_OR_RETURN(tensor_, empty_quantized(*recipe_, Role::kWeight, value.shape(),
                                                  {.rowwise = true, .columnwise = true},
                                                  value.device(), *state_, slot_));
  return tensor_;
}

void WeightCopy::commit(uint64_t version) {
  version_ = version;
  generation_ = state_->generation();
  written_recipe_ = recipe_;
  written_ = true;
}

Tensor WeightCopy::fresh(uint64_t version, const Recipe& recipe) const {
  const bool usable = written_ && version_ == version && generation_ == state_->generation() &&
                      *written_recipe_ == recipe;
  return usable ? tensor_ : Tensor();
}

}  // namespace te_fl::nn::detail
