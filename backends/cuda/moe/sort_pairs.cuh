// Assigns rows to (token, expert) pairs by a stable radix sort in one launch. A cluster of blocks
// counts the digits of (index - smallest index); the range of the indices determines the number of
// digits. Up to 256 experts need one digit.
#pragma once

#include <cooperative_groups.h>

#include <cstring>

#include "common/integers.cuh"
#include "common/pack.cuh"
#include "common/value_errors.cuh"

namespace te_fl::cuda {

constexpr int kSortBlocks = 8, kSortThreads = 1024, kSortWarps = kSortThreads / 32;
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

struct PairIndices {
  Integers indices;
  int64_t size, bound;  // bound 0: indices are arbitrary 32-bit numbers
  ValueErrorSink errors;

  __device__ void check(int64_t pair, int64_t v) const {
    const int64_t low = bound == 0 ? -(int64_t{1} << 31) : 0;
    const int64_t high = bound == 0 ? int64_t{1} << 31 : bound;
    if (v < low || v >= high) note(errors, ValueRule::kExpert, pair, v, high, low);
  }
  // Returns an unsigned sort key with the same order as the signed index v.
  __device__ uint32_t key(int64_t v) const {
    return static_cast<uint32_t>(v) ^ (bound == 0 ? 0x80000000u : 0u);
  }
};

static __global__ void __launch_bounds__(kThreads) check_experts_kernel(PairIndices p) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < p.size;
       i += int64_t{gridDim.x} * kThreads) {
    p.check(i, p.indices[i]);
  }
}

// Loads up to kHeld indices per lane, with a distance of 32 between them. The loads are
// independent, so that all are in flight at once.
constexpr int kHeld = 8;
template <class T>
__device__ inline void load_held(const void* indices, int64_t first, int64_t size,
                                 int64_t (&v)[kHeld]) {
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    v[u] = static_cast<const T*>(indices)[min(first + u * 32, size - 1)];
  }
}

// The outputs of the sort. `map` receives the final row of each pair. Between the passes over
// digits, the pairs are in two lists; the second starts `apart` elements after the first.
struct PairRows {
  int32_t *lists, *map;  // the map is [each, tokens]
  int64_t apart;
  FastDiv each;
  int64_t tokens, rows;

  __device__ void put(int32_t pair, uint32_t row) const {
    uint32_t s = 0;
    const uint32_t token = each(static_cast<uint32_t>(pair), s);
    map[s * tokens + token] = row < rows ? static_cast<int32_t>(row) : -1;
  }
};

// Access to the blocks of a cluster. With kBlocks 1 no cluster is used. Clusters need compute
// capability 9.0.
template <int kBlocks>
struct SortCluster {
  // A barrier for all threads of the cluster. Orders all their memory accesses.
  static __device__ void sync() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) return cooperative_groups::this_cluster().sync();
#endif
    __syncthreads();
  }
  // Returns the corresponding address in the shared memory of block b.
  static __device__ uint32_t* of(uint32_t* place, int b) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) return cooperative_groups::this_cluster().map_shared_rank(place, b);
#endif
    return place;
  }
};

