#include "cuda_check.hpp"

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace te_fl::cuda {
namespace {

std::atomic<bool> g_forked{false};

bool is_sticky(cudaError_t error) noexcept {
  switch (error) {
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
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
      return true;
    default:
      return false;
  }
}

}  // namespace

te_fl_status status_of(cudaError_t error) noexcept {
  if (error == cudaSuccess) return TE_FL_OK;
  if (error == cudaErrorMemoryAllocation) return TE_FL_OUT_OF_MEMORY;
  return is_sticky(error) ? TE_FL_DEVICE_LOST : TE_FL_INTERNAL;
}

std::string text_of(cudaError_t error, const char* call) {
  return std::string(call) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) +
         ")";
}

void throw_error(cudaError_t error, const char* call, const std::string& more) {
  (void)cudaGetLastError();  // a failure that is reported here must not be found by a later call
  throw backend::Error(status_of(error), text_of(error, call) + more);
}

void refuse_after_fork() {
  if (!g_forked.load(std::memory_order_relaxed)) return;
  throw backend::Error(TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN,
                       "CUDA cannot be used in a child that was forked after the CUDA plugin was "
                       "loaded: start the child by exec (spawn), or fork before the first use");
}

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });
  });
}

}  // namespace te_fl::cuda
