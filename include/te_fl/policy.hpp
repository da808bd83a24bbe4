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

// An exclusive list for the calls of one op that have this signature, exactly: the dtypes and
// scaling modes of all tensors as sets, and the type of device ("cpu", "cuda", "ext:acme").
struct SignatureList {
  std::string op;
  std::string device = "cpu";
  uint64_t dtypes = 0;    // mask of te_fl_dtype_index
  uint32_t scalings = 0;  // mask of te_fl_scaling
  // The list is for calls whose tensors' elements take so many bytes in all, both ends included.
  uint64_t min_bytes = 0, max_bytes = UINT64_MAX;
  std::vector<PolicyToken> use;
  bool same_signature(const SignatureList& other) const {
    return op == other.op && device == other.device && dtypes == other.dtypes &&
           scalings == other.scalings;
  }
  bool for_all_sizes() const { return min_bytes == 0 && max_bytes == UINT64_MAX; }
  friend bool operator==(const SignatureList&, const SignatureList&) = default;
};

// The wishes of a user; everything unset means "pure priority".
struct PolicySettings {
  std::optional<Kind> prefer;
  bool strict = false;
  bool deterministic = false;
  // Most bytes that one call may copy to and from the host to be served there (0: none may); unset:
  // any number.
  std::optional<uint64_t> max_staged_bytes;
  std::vector<std::string> allow_vendors;  // lower case; empty: all
  std::vector<std::string> deny_vendors;
  std::map<std::string, std::vector<PolicyToken>, std::less<>> per_op;  // exclusive lists
  std::vector<SignatureList> per_signature;                             // win over per_op
  friend bool operator==(const PolicySettings&, const PolicySettings&) = default;
};

// Parsers of the variables' syntax. A misspelt token, value or op is an error naming the nearest
// right one; `known_ops` is the catalogue plus registered custom ops (a "vendor::op" name always
// passes).
TE_FL_API Result<Kind> parse_kind(std::string_view text);  // flagos, default, vendor, reference
TE_FL_API Result<std::map<std::string, std::vector<PolicyToken>, std::less<>>> parse_per_op(
    std::string_view text, const std::vector<std::string>& known_ops);
TE_FL_API Result<std::vector<std::string>> parse_vendor_list(std::string_view text);

// Reads and checks a policy file (TE_FL_POLICY_FILE; docs/policy-file.md). A misspelt key, op,
// token, dtype or kind is an error that names the nearest. NOT_FOUND: there is no such file.
// FAILED_PRECONDITION: it is a folder or a device, may not be read, or is too large.
TE_FL_API Result<PolicySettings> load_policy_file(const std::string& path);

// An immutable, interned policy; equal settings give the same object and id, so entering and
// leaving a scope flushes nothing. Cheap to copy. Thread-safe.
class TE_FL_API SelectionPolicy {
 public:
  SelectionPolicy() noexcept;  // the empty policy, id 0
  // Never fails: calls under settings that list an op which does not exist fail, naming the nearest
  // one ("vendor::op" names pass, since custom ops may be registered later).
  static SelectionPolicy intern(PolicySettings settings);
  // From TE_FL_PREFER, TE_FL_PREFER_VENDOR, TE_FL_STRICT, TE_FL_ALLOW_VENDORS, TE_FL_DENY_VENDORS,
  // TE_FL_PER_OP, TE_FL_DETERMINISTIC, TE_FL_MAX_STAGED_BYTES as environment::get sees them now,
  // each of which wins over what TE_FL_POLICY_FILE says of the same; a list of TE_FL_PER_OP also
  // over the file's lists for signatures of that op.
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

// Process-wide policy set in code; wins over the environment. Takes effect on the next call.
TE_FL_API void set_global_policy(SelectionPolicy policy);
TE_FL_API void clear_global_policy();
// The policy in force for this thread: innermost scope, else global, else environment. An invalid
// environment gives its error.
TE_FL_API Result<SelectionPolicy> current_policy();

// Applies a policy to the calling thread until destroyed. Scopes nest; destroy in reverse order.
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

// The calling thread's scope (or "none"), to be re-entered on another thread:
//   auto captured = CapturedPolicy::capture();   ... on the other thread:   auto scope =
//   captured.enter();
class TE_FL_API CapturedPolicy {
 public:
  static CapturedPolicy capture();
  [[nodiscard]] std::unique_ptr<PolicyScope> enter() const;  // null if no scope was captured
 private:
  std::optional<SelectionPolicy> policy_;
};

}  // namespace te_fl
