#include "gemm/cublaslt.hpp"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>

#include "device/cuda_check.hpp"
#include "device/open_library.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda {
namespace {

struct Library {
  CublasLt table;
  std::string missing;

  Library() {
    std::string reason;
    void* handle = open_library(
        {"libcublasLt.so.13", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so.13",
         "/usr/local/cuda/lib64/libcublasLt.so.12"},
        reason);
    if (handle == nullptr) {
      missing = "cuBLASLt was not found (" + reason +
                "): install libcublas of CUDA 12.9 or newer (Debian and Ubuntu: libcublas-13-0 of "
                "NVIDIA's repository; PyPI: nvidia-cublas), or set LD_LIBRARY_PATH";
      return;
    }
    const auto find = [&](auto& slot, const char* name) {
      slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(handle, name));
      if (slot == nullptr && missing.empty()) {
        missing = std::string("cuBLASLt has no ") + name + ": install CUDA 12.9 or newer";
      }
    };
    find(table.version, "cublasLtGetVersion");
    find(table.status_name, "cublasLtGetStatusName");
    find(table.create, "cublasLtCreate");
    find(table.desc_init, "cublasLtMatmulDescInit_internal");
    find(table.desc_set, "cublasLtMatmulDescSetAttribute");
    find(table.layout_init, "cublasLtMatrixLayoutInit_internal");
    find(table.preference_init, "cublasLtMatmulPreferenceInit_internal");
    find(table.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(table.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(table.algo_get, "cublasLtMatmulAlgoConfigGetAttribute");
    find(table.algo_set, "cublasLtMatmulAlgoConfigSetAttribute");
    find(table.algo_check, "cublasLtMatmulAlgoCheck");
    find(table.matmul, "cublasLtMatmul");
    if (!missing.empty()) return;
    table.number = table.version();
    table.path = path_of(reinterpret_cast<const void*>(table.version));
  }
};

const Library& library() {
  static const Library instance;
  return instance;
}

}  // namespace

const CublasLt* cublaslt() noexcept {
  const Library& found = library();
  return found.missing.empty() ? &found.table : nullptr;
}
const char* cublaslt_missing() noexcept { return library().missing.c_str(); }

cublasLtHandle_t cublaslt_handle(int device) {
  static std::mutex mutex;
  static std::array<std::atomic<cublasLtHandle_t>, 64> handles{};
  std::atomic<cublasLtHandle_t>& kept = handles.at(static_cast<size_t>(device));
  if (const cublasLtHandle_t handle = kept.load(std::memory_order_acquire)) return handle;
  const std::lock_guard lock(mutex);
  cublasLtHandle_t handle = kept.load(std::memory_order_relaxed);
  if (handle == nullptr) {
    check(cublaslt()->create(&handle), "cublasLtCreate", "");
    kept.store(handle, std::memory_order_release);
  }
  return handle;
}

void check(cublasStatus_t status, const char* function, const std::string& what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::string text = std::string(function) + ": " + cublaslt()->status_name(status);
  if (!what.empty()) text += " for " + what;
  const te_fl_status code = device_is_lost(text)                   ? TE_FL_DEVICE_LOST
                            : status == CUBLAS_STATUS_ALLOC_FAILED ? TE_FL_OUT_OF_MEMORY
                                                                   : TE_FL_INTERNAL;
  throw backend::Error(code, text);
}

}  // namespace te_fl::cuda
