// Dynamic shared memory of more than 48 KB, which CUDA grants to a kernel on one device at a time.
#pragma once

#include <algorithm>
#include <climits>
#include <string>

#include "device/cuda_check.hpp"
#include "device/per_device.hpp"

namespace te_fl::cuda {

// The most bytes of one kernel. A static of the function that launches it.
class SharedMemory {
 public:
  // Lets blocks of `kernel` have up to `most` bytes on `device`, which is current; false if
  // `wanted` are more than the device has, with nothing done that the caller has to take back.
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
  // Lets blocks of `kernel` have `wanted` bytes, and up to `most`, on `device`, which is current;
  // throws UNSUPPORTED if the device has fewer.
  template <class Kernel>
  void require(int device, Kernel* kernel, size_t wanted, size_t most = INT_MAX) {
    if (allow(device, kernel, wanted, most)) return;
    throw backend::Error(TE_FL_UNSUPPORTED | TE_FL_CLEAN,
                         "a block of the kernel takes " + std::to_string(wanted) +
                             " bytes of shared memory, which this GPU does not have; let another "
                             "implementation serve the op");
  }

 private:
  PerDevice granted_;
};

}  // namespace te_fl::cuda
