// Loads and stores of float elements as 16-byte vectors, also for rows that are not 16-byte
// aligned; and fast division by numbers that are known before the launch.
#pragma once

#include <cstring>

#include "common/element.cuh"

namespace te_fl::cuda {

// Elements that a thread loads and stores together. T is float, bf16 or fp16. A pack of floats has
// eight elements, two vectors, only if a mask with one bit per element requires a full byte; the
// accesses of consecutive threads then have gaps, which costs a little speed.
template <class T, int kElements = 16 / static_cast<int>(sizeof(T))>
struct Pack {
  static constexpr int kSize = kElements;
  static constexpr int kPieces = kSize * static_cast<int>(sizeof(T)) / 16;
  uint4 raw[kPieces];

  // `p` must be 16-byte aligned.
  __device__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) raw[i] = reinterpret_cast<const uint4*>(p)[i];
  }
  __device__ void store(T* p) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) reinterpret_cast<uint4*>(p)[i] = raw[i];
  }
  // Stores values that set() wrote, with one instruction per 16-byte vector. (For store(), the
  // compiler would emit several narrower stores.)
  __device__ void store_set(T* p) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) store_whole(reinterpret_cast<uint4*>(p) + i, raw[i]);
  }
  // Elements begin <= i < end of p, of any alignment. load_some() sets the others to 0;
  // store_some() does not write them.
  __device__ void load_some(const T* p, int begin, int end) {
    T* values = reinterpret_cast<T*>(raw);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) raw[i] = uint4{};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i >= begin && i < end) values[i] = p[i];
    }
  }
  __device__ void store_some(T* p, int begin, int end) const {
    const T* values = reinterpret_cast<const T*>(raw);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i >= begin && i < end) p[i] = values[i];
    }
  }
  __device__ float operator[](int i) const { return to_f32(reinterpret_cast<const T*>(raw)[i]); }
  // Sets the pack to v, rounded to T.
  __device__ void set(const float (&v)[kSize]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) std::memcpy(&raw[i], v + 4 * i, 16);
    } else {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (std::is_same_v<T, bf16>) {
          const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
          std::memcpy(&words[i], &pair, 4);
        } else {
          const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
          std::memcpy(&words[i], &pair, 4);
        }
      }
      raw[0] = uint4{words[0], words[1], words[2], words[3]};
    }
  }
};

// Number of elements between the preceding 16-byte boundary and the row's begin. Pack i begins at
// column i * kSize - shift.
template <class T>
__device__ inline int misalignment(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
}
// Returns an upper bound of the number of 8-element runs that the packs of a row of `size` elements
// cover.
template <class T>
inline int64_t count_runs(const T* base, int64_t size) {
  const bool even = size % kGroup == 0 && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  return even ? size / kGroup : ceil_div(size + kGroup - 1, kGroup);
}
// Loads columns [col, col + kSize) of a row of `size` elements; columns outside the row become 0.
// row + col must be a multiple of 16 bytes.
template <class T, int kSize, class Index>
__device__ inline void load_cut(Pack<T, kSize>& x, const T* row, Index col, Index size) {
  if (col >= 0 && col + kSize <= size) return x.load(row + col);
  x.load_some(row + col, col < 0 ? static_cast<int>(-col) : 0,
              size - col < kSize ? static_cast<int>(size - col) : kSize);
}
// Stores columns [col, col + kSize) of a row of `size` elements; columns outside the row are not
// written. `aligned`: the row has the same misalignment() as the row that load_cut() read.
template <class T, int kSize, class Index>
__device__ inline void store_cut(const Pack<T, kSize>& x, T* row, Index col, Index size,
                                 bool aligned) {
  if (aligned && col >= 0 && col + kSize <= size) return x.store(row + col);
  x.store_some(row + col, col < 0 ? static_cast<int>(-col) : 0,
               size - col < kSize ? static_cast<int>(size - col) : kSize);
}

// Calls f with a value of the 16-bit or 32-bit float type that `dtype` names.
template <class F>
void with_type(int dtype, F&& f) {
  if (dtype == TE_FL_F32) return f(float{});
  if (dtype == TE_FL_BF16) return f(bf16{});
  f(fp16{});
}

// Computes n / d and n mod d for n < 2^31 with a multiplication.
struct FastDiv {
  uint32_t divisor = 1, factor = 1, shift = 0;

  FastDiv() = default;
  explicit FastDiv(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    factor = static_cast<uint32_t>((excess << 32) / divisor + 1);
  }
  __device__ uint32_t operator()(uint32_t n, uint32_t& rest) const {
    const uint32_t quotient = (__umulhi(n, factor) + n) >> shift;
    rest = n - quotient * divisor;
    return quotient;
  }
};
constexpr int64_t kFastDivLimit = int64_t{1} << 31;

}  // namespace te_fl::cuda
