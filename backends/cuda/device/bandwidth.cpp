#include "device/bandwidth.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "device/cuda_check.hpp"
#include "device/outside_capture.hpp"

namespace te_fl::cuda {
namespace {

constexpr int kKept = 64;  // devices whose bandwidth is cached
std::array<std::atomic<double>, kKept> g_measured{};

// Stream, events and device memory of the measurement. The memory does not come from the device's
// memory pool, because the pool would not return it to the driver.
struct Bench {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  void* from = nullptr;
  void* to = nullptr;

  ~Bench() {
    cudaFree(from);
    cudaFree(to);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
    if (stream != nullptr) cudaStreamDestroy(stream);
    (void)cudaGetLastError();
  }
};

double measure(int device) {
  constexpr size_t kLeast = size_t{64} << 20;
  constexpr int kCopies = 8;
  const DeviceGuard guard(device);
  const OutsideCapture outside;
  int cache = 0;
  check(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  const size_t bytes = std::max(kLeast, 4 * static_cast<size_t>(cache));
  Bench b;
  check(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  check(cudaEventCreate(&b.begin), "cudaEventCreate");
  check(cudaEventCreate(&b.end), "cudaEventCreate");
  check(cudaMalloc(&b.from, bytes), "cudaMalloc");
  check(cudaMalloc(&b.to, bytes), "cudaMalloc");
  check(cudaMemsetAsync(b.from, 1, bytes, b.stream), "cudaMemsetAsync");
  double best = 0;
  for (int i = 0; i <= kCopies; ++i) {
    check(cudaEventRecord(b.begin, b.stream), "cudaEventRecord");
    check(cudaMemcpyAsync(b.to, b.from, bytes, cudaMemcpyDeviceToDevice, b.stream),
          "cudaMemcpyAsync");
    check(cudaEventRecord(b.end, b.stream), "cudaEventRecord");
    check(cudaEventSynchronize(b.end), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, b.begin, b.end), "cudaEventElapsedTime");
    if (i == 0 || !(milliseconds > 0)) continue;  // the first copy touches the pages
    best = std::max(best, 2e3 * static_cast<double>(bytes) / static_cast<double>(milliseconds));
  }
  return best;
}

}  // namespace

double copy_bandwidth(int device) noexcept {
  if (device < 0 || device >= kKept) return 0;
  return g_measured[static_cast<size_t>(device)].load(std::memory_order_relaxed);
}

double measure_copy_bandwidth(int device) noexcept {
  static std::mutex one_at_a_time;
  if (device < 0 || device >= kKept) return 0;
  try {
    const std::lock_guard lock(one_at_a_time);
    std::atomic<double>& kept = g_measured[static_cast<size_t>(device)];
    if (kept.load(std::memory_order_relaxed) == 0) {
      kept.store(measure(device), std::memory_order_relaxed);
    }
  } catch (...) {  // check() has cleared the error, so no later call reports it
  }
  return copy_bandwidth(device);
}

}  // namespace te_fl::cuda
