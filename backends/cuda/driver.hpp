// The driver's functions that every op comes through. The runtime's own ones for the same look up
// the device, the kernel and who listens first, which takes longer than what they call.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace te_fl::cuda {

// nullptr: the driver has none; then the runtime's function serves.
struct Driver {
  CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     unsigned, CUstream, void**, void**) = nullptr;
  CUresult (*kernel_function)(CUfunction*, CUkernel) = nullptr;
  CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus*) = nullptr;
  decltype(&cuTensorMapEncodeTiled) encode_tensor_map = nullptr;
  CUresult (*current_device)(CUdevice*) = nullptr;
  CUresult (*stream_device)(CUstream, CUdevice*) = nullptr;  // from CUDA 12.8 on
};
// Asks the driver once; there must be one.
const Driver& driver() noexcept;

// cudaGetDevice().
cudaError_t current_device(int* device) noexcept;
// cudaStreamIsCapturing().
cudaError_t stream_capture_status(cudaStream_t stream, cudaStreamCaptureStatus* status) noexcept;
// Whether the stream is known to be another device's than `device`, and whose. The default streams
// are the current device's; a driver before 12.8 does not know.
bool is_stream_of_another(cudaStream_t stream, int device, int* whose) noexcept;

}  // namespace te_fl::cuda
