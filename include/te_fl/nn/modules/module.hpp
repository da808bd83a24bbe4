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

// The FP8 state of sites by name, for modules that stand for one: those that a framework's module
// has for other dtypes or masks, or a whole layer and its parts. See Module::share_fp8_states().
class TE_FL_API Fp8States {
 public:
  Fp8States();
  ~Fp8States();
  Fp8States(const Fp8States&) = delete;
  Fp8States& operator=(const Fp8States&) = delete;
  // True if no module has brought sites.
  bool empty() const;
  // As Module::state() names them, for those that delayed scaling was used at.
  std::vector<NamedTensor> state() const;
  // As Module::load_fp8_state().
  Status load(const std::vector<NamedTensor>& tensors, std::string_view source);
  // The modules have other states from now on: an AmaxReduction leaves these out.
  void retire();

 private:
  friend class Module;
  std::unique_ptr<detail::SharedStates> shared_;
};

// Base of all modules: a tree of parameters, FP8 state and submodules. Derive from it to compose a
// model:
//   struct Gpt : nn::Module { Gpt() { register_module("embedding", *embedding_); ... } };
// Modules are neither copied nor moved. One module's calls must not run at the same time on several
// threads; different modules are independent.
class TE_FL_API Module {
 public:
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // All parameters in registration order, depth first; a shared one once, under its first name.
  std::vector<NamedParameter> parameters() const;
  // Sum of the parameters' elements.
  int64_t parameter_count() const;
  // Parameter::set_requires_grad() for all parameters, those of submodules included.
  void set_requires_grad(bool wanted);
  // Zeroes the gradients that there are (op fill), but for frozen parameters'.
  Status zero_grad();
  // The dtype of all parameters' gradients from now on: F32 (what parameters are made with), BF16
  // or F16, which halve their memory and round every accumulation. Drops the gradients that there
  // are. An embedding's gradient can only be F32.
  Status set_grad_dtype(DType dtype);
  // True: from now on backwards leave the gradients of linear maps' weights (without FP8 also of
  // their biases) to backward_dw(), and keep what it reads, so that others' work comes before it,
  // e.g. the stages of a pipeline. Submodules included. False computes them in the backward again.
  // Until backward_dw() the gradients are incomplete: an optimizer's step, clip_grad_norm(),
  // sum_partial_gradients() and DataParallel::average_gradients() are FAILED_PRECONDITION.
  void set_delay_wgrad(bool delays);
  // Computes the gradients that backwards have left, in the order of registration; nothing if there
  // are none. After an error what was left is dropped.
  Status backward_dw();
  // Takes out what backward_dw() would compute now, as a function that does it, to be called once
  // while the module lives. Called after each backward it keeps the backwards' gradients apart.
  std::function<Status()> take_delayed_wgrad();
  // Parameters and FP8 state by name, sharing storage with the module: NAME for a parameter (of an
  // FP8-only one its codes, NAME.scale_inv, by which they are multiplied, and NAME.amax, F32 [1]);
  // for each FP8 site (only after delayed scaling was used) NAME.fwd.scale, NAME.fwd.amax_history,
  // NAME.bwd.scale, NAME.bwd.amax_history, and after a backward NAME.bwd.fp8_max, F32 [1] of the
  // host: 448 or 57344, the largest value of the FP8 type that the scales are for.
  std::vector<NamedTensor> state() const;
  // Copies tensors into parameters and FP8 state. First everything is checked, so an error changes
  // nothing: a missing parameter, a name that the module does not have, a wrong dtype or shape;
  // each error names `source`, the tensor, what it was and what it must be. FP8 state that
  // `tensors` lacks is reset; where fp8_max alone is absent, the scales are taken to be for the
  // type of the next backward. Amaxes that were collected before are in no update any more.
  // Everything is copied into the memory that is there, so captured graphs go on with what was
  // loaded; an FP8-only parameter takes codes with their scale_inv, or a high-precision tensor,
  // which it quantises by its own amax; only an amax history of another length takes new memory,
  // which is FAILED_PRECONDITION while a graph uses the old. Names in `tensors` for which `skip`
  // answers true are left to the caller.
  Status load_state(const std::vector<NamedTensor>& tensors, std::string_view source,
                    const std::function<bool(std::string_view)>& skip = nullptr);
  // Does so for FP8 state alone: `tensors` names no parameters, and those stay.
  Status load_fp8_state(const std::vector<NamedTensor>& tensors, std::string_view source);
  // From now on the FP8 sites below `prefix` ("" or "self_attention.proj.") use the states that
  // `states` has under the rest of their names, and it has those that it lacks: what one of the
  // modules collects and updates is the state of all. Before any forward; the modules are on one
  // device, and their calls must not run at the same time. INVALID_ARGUMENT if a site does not fit.
  Status share_fp8_states(Fp8States& states, std::string_view prefix = {});
  // The checks of load_state() alone.
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
