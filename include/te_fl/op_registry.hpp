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

// Index of an op in the op table: the catalogue first (te_fl/ops.hpp has constants), then custom
// ops.
struct OpId {
  uint32_t index = UINT32_MAX;
  friend bool operator==(OpId, OpId) = default;
};

// One registered implementation, as a snapshot shows it.
struct OpImplInfo {
  std::string op;
  std::string impl_id;
  Kind kind = Kind::kDefault;
  std::string vendor;
  int32_t priority = 0;
  std::string owner;     // "built-in" or the plugin's name
  te_fl_op_desc desc{};  // constraints and flags; the pointers are only valid while registered
};

// The implementations of all ops. Every function is thread-safe; changes take effect on the next
// call, through one epoch, and never disturb calls in flight.
class TE_FL_API OpRegistry {
 public:
  OpRegistry();
  // The caller sees to it that no call is going on and that no stream which its calls worked on is
  // being captured: the end of such a capture is waited for (R26).
  ~OpRegistry();
  OpRegistry(const OpRegistry&) = delete;
  OpRegistry& operator=(const OpRegistry&) = delete;

  // The registry behind OpManager::instance().
  static OpRegistry& instance();

  // Registers an implementation. The descriptor is copied; what it points to (functions, self,
  // schema) must outlive the registration and `keep_alive` is held until no call can use it.
  // Errors: unknown op (names the nearest), impl_id malformed (R16) or taken, missing run, a schema
  // that differs from the one known (R17), kDLExtDev without a provider (R18; no plugin tells it).
  Status register_op(const te_fl_op_desc& desc, std::string owner = "built-in",
                     std::string vendor = "te-fl", std::shared_ptr<void> keep_alive = nullptr);
  // Several, all or nothing.
  Status register_ops(std::span<const te_fl_op_desc* const> descs, std::string owner,
                      std::string vendor, std::shared_ptr<void> keep_alive = nullptr);
  // Removes; returns when every thread that was inside an op or a function of a device has left.
  // BUSY, and nothing was changed, when called from inside one, or while a stream that worked with
  // a plan of it that owns device memory (R26) is being captured: end the capture first. One that
  // another thread begins meanwhile is waited for. So are launches of graphs that its calls were
  // captured into; launch these no more.
  Status unregister_op(std::string_view op, std::string_view impl_id);
  // Removes everything an owner registered, likewise; OK if that is nothing. Plans are destroyed
  // and keep_alive is released when it returns.
  Status unregister_owner(std::string_view owner);
  Status set_priority(std::string_view op, std::string_view impl_id, int32_t priority);

  std::vector<OpImplInfo> snapshot() const;
  // Catalogue, then custom ops.
  std::vector<std::string> op_names() const;
  Result<OpId> find(std::string_view op) const;  // a misspelt name is an error naming the nearest
  const te_fl_op_schema* schema(OpId op) const;  // null if there is no such op
  // Declares a custom op without an implementation.
  Result<OpId> declare_op(const te_fl_op_schema& schema);
  uint64_t epoch() const noexcept;

  struct Impl;
  Impl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl
