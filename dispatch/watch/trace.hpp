#pragma once

#include <cstdint>

#include "dispatch/call.hpp"

// TE_FL_TRACE: what was called, who served it and how long the caller waited, for Perfetto.
namespace te_fl::dispatch {

// Begins the trace that the settings ask for, if that has not been done. FAILED_PRECONDITION: its
// file cannot be written, which the first call says, not the end of the run.
Status begin_trace();
// As begin_trace(), but begins nothing: only the mistake in TE_FL_TRACE is returned.
Status trace_status();

// One traced call, after begin_trace().
class TracedCall {
 public:
  explicit TracedCall(const Call& call);
  void record(const Status& status, const Served& served);

 private:
  const Call& call_;
  int64_t start_;  // nanoseconds since the trace began
  uint32_t description_;
};

}  // namespace te_fl::dispatch
