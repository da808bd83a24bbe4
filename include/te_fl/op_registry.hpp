#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/plugin.h"
#include "te_fl/policy.hpp"
#include "te_fl/status.hpp"

namespace te_fl {

// Index of an op in the op table. The catalogue's ops come first (te_fl/ops.hpp has constants),
// custom ops follow.
struct OpId {
  uint32_t index = UINT32_MAX;
  friend bool operator==(OpId, OpId) = default;
};

// Description of one registered implementation.
struct OpImplInfo {
  std::string op;
  std::string impl_id;
  Kind kind = Kind::kDefault;
  std::string vendor;
  int32_t priority = 0;
  std::string owner;     // "built-in" or the plugin's name
  te_fl_op_desc desc{};  // constraints and flags; its pointers are valid only while registered
};

// The implementations of all ops. Every function is thread-safe. Changes take effect on the next
// call and never disturb calls in flight; each change increments the epoch.
class TE_FL_API OpRegistry {
 public:
  OpRegistry();
  // The caller ensures that no call is in progress and that no stream used by its calls is being
  // captured. The destructor would wait for such a capture to end (R26).
  ~OpRegistry();
  OpRegistry(const OpRegistry&) = delete;
  OpRegistry& operator=(const OpRegistry&) = delete;

  // The registry behind OpManager::instance().
  static OpRegistry& instance();

  // Registers an implementation. The descriptor is copied. The functions, `self` and schema that it
  // points to must outlive the registration. `keep_alive` is held until no call can use the
  // implementation. Errors: unknown op (the message names the nearest), impl_id malformed (R16) or
  // already registered, missing run(), a schema that differs from the registered one (R17),
  // kDLExtDev without a provider (R18; here no plugin implies one).
  Status register_op(const te_fl_op_desc& desc, std::string owner = "built-in",
                     std::string vendor = "te-fl", std::shared_ptr<void> keep_alive = nullptr);
  // Registers several implementations, either all or none.
  Status register_ops(std::span<const te_fl_op_desc* const> descs, std::string owner,
                      std::string vendor, std::shared_ptr<void> keep_alive = nullptr);
  // Unregisters an implementation. Returns when every thread that was inside an op or a device
  // function has left it. Also waits for launches of graphs that captured a call of the
  // implementation; the caller must not launch these graphs again.
  //
  // BUSY, with nothing changed, if called from inside an op or a device function, or while a stream
  // is being captured that used a plan of the implementation with device memory (R26): end the
  // capture first. If another thread begins such a capture meanwhile, the function waits for its
  // end.
  Status unregister_op(std::string_view op, std::string_view impl_id);
  // Unregisters everything that `owner` registered, in the same way. OK if there is nothing. On
  // return, plans have been destroyed and keep_alive has been released.
  Status unregister_owner(std::string_view owner);
  Status set_priority(std::string_view op, std::string_view impl_id, int32_t priority);

  std::vector<OpImplInfo> snapshot() const;
  // The ops of the catalogue, followed by the custom ops.
  std::vector<std::string> op_names() const;
  // a misspelt name is an error that names the nearest op
  Result<OpId> find(std::string_view op) const;
  const te_fl_op_schema* schema(OpId op) const;  // null for an unknown op
  // Registers the schema of a custom op without an implementation.
  Result<OpId> declare_op(const te_fl_op_schema& schema);
  uint64_t epoch() const noexcept;

  struct Impl;
  Impl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl
