#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "te_fl/plugin.h"

// Reads the members of an argument struct by its schema. Members beyond struct_size count as absent
// (R3).
namespace te_fl::registry {

inline const void* member(uint32_t offset, size_t bytes, const void* args) noexcept {
  uint32_t size;
  std::memcpy(&size, args, sizeof size);
  return offset + bytes <= size ? static_cast<const char*>(args) + offset : nullptr;
}

template <class T>
T member_or(uint32_t offset, const void* args, T absent) noexcept {
  const void* at = member(offset, sizeof(T), args);
  if (at == nullptr) return absent;
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline const te_fl_tensor* tensor_argument(const te_fl_arg_desc& arg, const void* args) noexcept {
  return member_or<const te_fl_tensor*>(arg.offset, args, nullptr);
}

struct TensorList {
  const te_fl_tensor* const* data = nullptr;
  int64_t count = 0;
};

inline TensorList list_argument(const te_fl_arg_desc& arg, const void* args) noexcept {
  TensorList list;
  list.data = member_or<const te_fl_tensor* const*>(arg.offset, args, nullptr);
  list.count = member_or<int64_t>(arg.count_offset, args, 0);
  if (list.data == nullptr || list.count < 0) list.count = 0;
  return list;
}

struct IntegerList {
  const int64_t* data = nullptr;
  int64_t count = 0;
};

inline IntegerList integers_argument(const te_fl_arg_desc& arg, const void* args) noexcept {
  IntegerList list;
  list.data = member_or<const int64_t*>(arg.offset, args, nullptr);
  list.count = member_or<int64_t>(arg.count_offset, args, 0);
  if (list.data == nullptr || list.count < 0) list.count = 0;
  return list;
}

inline size_t scalar_bytes(const te_fl_arg_desc& arg) noexcept {
  return arg.type == TE_FL_ARG_I64 || arg.type == TE_FL_ARG_F64 ? 8 : 4;
}

// The arguments as text for messages: "input f32[2,3] cpu, output ...".
std::string describe_arguments(const te_fl_op_schema& schema, const void* args);

}  // namespace te_fl::registry
