// Reports the plugin's environment for diagnosis: driver, GPUs and libraries.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "device/device.hpp"
#include "te_fl/plugin.h"

namespace te_fl::cuda {

// Reports driver, GPUs and libraries to `findings`. Opens libraries that are not yet open.
// `why_no_device`: the reason from enumerate().
void report_surroundings(const std::vector<Device>& devices, const std::string& why_no_device,
                         const te_fl_finding_sink& findings);

// The architectures for which this build has kernels, such as "80,90a".
std::string_view built_architectures() noexcept;

}  // namespace te_fl::cuda
