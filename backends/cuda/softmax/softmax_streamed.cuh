// Scaled softmax of rows of up to 64 KiB, on GPUs with bulk copies (TMA, compute capability 9.0 and
// newer).
//
// Blocks are persistent. Each has three rows in shared memory: one that is being loaded, one that
// is being computed, and one that is being stored.
#pragma once

#include "common/hopper.cuh"
#include "softmax/softmax_kernels.cuh"

namespace te_fl::cuda {

constexpr int kStreamedThreads = 1024, kStreamedPacks = 4, kStreamedSlots = 3;
constexpr int kStreamedBytes = kStreamedThreads * kStreamedPacks * 16;  // maximum bytes per row
constexpr int kStreamedShared = kStreamedSlots * kStreamedBytes;

// Rows must be 16-byte aligned.
template <class T>
__global__ void __launch_bounds__(kStreamedThreads, 1)
    softmax_streamed(const T* in, T* out, Visible visible, float scale, int64_t rows) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSize = Pack<T>::kSize;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(8) uint64_t full[kStreamedSlots];
  __shared__ float parts[2][kStreamedThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), keys = static_cast<int>(visible.keys);
  const auto bytes = static_cast<uint32_t>(keys * sizeof(T));
  const uint32_t barriers = hopper::shared_address(full), first = hopper::shared_address(memory);
  const auto load = [&](int64_t row, int slot) {
    hopper::expect_bytes(barriers + slot * 8, bytes);
    hopper::load_bytes(in + row * keys, first + slot * kStreamedBytes, barriers + slot * 8, bytes);
  };
  if (thread == 0) {
    for (int slot = 0; slot < kStreamedSlots; ++slot) hopper::init_barrier(barriers + slot * 8, 1);
    hopper::fence_barrier_init();
    hopper::fence_for_copies();
    if (blockIdx.x < rows) load(blockIdx.x, 0);
  }
  __syncthreads();
  int slot = 0;
  uint32_t parity = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int next = slot + 1 == kStreamedSlots ? 0 : slot + 1;
    if (thread == 0 && row + gridDim.x < rows) {
      hopper::wait_stores_read<1>();  // all stores but the last row's, so `next` is free
      load(row + gridDim.x, next);
    }
    const int seen = static_cast<int>(visible.count(row));
    const uint8_t* mask = visible.mask_row(row);
    auto* const packs = reinterpret_cast<uint4*>(memory + slot * kStreamedBytes) + thread;
    hopper::wait_for(barriers + slot * 8, parity);
    float v[kStreamedPacks][kSize];
    uint32_t hidden = 0;
    float top = -INFINITY;
#pragma unroll
    for (int p = 0; p < kStreamedPacks; ++p) {
      const int col = (p * kStreamedThreads + thread) * kSize;
      Pack<T> raw{};
      if (col < seen) raw.raw[0] = packs[p * kStreamedThreads];
      const uint32_t bits = visible.hidden<kSize>(mask, col, seen);
      hidden |= bits << p * kSize;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        v[p][i] = (bits >> i & 1u) != 0 ? -INFINITY : scale * raw[i];
        top = max_nan(top, v[p][i]);
      }
    }
    top = max_lanes<kStreamedThreads>(top, parts[0]);
    const bool empty = top == -INFINITY;  // the row is fully masked
    const float base = empty ? 0.0f : top;
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < kStreamedPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum += v[p][i] = fast_exp(v[p][i] - base);
    }
    sum = sum_lanes<kStreamedThreads>(sum, parts[1]);
    const float share = empty ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int p = 0; p < kStreamedPacks; ++p) {
      if ((p * kStreamedThreads + thread) * kSize >= keys) continue;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        // `share` may be NaN, but hidden elements must be 0.
        v[p][i] = (hidden >> (p * kSize + i) & 1u) != 0 ? 0.0f : v[p][i] * share;
      }
      Pack<T> raw;
      raw.set(v[p]);
      packs[p * kStreamedThreads] = raw.raw[0];
    }
    hopper::fence_for_copies();
    __syncthreads();
    if (thread == 0) {
      hopper::store_bytes(out + row * keys, first + slot * kStreamedBytes, bytes);
      hopper::commit_stores();
    }
    slot = next;
    if (slot == 0) parity ^= 1;
  }
  if (thread == 0) hopper::wait_stores();
#endif
}

}  // namespace te_fl::cuda
