#pragma once

#include <cstdint>
#include <string>

#include "dispatch/call.hpp"

// TE_FL_TRACE: records, for Perfetto, the calls of ops: the implementation that ran each call, why
// it was chosen, its duration, and the verification of the call.
namespace te_fl::dispatch {

// Begins the trace that the settings request, unless it has begun. FAILED_PRECONDITION if the file
// cannot be written; the first call thus reports the error, before the run has been made.
Status begin_trace();
// Returns the error that begin_trace() would return, without beginning a trace.
Status trace_status();

// The time in nanoseconds since the start of the trace.
int64_t trace_now();

// One traced call. begin_trace() must have been called.
class TracedCall {
 public:
  explicit TracedCall(const Call& call);
  void record(const Status& status, const Execution& execution);
  // Records that TE_FL_VERIFY compared the call's results from `start` (trace_now()) until now.
  // `outcome` says what came of it.
  void record_verification(int64_t start, const Execution& execution, const std::string& outcome);

 private:
  const Call& call_;
  int64_t start_;  // in nanoseconds since the start of the trace
  uint32_t description_;
};

}  // namespace te_fl::dispatch
