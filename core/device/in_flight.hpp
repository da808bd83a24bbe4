#pragma once

#include <memory>

#include "te_fl/device.hpp"

namespace te_fl::core {

// Waits for the copies on a stream that read or write `memory`, which its caller is about to give
// up. After an error that may be an earlier op's, which is told once, it waits again; if that fails
// too, the copies may still be going on, and `memory` is kept until the process ends. The first
// wait's status.
Status wait_for_copies(const Device& device, void* stream, std::shared_ptr<void> memory);

}  // namespace te_fl::core
