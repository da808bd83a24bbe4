#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/nn/modules/parameter_part.hpp"

namespace te_fl::nn::detail {

class GemmUnit;

// A parameter whose rows belong to several ("query_weight", "key_weight", "value_weight"): a
// product computes with the whole, and users, optimizers and checkpoints see the parts. Parts that
// lie one after the other in memory, as they are made, are read where they are; others are copied
// together when one has changed. Gradients likewise: the parts' are slices of the whole's unless
// their owner has replaced some, and then what the product wrote is copied or added to them. Not
// thread-safe.
class JoinedParameter {
 public:
  // Parts of `rows` rows each of `whole`, whose extent 0 is the sum. The whole is registered
  // nowhere.
  static Result<std::unique_ptr<JoinedParameter>> create(std::shared_ptr<Parameter> whole,
                                                         const std::vector<int64_t>& rows);
  const std::vector<std::shared_ptr<Parameter>>& parts() const noexcept { return parts_; }

  // Makes the whole's value and version the parts'. Before each forward and backward.
  Status gather();
  // Around a backward that writes the whole's gradient: what it is to write to, and the parts' part
  // of it.
  Status open_grad();
  Status close_grad();

 private:
  JoinedParameter(std::shared_ptr<Parameter> whole, std::vector<int64_t> rows)
      : whole_(std::move(whole)), rows_(std::move(rows)), own_(whole_->value) {}
  Result<Tensor> slice(const Tensor& whole, size_t part) const;
  bool adjacent() const;
  // True if the parts' gradients are slices of the whole's, in the same state.
  bool shares_grad() const;
  Status make_shared_grad();
  Status copy_together();

  std::shared_ptr<Parameter> whole_;
  std::vector<int64_t> rows_, begins_;
  std::vector<std::shared_ptr<Parameter>> parts_;
  Tensor own_;     // the memory that the parts were made in; undefined once they have moved
  Tensor copies_;  // of parts that are not adjacent
  uint64_t copied_version_ = 0;
  void* copied_stream_ = nullptr;
  Tensor scratch_;  // of the whole's gradient, where the parts' are not its slices
  bool keeps_scratch_ = false;
  bool shared_ = false;  // between open_grad() and close_grad()
};

// The parts of one GemmUnit's weight and bias.
class SplitParameters {
 public:
  // INVALID_ARGUMENT naming the module unless the parts' rows are positive and sum to the unit's
  // output features.
  static Result<std::unique_ptr<SplitParameters>> create(const char* module, const GemmUnit& gemm,
                                                         const std::vector<ParameterPart>& parts);
  struct Named {
    std::string name;  // "query_weight"
    std::shared_ptr<Parameter> parameter;
  };
  // Weights first, then biases.
  std::vector<Named> named() const;
  Status gather();
  Status open_grad();
  Status close_grad();

 private:
  std::vector<std::string> names_;
  std::unique_ptr<JoinedParameter> weight_, bias_;        // bias_ null without one
  std::shared_ptr<Parameter> whole_weight_, whole_bias_;  // where there is one part only
};

}  // namespace te_fl::nn::detail
