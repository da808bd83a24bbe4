#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

namespace detail {
class DelayedWgrad;
class Fp8State;
class Fp8Values;
struct SharedStates;
class GradientUpdates;
class WeightCopy;
}  // namespace detail

// A trainable tensor and its gradient. Modules share parameters by pointer (tied weights).
struct TE_FL_API Parameter {
  Tensor value;  // F32, BF16 or F16, compact; FP8 codes alone under quantized_model_init
  // Same shape, of grad_dtype. Undefined, which counts as zero, until a backward first writes it or
  // ensure_grad(): a model that is not trained has none.
  Tensor grad;
  DType grad_dtype = DType::kF32;  // see Module::set_grad_dtype()
  // False: frozen. A backward computes no gradient for it (the gradient of the input stays the
  // same), a forward keeps no input for that, and an optimizer leaves it as it is.
  bool requires_grad = true;
  // Sets requires_grad; false also drops the gradient and its memory. Between steps: a backward
  // computes the gradient of a weight that required one in its forward and still does.
  void set_requires_grad(bool wanted);
  // Makes the gradient, zero, if there is none and the parameter is not frozen. A capture needs it
  // of every parameter that its backward is the first to write: the memory would be the graph's, so
  // the backward is FAILED_PRECONDITION, and so is this call (GraphedStep's warm-up has made it).
  // Not of a borrowed one in a capture that nn did not begin: its owner takes what a launch writes.
  Status ensure_grad();
  // False after zero_grad() or clear_grad(): the next backward overwrites grad instead of adding to
  // it. But a backward in a captured graph always adds unless the same capture cleared: the graph
  // may be launched for any microbatch (a gradient cleared outside is filled with zeros before
  // GraphedStep launches it).
  bool grad_written = false;
  // The next backward overwrites grad, whatever it holds. In a capture: that of every launch. Until
  // then an optimizer refuses the gradient as stale; zero_grad() makes it zero instead.
  Status clear_grad();
  // How many backwards have left its gradient to Module::backward_dw().
  int64_t delayed_wgrads = 0;
  // True between clear_grad() and what writes grad. Who writes it without a backward sets false.
  bool grad_stale = false;
  // True between clear_grad() or zero_grad() and what writes grad: a backward that finds it so
  // begins another step. False after take_grad().
  bool grad_cleared = false;
  uint64_t grad_cleared_in = 0;  // the capture that cleared it; 0: none

  // Borrowing: `lent`, compact, F32, BF16 or F16, of value's shape and on its device, becomes the
  // value; of a linear map's weight also E4M3 codes (wrap_quantized()), for training with their
  // column-wise copy. Its owner allocates and frees the memory (a Tensor::wrap with or without an
  // owner to keep alive) and advances `owners_version` with every change of the contents: the same
  // number as in the last call says that they are the same, wherever they lie, and then copies made
  // of them (FP8, other dtypes) and forwards whose backward is to come stay valid. An older number
  // says that the contents of then are lent again, for a backward of a forward of then. A framework
  // calls this before each forward, and before a backward if the memory has moved since. The memory
  // must be there, and unwritten, from then until the work that the calls enqueued is done; between
  // a forward and its backward te-fl holds no tensor of it. te-fl writes it in load_state() and in
  // the step of an optimizer that was given the parameter, nowhere else, and codes nowhere. A
  // captured graph goes on with the memory that it was captured with. INVALID_ARGUMENT names what
  // does not fit, and then the value stays.
  Status borrow(Tensor lent, uint64_t owners_version);
  // Takes the gradient out: the parameter has none afterwards. Undefined if there is none or it is
  // stale. Not while a graph is to write it.
  Tensor take_grad();
  // Makes `gradient`, compact, F32, BF16 or F16, of value's shape and on its device, what backwards
  // write from now on, and its dtype grad_dtype; the memory is its owner's as in borrow().
  // `written`: it holds values, to which a backward adds; false: the next one overwrites it.
  // INVALID_ARGUMENT if it does not fit; FAILED_PRECONDITION if the parameter is frozen.
  Status give_grad(Tensor gradient, bool written);
  // Writes F32, BF16 or F16 values of value's shape, from any device, and counts the version up; an
  // FP8-only parameter quantises them. INVALID_ARGUMENT if they do not fit.
  Status write(const Tensor& values);
  // The value in new memory as F32, BF16 or F16, dequantised if need be.
  Result<Tensor> read(DType dtype) const;
  // What an FP8-only parameter's first codes were made from, on the host, if that was asked for
  // (QuantizedModelInitOptions); assign Tensor() to free it.
  Tensor initial_value;
  std::shared_ptr<detail::Fp8Values> fp8_values;  // of an FP8-only parameter, else null
  // Changes whenever an optimizer or load_state() writes value; quantised copies of an older
  // version are not reused. Who writes value otherwise counts it up too.
  uint64_t version = 0;
  std::optional<uint64_t> owners_version;  // of a borrowed value
  // The module's FP8 copy of value, for an optimizer that writes it
  // (AdamOptions::write_fp8_weights)
  std::weak_ptr<detail::WeightCopy> fp8_copy;
  // Where the last FP8 backward that wrote grad noted the scales that wait for their update, for
  // the optimizer, which makes the updates that nobody made.
  std::shared_ptr<detail::GradientUpdates> gradient_updates;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

// The FP8 state of sites by name, for modules that stand for one: those that a framework's module
// has for other dtypes or masks, or a whole layer and its parts. See Module::share_fp8_states().
class TE_FL_API Fp8States {
 public:
  Fp8States();
  ~Fp8States();
  Fp8States(const Fp8States&) = delete;
  Fp8States& operator=(const Fp8States&) = delete;
  // Whether modules have brought sites.
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

struct NamedParameter {
  std::string name;  // dotted path, e.g. "self_attention.layernorm_qkv.weight"
  std::shared_ptr<Parameter> parameter;
  const Tensor& value() const { return parameter->value; }
  const Tensor& grad() const { return parameter->grad; }
};

// What a forward keeps for its backward. Give each forward its own, as many at once as microbatches
// are in flight. A backward consumes it, or reset() drops it; it may be reused for another forward
// then. A forward given one that is not empty is FAILED_PRECONDITION: that microbatch's gradients
// would be lost. Holds activations alive. A copy shares them and has a backward of its own, so that
// one forward can have several, as retained graphs of frameworks do.
class TE_FL_API Ctx {
 public:
  struct TE_FL_API Record {
    virtual ~Record();
    // Makes a copy of a record of this type. Null: it has none, and a copy of the Ctx is empty.
    std::unique_ptr<Record> (*copy)(const Record&) = nullptr;
  };
  Ctx();
  ~Ctx();
  Ctx(const Ctx& other);
  Ctx& operator=(const Ctx& other);
  Ctx(Ctx&&) noexcept;
  Ctx& operator=(Ctx&&) noexcept;
  bool empty() const noexcept { return record_ == nullptr; }
  void reset() noexcept;

