// Bits of pairs of a query and a key: how dropout draws them, and how a warp turns them.
#pragma once

#include "attention/attention.cuh"

namespace te_fl::cuda::flash {

// Dropout's random words (te_fl/numeric/philox.hpp), as bits of pairs that are kept.
struct Dropping {
  numeric::PhiloxKey key;
  uint64_t base;
  int64_t rows, cols;  // of the logical matrix
  uint32_t threshold;

  // By whole warps: the key passes through a shuffle, so that the compiler knows it to be the same
  // in all lanes and keeps the ten keys of the rounds in uniform registers (a third of the time).
  __device__ explicit Dropping(const Attention& p)
      : key(numeric::philox_key(p.seed_address != nullptr ? *p.seed_address : p.seed)),
        base(p.rng_offset + (p.offset_address != nullptr ? *p.offset_address : 0)),
        threshold(static_cast<uint32_t>(p.threshold)) {
    for (uint32_t& half : key) half = __shfl_sync(~0u, half, 0);
    p.logical(rows, cols);
  }
  // Four bits more at the low end of `bits`: of a counter's words, the last word first. In PTX:
  // that a word is not below the threshold is the carry of a sum, two instructions a word.
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
  // Serves 32 keys from j0 on. `row`: (b H + h) rows + i.
  __device__ uint32_t keep(int64_t row, int64_t j0) const {
    const uint64_t first = static_cast<uint64_t>(row * cols + j0), counter = base + first / 4;
    const int skipped = static_cast<int>(first % 4);
    const auto low = static_cast<uint32_t>(counter), high = static_cast<uint32_t>(counter >> 32);
    uint32_t bits = 0;
    if (low <= ~0u - 8) {  // then the high halves are one, and what is made of it alone, too
#pragma unroll 4
      for (int n = 7; n >= 0; --n) bits = append(bits, low + n, high);
    } else {
#pragma unroll 1
      for (int n = 7; n >= 0; --n) bits = append(bits, counter + n);
    }
    return skipped == 0 ? bits : bits >> skipped | append(0, counter + 8) << (32 - skipped);
  }
};

// Lane i's bit j becomes lane j's bit i.
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
