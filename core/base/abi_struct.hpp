#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "te_fl/plugin.h"

// Bytes from the start of a struct to the end of `member`: the smallest struct_size with which the
// struct contains that member.
#define TE_FL_SIZE_THROUGH(type, member) (offsetof(type, member) + sizeof(type::member))

namespace te_fl::core {

// The smallest struct_size that te-fl accepts for each ABI struct that it receives (rule R3). The
// values are the sizes of ABI 0.9. From 2.0 on they stay fixed when a struct grows, so that
// binaries built with earlier headers are still accepted.
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

// Each struct that begins with struct_size has a size that is a multiple of this. Every optional
// member lies within one word or consists of whole words, so that no such size cuts a member in
// two.
inline constexpr uint32_t kStructWord = 8;

// Number of bytes to copy from a struct of `size` bytes into one of `ours` bytes. Only whole
// members are copied: if `size` is not a multiple of kStructWord, the member in which it ends
// counts as absent.
constexpr size_t copied_size(uint32_t size, size_t ours) noexcept {
  const size_t whole = size / kStructWord * kStructWord;
  return whole < ours ? whole : ours;
}

// Copies an ABI struct that begins with struct_size and may be shorter or longer than ours (R3).
// Members that the source lacks keep their default value; members that we do not know are dropped.
template <class T>
T copy_struct(const void* raw) noexcept {
  static_assert(alignof(T) == kStructWord);
  T out{};
  std::memcpy(static_cast<void*>(&out), raw, copied_size(struct_size_of(raw), sizeof(T)));
  out.struct_size = sizeof(T);
  return out;
}

// True if `size` is at least `minimum`, at most kMaxStructSize, and a multiple of kStructWord.
constexpr bool plausible_size(uint32_t size, size_t minimum) noexcept {
  return size >= minimum && size <= kMaxStructSize && size % kStructWord == 0;
}
// The error text for a struct_size that plausible_size() refuses: "struct_size 3, must be ...".
inline std::string size_text(uint32_t size, size_t minimum) {
  return "struct_size " + std::to_string(size) + ", must be from " + std::to_string(minimum) +
         " to " + std::to_string(kMaxStructSize) + " and a multiple of " +
         std::to_string(kStructWord) + ", as sizeof the struct is (rule R3)";
}

}  // namespace te_fl::core
