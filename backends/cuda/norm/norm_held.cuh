// Rows that some warps of a block hold in registers, unconverted, with four groups of eight
// elements per thread; and the computation of their statistics.
#pragma once

#include "norm/norm.cuh"

namespace te_fl::cuda {

constexpr int kHeldGroups = 4;

// The rows of one call. `warps` warps of a block, a power of two, share a row.
struct HeldShape {
  int cols, groups, warps;
  float inverse_cols, epsilon;
  bool centred, full;  // full: every thread has all of its groups
};
// The shape for rows that fit a block of 16 warps (choose_norm() checks this).
inline HeldShape held_shape(int64_t cols, float epsilon, bool centred) {
  constexpr int64_t kEach = 32 * kHeldGroups * kGroup;
  static_assert(norm_choice::kHeldCols == 16 * kEach);
  HeldShape shape{static_cast<int>(cols),
                  static_cast<int>(cols / kGroup),
                  1,
                  1.0f / static_cast<float>(cols),
                  epsilon,
                  centred,
                  false};
  while (shape.warps * kEach < cols) shape.warps *= 2;
  shape.full = shape.warps * kEach == cols;
  return shape;
}

// A thread's position: the slot is its row in the block, the part is its warp in that row. kFull:
// every thread has all of its groups.
template <bool kFull>
struct HeldPlace {
  int lane, warp, slot, part, warps, groups;
  __device__ explicit HeldPlace(const HeldShape& shape)
      : lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        slot(warp / shape.warps),
        part(warp - slot * shape.warps),
        warps(shape.warps),
        groups(shape.groups) {}
  __device__ int group(int g) const { return (g * warps + part) * 32 + lane; }
  __device__ bool holds(int g) const { return kFull || group(g) < groups; }
};

// Loads 16 bytes without allocating an L1 line, so that L1 keeps data that is read again.
__device__ inline uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Loads weights through the read-only cache: no launch that reads them writes them.
template <class T>
__device__ inline Raw<T> load_weights(const T* p) {
  Raw<T> raw;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    raw.part[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
  }
  return raw;
}
template <class T>
__device__ inline Raw<T> load_raw_once(const T* p) {
  Raw<T> raw;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    raw.part[i] = load_once(reinterpret_cast<const uint4*>(p) + i);
  }
  return raw;
}
// Loads the thread's groups of the row that starts at element `first`. With a residual, adds it and
// writes the result to `sum`. Returns zeros unless `inside`.
template <bool kResidual, bool kFull, class T>
__device__ inline void hold_row(const HeldPlace<kFull>& at, int64_t first, bool inside,
                                const void* x, const void* residual, void* sum,
                                Raw<T> (&row)[kHeldGroups]) {
#pragma unroll
  for (int g = 0; g < kHeldGroups; ++g) {
    if (at.holds(g) && inside)
      row[g] = load_raw_once(static_cast<const T*>(x) + first + at.group(g) * kGroup);
  }
  if constexpr (kResidual) {
    Raw<T> more[kHeldGroups];
#pragma unroll
    for (int g = 0; g < kHeldGroups; ++g) {
      if (!at.holds(g) || !inside) continue;
      more[g] = load_raw_once(static_cast<const T*>(residual) + first + at.group(g) * kGroup);
    }
#pragma unroll
    for (int g = 0; g < kHeldGroups; ++g) {
      if (!at.holds(g) || !inside) continue;
      add_raw(row[g], more[g]);
      store_raw(static_cast<T*>(sum) + first + at.group(g) * kGroup, row[g]);
    }
  }
}

// Computes the statistics of the thread's row. All threads of the block must call it. `parts`:
// shared memory, one element per warp, which nothing else may access between the barriers before
// and after.
template <bool kFull, class T>
__device__ inline RowStatistics held_statistics(const HeldPlace<kFull>& at, const HeldShape& shape,
                                                const Raw<T> (&row)[kHeldGroups], float4* parts) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int g = 0; g < kHeldGroups; ++g) {
      if (!at.holds(g)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[kHalf];
        unpack(row[g], half, v);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) f(v[i], i);
      }
    }
  };
  int groups = kFull ? 32 * kHeldGroups : 0;  // number of this warp's groups
#pragma unroll
  for (int g = 0; !kFull && g < kHeldGroups; ++g) {
    groups += max(0, min(at.groups - (g * at.warps + at.part) * 32, 32));
  }
  const float n = static_cast<float>(groups * kGroup);
  float centre = 0.0f;  // needs only to be near the mean
  if (shape.centred) {
    float sums[kHalf] = {};
    each([&](float v, int i) { sums[i] += v; });
    const float sum = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    centre = n > 0.0f ? __fdividef(sum, n) : 0.0f;
  }
  float sums[kHalf] = {}, squares[kHalf] = {};
  each([&](float v, int i) {
    const float d = v - centre;
    sums[i] += d;
    squares[i] = fmaf(d, d, squares[i]);
  });
  const float two = two_sums((sums[0] + sums[1]) + (sums[2] + sums[3]),
                             (squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float other = __shfl_xor_sync(0xFFFFFFFFu, two, 16);
  if (at.warps == 1) {
    const bool upper = at.lane >= 16;
    return merge<1>({centre, upper ? other : two, upper ? two : other, n}, shape.inverse_cols,
                    shape.epsilon, shape.centred);
  }
  if (at.lane == 0) parts[at.warp] = make_float4(centre, two, other, n);
  __syncthreads();
  // Lanes k and k + 16 read the Moments of the row's k-th warp.
  float4 p = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (at.lane % 16 < at.warps) p = parts[at.slot * at.warps + at.lane % 16];
  return merge<16>({p.x, p.y, p.z, p.w}, shape.inverse_cols, shape.epsilon, shape.centred);
}

// Returns the values (high, rsigma, shift, 0) of a row for the tile kernels, which compute ((x -
// high) rsigma + shift) gamma + beta.
__device__ inline float4 for_tiles(const RowStatistics& s) {
  return make_float4(s.high, s.rsigma, -s.rest * s.rsigma, 0.0f);
}

}  // namespace te_fl::cuda
