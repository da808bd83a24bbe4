#pragma once

#include <string>

#include "te_fl/device.hpp"

// The ops that were enqueued last on devices. A device's error shows when somebody waits for it,
// long after the call that caused it: then these are the suspects.
namespace te_fl::core {

// Both texts must last as long as the process. Lock-free; a few nanoseconds.
void note_op(const Device& device, void* stream, const char* op, const char* impl_id) noexcept;

// "'gelu' by vendor.cuda, ...", newest first: those of the stream, then others of the device, at
// most `count`. Empty if there are none.
std::string recent_ops(const Device& device, void* stream, int count = 6);

}  // namespace te_fl::core
