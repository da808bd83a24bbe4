#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/export.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/policy.hpp"
#include "te_fl/status.hpp"

namespace te_fl {

// Options of a call, beyond its argument struct.
struct CallOptions {
  void* stream = nullptr;  // a stream of the op's device; null: its default stream
  te_fl_rng rng;           // random state, for ops that draw random numbers
};

// The evaluation of one implementation for a call.
struct Candidate {
  std::string impl_id;
  Kind kind = Kind::kDefault;
  std::string vendor;
  std::string owner;
  int32_t priority = 0;
  bool accepted = false;
  bool chosen = false;
  bool staged = false;  // would run on the host, on copies of another device's tensors
  // The reason for acceptance or refusal: "dtype f8e4m3 of input is not supported".
  std::string reason;
};

// The result of choosing an implementation for a call.
struct Decision {
  std::string op;
  std::string impl_id;                // empty if no candidate remains
  std::vector<Candidate> candidates;  // in the order of preference, including refused ones
  std::string policy;
  // `runs`: the kernel or library function that the chosen implementation's run() would launch for
  // the call, and why (rule R31). Empty if only a CallProfile was given, or if the implementation
  // has no describe(); `silent` is then the reason why `runs` is empty.
  std::string runs, silent;
};

// The implementation that a call would try first.
struct FirstChoice {
  // Valid forever; equal ids have equal addresses. Null if there is no implementation, or if the
  // first one would refuse the call or run it on copies in host memory.
  const char* impl_id = nullptr;
  uint32_t flags = 0;  // te_fl_op_desc.flags of the implementation; 0 if impl_id is null
};

// Description of a call without an argument struct, for explain(). Every tensor argument is assumed
// to match it.
struct CallProfile {
  Device device;
  std::vector<DType> dtypes;      // set of dtypes of the tensor arguments; empty: any
  std::vector<Scaling> scalings;  // set of scaling modes; empty: unquantised
};

// A call that is bound to one op, device, set of dtypes and set of scaling modes. call() skips the
// signature lookup. It returns INVALID_ARGUMENT if the arguments no longer have the prepared
// signature, and otherwise validates them as OpManager::call does. Registrations and policy changes
// take effect as for any call. Calls are cheapest if they reuse the same argument struct and tensor
// objects. Copyable and thread-safe. Must not be used after its manager has been destroyed.
class TE_FL_API PreparedOp {
 public:
  PreparedOp() = default;
  Status call(const void* args, const CallOptions& options = {}) const;
  bool valid() const noexcept { return rep_ != nullptr; }
  struct Rep;

 private:
  friend class OpManager;
  std::shared_ptr<Rep> rep_;
};

// Number of calls of one op that one implementation has run.
struct OpUsage {
  std::string op;
  std::string impl_id;
  uint64_t calls = 0;  // all calls, including staged ones
  // Staged calls: a host implementation ran on copies of a device's tensors.
  uint64_t staged_calls = 0;
  uint64_t staged_bytes = 0;         // copied, in both directions
  uint64_t staged_microseconds = 0;  // time spent on the copies
  // Time spent before the copies, waiting for earlier work on the stream.
  uint64_t staged_wait_microseconds = 0;
};

// Chooses and runs an implementation for each call. Thread-safe. The hot path takes no lock and
// allocates nothing.
class TE_FL_API OpManager {
 public:
  // A manager with its own registry and without plugins, for tests and embedding.
  explicit OpManager(OpRegistry& registry);
  ~OpManager();
  OpManager(const OpManager&) = delete;
  OpManager& operator=(const OpManager&) = delete;

  // The process-wide manager. The built-in backends are registered; plugins are discovered and
  // loaded on first use.
  static OpManager& instance();

  // Runs an op. `args` is the op's argument struct (te_fl/ops/*.h) with struct_size set. The struct
  // and its tensors must stay valid during the call. Device work may outlive the call, so the
  // caller keeps the data alive until that work is done. Errors: INVALID_ARGUMENT (names argument,
  // value and rule), UNSUPPORTED if no candidate remains (lists each with its reason), or the
  // implementation's own error.
  Status call(OpId op, const void* args, const CallOptions& options = {});
  Status call(std::string_view op, const void* args, const CallOptions& options = {});
  // These overloads accept the argument struct of any op.
  Result<PreparedOp> prepare(OpId op, const void* args, const CallOptions& options = {});
  // Returns the choice that call() would make, with the reasons, and runs nothing.
  Result<Decision> resolve(OpId op, const void* args, const CallOptions& options = {});
  // Returns only the first candidate, at about the cost of dispatch, for a caller that has another
  // way to compute the same result. Errors as for call(), before anything runs.
  Result<FirstChoice> first_choice(OpId op, const void* args, const CallOptions& options = {});
  // Like resolve(), for a call that is only described by a profile.
  Result<Decision> explain(OpId op, const CallProfile& profile);
  // Size in bytes of the te_fl_saved storage that the chosen implementation of a forward op needs;
  // usually 0.
  Result<size_t> saved_bytes(OpId op, const void* args, const CallOptions& options = {});

  // The implementations that have run calls since the last reset and are still registered, in order
  // of decreasing number of calls. Calls are counted per thread and added up here.
  std::vector<OpUsage> usage() const;
  // Counts one call for usage(): a compiler has put the implementation's operations into a program
  // that runs without te-fl. NOT_FOUND if the op has no implementation of this impl_id.
  Status count(OpId op, std::string_view impl_id);
  void reset_usage();
  // Reads the policy and the log level from the environment again. (Plugins are loaded only once.)
  Status reload();
  OpRegistry& registry() noexcept;

  struct Impl;
  Impl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl
