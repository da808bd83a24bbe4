#include "te_fl/nn/optim/optimizer.hpp"

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "core/base/fork.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/autograd/step_capture.hpp"
#include "nn/base/capture.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/autocast.hpp"
#include "nn/fp8/fp8_values.hpp"
#include "nn/fp8/weight_copy.hpp"
#include "te_fl/log.hpp"
#include "te_fl/nn/optim/loss_scaler.hpp"
#include "te_fl/watch.hpp"

namespace te_fl::nn {
namespace {

using Pointers = std::vector<const te_fl_tensor*>;

// True if a step has anything to do for the parameter.
bool trained(const Parameter& parameter) {
  return parameter.requires_grad && parameter.grad.defined();
}

// The optimizer's tensors for one parameter, none if it was frozen. master is undefined for F32
// parameters.
struct Slot {
  NamedParameter parameter;
  Tensor first;
  Tensor second;
  Tensor master;
  bool decays = true;
  size_t group = 0;  // as Optimizer::group_lr() counts
  Tensor fp8;        // the step under way quantises the parameter into it; undefined: nothing

  // For a parameter of codes alone, the step updates the master, and quantises it.
  bool of_codes() const { return parameter.value().quantized(); }
  bool mastered() const { return master.defined() && !of_codes(); }
};

size_t group_of(const NamedParameter& p, const std::vector<ParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].selects(p.name, p.value())) return i + 1;
  }
  return 0;
}

Result<std::vector<Slot>> make_slots(const std::vector<NamedParameter>& parameters,
                                     const DecayFilter& decay,
                                     const std::vector<ParamGroup>& groups, bool second) {
  std::vector<Slot> slots;
  for (const NamedParameter& p : parameters) {
    TE_FL_RETURN_IF_ERROR(detail::check_writable("Optimizer", p.name, *p.parameter));
    Slot slot;
    slot.parameter = p;
    slot.decays = decay == nullptr || decay(p.name, p.value());
    slot.group = group_of(p, groups);
    if (!p.parameter->requires_grad) {
      slots.push_back(std::move(slot));
      continue;
    }
    TE_FL_ASSIGN_OR_RETURN(slot.first, detail::empty_like(p.value(), DType::kF32));
    TE_FL_RETURN_IF_ERROR(detail::fill(slot.first, 0));
    if (second) {
      TE_FL_ASSIGN_OR_RETURN(slot.second, detail::empty_like(p.value(), DType::kF32));
      TE_FL_RETURN_IF_ERROR(detail::fill(slot.second, 0));
    }
    if (p.value().dtype() != DType::kF32) {
      TE_FL_ASSIGN_OR_RETURN(slot.master, detail::empty_like(p.value(), DType::kF32));
      const Tensor& preserved = p.parameter->initial_value;
      const bool initial = preserved.defined() && p.parameter->version == 0;
      TE_FL_ASSIGN_OR_RETURN(const Tensor from, initial ? preserved.to(p.value().device())
                                                        : Result<Tensor>(p.value()));
      TE_FL_RETURN_IF_ERROR(detail::copy_values(from, slot.master));
    }
    slots.push_back(std::move(slot));
  }
  return slots;
}

// The lists of one multi_tensor call: the groups, parameters with and without decay, with and
// without master weights or FP8 copies, go in separate calls.
struct Lists {
  Pointers grads, values, firsts, seconds, masters, fp8;
  bool empty() const { return grads.empty(); }
};

Lists collect(const std::vector<Slot>& slots, size_t group, bool decays, bool mastered,
              bool copied = false) {
  Lists lists;
  for (const Slot& slot : slots) {
    if (!trained(*slot.parameter.parameter) || slot.group != group || slot.decays != decays ||
        slot.mastered() != mastered || slot.fp8.defined() != copied) {
      continue;
    }
    lists.grads.push_back(slot.parameter.grad());
    lists.values.push_back(slot.of_codes() ? slot.master : slot.parameter.value());
    lists.firsts.push_back(slot.first);
    lists.seconds.push_back(slot.second);
    lists.masters.push_back(slot.master);
    lists.fp8.push_back(slot.fp8);
  }
  return lists;
}

template <class Args, class Member, class Count>
void set_list(Args& args, Member member, Count count, const Pointers& list) {
  args.*member = list.data();
  args.*count = static_cast<int64_t>(list.size());
}

Status copy_to_master(const Slot& slot) {
  return slot.master.defined() ? detail::copy_values(slot.parameter.value(), slot.master)
                               : Status();
}

// Does the last part of a step: the codes of FP8-only parameters from their new master weights.
Status write_codes(const std::vector<Slot>& slots) {
  for (const Slot& slot : slots) {
    const Parameter& parameter = *slot.parameter.parameter;
    if (!slot.of_codes() || !trained(parameter)) continue;
    TE_FL_RETURN_IF_ERROR(parameter.internals().fp8_values->write(slot.master, parameter.value));
  }
  return {};
}

Status check_once(const char* optimizer, const std::vector<NamedParameter>& parameters) {
  std::map<const Parameter*, const std::string*> seen;
  for (const NamedParameter& p : parameters) {
    const auto [first, fresh] = seen.emplace(p.parameter.get(), &p.name);
    if (fresh) continue;
    return invalid_argument(std::string(optimizer) + ": the parameter " + *first->second +
                            " is given again as " + p.name +
                            ", and would be updated twice in a step; give shared ones once");
  }
  return {};
}

Status check_non_negative(const char* optimizer, const char* field, float value) {
  if (std::isfinite(value) && value >= 0) return {};
  return invalid_argument(std::string(optimizer) + ": " + field + " is " + std::to_string(value) +
                          "; it must be finite and at least 0");
}

Status check_below_one(const char* optimizer, const char* field, float value) {
  if (value >= 0 && value < 1) return {};
  return invalid_argument(std::string(optimizer) + ": " + field + " is " + std::to_string(value) +
                          "; it must be at least 0 and less than 1");
}

// The weight decay of a group's parameters, as Optimizer::group_lr() counts.
template <class Options>
float decay_of(const Options& options, size_t group) {
  if (group == 0) return options.weight_decay;
  return options.groups[group - 1].weight_decay.value_or(options.weight_decay);
}

Pointers grads_of(const std::vector<NamedParameter>& parameters) {
  Pointers grads;
  for (const NamedParameter& p : parameters) {
    if (trained(*p.parameter)) grads.push_back(p.grad());
  }
  return grads;
}

// FAILED_PRECONDITION naming the first parameter whose gradient is an older step's, or not all
// there yet.
Status check_fresh(const char* who, const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& p : parameters) {
    TE_FL_RETURN_IF_ERROR(detail::check_writable(who, p.name, *p.parameter));
    if (p.parameter->requires_grad && p.parameter->internals().delayed_wgrads > 0) {
      return failed_precondition(std::string(who) + ": backwards have left the gradient of " +
                                 p.name +
                                 " to backward_dw(), which was not called since; call it "
                                 "on the module first");
    }
    if (!p.parameter->requires_grad || !p.parameter->internals().grad_stale) continue;
    return failed_precondition(
        std::string(who) + ": the gradient of " + p.name +
        " was cleared by clear_grad() and not written since, so it holds an earlier step's values; "
        "run a backward first, use zero_grad() where it is to count as zero, or give what you "
        "wrote yourself by Parameter::give_grad(gradient, true)");
  }
  return {};
}

// Ends the backwards that wrote the gradients, if nobody has: their scales' updates are still to be
// made.
Status end_backwards(const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& p : parameters) {
    const auto updates = std::exchange(p.parameter->internals().gradient_updates, nullptr);
    if (updates != nullptr) TE_FL_RETURN_IF_ERROR(updates->end());
  }
  return {};
}

