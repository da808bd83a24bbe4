// Attributes of a device, each queried once.
#pragma once

#include "device/cuda_check.hpp"
#include "device/driver.hpp"
#include "device/per_device.hpp"

namespace te_fl::cuda {

template <cudaDeviceAttr kAttribute>
int attribute_of(int device) {
  static PerDevice known;
  return known.get(device, [&] {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, kAttribute, device), "cudaDeviceGetAttribute");
    return value;
  });
}
inline int multiprocessors(int device) {
  return attribute_of<cudaDevAttrMultiProcessorCount>(device);
}
// Returns the number of multiprocessors of the current device. (During a call, the call's device is
// current.)
inline int current_multiprocessors() {
  int device = 0;
  check(current_device(&device), "cudaGetDevice");
  return multiprocessors(device);
}
inline int compute_capability(int device) {  // returns 10 * the major version
  return 10 * attribute_of<cudaDevAttrComputeCapabilityMajor>(device);
}

}  // namespace te_fl::cuda
