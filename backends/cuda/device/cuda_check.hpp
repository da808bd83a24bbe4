// CUDA statuses as te-fl statuses, and what every entry of the plugin does first.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "device/driver.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda {

// True if nothing of the device runs in this process after it.
bool is_sticky(cudaError_t error) noexcept;
// A te_fl_code: sticky errors are TE_FL_DEVICE_LOST.
te_fl_status status_of(cudaError_t error) noexcept;
// "cudaMallocAsync: out of memory (cudaErrorMemoryAllocation)"
std::string text_of(cudaError_t error, const char* call);
[[noreturn]] void throw_error(cudaError_t error, const char* call, const std::string& more = "");

// After a library's failure: whether it failed because the device is lost, which libraries put into
// words of their own. Then what CUDA says is appended to the text.
bool device_is_lost(std::string& text) noexcept;

inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw_error(error, call);
}
// True if a launch of this thread has gone by the runtime, not straight to the driver, since
// check_launch() last asked: then only the runtime knows whether it was accepted. Before CUDA 13
// all go so (driver.cpp).
inline constinit thread_local bool t_runtime_launched = true;
// After a kernel launch: its configuration was accepted.
inline void check_launch(const char* kernel) {
#if CUDART_VERSION >= 13000
  if (!t_runtime_launched) return;
  t_runtime_launched = false;
#endif
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw_error(error, kernel);
}

// Throws if a stream is another device's: what is enqueued there fails after it has been prepared,
// or is that device's. `status` is what its capture status is; streams that are being captured
// pass.
void refuse_foreign(int device, cudaStream_t stream, cudaStreamCaptureStatus status);
// Asks for the status first.
void refuse_foreign(int device, cudaStream_t stream);

// Throws if this process is a child of the one that opened the plugin: CUDA does not survive fork.
void refuse_after_fork();
void watch_forks();

// Makes a device current and restores the previous one (R8).
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(current_device(&previous_), "cudaGetDevice");
    if (previous_ != device) {
      check(cudaSetDevice(device), "cudaSetDevice");
      changed_ = true;
    }
    t_device_ = device;
  }
  ~DeviceGuard() {
    t_device_ = outer_;
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  // The device that the innermost guard of this thread has made current; -1 outside of all.
  static int current() noexcept { return t_device_; }

 private:
  static inline constinit thread_local int t_device_ = -1;
  const int outer_ = t_device_;
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace te_fl::cuda
