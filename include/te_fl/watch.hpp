#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/policy.hpp"
#include "te_fl/status.hpp"

// Observation of a run: calls verified against the reference (TE_FL_VERIFY), quarantined
// implementations, traces, tuning, and a fingerprint of what must be equal on all ranks.
// Thread-safe.
namespace te_fl {

// Counts of the calls that TE_FL_VERIFY selected in this process.
struct VerifyCounts {
  uint64_t agreed = 0;
  uint64_t differed = 0;
  uint64_t saved = 0;     // calls saved as case files
  uint64_t captured = 0;  // not verified: their stream was being captured into a graph
  // Not verified: the reference itself ran the call, there was nothing to compare (opaque
  // records, enquiries, collectives), no reference implementation accepts the call, or there was no
  // memory for copies.
  uint64_t skipped = 0;
  uint64_t failed = 0;  // the call itself failed
};
TE_FL_API VerifyCounts verify_counts();

// By how much the results of a right implementation may differ from the reference's, for each
// output of the op: "output: an FP32 sum, rounded once: ...". Empty for an op that is not verified.
// docs/numerics.md has the exact rules. NOT_FOUND: there is no such op.
TE_FL_API Result<std::vector<std::string>> verify_tolerances(const std::string& op);

// The error in the settings TE_FL_VERIFY or TE_FL_TRACE, such as a file that cannot be written,
// with which every call fails. OK if there is none.
TE_FL_API Status watch_status();

// Declares that a training step has ended. nn's Optimizer::step calls it.
//
// With TE_FL_VERIFY_ACTION=quarantine, an implementation whose results differed is quarantined: it
// is not used any more for that op and signature, and the quarantine file records this for later
// runs. In a process on its own, this takes effect at the end of the call in which the difference
// was found; if that call runs inside another call, or a stream is being captured, it takes effect
// after the next call for which neither is true. In a job of several ranks (TE_FL_WORLD_SIZE,
// WORLD_SIZE, OMPI_COMM_WORLD_SIZE or PMI_SIZE in the environment) it is held back until
// step_boundary(), which all ranks call alike: there they exchange what they found
// (set_rank_exchange()), and all of them change their choice before the next call. Quarantines that
// are still held back when the process ends are written to the file then.
//
// Costs an atomic load in a process on its own if nothing is held back, and waits for all ranks of
// a job whose ranks_exchange_quarantines(). Error: the file could not be written; the quarantine is
// in force nevertheless.
TE_FL_API Status step_boundary();

// Exchanges texts between the ranks of a job: every rank calls the function equally often, with its
// own text, and gets those of all ranks that are not empty, in an order that is the same on all
// ranks. NOT_FOUND: the ranks cannot exchange texts yet. Comm::world() sets one, which uses the
// job's store; te_fl.pytorch sets one that uses the process group's.
using RankExchange = std::function<Result<std::vector<std::string>>(const std::string& own)>;
TE_FL_API void set_rank_exchange(RankExchange exchange);
// True in a job of several ranks with TE_FL_VERIFY and TE_FL_VERIFY_ACTION=quarantine.
TE_FL_API bool ranks_exchange_quarantines();
// The quarantines that are held back, as a text for the exchange; empty if there are none.
TE_FL_API std::string held_quarantines();
// Puts the quarantines in these texts into effect.
TE_FL_API Status take_quarantines(const std::vector<std::string>& texts);

// A quarantine: an implementation that dispatch no longer uses for calls of one op and signature.
struct Quarantine {
  std::string op, impl_id;
  std::string owner, build_id;  // name and build id of the plugin; for built-in backends, of te-fl
  std::string chip, driver;     // of the device where the results differed (te_fl_device_props)
  uint64_t dtypes = 0;          // signature: masks of dtypes and scaling modes
  uint32_t scalings = 0;
  std::string reason;     // the outputs that differed
  std::string case_file;  // the saved call; empty if none was saved
  // Command that runs the saved call again, including the plugins that it needs.
  std::string replay;
};
// The quarantines in force, from the quarantine file and from this run. Entries of the file that
// cannot be read are skipped with a warning, here and in calls.
TE_FL_API Result<std::vector<Quarantine>> quarantines();
// Path of the quarantine file (TE_FL_QUARANTINE_FILE). Empty: no file is used.
TE_FL_API std::string quarantine_file();
// Removes the quarantines of `op` and `impl_id` from the file and from this process; an empty
// string matches all. Takes effect on the next call. Returns the number of quarantines removed.
// FAILED_PRECONDITION if the file cannot be written; nothing is removed then.
TE_FL_API Result<int> clear_quarantines(const std::string& op, const std::string& impl_id);

// The result of running one saved call on one implementation, compared with the saved results and
// with the reference's results.
struct Replay {
  std::string op, impl_id, device;
  std::string saved_by;  // implementation, build, chip and driver that produced the saved results
  std::string note;      // the differences found when the call was saved
  // Descriptions of the outputs that differ by more than the tolerance (docs/numerics.md).
  std::vector<std::string> from_saved, from_reference;
  int compared = 0;  // number of compared outputs, and of their data and scales if quantised
};
// Reads a case file that TE_FL_VERIFY saved and runs the call. Empty impl_id: the implementation
// that the case was saved from. Empty `device`: the device of the case if it exists, else the host.
// Quarantines are ignored. Errors: of the file (NOT_FOUND, DATA_LOSS, INVALID_ARGUMENT), or of the
// call.
TE_FL_API Result<Replay> replay(const std::string& file, const std::string& impl_id = {},
                                const std::string& device = {});

// Writes the trace so far to the file of TE_FL_TRACE, by atomic rename. This also happens when the
// process ends. OK if no trace is recorded. FAILED_PRECONDITION if the file cannot be written.
TE_FL_API Status write_trace();

// Timing of one implementation by `te-fl tune`, for one op, signature and size class
// (SignatureList::min_bytes).
struct TunedTime {
  std::string impl_id;
  double seconds = 0;  // total for all calls of the recorded run
  int calls = 0;       // number of different calls that it accepts
};
struct TunedSignature {
  // `list.use` names the fastest implementation first, followed by all kinds. It is empty if the
  // fastest is the one that dispatch would choose, or is faster by less than 5 % or 100 ns per
  // call, which is noise.
  SignatureList list;
  uint64_t count = 0;  // number of calls in the recorded run
  int calls = 0;       // number of different calls
  // implementations that accept every call, fastest first, then the others
  std::vector<TunedTime> times;
  // time with the implementations that dispatch would choose; 0 if not timed
  double usual_seconds = 0;
};
// Times the implementations that accept the calls in these files, which are traces of TE_FL_TRACE
// or case files of TE_FL_VERIFY. `seconds` is the approximate time spent per call and
// implementation. Calls that cannot be made here are listed in `left_out`, with the reason. Staged
// candidates are not timed. Error: a file cannot be read.
TE_FL_API Result<std::vector<TunedSignature>> tune(const std::vector<std::string>& files,
                                                   double seconds = 0.1,
                                                   std::vector<std::string>* left_out = nullptr);

// A hash of everything that decides which implementation runs: te-fl's version, device types with
// chip and driver, ops, implementations with priorities, build ids, the calling thread's policy
// (including the policy file), tuning files and quarantines. Ranks compare it before the first
// step. 32 hex digits. Loads plugins if they are not loaded yet.
TE_FL_API std::string fingerprint();
// The data behind the fingerprint in readable form: lines "key = value", the first being the
// fingerprint.
TE_FL_API std::string fingerprint_table();
// One sentence for each line in which two fingerprint tables differ.
TE_FL_API std::vector<std::string> fingerprint_difference(const std::string& a,
                                                          const std::string& b);

}  // namespace te_fl
