#include "te_fl/nn/modules/module.hpp"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "nn/autograd/delayed_wgrad.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "nn/fp8/fp8_values.hpp"
#include "te_fl/device.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"

namespace te_fl::nn {

// FP8 states by name, in the order in which the modules first named them.
struct detail::SharedStates {
  std::vector<std::pair<std::string, std::shared_ptr<Fp8State>>> states;
};

struct Module::Tree {
  struct Entry {
    std::string name;
    Module* child = nullptr;
    std::shared_ptr<Parameter> parameter;
    std::shared_ptr<detail::Fp8State> fp8;
  };
  std::vector<Entry> entries;
  std::vector<std::shared_ptr<detail::DelayedWgrad>> delayed;

  // Visits this module and its submodules, depth first.
  template <class Visit>
  void walk_modules(Visit&& visit) const {
    visit(*this);
    for (const Entry& entry : entries) {
      if (entry.child != nullptr) entry.child->tree_->walk_modules(visit);
    }
  }

  void add(Entry entry) {
    const bool taken = std::any_of(entries.begin(), entries.end(),
                                   [&](const Entry& e) { return e.name == entry.name; });
    if (taken || entry.name.empty()) {
      die(internal_error("nn::Module: the name \"" + entry.name +
                         "\" is empty or registered twice"));
    }
    entries.push_back(std::move(entry));
  }

