#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/export.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

namespace te_fl {

enum class Kind : uint8_t {
  kDefault = TE_FL_KIND_DEFAULT,
  kVendor = TE_FL_KIND_VENDOR,
  kReference = TE_FL_KIND_REFERENCE,
};
TE_FL_API std::string_view to_string(Kind kind);

// One token of a per-op list: a kind, a vendor or one implementation.
struct PolicyToken {
  enum class Type : uint8_t { kKind, kVendorName, kImpl } type = Type::kKind;
  Kind kind = Kind::kDefault;
  std::string name;  // vendor name (lower case) or impl id
  friend bool operator==(const PolicyToken&, const PolicyToken&) = default;
};

// A list of permitted implementations for calls of one op with exactly this signature: the set of
// dtypes and the set of scaling modes of all tensors, and the device type ("cpu", "cuda",
// "ext:acme").
struct SignatureList {
  std::string op;
  std::string device = "cpu";
  uint64_t dtypes = 0;    // mask of te_fl_dtype_index
  uint32_t scalings = 0;  // mask of te_fl_scaling
  // The list applies to calls whose tensors have this many bytes in total; both bounds are
  // inclusive.
  uint64_t min_bytes = 0, max_bytes = UINT64_MAX;
  std::vector<PolicyToken> use;
  bool same_signature(const SignatureList& other) const {
    return op == other.op && device == other.device && dtypes == other.dtypes &&
           scalings == other.scalings;
  }
  bool for_all_sizes() const { return min_bytes == 0 && max_bytes == UINT64_MAX; }
  friend bool operator==(const SignatureList&, const SignatureList&) = default;
};

// A user's selection policy. If everything is unset, priority alone decides.
struct PolicySettings {
  std::optional<Kind> prefer;
  bool strict = false;
  bool deterministic = false;
  // Maximum number of bytes that one call may copy to and from the host in order to run there. 0:
  // no call may be staged on the host. Unset: no limit.
  std::optional<uint64_t> max_staged_bytes;
  std::vector<std::string> allow_vendors;  // lower case; empty: all vendors
  std::vector<std::string> deny_vendors;
  // for an op in the map, only implementations that its list names may run
  std::map<std::string, std::vector<PolicyToken>, std::less<>> per_op;
  std::vector<SignatureList> per_signature;  // takes precedence over per_op
  friend bool operator==(const PolicySettings&, const PolicySettings&) = default;
};

// Parsers for the values of the environment variables. A misspelt token, value or op is an error
// that names the nearest valid one. `known_ops` is the catalogue plus the registered custom ops;
// names of the form "vendor::op" are always accepted.
TE_FL_API Result<Kind> parse_kind(std::string_view text);  // flagos, default, vendor, reference
TE_FL_API Result<std::map<std::string, std::vector<PolicyToken>, std::less<>>> parse_per_op(
    std::string_view text, const std::vector<std::string>& known_ops);
TE_FL_API Result<std::vector<std::string>> parse_vendor_list(std::string_view text);

// Reads and checks a policy file (TE_FL_POLICY_FILE; docs/policy-file.md). A misspelt key, op,
// token, dtype or kind is an error that names the nearest. NOT_FOUND: there is no such file.
// FAILED_PRECONDITION: it is a folder or a device, may not be read, or is too large.
TE_FL_API Result<PolicySettings> load_policy_file(const std::string& path);

// An immutable, interned policy. Equal settings give the same object and id, so entering and
// leaving a scope invalidates no caches. Cheap to copy. Thread-safe.
class TE_FL_API SelectionPolicy {
 public:
  SelectionPolicy() noexcept;  // the empty policy, id 0
  // Never fails. If the settings list an op that does not exist, calls under this policy fail with
  // a message that names the nearest op. Names of the form "vendor::op" are accepted, since custom
  // ops may be registered later.
  static SelectionPolicy intern(PolicySettings settings);
  // Reads TE_FL_PREFER, TE_FL_PREFER_VENDOR, TE_FL_STRICT, TE_FL_ALLOW_VENDORS, TE_FL_DENY_VENDORS,
  // TE_FL_PER_OP, TE_FL_DETERMINISTIC and TE_FL_MAX_STAGED_BYTES through environment::get, and the
  // file TE_FL_POLICY_FILE. A variable takes precedence over the same setting in the file. A list
  // in TE_FL_PER_OP also takes precedence over the file's signature lists for that op.
  static Result<SelectionPolicy> from_environment(const std::vector<std::string>& known_ops);
  uint32_t id() const noexcept { return id_; }
  const PolicySettings& settings() const noexcept { return *settings_; }
  std::string describe() const;
  friend bool operator==(const SelectionPolicy& a, const SelectionPolicy& b) {
    return a.id_ == b.id_;
  }

 private:
  uint32_t id_ = 0;
  const PolicySettings* settings_;  // interned, never freed
};

// The process-wide policy set by the program. It takes precedence over the environment. A change
// takes effect on the next call.
TE_FL_API void set_global_policy(SelectionPolicy policy);
TE_FL_API void clear_global_policy();
// The policy in force for this thread: that of the innermost scope, else the global policy, else
// the environment's. If the environment is invalid, returns its error.
TE_FL_API Result<SelectionPolicy> current_policy();

// Applies a policy to the calling thread until the scope is destroyed. Scopes nest; destroy them in
// reverse order.
class TE_FL_API PolicyScope {
 public:
  explicit PolicyScope(SelectionPolicy policy);
  explicit PolicyScope(PolicySettings settings)
      : PolicyScope(SelectionPolicy::intern(std::move(settings))) {}
  ~PolicyScope();
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

 private:
  uint32_t previous_;
};

// Copies the calling thread's innermost policy scope, if any, so that another thread can enter a
// scope with the same policy:
//   auto captured = CapturedPolicy::capture();
//   auto scope = captured.enter();  // on the other thread
class TE_FL_API CapturedPolicy {
 public:
  static CapturedPolicy capture();
  [[nodiscard]] std::unique_ptr<PolicyScope> enter() const;  // null if no scope was captured
 private:
  std::optional<SelectionPolicy> policy_;
};

}  // namespace te_fl