Status norm_into(const Pointers& tensors, const Tensor& norm) {
  if (tensors.empty()) return detail::fill(norm, 0);
  te_fl_multi_tensor_l2norm_args args{};
  args.inputs = tensors.data();
  args.inputs_count = static_cast<int64_t>(tensors.size());
  args.norm = norm;
  return ops::multi_tensor_l2norm(args, detail::call_options(norm.device()));
}

// The norm of the ranks' parts of divided gradients, and of those that each of them has: the norm
// of a vector of norms.
Status whole_norm_into(const std::vector<NamedParameter>& parameters, const Comm& ranks,
                       const Tensor& norm) {
  Pointers divided, whole;
  for (const NamedParameter& p : parameters) {
    if (!trained(*p.parameter)) continue;
    (p.parameter->shard.whole.empty() ? whole : divided).push_back(p.grad());
  }
  const int64_t n = ranks.size();
  TE_FL_ASSIGN_OR_RETURN(const Tensor norms, Tensor::empty({n + 1}, DType::kF32, norm.device()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor gathered, norms.slice(0, 0, n));
  TE_FL_ASSIGN_OR_RETURN(const Tensor common, norms.slice(0, n, n + 1));
  TE_FL_ASSIGN_OR_RETURN(const Tensor own, Tensor::empty({1}, DType::kF32, norm.device()));
  TE_FL_RETURN_IF_ERROR(norm_into(divided, own));
  TE_FL_RETURN_IF_ERROR(norm_into(whole, common));
  te_fl_all_gather_args args{};
  args.input = own;
  args.output = gathered;
  args.comm = ranks.c();
  TE_FL_RETURN_IF_ERROR(ops::all_gather(args, detail::call_options(norm.device())));
  return norm_into({norms}, norm);
}

Status grad_norm_into(const std::vector<NamedParameter>& parameters, const Comm* ranks,
                      const Tensor& norm) {
  if (ranks != nullptr && ranks->size() > 1) return whole_norm_into(parameters, *ranks, norm);
  return norm_into(grads_of(parameters), norm);
}

void set_in_place(te_fl_multi_tensor_scale_args& args, const Pointers& grads) {
  using Args = te_fl_multi_tensor_scale_args;
  set_list(args, &Args::inputs, &Args::inputs_count, grads);
  set_list(args, &Args::outputs, &Args::outputs_count, grads);
}

void append_state(std::vector<NamedTensor>& result, const std::vector<Slot>& slots,
                  const char* what, Tensor Slot::*member) {
  for (const Slot& slot : slots) {
    const Tensor& tensor = slot.*member;
    if (tensor.defined()) {
      result.push_back({std::string("optimizer.") + what + "." + slot.parameter.name, tensor});
    }
  }
}

}  // namespace

Result<float> clip_grad_norm(const std::vector<NamedParameter>& parameters, float max_norm,
                             const Comm* ranks) {
  if (!(max_norm > 0)) {
    return invalid_argument("clip_grad_norm: max_norm is " + std::to_string(max_norm) +
                            "; it must be greater than 0");
  }
  TE_FL_RETURN_IF_ERROR(check_fresh("clip_grad_norm", parameters));
  const Pointers grads = grads_of(parameters);
  const bool alone = ranks == nullptr || ranks->size() == 1;
  if (parameters.empty() || (grads.empty() && alone)) return 0.0f;
  const Device device = parameters.front().value().device();
  TE_FL_ASSIGN_OR_RETURN(Tensor norm, Tensor::empty({1}, DType::kF32, device));
  TE_FL_RETURN_IF_ERROR(grad_norm_into(parameters, ranks, norm));
  TE_FL_ASSIGN_OR_RETURN(float value, item(norm));
  if (!std::isfinite(value) || value <= max_norm || grads.empty()) return value;
  TE_FL_ASSIGN_OR_RETURN(Tensor flag, Tensor::empty({1}, DType::kI32, device));
  TE_FL_RETURN_IF_ERROR(detail::fill(flag, 0));
  te_fl_multi_tensor_scale_args scale_args{};
  set_in_place(scale_args, grads);
  scale_args.noop_flag = flag;
  scale_args.scale = max_norm / value;
  TE_FL_RETURN_IF_ERROR(ops::multi_tensor_scale(scale_args, detail::call_options(device)));
  return value;
}

