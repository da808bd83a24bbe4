#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/ctx.hpp"
#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

// A tape for automatic differentiation: modules are called as functions of values, and one call
// computes all gradients.
//   nn::Tape tape;
//   nn::Value y = linear(gelu(norm(tape.input(x))));       // nn::Layer, te_fl/nn/modules/layer.hpp
//   te_fl::Status status = tape.backward(nn::cross_entropy(y, targets));
// The tape calls the modules' explicit forward and backward functions; a program may mix both
// styles.
namespace te_fl::nn {

class Tape;

namespace detail {
struct Gradient;
}

// A tensor on a tape, or the error of the call that should have made it. Calls with an erroneous
// value only pass the error on, and backward() returns it. A handle; its tape must outlive it.
class TE_FL_API Value {
 public:
  Value();  // has an error, since no call has made this value
  ~Value();
  Value(const Value&);
  Value& operator=(const Value&);
  Value(Value&&) noexcept;
  Value& operator=(Value&&) noexcept;

  bool ok() const noexcept { return status_.ok(); }
  const Status& status() const noexcept { return status_; }
  const Tensor& tensor() const noexcept { return tensor_; }  // undefined after an error
  Tape* tape() const noexcept {
    return tape_;
  }  // null if the error occurred before a tape was known
  // True if backward() computes a gradient for this value: it is an input() with wants_grad, or it
  // depends on such an input or on a parameter that is trained.
  bool wants_grad() const noexcept { return gradient_ != nullptr; }
  // After backward(), the gradient of an input() with wants_grad; undefined otherwise.
  Tensor grad() const;

  Value view(std::initializer_list<int64_t> shape) const;  // see Tensor::view()
  // Splits the last dimension into N equal parts, which are views of the value's memory.
  template <size_t N>
  std::array<Value, N> split() const {
    std::array<Value, N> parts;
    split_into(parts);
    return parts;
  }

 private:
  friend class Tape;
  void split_into(std::span<Value> parts) const;

  Tape* tape_ = nullptr;
  Tensor tensor_;
  std::shared_ptr<detail::Gradient> gradient_;  // null: no gradient is needed
  Status status_;
};

// a + b. Both have the same shape.
TE_FL_API Value operator+(const Value& a, const Value& b);

// Records the calls made with its values. For use by one thread. Neither copyable nor movable.
class TE_FL_API Tape {
 public:
  // `training` false: inference. Modules save nothing, and backward() returns FAILED_PRECONDITION.
  explicit Tape(bool training = true);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  bool training() const noexcept { return training_; }
  // Default ForwardOptions: passed to every forward that has a parameter of this type and was not
  // given any, whatever other arguments it has (such as AttentionInputs).
  ForwardOptions options;

  // Puts a tensor on the tape as an input. `wants_grad`: backward() computes its gradient, see
  // Value::grad().
  Value input(Tensor tensor, bool wants_grad = false);
  Value error(Status status);

  // Computes all gradients of `of`. `of` has one element, unless its own `gradient` (of its shape)
  // is given. Adds to the gradients of parameters (Module::zero_grad() resets them) and sets the
  // gradients of inputs. Releases saved activations as it proceeds. Afterwards, and after an error,
  // the tape is empty and its values cannot be used any more. Ends the step's FP8 bookkeeping
  // (backward_end()). Returns the error of `of`, or the first error that occurs.
  Status backward(const Value& of, const Tensor& gradient = {});
  // Sets a function that backward() calls once for each parameter when its gradient is complete, on
  // the backward's thread and stream, for example to begin an all-reduce. An error ends the
  // backward. The parameters of a module are complete when the module's backward returns or, inside
  // a function that was passed to checkpoint(), when the backward of that function returns. Not
  // called for frozen parameters, nor for those whose gradient Module::backward_dw() will still
  // write.
  using GradientHook = std::function<Status(Parameter& parameter)>;
  void on_gradient(GradientHook hook) { hook_ = std::move(hook); }

  // Runs the function `segment` on x with activation checkpointing: only x is saved, and `segment`
  // runs again in the backward (nn::checkpoint()). Everything that `segment` refers to must live
  // until then.
  Value checkpoint(std::function<Value(const Value& x)> segment, const Value& x);

  // Interface for calls that are not modules. `backward` receives the gradients of the results
  // (undefined for a result without one) and returns the gradients of the inputs (undefined where
  // there is none).
  using Tensors = std::vector<Tensor>;
  using Backward = std::function<Result<Tensors>(const Tensors& dys)>;
  struct Recorded {
    Tensors results;
    Backward backward;
    std::vector<std::shared_ptr<Parameter>> parameters =
        {};  // trained parameters that the call uses
  };
  // Calls `run`, unless an input is an error, and records it. Returns `count` values, one per
  // result.
  std::vector<Value> record(std::span<const Value> inputs, size_t count,
                            const std::function<Result<Recorded>(bool training)>& run);

 private:
  struct Node;
  friend class Value;
  Status run(const Value& of, const Tensor& gradient);
  Status run_node(Node& node);
  Status finished(const Node& node);
  void clear();

  bool training_;
  std::vector<Node> nodes_;
  // parameters used by the recorded calls, once per call
  std::vector<std::shared_ptr<Parameter>> used_;
  uint64_t epoch_ = 1;  // counts backward() calls
  GradientHook hook_;
};

}  // namespace te_fl::nn
