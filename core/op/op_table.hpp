#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

namespace te_fl::core {

// The schemas of the catalogue, in OpId order, and the family of each op. Generated from
// ops/*.yaml.
std::span<const te_fl_op_schema* const> catalogue();
std::span<const char* const> catalogue_families();
// The ids of the ops (ops/ids.txt), ascending, without the ids of retired ops.
std::span<const uint32_t> catalogue_ids();

// Kinds of ops. An op computes on tensor data, or answers a query from metadata, or communicates
// with other ranks.
enum class OpClass : uint8_t { kCompute, kEnquiry, kCollective };
inline OpClass class_of(const te_fl_op_schema& schema) noexcept {
  if ((schema.flags & TE_FL_SCHEMA_ENQUIRY) != 0) return OpClass::kEnquiry;
  return (schema.flags & TE_FL_SCHEMA_COLLECTIVE) != 0 ? OpClass::kCollective : OpClass::kCompute;
}

// The properties of a call that an implementation's static constraints depend on.
struct Signature {
  uint64_t dtypes = 0;    // mask of te_fl_dtype_index over all tensor arguments present
  uint32_t scalings = 0;  // mask of te_fl_scaling
  uint32_t later = 0;  // mask of later-added arguments (R23) that differ from their neutral value
  uint32_t maker = 0;  // maker_number() of the call's communicator; 0: none
  Device device;       // the device of the tensor arguments; the host if there are none
  friend bool operator==(const Signature&, const Signature&) = default;
};

// The number of a plugin, assigned by name. It identifies the maker of communicators (R29) and the
// owner of implementations. At most kMaxMaker; 0 if the name is null or there is no memory to store
// it.
inline constexpr uint32_t kMaxMaker = 0xffff;
uint32_t maker_number(const char* plugin) noexcept;

struct CallLayout;  // defined in core/op/call_words.hpp

// A schema with compiled shape rules, validated. Immutable and thread-safe.
class CompiledOp {
 public:
  // Compiles a deep copy of the schema. An error names the argument and the rule that it violates.
  static Result<std::unique_ptr<const CompiledOp>> compile(const te_fl_op_schema& schema);
  ~CompiledOp();

  const te_fl_op_schema& schema() const noexcept;
  // Checks every argument and fills the signature: struct_size, required pointers, dtypes, scaling
  // modes and their required parts, shapes, devices, alignment, scalar ranges, enums, aliasing.
  // Reads metadata only and does not allocate. If it returns false, check_status() gives the
  // reason. A CallMemo recognises repeated calls without this check.
  bool check(const void* args, Signature& out) const noexcept;
  // The offsets of the members of the argument struct.
  const CallLayout& layout() const noexcept { return *layout_; }
  // The total size in bytes of the elements of all tensors of a valid call, including tensors in
  // lists. Does not count column-wise data and scales.
  uint64_t element_bytes(const void* args) const noexcept;
  // Computes only the signature, for routing decisions; does not check shapes or scalars.
  bool signature(const void* args, Signature& out) const noexcept;
  // The slow path of check(): the first error as text, with the argument, its value and the allowed
  // values.
  Status check_status(const void* args) const;
  // The mask of bits in Signature::later for the named arguments, separated by blanks; 0 for null.
  // INVALID_ARGUMENT if a name is not that of a later-added argument (R23) of the op.
  Result<uint32_t> later_mask(const char* names) const;
  // Names of the later-added arguments (R23) in the mask, in the op's order.
  std::string later_names(uint32_t mask) const;
  // The name of the first tensor argument whose dtype (or scaling) is outside the mask, for error
  // messages.
  std::string dtype_outside(const void* args, uint64_t mask) const;
  std::string scaling_outside(const void* args, uint32_t mask) const;
  // True if the contents of argument number `arg` before the call matter: the op reads them, or may
  // leave them unchanged.
  bool needs_contents(uint32_t arg, const void* args) const noexcept;
  // The te_fl_saved argument; null if the op has none or it is absent.
  te_fl_saved* saved(const void* args) const noexcept;
  // The communicator of a valid call; null if it has none.
  const te_fl_communicator* communicator(const void* args) const noexcept;
  // The first difference from another description with this name, as "gradient is none, not 'x'";
  // empty if they are equal (R17).
  std::string difference(const te_fl_op_schema& other) const;

  struct Impl;  // defined in core/op/compiled_op.hpp

 private:
  explicit CompiledOp(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  const CallLayout* layout_;  // owned by impl_
};

}  // namespace te_fl::core