Optimizer::Optimizer(std::vector<NamedParameter> parameters, float lr, float max_grad_norm)
    : parameters_(std::move(parameters)), lr_(lr), max_grad_norm_(max_grad_norm) {
  for (const NamedParameter& p : parameters_) stateless_.push_back(!p.parameter->requires_grad);
  set_steps(0);
}
Optimizer::~Optimizer() = default;

void Optimizer::set_steps(int64_t steps) noexcept {
  steps_ = steps;
  versions_.resize(parameters_.size());
  for (size_t i = 0; i < versions_.size(); ++i) versions_[i] = parameters_[i].parameter->version;
}

Status Optimizer::check_slots() const {
  for (size_t i = 0; i < stateless_.size(); ++i) {
    if (!stateless_[i] || !trained(*parameters_[i].parameter)) continue;
    return failed_precondition(
        "Optimizer::step: the parameter " + parameters_[i].name +
        " has a gradient but was frozen when the optimizer was created, which made no state for "
        "it; create the optimizer after unfreezing, or freeze the parameter again");
  }
  return {};
}

Status Optimizer::refresh_masters() {
  for (size_t i = 0; i < versions_.size(); ++i) {
    const uint64_t version = parameters_[i].parameter->version;
    if (versions_[i] == version) continue;
    TE_FL_RETURN_IF_ERROR(refresh_master(i));
    versions_[i] = version;
  }
  return {};
}

Device Optimizer::home() const {
  return parameters_.empty() ? Device() : parameters_.front().value().device();
}

const Tensor& Optimizer::grad_norm() const noexcept {
  static constinit std::atomic<const Tensor*> none{nullptr};
  return device_ != nullptr ? device_->grad_norm : core::made_once(none, [] { return new Tensor; });
}

Status Optimizer::make_capturable() {
  auto state = std::make_unique<OnDevice>();
  // One block, written by one copy: the step, then the learning rates.
  const auto rates = static_cast<int64_t>(lr_scales_.size());
  TE_FL_ASSIGN_OR_RETURN(Tensor block, Tensor::zeros({1 + (rates + 1) / 2}, DType::kI64, home()));
  TE_FL_ASSIGN_OR_RETURN(state->step, block.slice(0, 0, 1));
  auto owner = std::make_shared<Tensor>(block);
  const int64_t one[] = {1};
  for (int64_t i = 0; i < rates; ++i) {
    void* const at = reinterpret_cast<float*>(block.data<int64_t>() + 1) + i;
    TE_FL_ASSIGN_OR_RETURN(Tensor lr, Tensor::wrap(at, one, {}, DType::kF32, home(), owner));
    state->lr.push_back(std::move(lr));
  }
  // Before any capture, in which new memory would be the graph's.
  TE_FL_ASSIGN_OR_RETURN(flag_, Tensor::zeros({1}, DType::kI32, home()));
  if (max_grad_norm_ > 0) {
    TE_FL_ASSIGN_OR_RETURN(state->grad_norm, Tensor::zeros({1}, DType::kF32, home()));
  }
  device_ = std::move(state);
  return {};
}

Status Optimizer::write_state() {
  std::vector<std::byte> state(sizeof steps_ + lr_scales_.size() * sizeof(float));
  std::memcpy(state.data(), &steps_, sizeof steps_);
  for (size_t i = 0; i < lr_scales_.size(); ++i) {
    const float lr = group_lr(i);
    std::memcpy(state.data() + sizeof steps_ + i * sizeof lr, &lr, sizeof lr);
  }
  return devices::copy(home(), device_->step.raw_data(), Device(), state.data(), state.size(),
                       devices::current_stream(home()));
}

