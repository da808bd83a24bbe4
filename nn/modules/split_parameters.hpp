#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/nn/modules/parameter_part.hpp"

namespace te_fl::nn::detail {

class GemmUnit;

// A parameter whose rows are divided into several named parts ("query_weight", "key_weight",
// "value_weight"). GEMMs compute with the complete parameter; users, optimizers and checkpoints see
// the parts. Parts that are adjacent in memory, as they are created, are read in place; otherwise
// they are copied into one tensor whenever one has changed. In the same way the parts' gradients
// are slices of the complete gradient, unless their owner has replaced some; the GEMM's result is
// then copied or added to them. Not thread-safe.
class JoinedParameter {
 public:
  // Splits the parameter `whole` into parts, of which part i has rows[i] rows; these must sum to
  // extent 0 of `whole`. `whole` is not registered with a module.
  static Result<std::unique_ptr<JoinedParameter>> create(std::shared_ptr<Parameter> whole,
                                                         const std::vector<int64_t>& rows);
  const std::vector<std::shared_ptr<Parameter>>& parts() const noexcept { return parts_; }

  // Updates the value and version of the complete parameter from its parts. Must be called before
  // each forward and backward.
  Status gather();
  // Must be called before and after a backward that writes the gradient of the complete parameter.
  // open_grad() prepares the tensor to write to; close_grad() passes the result to the parts.
  Status open_grad();
  Status close_grad();

 private:
  JoinedParameter(std::shared_ptr<Parameter> whole, std::vector<int64_t> rows)
      : whole_(std::move(whole)), rows_(std::move(rows)), own_(whole_->value) {}
  Result<Tensor> slice(const Tensor& whole, size_t part) const;
  bool adjacent() const;
  // True if the parts' gradients are slices of the complete gradient, with equal flags.
  bool shares_grad() const;
  Status make_shared_grad();
  Status copy_together();

  std::shared_ptr<Parameter> whole_;
  std::vector<int64_t> rows_, begins_;
  std::vector<std::shared_ptr<Parameter>> parts_;
  Tensor own_;     // the memory in which the parts were created; undefined after a move
  Tensor copies_;  // copies of parts that are not adjacent
  uint64_t copied_version_ = 0;
  void* copied_stream_ = nullptr;
  Tensor scratch_;  // complete gradient if the parts' gradients are not its slices
  bool keeps_scratch_ = false;
  bool shared_ = false;  // result of shares_grad(), from open_grad() to close_grad()
};

// The parts of one GemmUnit's weight and bias.
class SplitParameters {
 public:
  // INVALID_ARGUMENT with the module's name unless all parts have at least one row and the rows sum
  // to the unit's output features.
  static Result<std::unique_ptr<SplitParameters>> create(const char* module, const GemmUnit& gemm,
                                                         const std::vector<ParameterPart>& parts);
  struct Named {
    std::string name;  // "query_weight"
    std::shared_ptr<Parameter> parameter;
  };
  // All parts, weights before biases.
  std::vector<Named> named() const;
  Status gather();
  Status open_grad();
  Status close_grad();

 private:
  std::vector<std::string> names_;
  std::unique_ptr<JoinedParameter> weight_, bias_;        // bias_ may be null
  std::shared_ptr<Parameter> whole_weight_, whole_bias_;  // set if there is only one part
};

}  // namespace te_fl::nn::detail
