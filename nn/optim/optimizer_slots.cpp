#include "nn/optim/optimizer_slots.hpp"

#include <array>
#include <cmath>
#include <map>
#include <utility>

#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/fp8_values.hpp"

namespace te_fl::nn::detail {
namespace {

size_t find_group(const NamedParameter& p, const std::vector<ParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].selects(p.name, p.value())) return i + 1;
  }
  return 0;
}

// Allocates an F32 tensor for the slot's parameter, or for this rank's part of it.
Result<Tensor> empty_state(const Slot& slot) {
  const Tensor& value = slot.parameter.value();
  if (slot.part == nullptr) return empty_like(value, DType::kF32);
  return Tensor::empty({slot.part->end - slot.part->begin}, DType::kF32, value.device());
}

// Copies the slot's elements from `from`, which has the parameter's shape. Dequantises FP8 data.
Status copy_own(const Slot& slot, const Tensor& from, const Tensor& to) {
  if (slot.part == nullptr) return copy_values(from, to);
  Tensor high = from;
  if (from.quantized()) {
    TE_FL_ASSIGN_OR_RETURN(high, empty_like(from, DType::kF32));
    TE_FL_RETURN_IF_ERROR(copy_values(from, high));
  }
  TE_FL_ASSIGN_OR_RETURN(high, high.view({-1}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor own, high.slice(0, slot.part->begin, slot.part->end));
  return copy_values(own, to);
}

Status make_state(Slot& slot, bool second) {
  const Parameter& parameter = *slot.parameter.parameter;
  TE_FL_ASSIGN_OR_RETURN(slot.first, empty_state(slot));
  TE_FL_RETURN_IF_ERROR(fill(slot.first, 0));
  if (second) {
    TE_FL_ASSIGN_OR_RETURN(slot.second, empty_state(slot));
    TE_FL_RETURN_IF_ERROR(fill(slot.second, 0));
  }
  if (parameter.value.dtype() == DType::kF32) return {};
  TE_FL_ASSIGN_OR_RETURN(slot.master, empty_state(slot));
  const Tensor& preserved = parameter.initial_value;
  const bool initial = preserved.defined() && parameter.version == 0;
  TE_FL_ASSIGN_OR_RETURN(const Tensor from, initial ? preserved.to(parameter.value.device())
                                                    : Result<Tensor>(parameter.value));
  return copy_own(slot, from, slot.master);
}

}  // namespace

bool trained(const Parameter& parameter) {
  return parameter.requires_grad && parameter.grad.defined();
}

Result<std::vector<Slot>> make_slots(const std::vector<NamedParameter>& parameters,
                                     const std::vector<const OwnPart*>& parts,
                                     const DecayFilter& decay,
                                     const std::vector<ParamGroup>& groups, bool second) {
  std::vector<Slot> slots;
  for (const NamedParameter& p : parameters) {
    TE_FL_RETURN_IF_ERROR(check_writable("Optimizer", p.name, *p.parameter));
    Slot slot;
    slot.parameter = p;
    if (!parts.empty()) slot.part = parts[slots.size()];
    slot.decays = decay == nullptr || decay(p.name, p.value());
    slot.group = find_group(p, groups);
    const bool nothing = slot.part != nullptr && slot.part->empty();
    if (p.parameter->requires_grad && !nothing) TE_FL_RETURN_IF_ERROR(make_state(slot, second));
    slots.push_back(std::move(slot));
  }
  return slots;
}

Lists collect(const std::vector<Slot>& slots, size_t group, bool decays, bool mastered,
              bool copied) {
  Lists lists;
  for (const Slot& slot : slots) {
    if (!slot.updated() || slot.group != group || slot.decays != decays ||
        slot.mastered() != mastered || slot.fp8.defined() != copied) {
      continue;
    }
    lists.grads.push_back(slot.grad());
    lists.values.push_back(slot.of_codes() ? slot.master : slot.value());
    lists.firsts.push_back(slot.first);
    lists.seconds.push_back(slot.second);
    lists.masters.push_back(slot.master);
    lists.fp8.push_back(slot.fp8);
  }
  return lists;
}

Status copy_to_master(const Slot& slot) {
  return slot.master.defined() ? copy_own(slot, slot.parameter.value(), slot.master) : Status();
}

Status finish_values(const std::vector<Slot>& slots, const GradientBuckets* zero) {
  if (zero != nullptr) {
    std::vector<NamedParameter> parameters;
    std::vector<Tensor> masters;
    for (const Slot& slot : slots) {
      if (!trained(*slot.parameter.parameter)) continue;
      parameters.push_back(slot.parameter);
      masters.push_back(slot.of_codes() ? slot.master : Tensor());
    }
    return zero->gather_values(parameters, masters);
  }
  for (const Slot& slot : slots) {
    const Parameter& parameter = *slot.parameter.parameter;
    if (!slot.of_codes() || !trained(parameter)) continue;
    TE_FL_RETURN_IF_ERROR(parameter.internals().fp8_values->write(slot.master, parameter.value));
  }
  return {};
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

}  // namespace te_fl::nn::detail
