// Access to cuDNN 9, which is opened on first use: a copy that the process has already loaded, else
// the one found by soname, else the one in the CUDA toolkit's folder. The plugin uses only cuDNN's
// graph API, whose descriptors have numbered attributes. The numbers are part of cuDNN's ABI, so
// cuDNN's headers are not needed.
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

// Version numbers are 10000 major + 100 minor + patch.
constexpr size_t kCudnnMinimum = 91400;

// The cuDNN functions that the plugin uses. Either all are found or the library is refused.
// Statuses and enumerations are ints.
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
  size_t number = 0;  // result of version(), queried once
  std::string path;   // path of the loaded copy
};

// Returns the loaded library, or NULL if the library or one of its functions was not found or the
// version is too old. cudnn_missing() then returns the reason and the remedy.
const Cudnn* cudnn() noexcept;
const char* cudnn_missing() noexcept;

// True for the statuses that mean "not supported", as opposed to those of an error.
constexpr bool cudnn_refuses(int status) noexcept { return status >= 3000 && status < 4000; }
// "cudnnBackendFinalize: CUDNN_STATUS_NOT_SUPPORTED (cuDNN's last error message) for <what>"
std::string cudnn_text(int status, const char* function, const std::string& what);
// Throws an error with the text of cudnn_text() unless `status` is success: UNSUPPORTED if
// cudnn_refuses(status), else OUT_OF_MEMORY or INTERNAL.
void check_cudnn(int status, const char* function, const std::string& what);

// An owned descriptor of the graph API.
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

// The cuDNN state of one plugin instance: a handle per device, made on first use. Thread-safe.
class CudnnState {
 public:
  // `host` must outlive this object; its log receives the path of the loaded library. May be NULL.
  explicit CudnnState(const te_fl_host_api* host) : host_(host) {}
  CudnnState(const CudnnState&) = delete;
  CudnnState& operator=(const CudnnState&) = delete;
  ~CudnnState();

  // Returns the finalized descriptor of a device's properties. A plan made with this descriptor
  // runs on any handle of a device with the same properties. The device must be current.
  void* properties(int device);
  // Enqueues a plan on `stream`. The device must be current.
  void execute(int device, cudaStream_t stream, void* plan, void* variant_pack,
               const std::string& what);
  // Keeps `thing` alive until this object is destroyed.
  void keep(std::shared_ptr<void> thing);

 private:
  struct PerDevice {
    std::mutex mutex;
    void* handle = nullptr;
    CudnnDescriptor properties;
  };
  PerDevice& at(int device);  // the caller must hold its mutex

  const te_fl_host_api* host_;
  std::once_flag announced_;
  std::array<PerDevice, 64> devices_;
  std::mutex kept_mutex_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace te_fl::cuda
