#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "te_fl/plugin.h"

// Bytes up to and including a member: the least struct_size that has it.
#define TE_FL_SIZE_THROUGH(type, member) (offsetof(type, member) + sizeof(type::member))

namespace te_fl::core {

// A struct that comes from outside must hold at least so many bytes (R3). These are sizes of ABI
// 0.9: from 2.0 on they stay when a struct grows, so that what was built with earlier headers is
// still read.
inline constexpr uint32_t kLeastTensor = TE_FL_SIZE_THROUGH(te_fl_tensor, quant);
inline constexpr uint32_t kLeastQuant = TE_FL_SIZE_THROUGH(te_fl_quant, columnwise_amax);
inline constexpr uint32_t kLeastSaved = TE_FL_SIZE_THROUGH(te_fl_saved, storage);
inline constexpr uint32_t kLeastCommunicator = TE_FL_SIZE_THROUGH(te_fl_communicator, self);
inline constexpr uint32_t kLeastArgDesc = TE_FL_SIZE_THROUGH(te_fl_arg_desc, max);
inline constexpr uint32_t kLeastSchema = TE_FL_SIZE_THROUGH(te_fl_op_schema, source);
inline constexpr uint32_t kLeastOpDesc = TE_FL_SIZE_THROUGH(te_fl_op_desc, run);
inline constexpr uint32_t kLeastDeviceApi = TE_FL_SIZE_THROUGH(te_fl_device_api, properties);
inline constexpr uint32_t kLeastAllocator = TE_FL_SIZE_THROUGH(te_fl_allocator, record_stream);
inline constexpr uint32_t kLeastDeviceDesc = TE_FL_SIZE_THROUGH(te_fl_device_desc, api);
inline constexpr uint32_t kLeastPluginApi = TE_FL_SIZE_THROUGH(te_fl_plugin_api, destroy);
inline constexpr uint32_t kLeastHeader = TE_FL_SIZE_THROUGH(te_fl_plugin_header, api);
inline constexpr uint32_t kLeastSetting = TE_FL_SIZE_THROUGH(te_fl_setting_desc, doc);
inline constexpr uint32_t kLeastCommDesc = TE_FL_SIZE_THROUGH(te_fl_comm_desc, api);
inline constexpr uint32_t kLeastCommApi = TE_FL_SIZE_THROUGH(te_fl_comm_api, version);
inline constexpr uint32_t kLeastFinding = TE_FL_SIZE_THROUGH(te_fl_finding, state);

// No struct of the ABI is near this size; a greater struct_size is garbage.
inline constexpr uint32_t kMaxStructSize = 1u << 16;

inline uint32_t struct_size_of(const void* raw) noexcept {
  uint32_t size = 0;
  std::memcpy(&size, raw, sizeof size);
  return size;
}

// sizeof of every struct that begins with struct_size is a multiple of this, and none of their
// members that may be absent is cut by such a size: each lies in one word, or consists of them.
inline constexpr uint32_t kStructWord = 8;

// Only whole members of a struct of `size` are copied into one of `ours`: where `size` is that of
// no struct, the member in which it ends counts as absent.
constexpr size_t copied_size(uint32_t size, size_t ours) noexcept {
  const size_t whole = size / kStructWord * kStructWord;
  return whole < ours ? whole : ours;
}

// A copy of an ABI struct that begins with struct_size and may be shorter or longer than ours (R3):
// members it lacks keep their neutral value, members we do not know are dropped.
template <class T>
T copy_struct(const void* raw) noexcept {
  static_assert(alignof(T) == kStructWord);
  T out{};
  std::memcpy(static_cast<void*>(&out), raw, copied_size(struct_size_of(raw), sizeof(T)));
  out.struct_size = sizeof(T);
  return out;
}

// Is the size large enough for what the reader needs, small enough to be one, and that of a struct?
constexpr bool plausible_size(uint32_t size, size_t minimum) noexcept {
  return size >= minimum && size <= kMaxStructSize && size % kStructWord == 0;
}
// Says what is wrong with one that is not: "struct_size 3, must be ...".
inline std::string size_text(uint32_t size, size_t minimum) {
  return "struct_size " + std::to_string(size) + ", must be from " + std::to_string(minimum) +
         " to " + std::to_string(kMaxStructSize) + " and a multiple of " +
         std::to_string(kStructWord) + ", as sizeof the struct is (rule R3)";
}

}  // namespace te_fl::core
