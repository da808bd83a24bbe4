// Converts CUDA statuses to te-fl statuses, and declares the checks that the plugin's entry points
// make first.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "device/driver.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda {

// True if the error is sticky: after it, this process can run nothing on the device any more.
bool is_sticky(cudaError_t error) noexcept;
// The te_fl_code of a CUDA error. Sticky errors give TE_FL_DEVICE_LOST.
te_fl_status to_status(cudaError_t error) noexcept;
// For example "cudaMallocAsync: out of memory (cudaErrorMemoryAllocation)".
std::string cuda_error_text(cudaError_t error, const char* call);
[[noreturn]] void throw_error(cudaError_t error, const char* call, const std::string& more = "");

// Called after a library such as cuBLASLt returned an error status. If the device is lost, appends
// CUDA's error to `text` and returns true.
bool device_is_lost(std::string& text) noexcept;

inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw_error(error, call);
}
// True if, since the last check_launch(), a kernel launch of this thread went through the CUDA
// runtime instead of directly to the driver. check_launch() must query the runtime for the result
// of such a launch. Before CUDA 13 all launches go through the runtime (driver.cpp).
inline constinit thread_local bool t_runtime_launched = true;
// Called after a kernel launch. Throws if the launch was not accepted.
inline void check_launch(const char* kernel) {
#if CUDART_VERSION >= 13000
  if (!t_runtime_launched) return;
  t_runtime_launched = false;
#endif
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw_error(error, kernel);
}

// Throws if the stream belongs to another device, because work enqueued there would fail late or
// run on that device. `status`: the stream's capture status; a stream that is being captured is
// accepted.
void refuse_foreign(int device, cudaStream_t stream, cudaStreamCaptureStatus status);
// Overload that queries the capture status itself.
void refuse_foreign(int device, cudaStream_t stream);

// Throws if this process was forked after the plugin was opened, because CUDA cannot be used after
// fork().
void refuse_after_fork();
void watch_forks();

// Makes a device current and restores the previous one (rule R8 of plugin.h).
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
  // The device that this thread's innermost guard has made current; -1 without a guard.
  static int current() noexcept { return t_device_; }

 private:
  static inline constinit thread_local int t_device_ = -1;
  const int outer_ = t_device_;
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace te_fl::cuda
