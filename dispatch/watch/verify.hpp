#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "dispatch/call.hpp"

// TE_FL_VERIFY: compares the results of a call with those of the reference implementation.
namespace te_fl::dispatch {

// The verification of one call.
class Verification {
 public:
  // Begins the verification of a call, if the call is selected, and copies its inputs. Null if it
  // is not selected or cannot be verified. An error if TE_FL_VERIFY is invalid, or if work enqueued
  // before the call has failed, which the wait for the copies reveals.
  static Result<std::unique_ptr<Verification>> begin(const Call& call);
  ~Verification();
  Verification(const Verification&) = delete;
  Verification& operator=(const Verification&) = delete;
  // Ends the verification of a call that returned `status`. Compares the outputs, and logs and
  // quarantines as configured. Returns the status for the caller, which is an error also if
  // enqueued work has failed.
  Status conclude(const Status& status, const Execution& execution);
  // The outcome of the comparison, after conclude(): "agreed with '...'", "differs from '...':
  // ...", "left out: ..." or "failed".
  const std::string& outcome() const { return outcome_; }

 private:
  struct Config;
  struct State;
  struct Seen;
  static std::shared_ptr<const Config> read(State& state);
  static uint64_t count(State& state, Seen& seen, std::string_view op);
  explicit Verification(const Call& call);
  void check(const Execution& execution);
  void compare(const Implementation& reference, const Execution& execution);
  void differs(const Execution& execution, const Implementation& reference, std::string what);
  std::string save(const Execution& execution, const std::string& what) const;

  struct Rep;
  std::unique_ptr<Rep> rep_;
  std::string outcome_;
};

// The error in TE_FL_VERIFY. OK if it is valid or not set.
Status verify_status();

// The reference implementation that can run a call of this signature on the host; null if there is
// none.
const Implementation* reference_for(const OpRow& row, const core::Signature& signature,
                                    bool deterministic);

}  // namespace te_fl::dispatch