  // For modules. check_empty() comes first in a forward, before it computes; store() last, and
  // is FAILED_PRECONDITION as well unless empty. take() returns the record that `owner` stored;
  // FAILED_PRECONDITION if there is none: the forward was not given this ctx, it was already
  // consumed, or another module filled it.
  Status check_empty(std::string_view module) const;
  Status store(const void* owner, std::unique_ptr<Record> record);
  Result<std::unique_ptr<Record>> take(const void* owner, std::string_view module);

 private:
  std::unique_ptr<Record> record_;
  const void* owner_ = nullptr;
};

struct ForwardOptions {
  // Weights are quantised (and cast to the activation dtype) once per step: true computes and keeps
  // them, false reuses what true kept, unset computes them for this call alone. false without an
  // earlier true computes and keeps.
  // Unset in inference (ctx null) computes them once per Parameter::version, FP8 scales and recipe,
  // and keeps them until one of these changes, another stream comes, or a training forward does:
  // 1 byte for each weight under FP8, or the activation dtype's size if the parameter has another
  // dtype; FP8-only parameters are dequantised for each call. In a capture they are computed for
  // this call, so that each launch reads the weights of its time.
  std::optional<bool> is_first_microbatch = {};
  // The same for FP8 weights, decided on the device when the work runs, so that one captured graph
  // serves every microbatch: F32 [1] on the modules' device; 0 quantises and keeps, any other value
  // reuses what was kept. What the host knows to be out of date (nothing kept yet, another recipe,
  // an optimizer's step) is quantised whatever it says, but in a capture only the value counts. Not
  // together with is_first_microbatch. Without FP8, weights of another dtype are cast every time.
  Tensor reuse_weights = {};
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
  void set_delay_wgrad(bool delays);
  // Computes the gradients that backwards have left, in the order of registration; nothing if there
  // are none. An optimizer's step before it is FAILED_PRECONDITION. After an error what was left is
  // dropped.
  Status backward_dw();
  // Takes out what backward_dw() would compute now, as a function that does it, to be called once
  // while the module lives. Called after each backward it keeps the backwards' gradients apart.
  std::function<Status()> take_delayed_wgrad();
  // Parameters and FP8 state by name, sharing storage with the module: NAME for a parameter (of an
  // FP8-only one its codes, NAME.scale_inv, by which they are multiplied, and NAME.amax, F32 [1]);
  // for each FP8 site (only after delayed scaling was used) NAME.fwd.scale, NAME.fwd.amax_history,
  // NAME.bwd.scale, NAME.bwd.amax_history.
  std::vector<NamedTensor> state() const;
  // Copies tensors into parameters and FP8 state. First everything is checked, so an error changes
  // nothing: a missing parameter, a name that the module does not have, a wrong dtype or shape;
  // each error names `source`, the tensor, what it was and what it must be. FP8 state that
  // `tensors` lacks is reset. Everything is copied into the memory that is there, so captured
  // graphs go on with what was loaded; an FP8-only parameter takes codes with their scale_inv, or a
  // high-precision tensor, which it quantises by its own amax; only an amax history of another
  // length takes new memory, which is FAILED_PRECONDITION while a graph uses the old. Names in
  // `tensors` for which `skip` answers true are left to the caller.
  Status load_state(const std::vector<NamedTensor>& tensors, std::string_view source,
                    const std::function<bool(std::string_view)>& skip = nullptr);
  // The same of FP8 state alone: `tensors` names no parameters, and those stay.
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

// Reads one F32 value to the host. Waits for the stream: a synchronisation point.
TE_FL_API Result<float> item(const Tensor& scalar);

}  // namespace te_fl::nn
