// NVIDIA's management library, which comes with the driver; opened when it is first needed.
#pragma once

namespace te_fl::cuda {

// W that a device may draw now (its enforced limit), as read when it was first asked; 0 where NVML
// is not there or does not say. Thread-safe.
int power_limit(int device);

}  // namespace te_fl::cuda
