#pragma once

#include <string>
#include <vector>

#include "nn/optim/gradient_buckets.hpp"
#include "te_fl/nn/optim/param_group.hpp"

// The optimizer state of each parameter, and lists of tensors for the multi_tensor ops.
namespace te_fl::nn::detail {

using Pointers = std::vector<const te_fl_tensor*>;

// True if a step has to update the parameter.
bool trained(const Parameter& parameter);

// The optimizer's tensors for one parameter; undefined if it was frozen at creation. `master` is
// undefined for F32 parameters.
struct Slot {
  NamedParameter parameter;
  const OwnPart* part = nullptr;  // with ZeRO, the part that the tensors cover; null: the whole
  Tensor first;
  Tensor second;
  Tensor master;
  bool decays = true;
  size_t group = 0;  // index as in Optimizer::group_lr()
  Tensor fp8;        // output of this step's quantisation; undefined: none

  // True for an FP8-only parameter: the step updates the master weight and quantises it.
  bool of_codes() const { return parameter.value().quantized(); }
  bool mastered() const { return master.defined() && !of_codes(); }
  // True if a step updates the slot.
  bool updated() const { return trained(*parameter.parameter) && first.defined(); }
  const Tensor& grad() const { return part != nullptr ? part->grad : parameter.grad(); }
  const Tensor& value() const { return part != nullptr ? part->value : parameter.value(); }
};

// Makes the slots. `second`: the slots have a second moment. `parts`: with ZeRO, this rank's part
// of each parameter, null for a frozen parameter; without ZeRO, empty.
Result<std::vector<Slot>> make_slots(const std::vector<NamedParameter>& parameters,
                                     const std::vector<const OwnPart*>& parts,
                                     const DecayFilter& decay,
                                     const std::vector<ParamGroup>& groups, bool second);

// The tensor lists of one multi_tensor call. Parameters of different groups, with or without weight
// decay, master weight or FP8 copy, go into different calls.
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

// Copies the parameter's current value to the master weight, if there is one.
Status copy_to_master(const Slot& slot);
// Ends a step. With ZeRO (`zero` not null) gathers the parameter values that other ranks have
// updated. Quantises the new master weights of FP8-only parameters.
Status finish_values(const std::vector<Slot>& slots, const GradientBuckets* zero);
void append_state(std::vector<NamedTensor>& result, const std::vector<Slot>& slots,
                  const char* what, Tensor Slot::*member);

// INVALID_ARGUMENT if a parameter occurs twice.
Status check_once(const char* optimizer, const std::vector<NamedParameter>& parameters);
// INVALID_ARGUMENT with the name of the field.
Status check_non_negative(const char* optimizer, const char* field, float value);
Status check_below_one(const char* optimizer, const char* field, float value);

// The weight decay of a group; the index is as in Optimizer::group_lr().
template <class Options>
float decay_of(const Options& options, size_t group) {
  if (group == 0) return options.weight_decay;
  return options.groups[group - 1].weight_decay.value_or(options.weight_decay);
}

}  // namespace te_fl::nn::detail
