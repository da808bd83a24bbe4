// Dynamic shared memory beyond 48 KB, which must be enabled for each kernel on each device.
#pragma once

#include <algorithm>
#include <climits>
#include <string>

#include "device/cuda_check.hpp"
#include "device/per_device.hpp"

namespace te_fl::cuda {

// The dynamic shared memory that one kernel has been granted on each device. Declare it as a static
// of the function that launches the kernel.
class SharedMemory {
 public:
  // Allows blocks of `kernel` up to `most` bytes on `device`, which must be current. Returns false,
  // without leaving a CUDA error, if the device has fewer than `wanted` bytes.
  template <class Kernel>
  bool allow(int device, Kernel* kernel, size_t wanted, size_t most) {
    const int granted = granted_.get(device, [&] {
      int limit = 0;
      check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            "cudaDeviceGetAttribute");
      cudaFuncAttributes own{};
      check(cudaFuncGetAttributes(&own, kernel), "cudaFuncGetAttributes");
      limit = std::min(limit - static_cast<int>(own.sharedSizeBytes), static_cast<int>(most));
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit),
            "cudaFuncSetAttribute");
      return limit;
    });
    return wanted <= static_cast<size_t>(granted);
  }
  // Allows blocks of `kernel` at least `wanted` and up to `most` bytes on `device`, which must be
  // current. Throws UNSUPPORTED if the device has fewer.
  template <class Kernel>
  void require(int device, Kernel* kernel, size_t wanted, size_t most = INT_MAX) {
    if (allow(device, kernel, wanted, most)) return;
    throw backend::Error(TE_FL_UNSUPPORTED | TE_FL_CLEAN,
                         "a block of the kernel takes " + std::to_string(wanted) +
                             " bytes of shared memory, which this GPU does not have; let another "
                             "implementation run the op");
  }

 private:
  PerDevice granted_;
};

}  // namespace te_fl::cuda
