#pragma once

#include <string>
#include <vector>

#include "nn/optim/gradient_buckets.hpp"
#include "te_fl/nn/optim/param_group.hpp"

// The state that optimizers keep for each parameter, and its lists for the multi_tensor ops.
namespace te_fl::nn::detail {

using Pointers = std::vector<const te_fl_tensor*>;

// True if a step has anything to do for the parameter.
bool trained(const Parameter& parameter);

// The optimizer's tensors for one parameter, none if it was frozen. master is undefined for F32
// parameters.
struct Slot {
  NamedParameter parameter;
  const OwnPart* part = nullptr;  // with ZeRO, what the tensors below are of; null: the whole
  Tensor first;
  Tensor second;
  Tensor master;
  bool decays = true;
  size_t group = 0;  // as Optimizer::group_lr() counts
  Tensor fp8;        // the step under way quantises the parameter into it; undefined: nothing

  // For a parameter of codes alone, the step updates the master, and quantises it.
  bool of_codes() const { return parameter.value().quantized(); }
  bool mastered() const { return master.defined() && !of_codes(); }
  // True if a step updates what the tensors are of.
  bool updated() const { return trained(*parameter.parameter) && first.defined(); }
  const Tensor& grad() const { return part != nullptr ? part->grad : parameter.grad(); }
  const Tensor& value() const { return part != nullptr ? part->value : parameter.value(); }
};

// `second`: there is a second moment. `parts`: with ZeRO, what this rank has of each parameter,
// null for frozen ones; else empty.
Result<std::vector<Slot>> make_slots(const std::vector<NamedParameter>& parameters,
                                     const std::vector<const OwnPart*>& parts,
                                     const DecayFilter& decay,
                                     const std::vector<ParamGroup>& groups, bool second);

// The lists of one multi_tensor call: the groups, parameters with and without decay, with and
// without master weights or FP8 copies, go in separate calls.
struct Lists {
  Pointers grads, values, firsts, seconds, masters, fp8;
  bool empty() const { return grads.empty(); }
};

Lists collect(const std::vector<Slot>& slots, size_t group, bool decays, bool mastered,
              bool copied = false);

template <class Args, class Member, class Count>
void set_list(Args& args, Member member, Count count, const Pointers& list) {
  args.*member = list.data();
  args.*count = static_cast<int64_t>(list.size());
}

// Copies the parameter's present value to the master weight, if there is one.
Status copy_to_master(const Slot& slot);
// Does the last part of a step. With ZeRO (`zero` not null) every rank gets the values that the
// others have updated. FP8-only parameters get the codes of their new master weights.
Status finish_values(const std::vector<Slot>& slots, const GradientBuckets* zero);
void append_state(std::vector<NamedTensor>& result, const std::vector<Slot>& slots,
                  const char* what, Tensor Slot::*member);

// INVALID_ARGUMENT if a parameter is given twice.
Status check_once(const char* optimizer, const std::vector<NamedParameter>& parameters);
// INVALID_ARGUMENT names the field.
Status check_non_negative(const char* optimizer, const char* field, float value);
Status check_below_one(const char* optimizer, const char* field, float value);

// The weight decay of a group's parameters, as Optimizer::group_lr() counts.
template <class Options>
float decay_of(const Options& options, size_t group) {
  if (group == 0) return options.weight_decay;
  return options.groups[group - 1].weight_decay.value_or(options.weight_decay);
}

}  // namespace te_fl::nn::detail
