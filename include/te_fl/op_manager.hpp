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

// The inputs of a call besides its arguments.
struct CallOptions {
  void* stream = nullptr;  // of the op's device; null is its default stream
  te_fl_rng rng;           // for ops with random numbers
};

// One implementation's standing for a call.
struct Candidate {
  std::string impl_id;
  Kind kind = Kind::kDefault;
  std::string vendor;
  std::string owner;
  int32_t priority = 0;
  bool accepted = false;
  bool chosen = false;
  bool staged = false;  // on the host, for tensors of another device: copied there and back
  // The reason it was taken or refused for: "dtype f8e4m3 of input is not served".
  std::string reason;
};

// The way that a call would be routed.
struct Decision {
  std::string op;
  std::string impl_id;  // empty if no candidate remains
  std::vector<Candidate>
      candidates;  // in the order in which they would be tried, refused ones where they stand
  std::string policy;
  // The kernel or library function that the chosen implementation's run() would launch for the
  // call, and why (rule R31). Empty if only a profile was given, or if it did not say, of which
  // `silent` is the reason.
  std::string runs, silent;
};

// The implementation that a call would try first.
struct FirstChoice {
  // Valid forever; equal ids have equal addresses. Null: it would refuse the call or serve it on
  // copies in host memory, or there is none.
  const char* impl_id = nullptr;
  uint32_t flags = 0;  // its te_fl_op_desc.flags; 0 if impl_id is null
};

// The facts that `explain` has of a call that is not there yet: every tensor argument is assumed to
// match.
struct CallProfile {
  Device device;
  std::vector<DType> dtypes;      // of the tensor arguments, as a set; empty: any
  std::vector<Scaling> scalings;  // as a set; empty: none
};

// A call bound to one op, device, dtypes and scaling modes. call() skips the signature lookup,
// checks that the arguments still have the prepared signature (dtypes, scalings, device: otherwise
// INVALID_ARGUMENT) and validates them as OpManager::call does. Follows registrations and policy
// changes like any call. Calls made again with the same argument struct and tensor objects cost
// least. Copyable; thread-safe; not to be used after its manager is gone.
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

// Counts of calls served, per op and implementation.
struct OpUsage {
  std::string op;
  std::string impl_id;
  uint64_t calls = 0;  // all, staged ones among them
  // Calls on tensors of a device that were copied to the host and back for a host implementation.
  uint64_t staged_calls = 0;
  uint64_t staged_bytes = 0;         // copied, both ways
  uint64_t staged_microseconds = 0;  // for the copies
  // Before the copies, for the stream's earlier work, which the host needs finished.
  uint64_t staged_wait_microseconds = 0;
};

// Chooses an implementation for each call. Thread-safe. The hot path takes no lock and allocates
// nothing.
class TE_FL_API OpManager {
 public:
  // A manager on its own registry, without plugins; for tests and embedding.
  explicit OpManager(OpRegistry& registry);
  ~OpManager();
  OpManager(const OpManager&) = delete;
  OpManager& operator=(const OpManager&) = delete;

  // The process's manager: built-in backends registered, plugins discovered and loaded on first
  // use.
  static OpManager& instance();

  // Runs an op. `args` is the op's argument struct (te_fl/ops/*.h) with struct_size set; it and the
  // tensors it points to must stay valid during the call (device work may outlive it; data is the
  // caller's). Errors: INVALID_ARGUMENT (names argument, value, rule), UNSUPPORTED when no
  // candidate remains (lists each with its reason), or the implementation's own.
  Status call(OpId op, const void* args, const CallOptions& options = {});
  Status call(std::string_view op, const void* args, const CallOptions& options = {});
  // Any argument struct of known type.
  Result<PreparedOp> prepare(OpId op, const void* args, const CallOptions& options = {});
  // The choice that call() would make, with the reasons; runs nothing.
  Result<Decision> resolve(OpId op, const void* args, const CallOptions& options = {});
  // The first candidate alone, at about the cost of dispatch: for a caller that has another way to
  // the same result. Errors: as of call(), before anything runs.
  Result<FirstChoice> first_choice(OpId op, const void* args, const CallOptions& options = {});
  // resolve() of a call that is only described.
  Result<Decision> explain(OpId op, const CallProfile& profile);
  // Bytes of te_fl_saved storage that the chosen implementation of a forward op wants; usually 0.
  Result<size_t> saved_bytes(OpId op, const void* args, const CallOptions& options = {});

  // The implementations that served calls since the last reset and are still registered, most calls
  // first. Counting is per thread and summed here.
  std::vector<OpUsage> usage() const;
  void reset_usage();
  // Reads the environment again: policy and log level. (Plugins are loaded once.)
  Status reload();
  OpRegistry& registry() noexcept;

  struct Impl;
  Impl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl
