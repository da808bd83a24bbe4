// The errors in values of each device of this process (value_errors.hpp), and what a call does with
// them.
#pragma once

#include <cuda_runtime_api.h>

#include "common/value_errors.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda {

// True if a call's values are to be looked at before anything is written: TE_FL_VALIDATE, outside
// of captures, which cannot be waited for.
inline bool validates(const te_fl_context& ctx) noexcept {
  return (ctx.flags & (TE_FL_CALL_VALIDATE | TE_FL_CALL_CAPTURING)) == TE_FL_CALL_VALIDATE;
}

// The place in which the kernels of a call note errors. Throws INVALID_ARGUMENT, clean, if an
// earlier call on the stream left one that nobody has been told; not in a capture. The device is
// current. `op` lasts as long as the plugin.
ValueErrorSink value_errors_of(const te_fl_context& ctx, const char* op);

// Waits for the stream and throws INVALID_ARGUMENT, clean, if the call's values broke a rule; what
// was enqueued so far has only looked.
void refuse_noted(const te_fl_context& ctx);

// After somebody has waited for a stream, or for an event of any: throws INVALID_ARGUMENT with
// what was noted and not told yet.
void tell_value_errors(int device, cudaStream_t stream);
void tell_value_errors(int device);

}  // namespace te_fl::cuda