Status Optimizer::set_groups(const char* optimizer, const std::vector<ParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string who = std::string(optimizer) + ": groups[" + std::to_string(i) + "]";
    if (groups[i].selects == nullptr) {
      return invalid_argument(who + " selects nothing: its function is null");
    }
    TE_FL_RETURN_IF_ERROR(check_non_negative(who.c_str(), "lr_scale", groups[i].lr_scale));
    TE_FL_RETURN_IF_ERROR(
        check_non_negative(who.c_str(), "weight_decay", groups[i].weight_decay.value_or(0)));
    lr_scales_.push_back(groups[i].lr_scale);
  }
  return {};
}

Status Optimizer::set_lr_scale(size_t group, float scale) {
  if (group + 1 >= lr_scales_.size()) {
    return invalid_argument("Optimizer::set_lr_scale: the group is " + std::to_string(group) +
                            "; the optimizer was created with " +
                            std::to_string(lr_scales_.size() - 1));
  }
  TE_FL_RETURN_IF_ERROR(check_non_negative("Optimizer::set_lr_scale", "scale", scale));
  lr_scales_[group + 1] = scale;
  return {};
}

Status Optimizer::advance() {
  if (device_ == nullptr) {
    return failed_precondition(
        "Optimizer::advance: the optimizer was created without capturable = true, so no graph can "
        "have captured its step");
  }
  TE_FL_RETURN_IF_ERROR(refresh_masters());
  ++steps_;
  if (Status status = write_state(); !status) {
    --steps_;
    return status;
  }
  // All: the graph may have been captured when other ones were frozen.
  for (const NamedParameter& p : parameters_) ++p.parameter->version;
  set_steps(steps_);
  return {};
}

// Clips by the norm on the device; one that is not finite sets `noop`.
Status Optimizer::clip_on_device(const Tensor& noop) {
  const Pointers grads = grads_of(parameters_);
  TE_FL_RETURN_IF_ERROR(grad_norm_into(parameters_, norm_ranks_.get(), device_->grad_norm));
  if (grads.empty()) return {};
  te_fl_multi_tensor_scale_args args{};
  set_in_place(args, grads);
  args.noop_flag = noop;
  args.norm = device_->grad_norm;
  args.max_norm = max_grad_norm_;
  return ops::multi_tensor_scale(args, detail::call_options(home()));
}

// Divides the gradients by the scale, which is at least 1: the op's clipping to norm 1 does that,
// and it reads the scale when it runs.
Status Optimizer::unscale(LossScaler& scaler) {
  if (scaler.scale().device() != home()) {
    return invalid_argument("Optimizer::step: the scaler is on " +
                            to_string(scaler.scale().device()) + ", the parameters on " +
                            to_string(home()) + "; create it there (LossScalerOptions::device)");
  }
  if (!flag_.defined()) {
    TE_FL_ASSIGN_OR_RETURN(flag_, Tensor::empty({1}, DType::kI32, home()));
  }
  noop_ = flag_;
  TE_FL_RETURN_IF_ERROR(detail::fill(noop_, 0));
  scaler.watch(noop_);
  const Pointers grads = grads_of(parameters_);
  if (grads.empty()) return {};
  te_fl_multi_tensor_scale_args args{};
  set_in_place(args, grads);
  args.noop_flag = noop_;
  args.norm = scaler.scale();
  args.max_norm = 1;
  return ops::multi_tensor_scale(args, detail::call_options(home()));
}

// With max_grad_norm: clips, on the device or, unless the optimizer is capturable, on the host.
Status Optimizer::clip(const LossScaler* scaler) {
  if (max_grad_norm_ <= 0 || parameters_.empty()) return {};
  if (device_ != nullptr) {
    if (scaler != nullptr) return clip_on_device(noop_);
    noop_ = flag_;
    TE_FL_RETURN_IF_ERROR(detail::fill(noop_, 0));
    return clip_on_device(noop_);
  }
  TE_FL_ASSIGN_OR_RETURN(last_grad_norm_,
                         clip_grad_norm(parameters_, max_grad_norm_, norm_ranks_.get()));
  if (std::isfinite(last_grad_norm_)) return {};
  if (scaler != nullptr) return detail::fill(noop_, 1);
  return failed_precondition(
      "Optimizer::step: the gradient norm is " + std::to_string(last_grad_norm_) +
      "; parameters are left as they are (the loss diverged or a gradient overflowed)");
}

