#include "gemm/gemm_compare.hpp"

#include <cmath>

#include "common/element.cuh"
#include "device/device_memory.hpp"

namespace te_fl::cuda {
namespace {

constexpr int kThreads = 256, kBlocks = 1024;

struct Findings {
  double squares;  // sum over the finite expected values
  unsigned long long different;
};

template <class T>
__global__ void squares_kernel(const T* expected, int64_t count, Findings* found) {
  double sum = 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const float v = to_f32(expected[i]);
    if (isfinite(v)) sum += static_cast<double>(v) * v;
  }
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_down_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) atomicAdd(&found->squares, sum);
}

template <class T>
__global__ void differences_kernel(const T* expected, const T* got, int64_t count, float step,
                                   float share, Findings* found) {
  const float atol = share * static_cast<float>(sqrt(found->squares / static_cast<double>(count)));
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    if (!explained(to_f32(expected[i]), to_f32(got[i]), step, atol)) {
      atomicAdd(&found->different, 1ull);
    }
  }
}

template <class T>
bool agree(const void* expected, const void* got, int64_t count, float step, float share,
           cudaStream_t stream) {
  const DeviceMemory memory(sizeof(Findings), stream);
  auto* found = static_cast<Findings*>(memory.get());
  check(cudaMemsetAsync(found, 0, sizeof *found, stream), "cudaMemsetAsync");
  const auto* a = static_cast<const T*>(expected);
  squares_kernel<T><<<kBlocks, kThreads, 0, stream>>>(a, count, found);
  check_launch("squares_kernel");
  differences_kernel<T>
      <<<kBlocks, kThreads, 0, stream>>>(a, static_cast<const T*>(got), count, step, share, found);
  check_launch("differences_kernel");
  Findings result{};
  check(cudaMemcpyAsync(&result, found, sizeof result, cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return result.different == 0;
}

}  // namespace

bool results_agree(const void* expected, const void* got, int64_t count, int dtype, float share,
                   void* stream) {
  if (count == 0) return true;
  const auto as = [&](auto element, int bits) {
    return agree<decltype(element)>(expected, got, count, std::ldexp(1.0f, -bits), share,
                                    static_cast<cudaStream_t>(stream));
  };
  switch (dtype) {
    case TE_FL_F16:
      return as(fp16{}, 10);
    case TE_FL_BF16:
      return as(bf16{}, 7);
    case TE_FL_F8E4M3:
      return as(e4m3{}, 3);
    case TE_FL_F8E5M2:
      return as(e5m2{}, 2);
    default:
      return as(float{}, 23);
  }
}

}  // namespace te_fl::cuda
