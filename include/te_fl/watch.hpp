#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/policy.hpp"
#include "te_fl/status.hpp"

// Watching a run: calls that were checked against the reference (TE_FL_VERIFY), implementations
// that lost their place for it, and what every rank must have alike. Thread-safe.
namespace te_fl {

// Calls that TE_FL_VERIFY picked, in this process.
struct VerifyCounts {
  uint64_t agreed = 0;
  uint64_t differed = 0;
  uint64_t saved = 0;     // cases written
  uint64_t captured = 0;  // left out: their stream was being captured into a graph
  // Left out: served by the reference, nothing to compare (opaque records, enquiries, collectives),
  // no reference implementation that takes the call, no memory for copies of it.
  uint64_t skipped = 0;
  uint64_t failed = 0;  // the call itself failed
};
TE_FL_API VerifyCounts verify_counts();

// The mistake in TE_FL_VERIFY or TE_FL_TRACE, a file that cannot be written included: every call
// fails with it. OK if nothing is.
TE_FL_API Status watch_status();

// Declares that a training step ended. What TE_FL_VERIFY_ACTION=quarantine holds against
// implementations takes effect at the end of the call in which it was found, if that call is inside
// no other and no stream is being captured; else after the next such call. In a job of several
// ranks (WORLD_SIZE, OMPI_COMM_WORLD_SIZE or PMI_SIZE in the environment) it waits for this
// declaration, which all ranks make alike: then implementations stop serving that op and signature,
// from the next call on, and the quarantine file says so to later runs. What is still held when the
// process ends is written to the file then. nn's Optimizer::step declares it. Costs one atomic load
// if nothing is held. Error: the file could not be written; the quarantine is in force all the
// same.
TE_FL_API Status step_boundary();

// An implementation that does not serve an op's calls of one signature.
struct Quarantine {
  std::string op, impl_id;
  std::string owner, build_id;  // of the plugin; of te-fl itself for built-in backends
  std::string chip, driver;     // te_fl_device_props; of the device on which it went wrong
  uint64_t dtypes = 0;          // masks: the signature
  uint32_t scalings = 0;
  std::string reason;     // the outputs that differed
  std::string case_file;  // the saved call; empty if none was saved
  std::string replay;     // the command that runs it again, with the plugins that it needs
};
// Those in force: of the quarantine file, and of this run. Never fails for the file's sake: what
// cannot be read of it is passed over with a warning, as it is by calls.
TE_FL_API Result<std::vector<Quarantine>> quarantines();
// The quarantine file (TE_FL_QUARANTINE_FILE); empty: none is kept.
TE_FL_API std::string quarantine_file();
// Ends those of `op` and `impl_id`, of which an empty one stands for any: in the file and in this
// process, from the next call on. How many. Error: FAILED_PRECONDITION, the file cannot be written,
// and nothing was ended.
TE_FL_API Result<int> clear_quarantines(const std::string& op, const std::string& impl_id);

// One call of a saved case on one implementation, against the case's own results and against the
// reference's.
struct Replay {
  std::string op, impl_id, device;
  std::string saved_by;  // implementation, build, chip and driver of the saved results
  std::string note;      // the findings when it was saved
  // Outputs that differ by more than the tolerance (docs/numerics.md), in words.
  std::vector<std::string> from_saved, from_reference;
  int compared = 0;  // outputs and parts
};
// Reads a case that TE_FL_VERIFY saved and runs it. Empty impl_id: the implementation that it was
// saved from. `device` empty: the case's own if it is there, else the host. A quarantine does not
// stand in the way. Errors: the file (NOT_FOUND, DATA_LOSS, INVALID_ARGUMENT), or the call's own.
TE_FL_API Result<Replay> replay(const std::string& file, const std::string& impl_id = {},
                                const std::string& device = {});

// Writes the file of TE_FL_TRACE as far as it is, by atomic rename; the end of the process does it
// too. OK if there is none. Error: FAILED_PRECONDITION, the file cannot be written.
TE_FL_API Status write_trace();

// The result of `te-fl tune` for one op, signature and class of sizes (SignatureList::min_bytes).
struct TunedTime {
  std::string impl_id;
  double seconds = 0;  // of all the calls that the run made
  int calls = 0;       // different ones that it served
};
struct TunedSignature {
  // Its `use` names the fastest first, then all kinds; empty: nothing is gained over what dispatch
  // takes by itself, or less than 5 % or 100 ns of a call, which is noise.
  SignatureList list;
  uint64_t count = 0;            // calls that the run made
  int calls = 0;                 // different ones
  std::vector<TunedTime> times;  // fastest first, after that those that do not serve every call
  double usual_seconds = 0;      // with what dispatch takes by itself; 0: that was not timed
};
// Times the implementations that accept the calls in these files: traces of TE_FL_TRACE, or calls
// that TE_FL_VERIFY saved. `seconds`: about, for one call on one implementation. Calls that cannot
// be made here go to `left_out`, with the reason. Staged candidates are not timed. Errors: a file
// cannot be read.
TE_FL_API Result<std::vector<TunedSignature>> tune(const std::vector<std::string>& files,
                                                   double seconds = 0.1,
                                                   std::vector<std::string>* left_out = nullptr);

// Identifies all that decides which implementation runs, for ranks to compare before the first
// step: te-fl's version, device types with chip and driver, ops, implementations with priorities,
// build ids, the calling thread's policy (policy file included), tuning files and quarantines. 32
// hex digits; equal for equal tables. Loads plugins if that has not been done.
TE_FL_API std::string fingerprint();
// The fingerprint in a form to read: "key = value" lines, the first being the fingerprint.
TE_FL_API std::string fingerprint_table();
// One sentence for each line in which two such tables differ.
TE_FL_API std::vector<std::string> fingerprint_difference(const std::string& a,
                                                          const std::string& b);

}  // namespace te_fl