  // Visits the entries depth first, in registration order. Visits a shared parameter only once.
  template <class Visit>
  void walk(const std::string& prefix, std::set<const Parameter*>& seen, Visit&& visit) const {
    for (const Entry& entry : entries) {
      const std::string path = prefix + entry.name;
      if (entry.child != nullptr) {
        entry.child->tree_->walk(path + ".", seen, visit);
      } else if (entry.parameter == nullptr || seen.insert(entry.parameter.get()).second) {
        visit(path, entry);
      }
    }
  }
  template <class Visit>
  void walk(Visit&& visit) const {
    std::set<const Parameter*> seen;
    walk("", seen, visit);
  }
};

Module::Module() : tree_(std::make_unique<Tree>()) {}
Module::~Module() = default;

void Module::register_module(std::string name, Module& child) {
  tree_->add({std::move(name), &child, nullptr, nullptr});
}

void Module::register_parameter(std::string name, std::shared_ptr<Parameter> parameter) {
  tree_->add({std::move(name), nullptr, std::move(parameter), nullptr});
}

void Module::register_fp8(std::string name, std::shared_ptr<detail::Fp8State> forward,
                          std::shared_ptr<detail::Fp8State> backward) {
  tree_->add({name + ".fwd", nullptr, nullptr, std::move(forward)});
  tree_->add({name + ".bwd", nullptr, nullptr, std::move(backward)});
}

void Module::register_delayed(std::shared_ptr<detail::DelayedWgrad> delayed) {
  tree_->delayed.push_back(std::move(delayed));
}

void Module::set_delay_wgrad(bool delays) {
  tree_->walk_modules([&](const Tree& tree) {
    for (const auto& delayed : tree.delayed) delayed->enable(delays);
  });
}

std::function<Status()> Module::take_delayed_wgrad() {
  struct Left {
    std::shared_ptr<detail::DelayedWgrad> from;
    std::vector<detail::DelayedWgrad::Run> runs;
  };
  std::vector<Left> taken;
  tree_->walk_modules([&](const Tree& tree) {
    for (const auto& delayed : tree.delayed) taken.push_back({delayed, delayed->take()});
  });
  return [taken = std::move(taken)] {
    Status status;
    for (const Left& left : taken) {
      if (Status one = left.from->run(left.runs); status.ok()) status = std::move(one);
    }
    return status;
  };
}

Status Module::backward_dw() { return take_delayed_wgrad()(); }

std::vector<NamedParameter> Module::parameters() const {
  std::vector<NamedParameter> result;
  tree_->walk([&](const std::string& path, const Tree::Entry& entry) {
    if (entry.parameter != nullptr) result.push_back({path, entry.parameter});
  });
  return result;
}

int64_t Module::parameter_count() const {
  int64_t total = 0;
  for (const NamedParameter& p : parameters()) total += p.value().numel();
  return total;
}

Status Module::zero_grad() {
  for (const NamedParameter& p : parameters()) {
    if (!p.parameter->requires_grad) continue;
    if (p.grad().defined()) TE_FL_RETURN_IF_ERROR(detail::fill(p.grad(), 0));
    TE_FL_RETURN_IF_ERROR(p.parameter->clear_grad());
    p.parameter->internals().grad_stale = false;
  }
  return {};
}

void Module::set_requires_grad(bool wanted) {
  for (const NamedParameter& p : parameters()) p.parameter->set_requires_grad(wanted);
}

Status Module::set_grad_dtype(DType dtype) {
  if (!is_high(dtype)) {
    return invalid_argument("set_grad_dtype: the dtype is " + std::string(te_fl::name(dtype)) +
                            "; it must be f32, bf16 or f16");
  }
  for (const NamedParameter& p : parameters()) {
    p.parameter->grad_dtype = dtype;
    detail::drop_grad(*p.parameter);
  }
  return {};
}

namespace {

void append_state(const std::string& name, const detail::Fp8State& state,
                  std::vector<NamedTensor>& result) {
  result.push_back({name + ".scale", state.scale()});
  result.push_back({name + ".amax_history", state.history()});
  if (state.fp8_max().defined()) result.push_back({name + ".fp8_max", state.fp8_max()});
}

}  // namespace

std::vector<NamedTensor> Module::state() const {
  std::vector<NamedTensor> result;
  tree_->walk([&](const std::string& path, const Tree::Entry& entry) {
    if (entry.parameter != nullptr && entry.parameter->value.quantized()) {
      const Tensor& value = entry.parameter->value;
      // value() is safe: a view of existing memory cannot fail.
      result.push_back({path, detail::wrap_codes(value).value()});
      result.push_back({path + ".scale_inv", value.scale_inv()});
      if (value.amax().defined()) result.push_back({path + ".amax", value.amax()});
    } else if (entry.parameter != nullptr) {
      result.push_back({path, entry.parameter->value});
    } else if (entry.fp8->defined()) {
      append_state(path, *entry.fp8, result);
    }
  });
  return result;
}

Fp8States::Fp8States() : shared_(std::make_unique<detail::SharedStates>()) {}
Fp8States::~Fp8States() = default;

std::vector<NamedTensor> Fp8States::state() const {
  std::vector<NamedTensor> result;
  for (const auto& [name, state] : shared_->states) {
    if (state->defined()) append_state(name, *state, result);
  }
  return result;
}

bool Fp8States::empty() const { return shared_->states.empty(); }

void Fp8States::retire() {
  for (const auto& [name, state] : shared_->states) state->retire();
}

Status Module::share_fp8_states(Fp8States& states, std::string_view prefix) {
  Status status;
  tree_->walk([&](const std::string& path, const Tree::Entry& entry) {
    if (!status.ok() || entry.fp8 == nullptr || !path.starts_with(prefix)) return;
    auto& known = states.shared_->states;
    const std::string name = path.substr(prefix.size());
    const auto found = std::ranges::find(known, name, [](const auto& s) { return s.first; });
    if (found == known.end()) {
      known.emplace_back(name, entry.fp8);
    } else if (found->second->slots() != entry.fp8->slots() ||
               found->second->device() != entry.fp8->device()) {
      status = invalid_argument(
          "share_fp8_states: the site " + path + " has " + std::to_string(entry.fp8->slots()) +
          " scales on " + to_string(entry.fp8->device()) + ", and the shared state " +
          std::to_string(found->second->slots()) + " on " + to_string(found->second->device()));
    } else {
      entry.fp8->share(*found->second);
    }
  });
  return status;
}

namespace {

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(shape[i]);
  }
  return text + "]";
}

bool one_float(const Tensor& tensor) {
  return tensor.dtype() == DType::kF32 && tensor.numel() == 1;
}

// The FP8 type whose largest value is in `fp8_max`; kF32 if the tensor is null or has another
// value.
Result<DType> scaled_dtype(const Tensor* fp8_max) {
  if (fp8_max == nullptr) return DType::kF32;
  TE_FL_ASSIGN_OR_RETURN(const Tensor host, fp8_max->to(Device()));
  return detail::dtype_of_largest(*host.data<float>());
}

