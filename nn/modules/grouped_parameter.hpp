#pragma once

#include <memory>
#include <vector>

#include "te_fl/nn/autograd/parameter.hpp"

namespace te_fl::nn::detail {

// A parameter [n, ...] whose slices are the parameters of n GemmUnits. Users, optimizers and
// checkpoints see the whole parameter; the GEMMs read its slices and write slices of its gradient.
// Not thread-safe.
class GroupedParameter {
 public:
  // Makes the whole parameter from the parts' values; the parts become its slices. `parts` have one
  // shape and dtype, and are not registered with a module. INVALID_ARGUMENT with the module's name
  // for FP8-only parts, whose codes do not share a scale.
  static Result<std::unique_ptr<GroupedParameter>> create(
      const char* module, std::vector<std::shared_ptr<Parameter>> parts);
  const std::shared_ptr<Parameter>& whole() const noexcept { return whole_; }

  // Sets the parts' values to slices of the whole parameter, and their versions to its version.
  // Must be called before each forward and backward.
  Status spread();
  // Must be called before and after the parts' gradients are written. open_grad() makes them slices
  // of the whole gradient, which it allocates if necessary; close_grad() marks it as written.
  Status open_grad();
  void close_grad();

 private:
  Result<Tensor> slice(const Tensor& whole, size_t part) const;

  std::shared_ptr<Parameter> whole_;
  std::vector<std::shared_ptr<Parameter>> parts_;
  const void* spread_ = nullptr;  // the memory of which the parts' values are slices
  const void* grad_ = nullptr;    // the memory of which their gradients are slices
};

}  // namespace te_fl::nn::detail
