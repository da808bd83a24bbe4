// Kernels of scaled softmax. A row stays in registers between its only read and its only write.
// Depending on its width, 8 to 1024 threads or a cluster of blocks share it. Longer rows stay in
// shared memory, or are read twice.
#pragma once

#include <cooperative_groups.h>

#include "softmax/running_sum.cuh"

namespace te_fl::cuda {

// The keys that a row sees.
struct Visible {
  int64_t queries = 1, keys = 0, heads = 1;
  bool causal = false;            // aligned at the bottom right
  const uint8_t* mask = nullptr;  // a nonzero byte hides the key
  int64_t mask_strides[4] = {};
  FastDiv by_queries, by_heads;  // used if there are fewer than 2^31 rows

  __device__ void split(int64_t row, int64_t& head, int64_t& query) const {
    if (row < kFastDivLimit) {
      uint32_t rest = 0;
      head = by_queries(static_cast<uint32_t>(row), rest);
      query = rest;
    } else {
      head = row / queries;
      query = row - head * queries;
    }
  }
  // Returns the number of leading keys that the row sees if the mask tensor is ignored.
  __device__ int64_t count(int64_t row) const {
    if (!causal) return keys;
    int64_t head = 0, query = 0;
    split(row, head, query);
    const int64_t seen = query + keys - queries + 1;
    return seen < 0 ? 0 : seen < keys ? seen : keys;
  }
  __device__ const uint8_t* mask_row(int64_t row) const {
    if (mask == nullptr) return nullptr;
    int64_t head = 0, query = 0;
    split(row, head, query);
    uint32_t rest = 0;
    int64_t batch = 0, in_batch = 0;
    if (head < kFastDivLimit) {
      batch = by_heads(static_cast<uint32_t>(head), rest);
      in_batch = rest;
    } else {
      batch = head / heads;
      in_batch = head - batch * heads;
    }
    return mask + batch * mask_strides[0] + in_batch * mask_strides[1] + query * mask_strides[2];
  }
  // Returns a bit mask: bit i is set if key col + i is hidden, that is, masked, before the row's
  // begin, or not among the first `seen` keys. kSize is 4 or 8.
  template <int kSize, class Index>
  __device__ uint32_t hidden(const uint8_t* mask_at, Index col, Index seen) const {
    constexpr uint32_t kAll = (1u << kSize) - 1u;
    uint32_t bits = 0;
    if (col < 0) bits = (1u << static_cast<int>(-col)) - 1u;
    if (col + kSize > seen) {
      bits |= seen <= col ? kAll : kAll << static_cast<int>(seen - col) & kAll;
    }
    if (mask_at == nullptr || bits == kAll) return bits;
    const uint8_t* at = mask_at + col * mask_strides[3];
    if (bits == 0 && mask_strides[3] == 1 && reinterpret_cast<uintptr_t>(at) % kSize == 0) {
      if constexpr (kSize == 4) return four_bits(*reinterpret_cast<const uint32_t*>(at));
      const uint2 bytes = *reinterpret_cast<const uint2*>(at);
      return four_bits(bytes.x) | four_bits(bytes.y) << 4;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if ((bits >> i & 1u) == 0 && at[i * mask_strides[3]] != 0) bits |= 1u << i;
    }
    return bits;
  }
  // Returns a bit mask: bit i is set if byte i of `bytes` is not 0.
  __device__ static uint32_t four_bits(uint32_t bytes) {
    return ((__vcmpne4(bytes, 0u) & 0x08040201u) * 0x01010101u) >> 24;
  }
};

template <int kLanes>
inline constexpr int kRowThreads = kLanes < 128 ? 128 : kLanes;

// kLanes threads share a row of scores; each has kPacks packs of it.
template <class T, int kLanes, int kPacks>
__global__ void __launch_bounds__(kRowThreads<kLanes>)
    softmax_rows(const T* in, T* out, Visible visible, float scale, int64_t rows) {
  constexpr int kSize = Pack<T>::kSize;
  __shared__ float parts[2][(kLanes + 31) / 32];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row = blockIdx.x * int64_t{kRowThreads<kLanes> / kLanes} + threadIdx.x / kLanes;
  const int keys = row < rows ? static_cast<int>(visible.keys) : 0;
  const int seen = row < rows ? static_cast<int>(visible.count(row)) : 0;
  const T* x = in + row * visible.keys;
  T* y = out + row * visible.keys;
  const int shift = misalignment(x);
  Pack<T> raw[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int col = (p * kLanes + lane) * kSize - shift;
    raw[p] = Pack<T>{};
    if (col < seen) load_cut(raw[p], x, col, keys);
  }
  const uint8_t* mask = row < rows ? visible.mask_row(row) : nullptr;
  float v[kPacks][kSize];
  uint32_t hidden = 0;  // one bit per element of this thread
  float top = -INFINITY;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const uint32_t bits = visible.hidden<kSize>(mask, (p * kLanes + lane) * kSize - shift, seen);
    hidden |= bits << p * kSize;
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[p][i] = scale * raw[p][i];
    if (bits != 0) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) v[p][i] = (bits >> i & 1u) != 0 ? -INFINITY : v[p][i];
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) top = max_nan(top, v[p][i]);
  }
  top = max_lanes<kLanes>(top, parts[0]);
  const bool empty = top == -INFINITY;  // the row is fully masked
  const float base = empty ? 0.0f : top;
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += v[p][i] = fast_exp(v[p][i] - base);
  }
  sum = sum_lanes<kLanes>(sum, parts[1]);
  const float share = empty ? 0.0f : 1.0f / sum;
  const bool aligned = misalignment(y) == shift;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int col = (p * kLanes + lane) * kSize - shift;
    if (col >= keys) continue;
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[p][i] *= share;
    if (isnan(share)) {  // hidden elements stay 0
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if ((hidden >> (p * kSize + i) & 1u) != 0) v[p][i] = 0.0f;
      }
    }
    raw[p].set(v[p]);
    store_cut(raw[p], y, col, keys, aligned);
  }
}

