#include <cmath>
#include <string>
#include <utility>

#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/autocast.hpp"
#include "nn/fp8/weight_copy.hpp"
#include "nn/optim/optimizer_slots.hpp"
#include "te_fl/nn/optim/optimizer.hpp"

namespace te_fl::nn {

struct Adam::Impl {
  AdamOptions options;
  std::vector<detail::Slot> slots;
};

Adam::Adam(std::vector<NamedParameter> parameters, const AdamOptions& options)
    : Optimizer(std::move(parameters), options.lr, options.max_grad_norm),
      impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
Adam::~Adam() = default;

Result<std::unique_ptr<Adam>> Adam::create(std::vector<NamedParameter> parameters,
                                           const AdamOptions& options) {
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("Adam", "lr", options.lr));
  TE_FL_RETURN_IF_ERROR(detail::check_below_one("Adam", "beta1", options.beta1));
  TE_FL_RETURN_IF_ERROR(detail::check_below_one("Adam", "beta2", options.beta2));
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("Adam", "epsilon", options.epsilon));
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("Adam", "weight_decay", options.weight_decay));
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("Adam", "max_grad_norm", options.max_grad_norm));
  TE_FL_RETURN_IF_ERROR(detail::check_once("Adam", parameters));
  std::unique_ptr<Adam> adam(new Adam(std::move(parameters), options));
  TE_FL_RETURN_IF_ERROR(adam->set_groups("Adam", options.groups));
  if (options.zero != nullptr) {
    TE_FL_RETURN_IF_ERROR(adam->divide("Adam", options.zero->buckets_));
  }
  if (options.write_fp8_weights && adam->zero_ != nullptr) {
    return invalid_argument(
        "Adam: write_fp8_weights does not go with zero: a rank updates a part of each weight, and "
        "its FP8 copy is of the whole; leave write_fp8_weights out");
  }
  TE_FL_ASSIGN_OR_RETURN(
      adam->impl_->slots,
      detail::make_slots(adam->parameters_, adam->parts_, options.decay, options.groups, true));
  if (options.capturable) TE_FL_RETURN_IF_ERROR(adam->make_capturable());
  if (options.write_fp8_weights) {
    adam->uncapturable_ =
        "Adam::step: the stream is being captured into a graph, and the optimizer writes FP8 "
        "weights, of which only the host knows whether they are fresh; create it with "
        "write_fp8_weights = false";
  }
  return adam;
}

// Updates the parameters of a group that match the three flags: with weight decay, with a master
// weight, with an FP8 copy.
Status Adam::update_some(size_t group, bool decays, bool mastered, bool copied) {
  using Args = te_fl_multi_tensor_adam_args;
  const AdamOptions& options = impl_->options;
  const detail::Lists lists = detail::collect(impl_->slots, group, decays, mastered, copied);
  if (lists.empty()) return {};
  Args args{};
  detail::set_list(args, &Args::grads, &Args::grads_count, lists.grads);
  detail::set_list(args, &Args::params, &Args::params_count, lists.values);
  detail::set_list(args, &Args::exp_avgs, &Args::exp_avgs_count, lists.firsts);
  detail::set_list(args, &Args::exp_avg_sqs, &Args::exp_avg_sqs_count, lists.seconds);
  if (mastered)
    detail::set_list(args, &Args::master_params, &Args::master_params_count, lists.masters);
  if (copied) detail::set_list(args, &Args::fp8_params, &Args::fp8_params_count, lists.fp8);
  args.lr = group_lr(group);
  args.beta1 = options.beta1;
  args.beta2 = options.beta2;
  args.epsilon = options.epsilon;
  args.weight_decay = decays ? detail::decay_of(options, group) : 0;
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
  std::vector<std::pair<detail::Slot*, std::shared_ptr<detail::WeightCopy>>> copies;
  for (detail::Slot& slot : impl_->slots) slot.fp8 = Tensor();
  if (impl_->options.write_fp8_weights && detail::current_frame() == nullptr) {
    for (detail::Slot& slot : impl_->slots) {
      const auto copy = slot.parameter.parameter->internals().fp8_copy.lock();
      if (copy == nullptr || !detail::trained(*slot.parameter.parameter)) continue;
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
  if (status) status = detail::finish_values(impl_->slots, zero_.get());
  for (auto& [slot, copy] : copies) {
    slot->fp8 = Tensor();
    if (status) copy->commit(slot->parameter.parameter->version + 1);  // set by step()
  }
  return status;
}

Status Adam::refresh_master(size_t index) { return detail::copy_to_master(impl_->slots[index]); }

std::vector<NamedTensor> Adam::state() const {
  std::vector<NamedTensor> result;
  detail::append_state(result, impl_->slots, "exp_avg", &detail::Slot::first);
  detail::append_state(result, impl_->slots, "exp_avg_sq", &detail::Slot::second);
  detail::append_state(result, impl_->slots, "master", &detail::Slot::master);
  return result;
}

}  // namespace te_fl::nn
