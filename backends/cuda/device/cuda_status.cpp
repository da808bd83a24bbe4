#include "device/cuda_check.hpp"

namespace te_fl::cuda {
namespace {

// Error numbers, for toolkits that are older than the driver and lack these names.
constexpr int kErrorContained = 226;         // the value of cudaErrorContained
constexpr int kErrorTensorMemoryLeak = 721;  // the value of cudaErrorTensorMemoryLeak

}  // namespace

// The sticky errors are those after which, according to CUDA's documentation, the process must be
// restarted, and those that mean that the context or the device is lost.
bool is_sticky(cudaError_t error) noexcept {
  switch (static_cast<int>(error)) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case kErrorContained:
    case kErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
      return true;
    default:
      return false;
  }
}

te_fl_status to_status(cudaError_t error) noexcept {
  switch (error) {
    case cudaSuccess:
      return TE_FL_OK;
    case cudaErrorMemoryAllocation:
      return TE_FL_OUT_OF_MEMORY;
    case cudaErrorInvalidResourceHandle:
      return TE_FL_INVALID_ARGUMENT;
    case cudaErrorNoKernelImageForDevice:
      return TE_FL_UNSUPPORTED;
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
      return TE_FL_FAILED_PRECONDITION;
    default:
      return is_sticky(error) ? TE_FL_DEVICE_LOST : TE_FL_INTERNAL;
  }
}

}  // namespace te_fl::cuda