template <int kBlocks>
__global__ void __launch_bounds__(kSortThreads, 1) sort_pairs_kernel(PairIndices in, PairRows out) {
  using Cluster = SortCluster<kBlocks>;
  constexpr int kDigitWarps = kDigits / 32;
  __shared__ uint32_t counts[kSortWarps][kDigits], totals[kDigits], starts[kDigits];
  __shared__ uint32_t range[2], warp_sums[kDigitWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int block = static_cast<int>(blockIdx.x);

  if (thread == 0) range[0] = 0xFFFFFFFFu, range[1] = 0;
  __syncthreads();
  // Each warp processes a run of consecutive pairs and counts the digits in it. Short runs are kept
  // in registers.
  const int64_t run = round_up(ceil_div(in.size, kBlocks * kSortWarps), 32);
  const int64_t begin = min((block * kSortWarps + warp) * run, in.size);
  const int64_t end = min(begin + run, in.size);
  const bool holds = run <= 32 * kHeld;
  uint32_t held[kHeld], low = 0xFFFFFFFFu, high = 0;
  const auto meet = [&](int64_t i, int64_t v) {
    in.check(i, v);
    low = min(low, in.key(v)), high = max(high, in.key(v));
  };
  if (holds) {
    int64_t v[kHeld];
    if (in.indices.wide) {
      load_held<int64_t>(in.indices.data, begin + lane, in.size, v);
    } else {
      load_held<int32_t>(in.indices.data, begin + lane, in.size, v);
    }
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      held[u] = in.key(v[u]);
      if (begin + lane + u * 32 < end) meet(begin + lane + u * 32, v[u]);
    }
  } else {
    for (int64_t i = begin + lane; i < end; i += 32) meet(i, in.indices[i]);
  }
  low = __reduce_min_sync(0xFFFFFFFFu, low), high = __reduce_max_sync(0xFFFFFFFFu, high);
  if (lane == 0) atomicMin(range, low), atomicMax(range + 1, high);
  Cluster::sync();
  for (int b = 0; b < kBlocks; ++b) {
    low = min(low, Cluster::of(range, b)[0]), high = max(high, Cluster::of(range, b)[1]);
  }

  uint32_t* const mine = counts[warp];
  for (int pass = 0;; ++pass) {
    const int shift = pass * kDigitBits;
    const uint32_t most = (high - low) >> shift;
    const bool last = most < kDigits;
    const int bits = last ? 32 - __clz(static_cast<int>(most)) : kDigitBits;
    const int32_t* const from = pass == 0 ? nullptr : out.lists + (pass - 1) % 2 * out.apart;
    int32_t* const to = out.lists + pass % 2 * out.apart;
    const auto pair_at = [&](int64_t i) {
      return from == nullptr ? static_cast<int32_t>(i) : __ldcg(from + i);
    };
    const auto digit_of = [&](int32_t pair) {
      return (in.key(in.indices[pair]) - low) >> shift & (kDigits - 1);
    };

    for (int d = lane; d < kDigits; d += 32) mine[d] = 0;
    __syncwarp();
    if (holds && pass == 0) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        if (begin + lane + u * 32 < end) atomicAdd(mine + (held[u] - low & (kDigits - 1)), 1u);
      }
    } else {
      for (int64_t i = begin + lane; i < end; i += 32) atomicAdd(mine + digit_of(pair_at(i)), 1u);
    }
    __syncthreads();
    uint32_t sum = 0;
    if (thread < kDigits) {  // one thread per digit sums over this block's warps, then over all
                             // blocks
      for (int w = 0; w < kSortWarps; ++w) {
        const uint32_t count = counts[w][thread];
        counts[w][thread] = sum;
        sum += count;
      }
      totals[thread] = sum;
    }
    Cluster::sync();
    uint32_t before = 0, all = 0;
    if (thread < kDigits) {
      for (int b = 0; b < kBlocks; ++b) {
        const uint32_t total = Cluster::of(totals, b)[thread];
        before += b < block ? total : 0;
        all += total;
      }
      sum = all;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
      }
      if (lane == 31) warp_sums[warp] = sum;
    }
    __syncthreads();
    if (thread < kDigits) {
      for (int w = 0; w < warp; ++w) before += warp_sums[w];
      starts[thread] = before + sum - all;
    }
    __syncthreads();

    const auto place = [&](bool there, int32_t pair, uint32_t digit) {
      unsigned peers = __ballot_sync(0xFFFFFFFFu, there);  // lanes with the same digit
      for (int bit = 0; bit < bits; ++bit) {
        const bool is = (digit >> bit & 1u) != 0;
        const unsigned ones = __ballot_sync(0xFFFFFFFFu, is);
        peers &= is ? ones : ~ones;
      }
      const uint32_t row = starts[digit] + mine[digit] + __popc(peers & ((1u << lane) - 1));
      __syncwarp();
      if (there && peers >> lane == 1u) mine[digit] += __popc(peers);  // by the last such lane
      if (there && last) out.put(pair, row);
      if (there && !last) to[row] = pair;
      __syncwarp();
    };
    if (holds && pass == 0) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        const int64_t i = begin + u * 32 + lane;
        if (begin + u * 32 >= end) break;
        place(i < end, static_cast<int32_t>(i), i < end ? held[u] - low & (kDigits - 1) : 0);
      }
    } else {
      for (int64_t first = begin; first < end; first += 32) {
        const bool there = first + lane < end;
        const int32_t pair = there ? pair_at(first + lane) : 0;
        place(there, pair, there ? digit_of(pair) : 0);
      }
    }
    Cluster::sync();  // the lists are complete, and no block reads this block's totals any more
    if (last) return;
  }
}

}  // namespace te_fl::cuda
