#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/tape.hpp"
#include "te_fl/nn/modules/call.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/status.hpp"

// Layer, Model and Sequential call modules as functions of tape values
// (te_fl/nn/autograd/tape.hpp).
namespace te_fl::nn {

namespace detail {

template <class Create>
struct OptionsOf;
template <class Made, class Given>
struct OptionsOf<Result<std::unique_ptr<Made>> (*)(const Given&)> {
  using type = Given;
};

}  // namespace detail

// Creates a module and calls it as a function of tape values, e.g. as a member
// `nn::Layer<nn::Linear> fc1{{.in_features = 8, .out_features = 8}}`. If the creation fails, each
// call returns a value with that error. Owns the module; movable.
template <class M>
class Layer {
 public:
  using Options = typename detail::OptionsOf<decltype(&M::create)>::type;
  Layer(const Options& options) : Layer(M::create(options)) {}       // NOLINT: implicit on purpose
  Layer(Result<std::unique_ptr<M>> made) : status_(made.status()) {  // NOLINT
    if (made.ok()) module_ = std::move(*made);
  }

  const Status& status() const noexcept { return status_; }
  // Require status().ok().
  M& operator*() const noexcept { return *module_; }
  M* operator->() const noexcept { return module_.get(); }
  std::shared_ptr<M> module() const noexcept { return module_; }  // null after an error

  // Calls nn::call() with the module.
  template <class First, class... Args>
  Value operator()(First&& first, const Args&... args) const {
    if (status_.ok()) return call(*module_, first, args...);
    if constexpr (std::is_same_v<std::remove_cvref_t<First>, Value>) {
      return first.ok() ? first.tape()->error(status_) : first;
    } else {
      return first.error(status_);  // `first` is a Tape
    }
  }
  // Calls an Embedding, whose input is not a Value.
  Value operator()(Tape& tape, const Tensor& indices) const {
    return status_.ok() ? call(tape, *module_, indices) : tape.error(status_);
  }

 private:
  std::shared_ptr<M> module_;
  Status status_;
};

// Base class of a model made of layers. Derive from it, add() the layers in the constructor, and
// define operator()(const Value&) or another function.
class TE_FL_API Model : public Module {
 public:
  // The first error among the layers that were added.
  const Status& status() const noexcept { return status_; }

 protected:
  // `layer` must live as long as this model, so make it a member.
  template <class M>
  void add(std::string name, const Layer<M>& layer) {
    if (layer.status().ok()) {
      register_module(std::move(name), *layer);
    } else if (status_.ok()) {
      status_ = layer.status().wrap(name);
    }
  }

 private:
  Status status_;
};

// Layers in sequence: y = last(... first(x)). It has an explicit forward and backward like every
// module. On a tape each of its layers is recorded as a separate call.
class TE_FL_API Sequential : public Module {
 public:
  Sequential();
  ~Sequential() override;
  Sequential(Sequential&&) = delete;

  // Appends a module with one input and one result. state() lists it under `name`, or under its
  // index if `name` is empty.
  template <class M>
  Sequential& add(Layer<M> layer, std::string name = {}) {
    if (!layer.status().ok()) return fail(layer.status());
    std::shared_ptr<M> module = layer.module();
    return append(std::move(name), module,
                  {[module](const Tensor& x, Ctx* ctx, const ForwardOptions& options) {
                     return detail::forward_with(*module, x, ctx, options);
                   },
                   [module](const Tensor& dy, Ctx& ctx) -> Result<Tensor> {
                     return module->backward(dy, ctx);
                   },
                   [module](const Value& x) { return call(*module, x); }});
  }
  // The first error among the layers that were added; every call returns it.
  const Status& status() const noexcept { return status_; }
  size_t size() const noexcept { return entries_.size(); }

  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {});
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);
  Value operator()(const Value& x) const;

 private:
  struct Calls {
    std::function<Result<Tensor>(const Tensor&, Ctx*, const ForwardOptions&)> forward;
    std::function<Result<Tensor>(const Tensor&, Ctx&)> backward;
    std::function<Value(const Value&)> on_tape;
  };
  struct Entry {
    std::shared_ptr<Module> module;
    Calls calls;
  };
  Sequential& append(std::string name, std::shared_ptr<Module> module, Calls calls);
  Sequential& fail(const Status& status);

  std::vector<Entry> entries_;
  Status status_;
};

}  // namespace te_fl::nn
