#pragma once

#include <string>

#include "te_fl/device.hpp"

// The ops that were enqueued last on each device. A device reports an error at a later wait, long
// after the call that caused it; these ops are the suspects.
namespace te_fl::core {

// Records an op. Both strings must live as long as the process. Lock-free; takes a few nanoseconds.
void note_op(const Device& device, void* stream, const char* op, const char* impl_id) noexcept;

// The last ops for an error message, newest first, at most `count`: "'gelu' by vendor.cuda, ...".
// Ops of `stream` come first, then others of the device. Empty if there are none.
std::string recent_ops(const Device& device, void* stream, int count = 6);

}  // namespace te_fl::core
