#pragma once

#include "te_fl/plugin.h"

namespace te_fl::opencl {

// Its self is a Device. No graphs: OpenCL 2.0 has none.
extern const te_fl_device_api kDeviceApi;

}  // namespace te_fl::opencl
