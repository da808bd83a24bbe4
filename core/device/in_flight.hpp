#pragma once

#include <memory>

#include "te_fl/device.hpp"

namespace te_fl::core {

// Waits for the copies on a stream that read or write `memory`, before the caller frees it. The
// first wait may report the error of an earlier op, so after an error the function waits again. If
// the second wait fails too, the copies may still be running, and `memory` is kept until the
// process ends. Returns the status of the first wait.
Status wait_for_copies(const Device& device, void* stream, std::shared_ptr<void> memory);

}  // namespace te_fl::core
