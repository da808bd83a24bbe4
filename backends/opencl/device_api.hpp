#pragma once

#include "te_fl/plugin.h"

namespace te_fl::opencl {

// The device API, whose self is a Device. It has no graphs, because OpenCL 2.0 has none.
extern const te_fl_device_api kDeviceApi;

}  // namespace te_fl::opencl
