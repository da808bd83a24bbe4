#include "attention/cudnn.hpp"

#include <dlfcn.h>

#include <type_traits>

#include "attention/cudnn_numbers.hpp"
#include "device/cuda_check.hpp"
#include "device/open_library.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda {
namespace {

std::string version_text(size_t number) {
  return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
         std::to_string(number % 100);
}

struct Library {
  Cudnn table;
  std::string missing;

  Library() {
    std::string reason;
    void* handle = open_library({"libcudnn.so.9", "/usr/local/cuda/lib64/libcudnn.so.9"}, reason);
    if (handle == nullptr) {
      missing =
          "cuDNN was not found (" + reason +
          "): install cuDNN 9 (Debian and Ubuntu: cudnn9-cuda-13 of NVIDIA's repository; PyPI: "
          "nvidia-cudnn-cu13), or set LD_LIBRARY_PATH";
      return;
    }
    const auto find = [&](auto& slot, const char* name) {
      slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(handle, name));
      if (slot == nullptr && missing.empty()) {
        missing = std::string("cuDNN has no ") + name + ": install cuDNN " +
                  version_text(kCudnnMinimum) + " or newer";
      }
    };
    find(table.version, "cudnnGetVersion");
    find(table.status_name, "cudnnGetErrorString");
    find(table.last_error, "cudnnGetLastErrorString");
    find(table.create, "cudnnCreate");
    find(table.destroy, "cudnnDestroy");
    find(table.set_stream, "cudnnSetStream");
    find(table.create_descriptor, "cudnnBackendCreateDescriptor");
    find(table.destroy_descriptor, "cudnnBackendDestroyDescriptor");
    find(table.finalize, "cudnnBackendFinalize");
    find(table.set, "cudnnBackendSetAttribute");
    find(table.get, "cudnnBackendGetAttribute");
    find(table.execute, "cudnnBackendExecute");
    if (!missing.empty()) return;
    table.number = table.version();
    table.path = path_of(reinterpret_cast<const void*>(table.version));
    if (table.number < kCudnnMinimum) {
      missing = "cuDNN " + version_text(table.number) + " (" + table.path +
                ") is too old: install " + version_text(kCudnnMinimum) + " or newer";
    }
  }
};

const Library& library() {
  static const Library instance;
  return instance;
}

constexpr int kAllocationFailed[] = {4003, 4004};  // on the host, on the device

}  // namespace

const Cudnn* cudnn() noexcept {
  const Library& found = library();
  return found.missing.empty() ? &found.table : nullptr;
}
const char* cudnn_missing() noexcept { return library().missing.c_str(); }

std::string cudnn_text(int status, const char* function, const std::string& what) {
  char words[512] = {};
  cudnn()->last_error(words, sizeof words);
  std::string text = std::string(function) + ": " + cudnn()->status_name(status);
  if (words[0] != '\0') text += std::string(" (") + words + ")";
  if (!what.empty()) text += " for " + what;
  return text;
}

void check_cudnn(int status, const char* function, const std::string& what) {
  if (status == 0) return;
  te_fl_status code = cudnn_refuses(status) ? TE_FL_UNSUPPORTED : TE_FL_INTERNAL;
  for (const int failed : kAllocationFailed) {
    if (status == failed) code = TE_FL_OUT_OF_MEMORY;
  }
  std::string text = cudnn_text(status, function, what);
  if (code == TE_FL_INTERNAL && device_is_lost(text)) code = TE_FL_DEVICE_LOST;
  throw backend::Error(code, text);
}

CudnnDescriptor::CudnnDescriptor(int type, const std::string& what) {
  check_cudnn(cudnn()->create_descriptor(type, &descriptor_), "cudnnBackendCreateDescriptor", what);
}
CudnnDescriptor::~CudnnDescriptor() {
  if (descriptor_ != nullptr) cudnn()->destroy_descriptor(descriptor_);
}

CudnnState::~CudnnState() {
  for (PerDevice& d : devices_) {
    if (d.handle != nullptr) cudnn()->destroy(d.handle);
  }
}

CudnnState::PerDevice& CudnnState::at(int device) {
  return devices_.at(static_cast<size_t>(device));
}

void* CudnnState::properties(int device) {
  std::call_once(announced_, [&] {
    if (host_ == nullptr || host_->log == nullptr) return;
    const std::string text = "cuDNN " + version_text(cudnn()->number) + " (" + cudnn()->path + ")";
    host_->log(host_->host, TE_FL_LOG_INFO, text.c_str());
  });
  PerDevice& d = at(device);
  const std::lock_guard lock(d.mutex);
  if (d.properties.get() == nullptr) {
    CudnnDescriptor made(cudnn_type::kDeviceProperties, "");
    const int32_t index = device;
    check_cudnn(cudnn()->set(made.get(), cudnn_attr::kDeviceIndex, cudnn_of::kInt32, 1, &index),
                "cudnnBackendSetAttribute", "the device's index");
    check_cudnn(cudnn()->finalize(made.get()), "cudnnBackendFinalize", "the device's properties");
    d.properties = std::move(made);
  }
  return d.properties.get();
}

void CudnnState::keep(std::shared_ptr<void> thing) {
  const std::lock_guard lock(kept_mutex_);
  kept_.push_back(std::move(thing));
}

void CudnnState::execute(int device, cudaStream_t stream, void* plan, void* variant_pack,
                         const std::string& what) {
  PerDevice& d = at(device);
  // A handle has one stream at a time, so the lock covers set_stream() and execute(). Both only
  // enqueue work.
  const std::lock_guard lock(d.mutex);
  if (d.handle == nullptr) check_cudnn(cudnn()->create(&d.handle), "cudnnCreate", what);
  check_cudnn(cudnn()->set_stream(d.handle, stream), "cudnnSetStream", what);
  check_cudnn(cudnn()->execute(d.handle, plan, variant_pack), "cudnnBackendExecute", what);
}

}  // namespace te_fl::cuda
