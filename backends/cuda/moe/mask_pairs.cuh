// Rows of the pairs of a token and an expert that a mask has: tiles of tokens count their pairs, and
// then every block adds up what lies before its own.
#pragma once

#include <algorithm>

#include "common/integers.cuh"
#include "common/pack.cuh"
#include "common/value_errors.cuh"

namespace te_fl::cuda {

constexpr int kMostMasked = 2048;  // experts, for which a block has 16 bytes of shared memory each
constexpr int64_t kLeastTile = 64, kMostTiles = 512;
constexpr int kGapBlocks = 128;  // that zero the rows which no pair has

struct MaskPairs {
  const uint8_t* mask;  // [tokens, experts]
  int64_t tokens;
  int experts;
  int64_t tile;  // tokens of a tile
  int tiles;
  uint32_t* counts;  // [experts, tiles]

  MaskPairs(const te_fl_tensor& routing_map, void* workspace)
      : mask(backend::data<const uint8_t>(routing_map)),
        tokens(routing_map.dl.shape[0]),
        experts(static_cast<int>(routing_map.dl.shape[1])),
        tile(std::max(kLeastTile, round_up(ceil_div(tokens, kMostTiles), 32))),
        tiles(static_cast<int>(ceil_div(tokens, tile))),
        counts(static_cast<uint32_t*>(workspace)) {}
  __device__ bool has(int64_t token, int expert) const {
    return mask[token * experts + expert] != 0;
  }
};

// A block counts a tile. `found` [experts] is shared memory.
static __global__ void __launch_bounds__(kThreads) count_masked_kernel(MaskPairs m) {
  extern __shared__ uint32_t found[];
  const int64_t begin = blockIdx.x * m.tile, end = min(begin + m.tile, m.tokens);
  for (int e = static_cast<int>(threadIdx.x); e < m.experts; e += kThreads) found[e] = 0;
  __syncthreads();
  // Threads beside each other have experts beside each other; the block takes `beside` tokens.
  const int width = min(m.experts, static_cast<int>(kThreads)), beside = kThreads / width;
  const int of_token = static_cast<int>(threadIdx.x) / width;
  for (int e = static_cast<int>(threadIdx.x) % width; e < m.experts; e += width) {
    uint32_t count = 0;
#pragma unroll 4
    for (int64_t t = begin + of_token; t < end; t += beside) {
      count += of_token < beside && m.has(t, e) ? 1 : 0;
    }
    if (count > 0) atomicAdd(found + e, count);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < m.experts; e += kThreads) {
    m.counts[int64_t{e} * m.tiles + blockIdx.x] = found[e];
  }
}

// A pair of a mask becomes a row of the output. Its probability is moved as it is.
struct MaskedRows {
  const void* pads;  // [experts]; null: 0
  bool wide_pads;
  const void* probs;
  void* permuted_probs;
  int prob_bytes;  // 0: none
  int32_t* map;
  int64_t rows;
  ValueErrorSink errors;

  __device__ int64_t pad(int e) const {
    if (pads == nullptr) return 0;
    return wide_pads ? static_cast<const int64_t*>(pads)[e] : static_cast<const int32_t*>(pads)[e];
  }
  __device__ void move_prob(int64_t row, int64_t pair) const {
    if (prob_bytes == 4) {
      static_cast<uint32_t*>(permuted_probs)[row] = static_cast<const uint32_t*>(probs)[pair];
    } else if (prob_bytes == 2) {
      static_cast<uint16_t*>(permuted_probs)[row] = static_cast<const uint16_t*>(probs)[pair];
    }
  }
  __device__ void zero_prob(int64_t row) const {
    if (prob_bytes == 4) static_cast<uint32_t*>(permuted_probs)[row] = 0;
    if (prob_bytes == 2) static_cast<uint16_t*>(permuted_probs)[row] = 0;
  }
};

// The first m.tiles blocks have a tile each, and write the map and what goes with the pairs. The
// others zero the rows, of `words` words, that no pair has. `starts` [experts] is shared memory: the
// row of the first pair of each expert; totals and before [experts] lie behind it. With kChecks
// nothing is written, and values that break a rule are noted all the same.
template <class Word, bool kChecks>
__global__ void __launch_bounds__(kThreads)
    place_masked_kernel(MaskPairs m, MaskedRows out, Word* output, int64_t words) {
  extern __shared__ int64_t starts[];
  auto* const totals = reinterpret_cast<uint32_t*>(starts + m.experts);
  uint32_t* const before = totals + m.experts;
  constexpr int kWarps = kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int tile = static_cast<int>(blockIdx.x);

  for (int e = warp; e < m.experts; e += kWarps) {
    uint32_t all = 0, mine = 0;
#pragma unroll 4
    for (int k = lane; k < m.tiles; k += 32) {
      const uint32_t count = m.counts[int64_t{e} * m.tiles + k];
      all += count, mine += k < tile ? count : 0;
    }
    all = __reduce_add_sync(0xFFFFFFFFu, all), mine = __reduce_add_sync(0xFFFFFFFFu, mine);
    if (lane == 0) totals[e] = all, before[e] = mine;
  }
  __syncthreads();
  if (warp == 0) {
    int64_t carry = 0;
    for (int first = 0; first < m.experts; first += 32) {
      const int e = first + lane;
      const uint32_t total = e < m.experts ? totals[e] : 0;
      uint32_t sum = total;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
      }
      if (e < m.experts) {
        const int64_t pad = out.pad(e), least = e > 0 ? out.pad(e - 1) : 0;
        if (tile == 0 && pad < least) note(out.errors, ValueRule::kPadOffset, e, pad, 0, least);
        starts[e] = carry + sum - total + pad;
      }
      carry += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
  }
  __syncthreads();

  if (tile < m.tiles) {
    const int64_t begin = tile * m.tile, end = min(begin + m.tile, m.tokens);
    for (int e = warp; e < m.experts; e += kWarps) {
      int64_t next = starts[e] + before[e];
      for (int64_t first = begin; first < end; first += 32) {
        const int64_t token = first + lane;
        const bool is = token < end && m.has(token, e);
        const unsigned peers = __ballot_sync(0xFFFFFFFFu, is);
        const int64_t row = next + __popc(peers & ((1u << lane) - 1));
        const int64_t pair = token * m.experts + e;
        const bool fits = is && row >= 0 && row < out.rows;
        if (is && !fits) note(out.errors, ValueRule::kMaskedRow, pair, row, out.rows);
        next += __popc(peers);
        if (kChecks || token >= end) continue;
        out.map[e * m.tokens + token] = fits ? static_cast<int32_t>(row) : -1;
        if (fits) out.move_prob(row, pair);
      }
    }
    return;
  }
  if (kChecks) return;
  for (int e = 0; e <= m.experts; ++e) {  // the gap before each expert, and that behind the last
    const int64_t from = e > 0 ? max(starts[e - 1] + totals[e - 1], int64_t{0}) : 0;
    const int64_t to = e < m.experts ? min(starts[e], out.rows) : out.rows;
    for (int64_t row = from + tile - m.tiles; row < to; row += kGapBlocks) {
      for (int64_t w = threadIdx.x; w < words; w += kThreads) output[row * words + w] = Word{};
      if (threadIdx.x == 0) out.zero_prob(row);
    }
  }
}

}  // namespace te_fl::cuda