// The kBlocks blocks of a cluster that share a row. With kBlocks 1 no cluster is used. Clusters
// need compute capability 9.0.
template <int kBlocks>
struct RowCluster {
  int rank = 0;

  __device__ RowCluster() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
      cooperative_groups::this_cluster().barrier_arrive();  // awaited before the first remote write
    }
#endif
  }
  // Sums `mine` over the blocks, in a fixed order. All threads must call it, once.
  __device__ float sum(float mine) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      __shared__ float of_blocks[kBlocks];
      auto cluster = cooperative_groups::this_cluster();
      cluster.barrier_wait();
      if (threadIdx.x < kBlocks) *cluster.map_shared_rank(of_blocks + rank, threadIdx.x) = mine;
      cluster.sync();
      mine = 0.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) mine += of_blocks[b];
    }
#endif
    return mine;
  }
};

// kLanes threads of each of kBlocks blocks share a row; each thread has kPacks packs of it.
template <class T, int kLanes, int kPacks, int kBlocks>
__global__ void __launch_bounds__(kRowThreads<kLanes>)
    softmax_gradient_rows(const T* grad, const T* results, T* out, Visible visible, float scale,
                          int64_t rows) {
  constexpr int kSize = Pack<T>::kSize;
  __shared__ float parts[(kLanes + 31) / 32];
  const RowCluster<kBlocks> cluster;
  const int lane = cluster.rank * (kLanes * kPacks) + static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row =
      blockIdx.x / kBlocks * int64_t{kRowThreads<kLanes> / kLanes} + threadIdx.x / kLanes;
  const int keys = row < rows ? static_cast<int>(visible.keys) : 0;
  const int seen = row < rows ? static_cast<int>(visible.count(row)) : 0;
  const T* dy = grad + row * visible.keys;
  const T* y = results + row * visible.keys;
  T* dx = out + row * visible.keys;
  const int shift = misalignment(dy);
  const bool y_aligned = misalignment(y) == shift, dx_aligned = misalignment(dx) == shift;
  Pack<T> g[kPacks], r[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int col = (p * kLanes + lane) * kSize - shift;
    g[p] = r[p] = Pack<T>{};
    if (col >= seen) continue;
    load_cut(g[p], dy, col, keys);
    if (y_aligned) {
      load_cut(r[p], y, col, keys);
    } else {
      r[p].load_some(y + col, -col, keys - col);
    }
  }
  float dot = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int left = seen - ((p * kLanes + lane) * kSize - shift);  // keys that the row sees
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (left >= kSize || i < left) dot = fmaf(g[p][i], r[p][i], dot);
    }
  }
  dot = cluster.sum(sum_lanes<kLanes>(dot, parts));
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int col = (p * kLanes + lane) * kSize - shift;
    if (col >= keys) continue;
    float v[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] = scale * r[p][i] * (g[p][i] - dot);
    if (col + kSize > seen) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) v[i] = col + i < seen ? v[i] : 0.0f;
    }
    g[p].set(v);
    store_cut(g[p], dx, col, keys, dx_aligned);
  }
}