// Checks the tensors of a file against the module's tensors of the same names.
class StateChecker {
 public:
  StateChecker(const std::vector<NamedTensor>& tensors, std::string_view source,
               const std::function<bool(std::string_view)>& skip)
      : source_(source) {
    for (const NamedTensor& t : tensors) {
      if (skip != nullptr && skip(t.name)) continue;
      if (!by_name_.emplace(t.name, &t.tensor).second && twice_.empty()) twice_ = t.name;
    }
  }

  const Tensor* find(const std::string& name) {
    wanted_.push_back(name);
    auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

  Status check_parameter(const std::string& name, const Tensor& target) {
    const Tensor* tensor = find(name);
    if (tensor == nullptr) {
      return error(name, "is missing; the module needs it as " + target.describe(),
                   StatusCode::kNotFound);
    }
    if (tensor->dtype() != target.dtype() || tensor->quantized() ||
        !std::ranges::equal(tensor->shape(), target.shape())) {
      return mismatch(name, *tensor,
                      std::string(te_fl::name(target.dtype())) + shape_text(target.shape()));
    }
    return {};
  }

  // Checks an FP8-only parameter: the file has FP8 data with a scale, or high-precision data that
  // will be quantised.
  Status check_codes(const std::string& name, const Tensor& target) {
    const Tensor* tensor = find(name);
    const std::string scale_name = name + ".scale_inv";
    const Tensor* scale = find(scale_name);
    const Tensor* amax = find(name + ".amax");
    const std::string shape = shape_text(target.shape());
    if (tensor == nullptr) {
      return error(name, "is missing; the module needs it as " + target.describe(),
                   StatusCode::kNotFound);
    }
    const bool codes = tensor->dtype() == target.dtype();
    if ((!codes && !is_high(tensor->dtype())) || tensor->quantized() ||
        !std::ranges::equal(tensor->shape(), target.shape())) {
      return mismatch(name, *tensor,
                      std::string(te_fl::name(target.dtype())) + shape + ", or f32, bf16 or f16");
    }
    if (codes != (scale != nullptr)) {
      return error(scale_name,
                   codes ? "is missing; the codes are multiplied by it"
                         : "is given although the values of " + name + " are no codes",
                   codes ? StatusCode::kNotFound : StatusCode::kInvalidArgument);
    }
    if (codes && !one_float(*scale)) return mismatch(scale_name, *scale, "f32[1]");
    if (amax == nullptr || (codes && one_float(*amax))) return {};
    return codes
               ? mismatch(name + ".amax", *amax, "f32[1]")
               : error(name + ".amax", "is given although the values of " + name + " are no codes",
                       StatusCode::kInvalidArgument);
  }

  Status check(const std::string& name, const Parameter& parameter) {
    TE_FL_RETURN_IF_ERROR(detail::check_writable(source_, name, parameter));
    return parameter.internals().fp8_values != nullptr ? check_codes(name, parameter.value)
                                                       : check_parameter(name, parameter.value);
  }

  Status check_fp8(const std::string& path, const detail::Fp8State& state) {
    const int64_t slots = state.slots();
    const Tensor* scale = find(path + ".scale");
    const Tensor* history = find(path + ".amax_history");
    const Tensor* largest = find(path + ".fp8_max");
    if (scale == nullptr && history == nullptr && largest == nullptr) return {};
    if (scale == nullptr || history == nullptr) {
      const std::string absent = path + (scale == nullptr ? ".scale" : ".amax_history");
      return error(absent, "is missing although the other half of the FP8 state is there",
                   StatusCode::kNotFound);
    }
    const std::string n = std::to_string(slots);
    if (scale->dtype() != DType::kF32 || scale->rank() != 1 || scale->size(0) != slots) {
      return mismatch(path + ".scale", *scale, "f32[" + n + "]");
    }
    if (history->dtype() != DType::kF32 || history->rank() != 2 || history->size(0) < 1 ||
        history->size(1) != slots) {
      return mismatch(path + ".amax_history", *history, "f32[length >= 1," + n + "]");
    }
    if (Status status = state.check_length(history->size(0)); !status) {
      return status.wrap(std::string(source_) + ": tensor " + path + ".amax_history");
    }
    if (largest == nullptr) return {};
    if (!one_float(*largest)) return mismatch(path + ".fp8_max", *largest, "f32[1]");
    TE_FL_ASSIGN_OR_RETURN(const DType dtype, scaled_dtype(largest));
    if (dtype != DType::kF32) return {};
    return error(path + ".fp8_max",
                 "is the largest value of no FP8 type; it is 448 of E4M3 or 57344 of E5M2",
                 StatusCode::kInvalidArgument);
  }

  Status check_names() const {
    if (!twice_.empty()) return error(twice_, "is given twice", StatusCode::kInvalidArgument);
    for (const auto& [name, tensor] : by_name_) {
      if (std::find(wanted_.begin(), wanted_.end(), name) != wanted_.end()) continue;
      std::string near = environment::nearest(name, wanted_);
      return error(name, "is not in the module" + (near.empty() ? "" : "; the nearest is " + near),
                   StatusCode::kNotFound);
    }
    return {};
  }

 private:
  Status error(const std::string& name, const std::string& what, StatusCode code) const {
    Status status(code, std::string(source_) + ": tensor " + name + " " + what);
    status.set_clean();
    return status;
  }
  Status mismatch(const std::string& name, const Tensor& tensor, const std::string& want) const {
    return error(name, "is " + tensor.describe() + "; it must be " + want,
                 StatusCode::kInvalidArgument);
  }

  std::string_view source_;
  std::map<std::string, const Tensor*, std::less<>> by_name_;
  std::vector<std::string> wanted_;
  std::string twice_;
};

// True if an update has set the scales [slots]: a scale differs from the initial 1, or the history
// [length, slots] has an amax outside of row 0. Waits for the device.
Result<bool> calibrated(const Tensor& history, const Tensor& scale) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor scales, scale.to(Device()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows, history.to(Device()));
  const float *s = scales.data<float>(), *h = rows.data<float>();
  return std::any_of(s, s + scales.numel(), [](float v) { return v != 1; }) ||
         std::any_of(h + rows.size(1), h + rows.numel(), [](float v) { return v != 0; });
}

