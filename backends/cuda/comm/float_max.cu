#include "comm/float_max.hpp"

#include <algorithm>

#include "common/element.cuh"

namespace te_fl::cuda {
namespace {

template <class T>
struct Ordered {  // for F32, and for F16 and BF16, which F32 represents exactly
  using Integer = int32_t;
  static __device__ Integer of(T x) {
    const float v = to_f32(x);
    const Integer bits = __float_as_int(v);
    return isnan(v) ? INT32_MAX : bits < 0 ? bits ^ INT32_MAX : bits;
  }
  static __device__ T back(Integer i) {
    // INT32_MAX converts back to a NaN
    return from_f32<T>(__int_as_float(i < 0 ? i ^ INT32_MAX : i));
  }
};
template <>
struct Ordered<double> {
  using Integer = int64_t;
  static __device__ Integer of(double v) {
    const Integer bits = __double_as_longlong(v);
    return isnan(v) ? INT64_MAX : bits < 0 ? bits ^ INT64_MAX : bits;
  }
  static __device__ double back(Integer i) {
    return __longlong_as_double(i < 0 ? i ^ INT64_MAX : i);
  }
};

template <class T>
__global__ void ordered_kernel(const T* from, typename Ordered<T>::Integer* to, int64_t n) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step)
    to[i] = Ordered<T>::of(from[i]);
}
template <class T>
__global__ void values_kernel(const typename Ordered<T>::Integer* from, T* to, int64_t n) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step)
    to[i] = Ordered<T>::back(from[i]);
}

constexpr int kBlockThreads = 256;
constexpr int64_t kMostBlocks = 1024;

template <class F>
void visit(int dtype, F&& f) {
  switch (dtype) {
    case TE_FL_F16:
      return f(static_cast<fp16*>(nullptr));
    case TE_FL_BF16:
      return f(static_cast<bf16*>(nullptr));
    case TE_FL_F64:
      return f(static_cast<double*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

unsigned block_count(int64_t n) {
  return static_cast<unsigned>(std::min((n + kBlockThreads - 1) / kBlockThreads, kMostBlocks));
}

}  // namespace

size_t ordered_bytes(int dtype, int64_t n) noexcept {
  return static_cast<size_t>(n) * (dtype == TE_FL_F64 ? 8 : 4);
}

void to_ordered(int dtype, const void* from, void* integers, int64_t n, cudaStream_t stream) {
  visit(dtype, [&]<class T>(T*) {
    using Integer = typename Ordered<T>::Integer;
    ordered_kernel<T><<<block_count(n), kBlockThreads, 0, stream>>>(
        static_cast<const T*>(from), static_cast<Integer*>(integers), n);
  });
  check_launch("ordered_kernel");
}

void from_ordered(int dtype, const void* integers, void* to, int64_t n, cudaStream_t stream) {
  visit(dtype, [&]<class T>(T*) {
    using Integer = typename Ordered<T>::Integer;
    values_kernel<T><<<block_count(n), kBlockThreads, 0, stream>>>(
        static_cast<const Integer*>(integers), static_cast<T*>(to), n);
  });
  check_launch("values_kernel");
}

}  // namespace te_fl::cuda
