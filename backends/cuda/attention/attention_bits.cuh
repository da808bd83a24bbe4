// Device code for one-bit values of (query, key) pairs: draws dropout's decisions, and transposes a
// bit matrix across a warp.
#pragma once

#include "attention/attention.cuh"

namespace te_fl::cuda::flash {

// Draws dropout's random words (te_fl/numeric/philox.hpp) as one bit per pair, set if the pair is
// kept.
struct Dropping {
  numeric::PhiloxKey key;
  uint64_t base;
  int64_t rows, cols;  // extents of the logical matrix
  uint32_t threshold;

  // All lanes of the warp must call this constructor. The shuffle tells the compiler that all lanes
  // have the same key, so it keeps the round keys in uniform registers, which saves a third of the
  // time.
  __device__ explicit Dropping(const Attention& p)
      : key(numeric::philox_key(p.seed_address != nullptr ? *p.seed_address : p.seed)),
        base(p.rng_offset + (p.offset_address != nullptr ? *p.offset_address : 0)),
        threshold(static_cast<uint32_t>(p.threshold)) {
    for (uint32_t& half : key) half = __shfl_sync(~0u, half, 0);
    p.logical(rows, cols);
  }
  // Shifts four bits into the low end of `bits`: one per random word that Philox computes from the
  // counter (low, high), last word first. The carry of the PTX addition is set exactly if the word
  // is at least the threshold, so each word needs two instructions.
  __device__ uint32_t append(uint32_t bits, uint32_t low, uint32_t high) const {
    const auto words = numeric::philox4x32_10({low, high, 0u, 0u}, key);
#pragma unroll
    for (int w = 3; w >= 0; --w) {
      asm("{\n.reg .u32 rest;\nadd.cc.u32 rest, %1, %2;\naddc.u32 %0, %0, %0;\n}"
          : "+r"(bits)
          : "r"(words[w]), "r"(0u - threshold));
    }
    return bits;
  }
  __device__ uint32_t append(uint32_t bits, uint64_t counter) const {
    return append(bits, static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32));
  }
  // Returns the bits of the 32 keys from j0. `row`: (b * heads + h) * rows + i.
  __device__ uint32_t keep(int64_t row, int64_t j0) const {
    const uint64_t first = static_cast<uint64_t>(row * cols + j0), counter = base + first / 4;
    const int skipped = static_cast<int>(first % 4);
    const auto low = static_cast<uint32_t>(counter), high = static_cast<uint32_t>(counter >> 32);
    uint32_t bits = 0;
    if (low <= ~0u - 8) {  // the eight counters share `high`, so the compiler can hoist work on it
#pragma unroll 4
      for (int n = 7; n >= 0; --n) bits = append(bits, low + n, high);
    } else {
#pragma unroll 1
      for (int n = 7; n >= 0; --n) bits = append(bits, counter + n);
    }
    return skipped == 0 ? bits : bits >> skipped | append(0, counter + 8) << (32 - skipped);
  }
};

// Transposes a 32 x 32 bit matrix across the warp: bit j of lane i becomes bit i of lane j.
__device__ inline uint32_t transposed(uint32_t x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr uint32_t kMasks[5] = {0x0000FFFFu, 0x00FF00FFu, 0x0F0F0F0Fu, 0x33333333u, 0x55555555u};
#pragma unroll
  for (int n = 0; n < 5; ++n) {
    const int step = 16 >> n;
    const uint32_t y = __shfl_xor_sync(~0u, x, step), mask = kMasks[n];
    x = (lane & step) == 0 ? (x & mask) | (y & mask) << step : (y >> step & mask) | (x & ~mask);
  }
  return x;
}

}  // namespace te_fl::cuda::flash