// Returns a copy of `tensor` on `device`, so that a failure during loading leaves no partial state.
// Returns the tensor itself if it is on the device and is not one of the module's `own` tensors,
// which will be overwritten.
Result<Tensor> staged(const Tensor& tensor, const Device& device,
                      const std::vector<NamedTensor>& own) {
  const bool usable = tensor.device() == device && tensor.contiguous() &&
                      std::none_of(own.begin(), own.end(), [&](const NamedTensor& o) {
                        return detail::shares_memory(o.tensor, tensor);
                      });
  return usable ? Result<Tensor>(tensor) : tensor.to(device);
}

Status load_scales(detail::Fp8State& state, const Tensor& history, const Tensor& scale,
                   const Tensor* fp8_max, const Result<bool>& set) {
  if (!set.ok()) return set.status();
  TE_FL_ASSIGN_OR_RETURN(const DType dtype, scaled_dtype(fp8_max));
  return state.load(history, scale, *set, dtype);
}

// Writes a loaded tensor into the parameter. If `scale_inv` is defined, `tensor` is FP8 data.
Status load_parameter(const Tensor& tensor, const Tensor& scale_inv, const Tensor& amax,
                      const Parameter& parameter) {
  if (scale_inv.defined()) return detail::load_codes(tensor, scale_inv, amax, parameter.value);
  if (parameter.internals().fp8_values == nullptr) return detail::copy(tensor, parameter.value);
  return parameter.internals().fp8_values->write(tensor, parameter.value, true);
}

}  // namespace

