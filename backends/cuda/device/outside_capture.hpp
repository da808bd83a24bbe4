#pragma once

#include <cuda_runtime_api.h>

namespace te_fl::cuda {

// While an object of this class exists, the thread may make CUDA calls that its own capture in
// progress would forbid, for work on other streams.
class OutsideCapture {
 public:
  OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace te_fl::cuda
