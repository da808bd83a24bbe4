// Pairs of BF16 or FP16 elements in a 32-bit word; the first element is in the low half.
#pragma once

#include "common/element.cuh"

namespace te_fl::cuda {

// The maximum of each half. If one operand is NaN, the result is the other.
template <class T>
__device__ inline uint32_t larger_pair(uint32_t a, uint32_t b) {
  using Two = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;
  const Two most = __hmax2(reinterpret_cast<const Two&>(a), reinterpret_cast<const Two&>(b));
  return reinterpret_cast<const uint32_t&>(most);
}
__device__ inline uint32_t absolute_pair(uint32_t pair) { return pair & 0x7FFF7FFFu; }
template <class T>
__device__ inline float2 values_of_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, bf16>) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}
// Reduces two words to one: the maximum of `first`'s halves is in the low half, that of `second`'s
// in the high half.
template <class T>
__device__ inline uint32_t larger_halves(uint32_t first, uint32_t second) {
  return larger_pair<T>(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

}  // namespace te_fl::cuda
