// The device function with which a kernel records an invalid input value.
#pragma once

#include "common/value_errors.hpp"

namespace te_fl::cuda {

// Records an error. If the slot holds an unreported error, the new error is dropped. The slot is in
// mapped host memory; its atomics are coherent among the device's threads, and the host does not
// write `claimed`.
__device__ inline void note(const ValueErrorSink& sink, ValueRule rule, int64_t at, int64_t value,
                            int64_t bound, int64_t more = 0, const char* argument = nullptr) {
  ValueErrorSlot* const slot = sink.slot;
  const uint32_t reported = *static_cast<const volatile uint32_t*>(&slot->reported);
  if (atomicCAS(&slot->claimed, reported, reported + 1) != reported) return;
  slot->error.op = sink.op;
  slot->error.argument = argument;
  slot->error.rule = rule;
  slot->error.at = at;
  slot->error.value = value;
  slot->error.more = more;
  slot->error.bound = bound;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&slot->written) = reported + 1;
}

}  // namespace te_fl::cuda
