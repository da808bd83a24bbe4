#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "dispatch/call.hpp"

// TE_FL_VERIFY: the reference implementation beside the one that served a call.
namespace te_fl::dispatch {

// One call that is checked.
class Verification {
 public:
  // Begins the check of a call if it is one of those that are picked, and copies what it reads.
  // Null: it is not, or cannot be. Error: TE_FL_VERIFY is not as it must be, or work that was
  // enqueued before the call has failed, which showed as the copies waited for it.
  static Result<std::unique_ptr<Verification>> begin(const Call& call);
  ~Verification();
  Verification(const Verification&) = delete;
  Verification& operator=(const Verification&) = delete;
  // After the call, which ended with `status`: compares, and acts on what it finds. Returns what
  // the call is to answer: an error too if its work has failed since it was enqueued.
  Status conclude(const Status& status, const Served& served);

 private:
  struct Config;
  struct State;
  struct Seen;
  static std::shared_ptr<const Config> read(State& state);
  static uint64_t count(State& state, Seen& seen, std::string_view op);
  explicit Verification(const Call& call);
  void check(const Served& served);
  void compare(const Implementation& reference, const Served& served);
  void differs(const Served& served, const Implementation& reference, std::string what);
  std::string save(const Served& served, const std::string& what) const;

  struct Rep;
  std::unique_ptr<Rep> rep_;
};

// The mistake in TE_FL_VERIFY. OK: nothing, or it is not set.
Status verify_status();

// The reference implementation that serves such a call on the host; null if there is none.
const Implementation* reference_for(const OpRow& row, const core::Signature& signature,
                                    bool deterministic);

}  // namespace te_fl::dispatch
