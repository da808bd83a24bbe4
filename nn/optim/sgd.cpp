#include <utility>

#include "nn/base/tensor_ops.hpp"
#include "nn/optim/optimizer_slots.hpp"
#include "te_fl/nn/optim/optimizer.hpp"

namespace te_fl::nn {

struct SGD::Impl {
  SGDOptions options;
  std::vector<detail::Slot> slots;
};

SGD::SGD(std::vector<NamedParameter> parameters, const SGDOptions& options)
    : Optimizer(std::move(parameters), options.lr, options.max_grad_norm),
      impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
SGD::~SGD() = default;

Result<std::unique_ptr<SGD>> SGD::create(std::vector<NamedParameter> parameters,
                                         const SGDOptions& options) {
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("SGD", "lr", options.lr));
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("SGD", "momentum", options.momentum));
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("SGD", "dampening", options.dampening));
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("SGD", "weight_decay", options.weight_decay));
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("SGD", "max_grad_norm", options.max_grad_norm));
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    return invalid_argument("SGD: nesterov needs momentum greater than 0 and dampening 0");
  }
  TE_FL_RETURN_IF_ERROR(detail::check_once("SGD", parameters));
  std::unique_ptr<SGD> sgd(new SGD(std::move(parameters), options));
  TE_FL_RETURN_IF_ERROR(sgd->set_groups("SGD", options.groups));
  sgd->first_differs_ = options.momentum != 0 && options.dampening != 0;
  TE_FL_ASSIGN_OR_RETURN(sgd->impl_->slots, detail::make_slots(sgd->parameters_, {}, options.decay,
                                                               options.groups, false));
  if (options.capturable) TE_FL_RETURN_IF_ERROR(sgd->make_capturable());
  return sgd;
}

Status SGD::update_some(size_t group, bool decays, bool mastered, bool first) {
  using Args = te_fl_multi_tensor_sgd_args;
  const SGDOptions& options = impl_->options;
  const detail::Lists lists = detail::collect(impl_->slots, group, decays, mastered);
  if (lists.empty()) return {};
  Args args{};
  detail::set_list(args, &Args::grads, &Args::grads_count, lists.grads);
  detail::set_list(args, &Args::params, &Args::params_count,
                   mastered ? lists.masters : lists.values);
  detail::set_list(args, &Args::momentums, &Args::momentums_count, lists.firsts);
  if (mastered)
    detail::set_list(args, &Args::param_copies, &Args::param_copies_count, lists.values);
  args.lr = group_lr(group);
  args.weight_decay = decays ? detail::decay_of(options, group) : 0;
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
  return detail::finish_values(impl_->slots, nullptr);
}

Status SGD::refresh_master(size_t index) { return detail::copy_to_master(impl_->slots[index]); }

std::vector<NamedTensor> SGD::state() const {
  std::vector<NamedTensor> result;
  detail::append_state(result, impl_->slots, "momentum", &detail::Slot::first);
  detail::append_state(result, impl_->slots, "master", &detail::Slot::master);
  return result;
}

}  // namespace te_fl::nn
