// Loads and stores of every float dtype as FP32 in device code, with vector accesses of eight
// elements where the alignment allows them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "common/dtype_bytes.hpp"
#include "device/cuda_check.hpp"
#include "device/device_attributes.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using e4m3 = __nv_fp8_e4m3;
using e5m2 = __nv_fp8_e5m2;

inline cudaStream_t stream_of(const te_fl_context& ctx) {
  return static_cast<cudaStream_t>(ctx.stream);
}

__device__ inline float to_f32(float x) { return x; }
__device__ inline float to_f32(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_f32(fp16 x) { return __half2float(x); }
__device__ inline float to_f32(e4m3 x) { return static_cast<float>(x); }
__device__ inline float to_f32(e5m2 x) { return static_cast<float>(x); }

// Rounds to nearest even. For FP8, infinities and finite values that overflow saturate, and every
// NaN becomes 0x7F. The conversion instructions of compute capability 8.9 and newer do the same.
template <class T>
__device__ inline T from_f32(float x);
template <>
__device__ inline float from_f32<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_f32<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline fp16 from_f32<fp16>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline e4m3 from_f32<e4m3>(float x) {
  e4m3 r;
  r.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
#if __CUDA_ARCH__ < 890
  if (isnan(x)) r.__x = 0x7F;
#endif
  return r;
}
template <>
__device__ inline e5m2 from_f32<e5m2>(float x) {
  e5m2 r;
  r.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
#if __CUDA_ARCH__ < 890
  if (isnan(x)) r.__x = 0x7F;
#endif
  return r;
}

// Converts four values to FP8 and packs them into a word; `a` is in the lowest byte.
__device__ inline uint32_t encode_four(float a, float b, float c, float d, bool is_e5m2) {
#if __CUDA_ARCH__ >= 890
  const auto pair = [](float low, float high, __nv_fp8_interpretation_t kind) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kind);
  };
  if (is_e5m2) return pair(a, b, __NV_E5M2) | pair(c, d, __NV_E5M2) << 16;
  return pair(a, b, __NV_E4M3) | pair(c, d, __NV_E4M3) << 16;
#else
  const auto one = [is_e5m2](float v) -> uint32_t {
    return is_e5m2 ? from_f32<e5m2>(v).__x : from_f32<e4m3>(v).__x;
  };
  return one(a) | one(b) << 8 | one(c) << 16 | one(d) << 24;
#endif
}

constexpr int kGroup = 8;  // elements that a thread loads or stores with one call

// Loads n <= kGroup elements from p, which may have any alignment. Uses vector loads if n is kGroup
// and p is aligned.
template <class T>
__device__ inline void load_group(const T* p, int n, float* out) {
  constexpr int kBytes = kGroup * sizeof(T);
  using Piece = std::conditional_t<(kBytes >= 16), uint4, uint2>;
  if (n == kGroup && reinterpret_cast<uintptr_t>(p) % sizeof(Piece) == 0) {
    Piece raw[kBytes / sizeof(Piece)];
#pragma unroll
    for (int i = 0; i < static_cast<int>(kBytes / sizeof(Piece)); ++i) {
      raw[i] = reinterpret_cast<const Piece*>(p)[i];
    }
    const T* values = reinterpret_cast<const T*>(raw);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) out[i] = to_f32(values[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) out[i] = i < n ? to_f32(p[i]) : 0.0f;
}
// Stores 8 or 16 bytes to global memory with one instruction. For a plain assignment, the compiler
// emits several 2-byte or 4-byte stores, which are up to a third slower.
__device__ inline void store_whole(uint4* to, const uint4& v) { __stwb(to, v); }
__device__ inline void store_whole(uint2* to, const uint2& v) { __stwb(to, v); }

template <class T>
__device__ inline void store_group(T* p, int n, const float* in) {
  constexpr int kBytes = kGroup * sizeof(T);
  using Piece = std::conditional_t<(kBytes >= 16), uint4, uint2>;
  if (n == kGroup && reinterpret_cast<uintptr_t>(p) % sizeof(Piece) == 0) {
    alignas(16) T values[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = from_f32<T>(in[i]);
#pragma unroll
    for (int i = 0; i < static_cast<int>(kBytes / sizeof(Piece)); ++i) {
      store_whole(reinterpret_cast<Piece*>(p) + i, reinterpret_cast<const Piece*>(values)[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (i < n) p[i] = from_f32<T>(in[i]);
  }
}

// A compact float tensor with a dtype known at run time. load() branches on the dtype once per
// eight elements.
struct Source {
  const void* data = nullptr;
  int dtype = TE_FL_F32;

  Source() = default;
  explicit Source(const te_fl_tensor& t) : data(backend::data<const void>(t)), dtype(dtype_of(t)) {}
  __device__ void load(int64_t i, int n, float* out) const {
    switch (dtype) {
      case TE_FL_F32:
        return load_group(static_cast<const float*>(data) + i, n, out);
      case TE_FL_BF16:
        return load_group(static_cast<const bf16*>(data) + i, n, out);
      case TE_FL_F16:
        return load_group(static_cast<const fp16*>(data) + i, n, out);
      case TE_FL_F8E4M3:
        return load_group(static_cast<const e4m3*>(data) + i, n, out);
      default:
        return load_group(static_cast<const e5m2*>(data) + i, n, out);
    }
  }
  __device__ float at(int64_t i) const {
    switch (dtype) {
      case TE_FL_F32:
        return static_cast<const float*>(data)[i];
      case TE_FL_BF16:
        return to_f32(static_cast<const bf16*>(data)[i]);
      case TE_FL_F16:
        return to_f32(static_cast<const fp16*>(data)[i]);
      case TE_FL_F8E4M3:
        return to_f32(static_cast<const e4m3*>(data)[i]);
      default:
        return to_f32(static_cast<const e5m2*>(data)[i]);
    }
  }
};
struct Target {
  void* data = nullptr;
  int dtype = TE_FL_F32;

  Target() = default;
  explicit Target(const te_fl_tensor& t) : data(backend::data<void>(t)), dtype(dtype_of(t)) {}
  __device__ void store(int64_t i, int n, const float* in) const {
    switch (dtype) {
      case TE_FL_F32:
        return store_group(static_cast<float*>(data) + i, n, in);
      case TE_FL_BF16:
        return store_group(static_cast<bf16*>(data) + i, n, in);
      case TE_FL_F16:
        return store_group(static_cast<fp16*>(data) + i, n, in);
      case TE_FL_F8E4M3:
        return store_group(static_cast<e4m3*>(data) + i, n, in);
      default:
        return store_group(static_cast<e5m2*>(data) + i, n, in);
    }
  }
};

// max(a, |v|), or `a` if v is NaN.
__device__ inline float fold_amax(float a, float v) {
  const float absolute = fabsf(v);
  return absolute > a ? absolute : a;
}
// Raises *to to `amax`. Uses an integer maximum, because non-negative floats have the same order as
// their bits.
__device__ inline void atomic_amax(float* to, float amax) {
  if (amax > 0.0f) atomicMax(reinterpret_cast<int*>(to), __float_as_int(amax));
}
__device__ inline float warp_max(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
  return v;
}
__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int kThreads = 256;
// Number of thread blocks for a grid-stride loop over `items`: at most 16 per multiprocessor.
inline unsigned blocks_for(int64_t items, int threads = kThreads) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(ceil_div(items, threads), 1, int64_t{16} * current_multiprocessors()));
}

}  // namespace te_fl::cuda
