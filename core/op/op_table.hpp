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

// The catalogue's schemas in OpId order, and the family of each; generated from ops/*.yaml.
std::span<const te_fl_op_schema* const> catalogue();
std::span<const char* const> catalogue_families();
// Their ids (ops/ids.txt), rising. Ids of ops that were retired are left out.
std::span<const uint32_t> catalogue_ids();

// An op computes on tensors' data, only answers from metadata, or needs other ranks.
enum class OpClass : uint8_t { kCompute, kEnquiry, kCollective };
inline OpClass class_of(const te_fl_op_schema& schema) noexcept {
  if ((schema.flags & TE_FL_SCHEMA_ENQUIRY) != 0) return OpClass::kEnquiry;
  return (schema.flags & TE_FL_SCHEMA_COLLECTIVE) != 0 ? OpClass::kCollective : OpClass::kCompute;
}

// The part of a call that static constraints read.
struct Signature {
  uint64_t dtypes = 0;    // mask of te_fl_dtype_index over all tensor arguments present
  uint32_t scalings = 0;  // mask of te_fl_scaling
  uint32_t later = 0;     // the later arguments (R23) that are not at their neutral value
  uint32_t maker = 0;     // maker_number() of the call's communicator; 0: it has none
  Device device;          // of the tensor arguments; the host if there are none
  friend bool operator==(const Signature&, const Signature&) = default;
};

// The number of a plugin by its name, as a maker of communicators (R29) and as the owner of
// implementations; at most kMaxMaker. 0 if there is no name, or no memory to note it.
inline constexpr uint32_t kMaxMaker = 0xffff;
uint32_t maker_number(const char* plugin) noexcept;

struct CallLayout;  // core/op/call_words.hpp

// A schema with its shape rules compiled, checked for consistency. Immutable, thread-safe.
class CompiledOp {
 public:
  // Deep-copies the schema. Errors name the argument and the rule that it breaks.
  static Result<std::unique_ptr<const CompiledOp>> compile(const te_fl_op_schema& schema);
  ~CompiledOp();

  const te_fl_op_schema& schema() const noexcept;
  // Checks every argument and fills the signature: struct_size, pointers present, dtypes, scaling
  // modes and their required parts, shapes, devices, alignment, scalar ranges, enums, aliasing.
  // Metadata only, no allocation. false: check_status() says why. Calls like earlier ones are known
  // to a CallMemo without it.
  bool check(const void* args, Signature& out) const noexcept;
  // The offsets of the argument struct's members.
  const CallLayout& layout() const noexcept { return *layout_; }
  // Bytes of the elements of all tensors of a call that check() found in order, lists' too; copies
  // and scales are not counted.
  uint64_t element_bytes(const void* args) const noexcept;
  // The signature alone (no shape or scalar checks), for routing decisions.
  bool signature(const void* args, Signature& out) const noexcept;
  // The slow path: the first mistake in words, naming argument, what it was and what it must be.
  Status check_status(const void* args) const;
  // The bits in Signature::later of the arguments named, with blanks between them; null: none.
  // INVALID_ARGUMENT names one that is no later argument of the op.
  Result<uint32_t> later_mask(const char* names) const;
  // Names of the later arguments in the mask, in the op's order.
  std::string later_names(uint32_t mask) const;
  // The name of the first tensor argument whose dtype (scaling) lies outside the mask; for
  // refusals.
  std::string dtype_outside(const void* args, uint64_t mask) const;
  std::string scaling_outside(const void* args, uint32_t mask) const;
  // True if the contents of argument number `arg` before the call matter: the op reads them, or may
  // leave them as they were.
  bool needs_contents(uint32_t arg, const void* args) const noexcept;
  // The te_fl_saved argument, null if the op has none or it is not given.
  te_fl_saved* saved(const void* args) const noexcept;
  // The communicator of a call whose arguments check() found in order; null if it has none.
  const te_fl_communicator* communicator(const void* args) const noexcept;
  // In what another description under this name differs first, as "gradient is none, not 'x'";
  // empty if in nothing (R17).
  std::string difference(const te_fl_op_schema& other) const;

  struct Impl;  // core/compiled_op.hpp

 private:
  explicit CompiledOp(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  const CallLayout* layout_;  // of impl_
};

}  // namespace te_fl::core
