// The first pass of current scaling: computes the amax of an elementwise op's results (a Math of
// tile.cuh) without storing them. The pass only reads memory, so its arithmetic must be cheap. A
// Math may therefore have
//
//   __device__ float bound(const float (&x)[kSources]) const;
//
// which returns an upper bound of |v| for these sources. A warp skips the computation where the
// bound does not exceed the maximum that it has found.
#pragma once

#include "common/tile.cuh"

namespace te_fl::cuda {

template <class Math>
concept Bounded = requires(const Math& math, const float (&x)[Math::kSources]) {
  math.bound(x);
};

// Returns the largest magnitude of math's results over the elements that the calling thread
// processes. The thread belongs to block number `block` of `blocks` blocks, which share the
// elements. Each source must be contiguous and have the result's size, `pieces` chunks of 16 bytes.
template <class Math, int kBytes>
__device__ inline float most_of_pieces(const TileSources<Math::kSources>& in, int64_t pieces,
                                       const Math& math, unsigned block, unsigned blocks) {
  constexpr int kElements = Piece<kBytes>::kElements;
  constexpr int kAtOnce = Math::kSources == 1 ? 4 : 2;
  const int64_t step = int64_t{blocks} * kThreads * kAtOnce;
  float most = 0.0f;
  for (int64_t first = block * int64_t{kThreads * kAtOnce} + threadIdx.x;
       first - threadIdx.x < pieces; first += step) {
    uint4 raw[kAtOnce][Math::kSources];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Indices past the end are clamped to the last 16-byte chunk.
      const int64_t at = min(first + i * kThreads, pieces - 1);
#pragma unroll
      for (int s = 0; s < Math::kSources; ++s) {
        raw[i][s] = reinterpret_cast<const uint4*>(in.base[s])[at];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float x[Math::kSources][kElements];
#pragma unroll
      for (int s = 0; s < Math::kSources; ++s) unpack_piece<kBytes>(raw[i][s], in.is_half, x[s]);
      const auto sources = [&](int e, float(&to)[Math::kSources]) {
#pragma unroll
        for (int s = 0; s < Math::kSources; ++s) to[s] = x[s][e];
      };
      if constexpr (Bounded<Math>) {
        float bound = 0.0f;
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          float of[Math::kSources];
          sources(e, of);
          bound = fmaxf(bound, math.bound(of));
        }
        if (bound <= most) continue;
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        float of[Math::kSources], v[Math::kOutputs];
        sources(e, of);
        math(of, v);
#pragma unroll
        for (int o = 0; o < Math::kOutputs; ++o) most = fmaxf(most, fabsf(v[o]));
      }
    }
    if constexpr (Bounded<Math>) most = warp_most(most);
  }
  return most;
}

template <class Math, int kBytes>
__global__ void __launch_bounds__(kThreads, 4)
    measure_kernel(const __grid_constant__ TileSources<Math::kSources> in, int64_t pieces,
                   Math math, const float* noop, float* amax) {
  if (noop != nullptr && *noop != 0.0f) return;
  __shared__ float shared[kWarps];
  const float most =
      block_amax(most_of_pieces<Math, kBytes>(in, pieces, math, blockIdx.x, gridDim.x), shared);
  if (threadIdx.x == 0) atomic_amax(amax, most);
}

// Current scaling in one launch: every block computes the amax of all results, then quantises its
// own tile. The output must not share memory with the source.
template <class Math, int kBytes>
__global__ void __launch_bounds__(kThreads, 2)
    self_scaled_kernel(const __grid_constant__ TileSources<Math::kSources> in, int64_t pieces,
                       const __grid_constant__ TileGrid g, const __grid_constant__ Quantised q,
                       Math math) {
  if (q.skip()) return;
  __shared__ float found, shared[kWarps];
  const float most = block_amax(most_of_pieces<Math, kBytes>(in, pieces, math, 0, 1), shared);
  if (threadIdx.x == 0) found = most;
  __syncthreads();
  Quantised own = q;
  own.found = &found;
  quantise_tiles<Math, kBytes, false>(in, g, own, math, {}, blockIdx.x);
}

}  // namespace te_fl::cuda
