// Device memory for the duration of one function, allocated and freed in stream order.
#pragma once

#include <cuda_runtime_api.h>

#include "device/cuda_check.hpp"

namespace te_fl::cuda {

class DeviceMemory {
 public:
  DeviceMemory(size_t bytes, cudaStream_t stream) : bytes_(bytes), stream_(stream) {
    check(cudaMallocAsync(&data_, bytes, stream), "cudaMallocAsync");
  }
  ~DeviceMemory() { cudaFreeAsync(data_, stream_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* get() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
  cudaStream_t stream_;
};

}  // namespace te_fl::cuda
