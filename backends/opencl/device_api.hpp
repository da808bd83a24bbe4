#pragma once

#include "te_fl/plugin.h"

namespace te_fl::opencl {

// The device functions for the host; `self` is a Device. They do not include graph capture, because
// OpenCL 2.0 has no graphs.
extern const te_fl_device_api kDeviceApi;

}  // namespace te_fl::opencl
