// Argument structs and schemas of the custom ops that the fault plugins register (rule R17).
#pragma once

#include <cstddef>
#include <cstdint>

#include "te_fl/plugin.h"

namespace fault {

// "fault::scale": output = input * factor + bias. A later version of the op added `bias`.
struct ScaleArgs {
  uint32_t struct_size = sizeof(ScaleArgs);
  const te_fl_tensor* input = nullptr;
  const te_fl_tensor* output = nullptr;
  float factor = 1;
  float bias = 0;
};

// "fault::forward" and "fault::backward": the forward saves a record that the backward reads.
struct RecordArgs {
  uint32_t struct_size = sizeof(RecordArgs);
  const te_fl_tensor* input = nullptr;
  const te_fl_tensor* output = nullptr;
  te_fl_saved* saved = nullptr;
};

constexpr te_fl_arg_desc tensor(const char* name, te_fl_arg_role role, uint32_t offset) {
  te_fl_arg_desc d{};
  d.struct_size = sizeof d;
  d.type = TE_FL_ARG_TENSOR;
  d.role = static_cast<uint8_t>(role);
  d.offset = offset;
  d.dtypes = TE_FL_BIT(TE_FL_F32);
  d.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
  d.name = name;
  d.shape = "...";
  return d;
}

constexpr te_fl_arg_desc number(const char* name, uint32_t offset, uint32_t flags, double neutral) {
  te_fl_arg_desc d{};
  d.struct_size = sizeof d;
  d.type = TE_FL_ARG_F32;
  d.flags = flags;
  d.offset = offset;
  d.name = name;
  d.neutral = neutral;
  return d;
}

constexpr te_fl_arg_desc record(te_fl_arg_role role) {
  te_fl_arg_desc d{};
  d.struct_size = sizeof d;
  d.type = TE_FL_ARG_SAVED;
  d.role = static_cast<uint8_t>(role);
  d.flags = TE_FL_ARG_OPTIONAL;
  d.offset = offsetof(RecordArgs, saved);
  d.name = "saved";
  return d;
}

constexpr te_fl_op_schema schema(const char* name, uint32_t size, uint32_t least_size,
                                 uint32_t count, const te_fl_arg_desc* const* args) {
  te_fl_op_schema s{};
  s.struct_size = sizeof s;
  s.args_size = size;
  s.least_args_size = least_size;
  s.arg_count = count;
  s.args = args;
  s.name = name;
  s.summary = "for tests";
  s.formula = "see tests/fault/fault_ops.h";
  s.source = "tests";
  return s;
}

inline constexpr te_fl_arg_desc kScaleIn = tensor("input", TE_FL_IN, offsetof(ScaleArgs, input));
inline constexpr te_fl_arg_desc kScaleOut =
    tensor("output", TE_FL_OUT, offsetof(ScaleArgs, output));
inline constexpr te_fl_arg_desc kScaleFactor = number("factor", offsetof(ScaleArgs, factor), 0, 1);
inline constexpr te_fl_arg_desc kScaleBias =
    number("bias", offsetof(ScaleArgs, bias), TE_FL_ARG_LATER, 0);
inline constexpr const te_fl_arg_desc* kScaleList[] = {&kScaleIn, &kScaleOut, &kScaleFactor,
                                                       &kScaleBias};
inline constexpr te_fl_op_schema kScale =
    schema("fault::scale", sizeof(ScaleArgs), offsetof(ScaleArgs, bias), 4, kScaleList);

inline constexpr te_fl_arg_desc kRecordIn = tensor("input", TE_FL_IN, offsetof(RecordArgs, input));
inline constexpr te_fl_arg_desc kRecordOut =
    tensor("output", TE_FL_OUT, offsetof(RecordArgs, output));
inline constexpr te_fl_arg_desc kRecordWritten = record(TE_FL_OUT);
inline constexpr te_fl_arg_desc kRecordRead = record(TE_FL_IN);
inline constexpr const te_fl_arg_desc* kForwardList[] = {&kRecordIn, &kRecordOut, &kRecordWritten};
inline constexpr const te_fl_arg_desc* kBackwardList[] = {&kRecordIn, &kRecordOut, &kRecordRead};
inline constexpr te_fl_op_schema kForward =
    schema("fault::forward", sizeof(RecordArgs), sizeof(RecordArgs), 3, kForwardList);
inline constexpr te_fl_op_schema kBackward =
    schema("fault::backward", sizeof(RecordArgs), sizeof(RecordArgs), 3, kBackwardList);

}  // namespace fault
