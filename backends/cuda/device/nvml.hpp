// Access to NVML, NVIDIA's management library, which comes with the driver. Opened on first use.
#pragma once

namespace te_fl::cuda {

// The enforced power limit of a device in W, queried once. 0 if NVML is missing or does not report
// it. Thread-safe.
int power_limit(int device);

}  // namespace te_fl::cuda