// Checks that the step that is being captured can be every launch's.
Status Optimizer::check_capture() const {
  if (device_ == nullptr) {
    return failed_precondition(
        "Optimizer::step: the stream is being captured into a graph, which would repeat this "
        "step's count and learning rate for ever; create the optimizer with capturable = true");
  }
  if (uncapturable_ != nullptr) return failed_precondition(uncapturable_);
  if (first_differs_ && steps_ == 0) {
    return failed_precondition(
        "Optimizer::step: the stream is being captured into a graph before the first step, which "
        "alone takes the gradient into the momentum without dampening; run a step before the "
        "capture");
  }
  if (detail::counted_in_capture(this)) return {};
  return failed_precondition(
      "Optimizer::step: the step that a GraphedStep captures has an optimizer that it does not "
      "count the steps of, nor give the learning rate to; name it in "
      "GraphedStepOptions::optimizer, and call any other one's step() outside");
}

Status Optimizer::step() { return step(nullptr); }
Status Optimizer::step(LossScaler& scaler) { return step(&scaler); }

Status Optimizer::step(LossScaler* scaler) {
  bool capturing = false;
  if (!home().is_host()) {
    TE_FL_ASSIGN_OR_RETURN(capturing,
                           devices::is_capturing(home(), devices::current_stream(home())));
  }
  if (capturing) TE_FL_RETURN_IF_ERROR(check_capture());
  TE_FL_RETURN_IF_ERROR(check_slots());
  TE_FL_RETURN_IF_ERROR(check_fresh("Optimizer::step", parameters_));
  TE_FL_RETURN_IF_ERROR(end_backwards(parameters_));
  noop_ = Tensor();
  if (scaler != nullptr) TE_FL_RETURN_IF_ERROR(unscale(*scaler));
  // On the host before anything is counted, since it may refuse the gradients.
  if (device_ == nullptr || capturing) TE_FL_RETURN_IF_ERROR(clip(scaler));
  if (capturing) return update(false);
  TE_FL_RETURN_IF_ERROR(refresh_masters());
  ++steps_;
  Status status;
  if (device_ != nullptr) status = write_state();
  if (status && device_ != nullptr) status = clip(scaler);
  if (status) status = update(steps_ == 1);
  if (!status) {
    --steps_;
    return status;
  }
  for (const NamedParameter& p : parameters_) p.parameter->version += trained(*p.parameter);
  set_steps(steps_);
  // An implementation that was found wrong goes out of service between two steps, whether or not it
  // can be noted.
  if (const Status noted = step_boundary(); !noted.ok()) {
    log::once(log::Level::kWarning, "step boundary", noted.to_string());
  }
  return {};
}

struct Adam::Impl {
  AdamOptions options;
  std::vector<Slot> slots;
};

Adam::Adam(std::vector<NamedParameter> parameters, const AdamOptions& options)
    : Optimizer(std::move(parameters), options.lr, options.max_grad_norm),
      impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
Adam::~Adam() = default;

