#include "device/cuda_check.hpp"

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace te_fl::cuda {
namespace {

std::atomic<bool> g_forked{false};

const char* way_out(cudaError_t error) noexcept {
  switch (error) {
    case cudaErrorInvalidResourceHandle:
      return "; the stream or event is another device's or was destroyed: give one of the tensors' "
             "device";
    case cudaErrorNoKernelImageForDevice:
      return "; the plugin was not built for this GPU: configure te-fl with its architecture in "
             "TE_FL_CUDA_ARCHITECTURES";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
      return "; this cannot be captured into a graph: do it once before the capture, or outside it";
    default:
      return "";
  }
}

}  // namespace

std::string cuda_error_text(cudaError_t error, const char* call) {
  return std::string(call) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) +
         ")" + way_out(error);
}

bool device_is_lost(std::string& text) noexcept {
  size_t available = 0, total = 0;
  const cudaError_t error = cudaMemGetInfo(&available, &total);  // any call that queries the driver
  (void)cudaGetLastError();
  if (!is_sticky(error)) return false;
  try {
    text += "; " + cuda_error_text(error, "the device");
  } catch (...) {  // no host memory for the text; the status suffices
  }
  return true;
}

void throw_error(cudaError_t error, const char* call, const std::string& more) {
  (void)cudaGetLastError();  // so that no later call finds this error
  throw backend::Error(to_status(error), cuda_error_text(error, call) + more);
}

void refuse_foreign(int device, cudaStream_t stream, cudaStreamCaptureStatus status) {
  if (status != cudaStreamCaptureStatusNone) return;
  const int whose = device_of_stream(stream, device);
  if (whose < 0 || whose == device) return;
  backend::invalid("the stream belongs to cuda:" + std::to_string(whose) + "; give one of cuda:" +
                   std::to_string(device) + ", or NULL for its default stream");
}

void refuse_foreign(int device, cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  if (stream_capture_status(stream, &status) == cudaSuccess) {
    return refuse_foreign(device, stream, status);
  }
  (void)cudaGetLastError();  // the default stream, while another stream is being captured
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
