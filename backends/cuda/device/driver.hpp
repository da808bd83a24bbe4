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
  CUresult (*stream_context)(CUstream, CUcontext*) = nullptr;
  CUresult (*push_context)(CUcontext) = nullptr;
  CUresult (*pop_context)(CUcontext*) = nullptr;
};
// Asks the driver once; there must be one.
const Driver& driver() noexcept;

// cudaGetDevice().
cudaError_t current_device(int* device) noexcept;
// cudaStreamIsCapturing().
cudaError_t stream_capture_status(cudaStream_t stream, cudaStreamCaptureStatus* status) noexcept;
// The device of a stream for which stream_capture_status() has just answered; -1: not known.
// The default streams are the current device's, whichever that is. Fast if it is `likely`'s. By its
// context: cuStreamGetDevice() ends a capture (CUDA 13.0).
int device_of_stream(cudaStream_t stream, int likely) noexcept;

}  // namespace te_fl::cuda
