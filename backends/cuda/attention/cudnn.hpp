// cuDNN 9, opened when it is first needed: a copy that the process holds already, else by soname,
// else in the CUDA toolkit's folder. Only its graph API is used, through descriptors with numbered
// attributes; the numbers are part of the library's binary interface, so no header of it is needed.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::cuda {

// Versions are 10000 major + 100 minor + patch.
constexpr size_t kCudnnMinimum = 91400;

// The functions used here. Found together or not at all. Statuses and enumerations are ints.
struct Cudnn {
  size_t (*version)() = nullptr;
  const char* (*status_name)(int) = nullptr;
  void (*last_error)(char*, size_t) = nullptr;
  int (*create)(void** handle) = nullptr;
  int (*destroy)(void* handle) = nullptr;
  int (*set_stream)(void* handle, cudaStream_t) = nullptr;
  int (*create_descriptor)(int type, void** descriptor) = nullptr;
  int (*destroy_descriptor)(void* descriptor) = nullptr;
  int (*finalize)(void* descriptor) = nullptr;
  int (*set)(void* descriptor, int name, int type, int64_t count, const void* values) = nullptr;
  int (*get)(const void* descriptor, int name, int type, int64_t room, int64_t* count,
             void* values) = nullptr;
  int (*execute)(void* handle, void* plan, void* variant_pack) = nullptr;
  size_t number = 0;  // version(), asked once
  std::string path;   // of the copy in use
};

// NULL if the library or one of the functions was not found, or it is too old; cudnn_missing() says
// which, with the remedy.
const Cudnn* cudnn() noexcept;
const char* cudnn_missing() noexcept;

// True for the statuses by which cuDNN says that it cannot, as against that something went wrong.
constexpr bool cudnn_refuses(int status) noexcept { return status >= 3000 && status < 4000; }
// "cudnnBackendFinalize: CUDNN_STATUS_NOT_SUPPORTED (its last words) for <what>"
std::string cudnn_text(int status, const char* function, const std::string& what);
// Throws that text unless the status is good: UNSUPPORTED for a refusal, else OUT_OF_MEMORY or
// INTERNAL.
void check_cudnn(int status, const char* function, const std::string& what);

// A descriptor of the graph API, owned.
class CudnnDescriptor {
 public:
  CudnnDescriptor() = default;
  CudnnDescriptor(int type, const std::string& what);
  CudnnDescriptor(CudnnDescriptor&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, nullptr)) {}
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~CudnnDescriptor();
  void* get() const noexcept { return descriptor_; }

 private:
  void* descriptor_ = nullptr;
};

// One instance of the plugin keeps of cuDNN: a handle for each device, made on first use.
// Thread-safe.
class CudnnState {
 public:
  // `host` outlives this object; it is told which copy of the library serves. May be NULL.
  explicit CudnnState(const te_fl_host_api* host) : host_(host) {}
  CudnnState(const CudnnState&) = delete;
  CudnnState& operator=(const CudnnState&) = delete;
  ~CudnnState();

  // The properties of a device as a finalized descriptor; plans are made for it, and any handle of
  // such a device runs them. The device is current.
  void* properties(int device);
  // Enqueues a plan. The device is current.
  void execute(int device, cudaStream_t stream, void* plan, void* variant_pack,
               const std::string& what);
  // Holds on to something until this object goes.
  void keep(std::shared_ptr<void> thing);

 private:
  struct PerDevice {
    std::mutex mutex;
    void* handle = nullptr;
    CudnnDescriptor properties;
  };
  PerDevice& at(int device);  // its mutex is locked by the caller

  const te_fl_host_api* host_;
  std::once_flag announced_;
  std::array<PerDevice, 64> devices_;
  std::mutex kept_mutex_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace te_fl::cuda