Result<std::unique_ptr<Adam>> Adam::create(std::vector<NamedParameter> parameters,
                                           const AdamOptions& options) {
  TE_FL_RETURN_IF_ERROR(check_non_negative("Adam", "lr", options.lr));
  TE_FL_RETURN_IF_ERROR(check_below_one("Adam", "beta1", options.beta1));
  TE_FL_RETURN_IF_ERROR(check_below_one("Adam", "beta2", options.beta2));
  TE_FL_RETURN_IF_ERROR(check_non_negative("Adam", "epsilon", options.epsilon));
  TE_FL_RETURN_IF_ERROR(check_non_negative("Adam", "weight_decay", options.weight_decay));
  TE_FL_RETURN_IF_ERROR(check_non_negative("Adam", "max_grad_norm", options.max_grad_norm));
  TE_FL_RETURN_IF_ERROR(check_once("Adam", parameters));
  std::unique_ptr<Adam> adam(new Adam(std::move(parameters), options));
  TE_FL_RETURN_IF_ERROR(adam->set_groups("Adam", options.groups));
  TE_FL_ASSIGN_OR_RETURN(adam->impl_->slots,
                         make_slots(adam->parameters_, options.decay, options.groups, true));
  if (options.capturable) TE_FL_RETURN_IF_ERROR(adam->make_capturable());
  if (options.write_fp8_weights) {
    adam->uncapturable_ =
        "Adam::step: the stream is being captured into a graph, and the optimizer writes FP8 "
        "weights, of which only the host knows whether they are fresh; create it with "
        "write_fp8_weights = false";
  }
  return adam;
}

// The parameters of a group that decay or not, have masters or not, get FP8 copies or not.
Status Adam::update_some(size_t group, bool decays, bool mastered, bool copied) {
  using Args = te_fl_multi_tensor_adam_args;
  const AdamOptions& options = impl_->options;
  const Lists lists = collect(impl_->slots, group, decays, mastered, copied);
  if (lists.empty()) return {};
  Args args{};
  set_list(args, &Args::grads, &Args::grads_count, lists.grads);
  set_list(args, &Args::params, &Args::params_count, lists.values);
  set_list(args, &Args::exp_avgs, &Args::exp_avgs_count, lists.firsts);
  set_list(args, &Args::exp_avg_sqs, &Args::exp_avg_sqs_count, lists.seconds);
  if (mastered) set_list(args, &Args::master_params, &Args::master_params_count, lists.masters);
  if (copied) set_list(args, &Args::fp8_params, &Args::fp8_params_count, lists.fp8);
  args.lr = group_lr(group);
  args.beta1 = options.beta1;
  args.beta2 = options.beta2;
  args.epsilon = options.epsilon;
  args.weight_decay = decays ? decay_of(options, group) : 0;
  args.step = steps_;
  args.mode = options.adamw ? TE_FL_ADAM_MODE_ADAMW : TE_FL_ADAM_MODE_L2;
  args.bias_correction = options.bias_correction;
  args.noop_flag = noop();
  if (const OnDevice* state = on_device()) {
    args.lr_tensor = state->lr[group];
    args.step_tensor = state->step;
  }
  return ops::multi_tensor_adam(
      args, detail::call_options(impl_->slots.front().parameter.value().device()));
}

Status Adam::update(bool) {
  std::vector<std::pair<Slot*, std::shared_ptr<detail::WeightCopy>>> copies;
  for (Slot& slot : impl_->slots) slot.fp8 = Tensor();
  if (impl_->options.write_fp8_weights && detail::current_frame() == nullptr) {
    for (Slot& slot : impl_->slots) {
      const auto copy = slot.parameter.parameter->internals().fp8_copy.lock();
      if (copy == nullptr || !trained(*slot.parameter.parameter)) continue;
      TE_FL_ASSIGN_OR_RETURN(slot.fp8, copy->open(slot.parameter.value()));
      if (slot.fp8.defined()) copies.emplace_back(&slot, copy);
    }
  }
  Status status;
  for (size_t group = 0; group <= impl_->options.groups.size(); ++group) {
    for (bool decays : {true, false}) {
      for (bool mastered : {false, true}) {
        for (bool copied : {false, true}) {
          if (status) status = update_some(group, decays, mastered, copied);
        }
      }
    }
  }
  if (status) status = write_codes(impl_->slots);
  for (auto& [slot, copy] : copies) {
    slot->fp8 = Tensor();
    if (status) copy->commit(slot->parameter.parameter->version + 1);  // as step() counts it
  }
  return status;
}

Status Adam::refresh_master(size_t index) { return copy_to_master(impl_->slots[index]); }