constexpr int kWideThreads = 512;

// Each block processes one row. kStaged: the 16-byte packs that a thread reads stay in shared
// memory, kWideThreads packs apart, until the row's sum is known. Otherwise the row is read twice.
template <class T, bool kStaged>
__global__ void __launch_bounds__(kWideThreads, 2)
    softmax_wide(const T* in, T* out, Visible visible, float scale) {
  constexpr int kSize = Pack<T>::kSize, kAtOnce = 4, kStep = kWideThreads * kSize;
  extern __shared__ uint4 staged[];
  __shared__ float parts[2][kWideThreads / 32];
  const int64_t row = blockIdx.x, keys = visible.keys, seen = visible.count(row);
  const T* x = in + row * keys;
  T* y = out + row * keys;
  const int shift = misalignment(x);
  const bool aligned = misalignment(y) == shift;
  const uint8_t* mask = visible.mask_row(row);
  const auto unpack = [&](const Pack<T>& raw, int64_t col, float(&v)[kSize]) {
    const uint32_t bits = visible.hidden<kSize>(mask, col, seen);
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] = (bits >> i & 1u) != 0 ? -INFINITY : scale * raw[i];
    return bits;
  };
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kSize - shift;
  uint4* slot = staged + threadIdx.x;
  RunningSum total;
  for (int64_t at = first; at < seen; at += kAtOnce * kStep) {
    Pack<T> raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t col = at + u * kStep;
      if (col < seen) load_cut(raw[u], x, col, keys);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t col = at + u * kStep;
      if (col >= seen) continue;
      if constexpr (kStaged) *slot = raw[u].raw[0], slot += kWideThreads;
      float v[kSize];
      unpack(raw[u], col, v);
      total.add(v);
    }
  }
  total.join<kWideThreads>(parts[0], parts[1]);
  const float share = total.sum == 0.0f ? 0.0f : 1.0f / total.sum;
  slot = staged + threadIdx.x;
#pragma unroll 2
  for (int64_t col = first; col < keys; col += kStep, slot += kWideThreads) {
    Pack<T> raw{};
    if (col < seen) {
      if constexpr (kStaged) {
        raw.raw[0] = *slot;
      } else {
        load_cut(raw, x, col, keys);
      }
    }
    float v[kSize];
    const uint32_t bits = unpack(raw, col, v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      v[i] = (bits >> i & 1u) != 0 ? 0.0f : fast_exp(v[i] - total.top) * share;
    }
    raw.set(v);
    store_cut(raw, y, col, keys, aligned);
  }
}

template <class T>
__global__ void __launch_bounds__(kWideThreads)
    softmax_gradient_wide(const T* grad, const T* results, T* out, Visible visible, float scale) {
  constexpr int kSize = Pack<T>::kSize;
  __shared__ float parts[kWideThreads / 32];
  const int64_t row = blockIdx.x, keys = visible.keys, seen = visible.count(row);
  const T* dy = grad + row * keys;
  const T* y = results + row * keys;
  T* dx = out + row * keys;
  const int shift = misalignment(dy);
  const bool y_aligned = misalignment(y) == shift, dx_aligned = misalignment(dx) == shift;
  const auto read = [&](int64_t col, Pack<T>& g, Pack<T>& r) {
    g = r = Pack<T>{};
    if (col >= seen) return;
    load_cut(g, dy, col, seen);
    if (y_aligned) return load_cut(r, y, col, seen);
    r.load_some(y + col, col < 0 ? static_cast<int>(-col) : 0,
                seen - col < kSize ? static_cast<int>(seen - col) : kSize);
  };
  constexpr int kStep = kWideThreads * kSize;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kSize - shift;
  float dot = 0.0f;
#pragma unroll 2
  for (int64_t col = first; col < seen; col += kStep) {
    Pack<T> g, r;
    read(col, g, r);
#pragma unroll
    for (int i = 0; i < kSize; ++i) dot = fmaf(g[i], r[i], dot);
  }
  dot = sum_lanes<kWideThreads>(dot, parts);
#pragma unroll 2
  for (int64_t col = first; col < keys; col += kStep) {
    Pack<T> g, r;
    read(col, g, r);
    float v[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      v[i] = col + i < seen ? scale * r[i] * (g[i] - dot) : 0.0f;
    }
    g.set(v);
    store_cut(g, dx, col, keys, dx_aligned);
  }
}

}  // namespace te_fl::cuda
