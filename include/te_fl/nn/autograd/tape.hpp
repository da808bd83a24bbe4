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
#include "te_fl/nn/modules/attention.hpp"
#include "te_fl/nn/modules/embedding.hpp"
#include "te_fl/nn/modules/loss.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/modules/transformer.hpp"
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
  // Of an input() that wants it, after backward(); else undefined.
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
  // What calls give to forwards that take ForwardOptions and were given none, whatever else they
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
    std::vector<std::shared_ptr<Parameter>> parameters = {};  // beside the module's
  };
  // Calls `run` unless an input is an error; `module` (may be null) is whose parameters it uses.
  // As many values as it has results, `count`.
  std::vector<Value> record(std::span<const Value> inputs, const Module* module, size_t count,
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

// module.forward(x, ctx, args...) on x's tape.
template <class Called, class... Args>
Value call(Called& module, const Value& x, const Args&... args);

// Of other signatures.
TE_FL_API Value call(DotProductAttention& attention, const Value& q, const Value& k, const Value& v,
                     const AttentionInputs& inputs = {});
// Cross-attention; `encoder` takes the place of inputs.encoder_output.
TE_FL_API Value call(MultiheadAttention& attention, const Value& x, const Value& encoder,
                     const AttentionInputs& inputs = {});
// A decoder; `encoder` takes the place of cross.encoder_output.
TE_FL_API Value call(TransformerLayer& decoder, const Value& x, const Value& encoder,
                     const AttentionInputs& inputs = {}, const AttentionInputs& cross = {});
TE_FL_API Value call(Residual& residual, const Value& a, const Value& b);
TE_FL_API Value call(Tape& tape, Embedding& embedding, const Tensor& indices);
// The mean of the rows' losses (CrossEntropyLoss::forward()), F32 [1].
TE_FL_API Value cross_entropy(const Value& logits, const Tensor& targets,
                              const CrossEntropyOptions& options = {}, double divisor = 0);

namespace detail {

// forward() with the options, wherever it takes them.
template <class Called>
Result<Tensor> forward_with(Called& module, const Tensor& x, Ctx* ctx,
                            const ForwardOptions& options) {
  if constexpr (requires { module.forward(x, ctx, options); }) {
    return module.forward(x, ctx, options);
  } else if constexpr (requires { module.forward(x, ctx, AttentionInputs{}, options); }) {
    return module.forward(x, ctx, AttentionInputs{}, options);
  } else {
    return module.forward(x, ctx);
  }
}

using Forward = std::function<Result<Tensor>(const Tensor& x, Ctx* ctx)>;
using Back = std::function<Result<Tensor>(const Tensor& dy, Ctx& ctx)>;
TE_FL_API Value call_module(const Module& module, const Value& x, const Forward& forward,
                            Back backward);

}  // namespace detail

template <class Called, class... Args>
Value call(Called& module, const Value& x, const Args&... args) {
  return detail::call_module(
      module, x,
      [&](const Tensor& in, Ctx* ctx) -> Result<Tensor> {
        if constexpr (sizeof...(args) == 0) {
          return detail::forward_with(module, in, ctx, x.tape()->options);
        } else if constexpr (requires { module.forward(in, ctx, args..., x.tape()->options); }) {
          return module.forward(in, ctx, args..., x.tape()->options);
        } else {
          return module.forward(in, ctx, args...);
        }
      },
      [&module](const Tensor& dy, Ctx& ctx) -> Result<Tensor> { return module.backward(dy, ctx); });
}

}  // namespace te_fl::nn
