// CUDA driver functions that every op uses. The equivalent functions of the CUDA runtime are
// slower: they first look up the device, the kernel and subscribed profilers.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace te_fl::cuda {

// A NULL entry means that the driver lacks the function; the runtime's function is used instead.
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
// Loads the functions on the first call. A driver must be present.
const Driver& driver() noexcept;

// Like cudaGetDevice(), but faster.
cudaError_t current_device(int* device) noexcept;
// Like cudaStreamIsCapturing(), but faster.
cudaError_t stream_capture_status(cudaStream_t stream, cudaStreamCaptureStatus* status) noexcept;
// Returns the device of a stream, or -1 if it is unknown. stream_capture_status() must have
// succeeded for the stream. Returns -1 for a default stream, because it belongs to whichever device
// is current. `likely`: the expected device, for which the look-up is fastest. Uses the stream's
// context, because cuStreamGetDevice() ends a capture in progress (CUDA 13.0).
int device_of_stream(cudaStream_t stream, int likely) noexcept;

}  // namespace te_fl::cuda
