#pragma once

#include "te_fl/plugin.h"

namespace te_fl::core {

// The host's memory as a device, with the table of a plugin's device. It has no state, so a forked
// child can use it. It has no streams: every call is complete when it returns.
const te_fl_device_desc* host_device();

// The number of cores that this process may run on.
uint32_t available_cores();

}  // namespace te_fl::core