Status Fp8States::load(const std::vector<NamedTensor>& tensors, std::string_view source) {
  StateChecker checker(tensors, source, nullptr);
  for (const auto& [name, state] : shared_->states) {
    TE_FL_RETURN_IF_ERROR(checker.check_fp8(name, *state));
  }
  TE_FL_RETURN_IF_ERROR(checker.check_names());
  const std::vector<NamedTensor> own = state();
  std::map<std::string, std::pair<Tensor, Tensor>> ready;  // loaded histories and scales by name
  for (const auto& [name, state] : shared_->states) {
    const Tensor *history = checker.find(name + ".amax_history"),
                 *scale = checker.find(name + ".scale");
    if (scale == nullptr) continue;
    TE_FL_ASSIGN_OR_RETURN(ready[name].first, staged(*history, state->device(), own));
    TE_FL_ASSIGN_OR_RETURN(ready[name].second, staged(*scale, state->device(), own));
  }
  for (const auto& [name, state] : shared_->states) {
    const auto found = ready.find(name);
    if (found == ready.end()) {
      TE_FL_RETURN_IF_ERROR(state->reset());
      continue;
    }
    const auto& [history, scale] = found->second;
    TE_FL_RETURN_IF_ERROR(load_scales(*state, history, scale, checker.find(name + ".fp8_max"),
                                      calibrated(history, scale)));
  }
  return {};
}

Status Module::check_state(const std::vector<NamedTensor>& tensors, std::string_view source,
                           const Skip& skip) const {
  return check(tensors, source, skip, true);
}
Status Module::load_state(const std::vector<NamedTensor>& tensors, std::string_view source,
                          const Skip& skip) {
  return load(tensors, source, skip, true);
}
Status Module::load_fp8_state(const std::vector<NamedTensor>& tensors, std::string_view source) {
  return load(tensors, source, nullptr, false);
}

Status Module::check(const std::vector<NamedTensor>& tensors, std::string_view source,
                     const Skip& skip, bool parameters) const {
  StateChecker checker(tensors, source, skip);
  Status status;
  tree_->walk([&](const std::string& path, const Tree::Entry& entry) {
    if (!status.ok()) return;
    if (entry.parameter == nullptr) {
      status = checker.check_fp8(path, *entry.fp8);
    } else if (parameters) {
      status = checker.check(path, *entry.parameter);
    }
  });
  TE_FL_RETURN_IF_ERROR(status);
  return checker.check_names();
}

Status Module::load(const std::vector<NamedTensor>& tensors, std::string_view source,
                    const Skip& skip, bool parameters) {
  TE_FL_RETURN_IF_ERROR(check(tensors, source, skip, parameters));
  const std::vector<NamedTensor> own = state();
  std::unordered_map<std::string, Device> devices;  // target device of each tensor
  tree_->walk([&](const std::string& path, const Tree::Entry& entry) {
    if (entry.parameter != nullptr) {
      devices.emplace(path, entry.parameter->value.device());
      devices.emplace(path + ".scale_inv", entry.parameter->value.device());
      devices.emplace(path + ".amax", entry.parameter->value.device());
    } else {
      devices.emplace(path + ".scale", entry.fp8->device());
      devices.emplace(path + ".amax_history", entry.fp8->device());
      devices.emplace(path + ".fp8_max", Device());
    }
  });
  std::unordered_map<std::string, Tensor> originals, ready;
  for (const NamedTensor& t : tensors) {
    if (skip != nullptr && skip(t.name)) continue;
    TE_FL_ASSIGN_OR_RETURN(Tensor tensor, staged(t.tensor, devices.at(t.name), own));
    originals.emplace(t.name, t.tensor);
    ready.emplace(t.name, std::move(tensor));
  }
  Status status;
  tree_->walk([&](const std::string& path, const Tree::Entry& entry) {
    if (!status.ok()) return;
    if (entry.parameter != nullptr) {
      if (!parameters) return;
      const auto part = [&](const char* name) {
        const auto found = ready.find(path + name);
        return found == ready.end() ? Tensor() : found->second;
      };
      status = load_parameter(ready.at(path), part(".scale_inv"), part(".amax"), *entry.parameter);
      ++entry.parameter->version;
      return;
    }
    auto scale = ready.find(path + ".scale");
    if (scale == ready.end()) {
      status = entry.fp8->reset();
      return;
    }
    const std::string history = path + ".amax_history";
    const auto largest = ready.find(path + ".fp8_max");
    status = load_scales(*entry.fp8, ready.at(history), scale->second,
                         largest == ready.end() ? nullptr : &largest->second,
                         calibrated(originals.at(history), originals.at(path + ".scale")));
  });
  return status;
}

}  // namespace te_fl::nn