std::vector<NamedTensor> Adam::state() const {
  std::vector<NamedTensor> result;
  append_state(result, impl_->slots, "exp_avg", &Slot::first);
  append_state(result, impl_->slots, "exp_avg_sq", &Slot::second);
  append_state(result, impl_->slots, "master", &Slot::master);
  return result;
}

struct SGD::Impl {
  SGDOptions options;
  std::vector<Slot> slots;
};

SGD::SGD(std::vector<NamedParameter> parameters, const SGDOptions& options)
    : Optimizer(std::move(parameters), options.lr, options.max_grad_norm),
      impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
SGD::~SGD() = default;

Result<std::unique_ptr<SGD>> SGD::create(std::vector<NamedParameter> parameters,
                                         const SGDOptions& options) {
  TE_FL_RETURN_IF_ERROR(check_non_negative("SGD", "lr", options.lr));
  TE_FL_RETURN_IF_ERROR(check_non_negative("SGD", "momentum", options.momentum));
  TE_FL_RETURN_IF_ERROR(check_non_negative("SGD", "dampening", options.dampening));
  TE_FL_RETURN_IF_ERROR(check_non_negative("SGD", "weight_decay", options.weight_decay));
  TE_FL_RETURN_IF_ERROR(check_non_negative("SGD", "max_grad_norm", options.max_grad_norm));
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    return invalid_argument("SGD: nesterov needs momentum greater than 0 and dampening 0");
  }
  TE_FL_RETURN_IF_ERROR(check_once("SGD", parameters));
  std::unique_ptr<SGD> sgd(new SGD(std::move(parameters), options));
  TE_FL_RETURN_IF_ERROR(sgd->set_groups("SGD", options.groups));
  sgd->first_differs_ = options.momentum != 0 && options.dampening != 0;
  TE_FL_ASSIGN_OR_RETURN(sgd->impl_->slots,
                         make_slots(sgd->parameters_, options.decay, options.groups, false));
  if (options.capturable) TE_FL_RETURN_IF_ERROR(sgd->make_capturable());
  return sgd;
}

Status SGD::update_some(size_t group, bool decays, bool mastered, bool first) {
  using Args = te_fl_multi_tensor_sgd_args;
  const SGDOptions& options = impl_->options;
  const Lists lists = collect(impl_->slots, group, decays, mastered);
  if (lists.empty()) return {};
  Args args{};
  set_list(args, &Args::grads, &Args::grads_count, lists.grads);
  set_list(args, &Args::params, &Args::params_count, mastered ? lists.masters : lists.values);
  set_list(args, &Args::momentums, &Args::momentums_count, lists.firsts);
  if (mastered) set_list(args, &Args::param_copies, &Args::param_copies_count, lists.values);
  args.lr = group_lr(group);
  args.weight_decay = decays ? decay_of(options, group) : 0;
  args.momentum = options.momentum;
  args.dampening = options.dampening;
  args.nesterov = options.nesterov;
  args.first_run = first;
  args.noop_flag = noop();
  if (const OnDevice* state = on_device()) args.lr_tensor = state->lr[group];
  return ops::multi_tensor_sgd(
      args, detail::call_options(impl_->slots.front().parameter.value().device()));
}

Status SGD::update(bool first) {
  for (size_t group = 0; group <= impl_->options.groups.size(); ++group) {
    for (bool decays : {true, false}) {
      for (bool mastered : {false, true}) {
        TE_FL_RETURN_IF_ERROR(update_some(group, decays, mastered, first));
      }
    }
  }
  return write_codes(impl_->slots);
}

Status SGD::refresh_master(size_t index) { return copy_to_master(impl_->slots[index]); }

std::vector<NamedTensor> SGD::state() const {
  std::vector<NamedTensor> result;
  append_state(result, impl_->slots, "momentum", &Slot::first);
  append_state(result, impl_->slots, "master", &Slot::master);
  return result;
}

}  // namespace te_fl::nn
