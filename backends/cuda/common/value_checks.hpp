// Reporting of invalid input values that kernels find (value_errors.hpp). The process has one
// ValueErrorBoard per device.
#pragma once

#include <cuda_runtime_api.h>

#include "common/value_errors.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda {

// True if a call must check its values before it writes anything: TE_FL_VALIDATE is set, and the
// stream is not capturing, because a capture cannot be synchronised.
inline bool validates(const te_fl_context& ctx) noexcept {
  return (ctx.flags & (TE_FL_CALL_VALIDATE | TE_FL_CALL_CAPTURING)) == TE_FL_CALL_VALIDATE;
}

// Returns the slot in which the kernels of a call record errors. Throws INVALID_ARGUMENT (clean) if
// an earlier call on the stream left an unreported error, except during capture. The device must be
// current. `op` must live as long as the plugin.
ValueErrorSink open_value_errors(const te_fl_context& ctx, const char* op);

// Waits for the stream and throws INVALID_ARGUMENT (clean) if the call's kernels recorded an error.
// The kernels that the call has enqueued so far must not have written any output.
void refuse_noted(const te_fl_context& ctx);

// Both overloads throw INVALID_ARGUMENT if there is an unreported error. Call the first after
// waiting for a stream, the second after waiting for an event.
void report_value_errors(int device, cudaStream_t stream);
void report_value_errors(int device);

}  // namespace te_fl::cuda
