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

// A tape: modules are called as functions of values, and one call computes all gradients.
//   nn::Tape tape;
//   nn::Value y = linear(gelu(norm(tape.input(x))));       // nn::Layer, te_fl/nn/modules/layer.hpp
//   te_fl::Status status = tape.backward(nn::cross_entropy(y, targets));
// It calls the modules' explicit forward and backward, which may be mixed with it.
namespace te_fl::nn {

class Tape;

namespace detail {
struct Gradient;
}

// A tensor on a tape, or the error of what should have made it: calls with such a value do nothing
// but pass it on, and backward() returns it. A handle; its tape must outlive it.
class TE_FL_API Value {
 public:
  Value();  // an error: a value that nothing has made
  ~Value();
  Value(const Value&);
  Value& operator=(const Value&);
  Value(Value&&) noexcept;
  Value& operator=(Value&&) noexcept;

  bool ok() const noexcept { return status_.ok(); }
  const Status& status() const noexcept { return status_; }
  const Tensor& tensor() const noexcept { return tensor_; }  // undefined after an error
  Tape* tape() const noexcept { return tape_; }              // null if the error came before one
  // True if backward() gives it a gradient: it is an input() that wants one, or was made from such
  // or from trained parameters.
  bool wants_grad() const noexcept { return gradient_ != nullptr; }
  // Returns the gradient of an input() that wants it, after backward(); else undefined.
  Tensor grad() const;

  Value view(std::initializer_list<int64_t> shape) const;  // as Tensor::view()
  // Equal parts of the last dimension, views of the value's memory.
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
  std::shared_ptr<detail::Gradient> gradient_;  // null: none is wanted
  Status status_;
};

// a + b, of one shape.
TE_FL_API Value operator+(const Value& a, const Value& b);

// Records what is called with its values. For one thread. Not copied, not moved.
class TE_FL_API Tape {
 public:
  // `training` false: inference; modules keep nothing, and backward() is FAILED_PRECONDITION.
  explicit Tape(bool training = true);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  bool training() const noexcept { return training_; }
  // Calls give these to forwards that take ForwardOptions and were given none, whatever else they
  // were given (AttentionInputs, say).
  ForwardOptions options;

  // A value that nothing on the tape makes. `wants_grad`: backward() leaves its gradient in it.
  Value input(Tensor tensor, bool wants_grad = false);
  Value error(Status status);

  // The gradients of `of`, one element unless `gradient` (its own, of its shape) is given: adds to
  // those of the parameters (Module::zero_grad()) and sets those of the inputs. Drops on its way
  // what it has used; afterwards, and after an error, the tape is empty and its values are used up.
  // Ends the step's FP8 bookkeeping (backward_end()). Returns the error of `of`, or the first met.
  Status backward(const Value& of, const Tensor& gradient = {});
  // Called once per parameter and backward(), when that has added the last of its contributions,
  // on the thread and stream of the backward, e.g. to begin its all-reduce. An error ends the
  // backward. A module's parameters are complete when its backward, or that of the checkpointed
  // piece that it is in, returns; frozen ones are left out, and those that Module::backward_dw()
  // is still to write.
  using GradientHook = std::function<Status(Parameter& parameter)>;
  void on_gradient(GradientHook hook) { hook_ = std::move(hook); }

  // `piece` of x, which keeps x alone and runs again in backward (nn::checkpoint()). What it refers
  // to must live until then.
  Value checkpoint(std::function<Value(const Value& x)> piece, const Value& x);

  // For calls that are not modules'. The gradients that reach the results, undefined for one that
  // none reaches, are turned into those of the inputs, undefined where there is none.
  using Tensors = std::vector<Tensor>;
  using Backward = std::function<Result<Tensors>(const Tensors& dys)>;
  struct Recorded {
    Tensors results;
    Backward backward;
    std::vector<std::shared_ptr<Parameter>> parameters = {};  // that it uses and that are trained
  };
  // Calls `run` unless an input is an error. As many values as it has results, `count`.
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
  std::vector<std::shared_ptr<Parameter>> used_;  // by what was recorded, each once a call
  uint64_t epoch_ = 1;                            // counts backwards
  GradientHook hook_;
};

}  // namespace te_fl::nn
