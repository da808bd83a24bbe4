#include "device/driver.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "device/cuda_check.hpp"

namespace te_fl::cuda {

const Driver& driver() noexcept {
  static const Driver instance = [] {
    Driver d;
    const auto find = [](auto& slot, const char* name) {
      void* found = nullptr;
      cudaDriverEntryPointQueryResult result{};
      if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) ==
              cudaSuccess &&
          result == cudaDriverEntryPointSuccess) {
        slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(found);
      }
    };
    find(d.launch, "cuLaunchKernel");
    find(d.kernel_function, "cuKernelGetFunction");
    find(d.is_capturing, "cuStreamIsCapturing");
    find(d.encode_tensor_map, "cuTensorMapEncodeTiled");
    find(d.current_device, "cuCtxGetDevice");
    find(d.stream_context, "cuStreamGetCtx");
    find(d.push_context, "cuCtxPushCurrent");
    find(d.pop_context, "cuCtxPopCurrent");
    (void)cudaGetLastError();
    return d;
  }();
  return instance;
}

namespace {
// True once a runtime call has made a context current on this thread. Driver queries need a
// context; without one they fail, and tools that monitor driver errors would report that.
constinit thread_local bool t_has_context = false;

// True if the process sees only one device, to which every stream then belongs.
bool is_alone() noexcept {
  static const bool alone = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count == 1;
  }();
  return alone;
}
}  // namespace

cudaError_t current_device(int* device) noexcept {
  if (t_has_context && is_alone()) {
    *device = 0;
    return cudaSuccess;
  }
  const Driver& d = driver();
  CUdevice found = 0;
  if (t_has_context && d.current_device != nullptr && d.current_device(&found) == CUDA_SUCCESS) {
    *device = found;
    return cudaSuccess;
  }
  return cudaGetDevice(device);
}

cudaError_t stream_capture_status(cudaStream_t stream, cudaStreamCaptureStatus* status) noexcept {
  const Driver& d = driver();
  CUstreamCaptureStatus found{};
  if (t_has_context && d.is_capturing != nullptr &&
      d.is_capturing(stream, &found) == CUDA_SUCCESS) {
    *status = static_cast<cudaStreamCaptureStatus>(found);
    return cudaSuccess;
  }
  const cudaError_t error =
      cudaStreamIsCapturing(stream, status);  // the runtime also reports the error
  t_has_context = error == cudaSuccess;
  return error;
}

int device_of_stream(cudaStream_t stream, int likely) noexcept {
  if (is_alone()) return likely;
  // The context that was last found for each device; a device rarely has more than one.
  static constinit std::array<std::atomic<CUcontext>, 64> contexts{};
  const auto known = [&](int device) { return device >= 0 && device < std::ssize(contexts); };
  const Driver& d = driver();
  const bool is_default =
      stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  if (is_default || !t_has_context || d.stream_context == nullptr || d.push_context == nullptr ||
      d.pop_context == nullptr || d.current_device == nullptr) {
    return -1;
  }
  CUcontext context = nullptr;
  if (d.stream_context(stream, &context) != CUDA_SUCCESS || context == nullptr) return -1;
  if (known(likely) &&
      contexts[static_cast<size_t>(likely)].load(std::memory_order_relaxed) == context) {
    return likely;
  }
  CUdevice found = -1;
  if (d.push_context(context) != CUDA_SUCCESS) return -1;
  const bool found_device = d.current_device(&found) == CUDA_SUCCESS;
  d.pop_context(&context);
  if (!found_device) return -1;
  if (known(found)) {
    contexts[static_cast<size_t>(found)].store(context, std::memory_order_relaxed);
  }
  return found;
}

#if CUDART_VERSION >= 13000
namespace {

// An entry of a thread's cache: the driver function of a kernel in a device's context.
struct Known {
  cudaKernel_t kernel = nullptr;
  int device = -1;
  CUfunction function = nullptr;
};
constexpr size_t kKnown = 256;
constinit thread_local std::array<Known, kKnown> t_known{};

Known& find_slot(cudaKernel_t kernel) noexcept {
  const uint64_t hash = reinterpret_cast<uintptr_t>(kernel) * 0x9e3779b97f4a7c15u;
  return t_known[hash >> 56];
}

}  // namespace
#endif

}  // namespace te_fl::cuda

#if CUDART_VERSION >= 13000
// The linker redirects every <<<>>> launch of this plugin to this function (--wrap in
// CMakeLists.txt). A kernel's first launch on a device, launches without a DeviceGuard, and
// launches that the driver refuses go to the runtime, so that check_launch() finds their errors.
extern "C" {

cudaError_t __real___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                      size_t shared, cudaStream_t stream);

__attribute__((visibility("hidden"))) cudaError_t __wrap___cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  using namespace te_fl::cuda;  // NOLINT: the linker's names are C
  const int device = DeviceGuard::current();
  Known& known = find_slot(kernel);
  if (device >= 0 && known.kernel == kernel && known.device == device) {
    const CUresult result =
        driver().launch(known.function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                        static_cast<unsigned>(shared), stream, args, nullptr);
    if (result == CUDA_SUCCESS) return cudaSuccess;
    known = {};
    t_runtime_launched = true;
    return __real___cudaLaunchKernel(kernel, grid, block, args, shared, stream);
  }
  t_runtime_launched = true;
  const cudaError_t error = __real___cudaLaunchKernel(kernel, grid, block, args, shared, stream);
  const Driver& d = driver();
  CUfunction function = nullptr;
  if (error == cudaSuccess && device >= 0 && d.launch != nullptr && d.kernel_function != nullptr &&
      d.kernel_function(&function, kernel) == CUDA_SUCCESS) {
    known = {kernel, device, function};
  }
  return error;
}

}  // extern "C"
#endif
