#pragma once

#include "te_fl/plugin.h"

namespace te_fl::core {

// The host's memory as a device, like any plugin's. It has no state, so a forked child can go on
// using it, and no streams: every call has taken effect when it returns.
const te_fl_device_desc* host_device();

// Cores that this process may run on.
uint32_t available_cores();

}  // namespace te_fl::core
