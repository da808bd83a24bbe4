#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/ctx.hpp"
#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/nn/base/item.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

namespace detail {
class DelayedWgrad;
class Fp8State;
struct SharedStates;
}  // namespace detail

// FP8 states (scales and amax histories), by name, for several modules that share them, for example
// the variants of one framework module for different dtypes or masks, or a whole layer and its
// parts. See Module::share_fp8_states().
class TE_FL_API Fp8States {
 public:
  Fp8States();
  ~Fp8States();
  Fp8States(const Fp8States&) = delete;
  Fp8States& operator=(const Fp8States&) = delete;
  // True if no module has added states.
  bool empty() const;
  // The states for which delayed scaling has been used, with names as in Module::state().
  std::vector<NamedTensor> state() const;
  // See Module::load_fp8_state().
  Status load(const std::vector<NamedTensor>& tensors, std::string_view source);
  // Call this when the modules have switched to other states: an AmaxReduction then leaves these
  // out.
  void retire();

 private:
  friend class Module;
  std::unique_ptr<detail::SharedStates> shared_;
};

// Base class of all modules: a tree of parameters, FP8 state and submodules. Derive from it to
// compose a model:
//   struct Gpt : nn::Module { Gpt() { register_module("embedding", *embedding_); ... } };
// Modules can be neither copied nor moved. Calls of one module must not run concurrently on several
// threads; different modules are independent.
class TE_FL_API Module {
 public:
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // All parameters in registration order, depth first. A shared parameter is listed once, under its
  // first name.
  std::vector<NamedParameter> parameters() const;
  // Total number of elements of all parameters.
  int64_t parameter_count() const;
  // Calls Parameter::set_requires_grad() for all parameters, including those of submodules.
  void set_requires_grad(bool wanted);
  // Sets existing gradients to zero (op fill), except those of frozen parameters.
  Status zero_grad();
  // Sets the dtype of all parameters' gradients: F32 (the default), BF16 or F16. The 16-bit types
  // need half the memory and round every accumulation. Drops existing gradients. An embedding's
  // gradient must be F32.
  Status set_grad_dtype(DType dtype);
  // True: from now on a backward of this module or its submodules does not compute the weight
  // gradients of linear layers (without FP8, also their bias gradients). It saves the inputs of
  // this computation for backward_dw(), so that other work, such as the next stage of a pipeline,
  // can run first. False: the backward computes them. Until backward_dw() the gradients are
  // incomplete: an optimizer step, clip_grad_norm(), sum_partial_gradients() and
  // DataParallel::average_gradients() return FAILED_PRECONDITION.
  void set_delay_wgrad(bool delays);
  // Computes the weight gradients that earlier backward passes have deferred, in registration
  // order. Does nothing if there are none. After an error the deferred work is dropped.
  Status backward_dw();
  // Removes the deferred work of backward_dw() and returns it as a function. Call the function
  // once, while the module lives. A caller that takes the function after each backward can run the
  // deferred work of several backward passes separately.
  std::function<Status()> take_delayed_wgrad();
  // Parameters and FP8 state by name, sharing storage with the module. For a parameter: NAME. For
  // an FP8-only parameter: NAME (FP8 data), NAME.scale_inv (the factor that dequantises it) and
  // NAME.amax, F32 [1]. For each FP8 state, once delayed scaling has been used: NAME.fwd.scale,
  // NAME.fwd.amax_history, NAME.bwd.scale, NAME.bwd.amax_history and, after a backward,
  // NAME.bwd.fp8_max, F32 [1] on the host: 448 or 57344, the largest value of the FP8 type that the
  // backward scales are for.
  std::vector<NamedTensor> state() const;
  // Copies tensors into parameters and FP8 state. Everything is checked first, so that an error
  // changes nothing: a missing parameter, an unknown name, a wrong dtype or shape. Errors name
  // `source`, the tensor, and its actual and expected dtype or shape. Names for which `skip`
  // returns true are ignored.
  //
  // FP8 state that `tensors` lacks is reset. If only fp8_max is missing, the scales are assumed to
  // be for the FP8 type of the next backward. Amaxes collected before this call are discarded. An
  // FP8-only parameter accepts FP8 data with its scale_inv, or a high-precision tensor, which is
  // quantised with the tensor's own amax. Everything is copied into existing memory, so captured
  // graphs continue with the loaded values. Only an amax history of a different length needs new
  // memory; this is FAILED_PRECONDITION while a graph uses the old history.
  Status load_state(const std::vector<NamedTensor>& tensors, std::string_view source,
                    const std::function<bool(std::string_view)>& skip = nullptr);
  // Like load_state(), for FP8 state only: `tensors` has no parameters, and the module's parameters
  // do not change.
  Status load_fp8_state(const std::vector<NamedTensor>& tensors, std::string_view source);
  // Replaces the FP8 states whose names begin with `prefix` ("" or "self_attention.proj.") by those
  // in `states` that have the same names without the prefix. Adds the states that `states` lacks to
  // it. All modules that share a state then collect amaxes in it and use its scales. Call this
  // before any forward. The modules must be on one device, and their calls must not run
  // concurrently. INVALID_ARGUMENT if a state does not match.
  Status share_fp8_states(Fp8States& states, std::string_view prefix = {});
  // Makes only the checks of load_state().
  Status check_state(const std::vector<NamedTensor>& tensors, std::string_view source,
                     const std::function<bool(std::string_view)>& skip = nullptr) const;

 protected:
  Module();
  // The child must live as long as this module. Names are unique within a module and contain no
  // dot.
  void register_module(std::string name, Module& child);
  void register_parameter(std::string name, std::shared_ptr<Parameter> parameter);
  void register_fp8(std::string name, std::shared_ptr<detail::Fp8State> forward,
                    std::shared_ptr<detail::Fp8State> backward);
  void register_delayed(std::shared_ptr<detail::DelayedWgrad> delayed);

 private:
  struct Tree;
  using Skip = std::function<bool(std::string_view)>;
  Status check(const std::vector<NamedTensor>& tensors, std::string_view source, const Skip& skip,
               bool parameters) const;
  Status load(const std::vector<NamedTensor>& tensors, std::string_view source, const Skip& skip,
              bool parameters);
  std::unique_ptr<Tree> tree_;
};

}  // namespace te_fl::nn
