// Assigns rows to the (token, expert) pairs that a mask selects. First each tile of tokens counts
// its pairs per expert; then each block sums the counts of the tiles before its own.
#pragma once

#include <algorithm>

#include "common/integers.cuh"
#include "common/pack.cuh"
#include "common/value_errors.cuh"

namespace te_fl::cuda {

constexpr int kMostMasked = 2048;  // experts; a block needs 16 bytes of shared memory for each
constexpr int64_t kLeastTile = 64, kMostTiles = 512;
constexpr int kGapBlocks = 32;  // blocks that zero the rows without a pair
constexpr int kPlaceThreads = 512;
// Independent loads per thread, so that they are in flight together. Indices past the end are
// clamped to the last one.
constexpr int kLoads = 16;
constexpr int kPiece = 64;  // extent, in tokens and in experts, of the square of the mask that is
                            // copied to shared memory

struct MaskPairs {
  const uint8_t* mask;  // shape [tokens, experts]
  int64_t tokens;
  int experts;
  int64_t tile;  // number of tokens per tile
  int tiles;
  uint32_t* counts;  // pairs by tile and expert, shape [tiles, experts]

  MaskPairs(const te_fl_tensor& routing_map, void* workspace)
      : mask(backend::data<const uint8_t>(routing_map)),
        tokens(routing_map.dl.shape[0]),
        experts(static_cast<int>(routing_map.dl.shape[1])),
        tile(std::max(kLeastTile, round_up(ceil_div(tokens, kMostTiles), 32))),
        tiles(static_cast<int>(ceil_div(tokens, tile))),
        counts(static_cast<uint32_t*>(workspace)) {}
  __device__ bool has(int64_t token, int expert) const {
    return __ldg(mask + token * experts + expert) != 0;
  }
};

// Each block counts the pairs of one tile. `found` [experts] is dynamic shared memory.
static __global__ void __launch_bounds__(kThreads) count_masked_kernel(MaskPairs m) {
  extern __shared__ uint32_t found[];
  const int64_t begin = blockIdx.x * m.tile, end = min(begin + m.tile, m.tokens);
  for (int e = static_cast<int>(threadIdx.x); e < m.experts; e += kThreads) found[e] = 0;
  __syncthreads();
  // Adjacent threads count adjacent experts. The block reads `beside` tokens at a time.
  const int width = min(m.experts, static_cast<int>(kThreads)), beside = kThreads / width;
  const int of_token = static_cast<int>(threadIdx.x) / width;
  const int64_t from = of_token < beside ? begin + of_token : end;
  for (int e = static_cast<int>(threadIdx.x) % width; e < m.experts; e += width) {
    uint32_t count = 0;
    for (int64_t t = from; t < end; t += kLoads * beside) {
      bool has[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) has[u] = m.has(min(t + u * beside, end - 1), e);
#pragma unroll
      for (int u = 0; u < kLoads; ++u) count += has[u] && t + u * beside < end ? 1 : 0;
    }
    if (count > 0) atomicAdd(found + e, count);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < m.experts; e += kThreads) {
    m.counts[int64_t{blockIdx.x} * m.experts + e] = found[e];
  }
}

// The outputs of the permutation. Each (token, expert) pair of the mask gets a row, and its
// probability is copied unchanged.
struct MaskedRows {
  const void* pads;  // shape [experts]; NULL: no padding
  bool wide_pads;
  const void* probs;
  void* permuted_probs;
  int prob_bytes;  // size of a probability; 0: there are none
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

// Each of the first m.tiles blocks processes one tile of tokens: it writes row_id_map and copies
// the pairs' probabilities to their rows. The other blocks zero the output rows (of `words` words)
// that have no pair. Dynamic shared memory: `starts` [experts], the row of each expert's first
// pair, followed by `totals` and `before` [experts]. kChecks: writes no output and only records
// invalid values.
template <class Word, bool kChecks>
__global__ void __launch_bounds__(kPlaceThreads)
    place_masked_kernel(MaskPairs m, MaskedRows out, Word* output, int64_t words) {
  extern __shared__ int64_t starts[];
  auto* const totals = reinterpret_cast<uint32_t*>(starts + m.experts);
  uint32_t* const before = totals + m.experts;
  constexpr int kWarps = kPlaceThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int tile = static_cast<int>(blockIdx.x);

  for (int e = static_cast<int>(threadIdx.x); e < 2 * m.experts; e += kPlaceThreads) totals[e] = 0;
  __syncthreads();
  const int width = min(m.experts, kPlaceThreads), beside = kPlaceThreads / width;
  const int of_tile = static_cast<int>(threadIdx.x) / width;
  for (int e = static_cast<int>(threadIdx.x) % width; e < m.experts && of_tile < beside;
       e += width) {
    uint32_t all = 0, mine = 0;
    // Each block starts with a different tile, so that the blocks do not read the same addresses at
    // the same time.
    const auto turned = [&](int k) {
      const int of = min(k, m.tiles - 1) + tile % m.tiles;
      return of < m.tiles ? of : of - m.tiles;
    };
    for (int k = of_tile; k < m.tiles; k += kLoads * beside) {
      uint32_t count[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        count[u] = m.counts[int64_t{turned(k + u * beside)} * m.experts + e];
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const bool is = k + u * beside < m.tiles;
        all += is ? count[u] : 0, mine += is && turned(k + u * beside) < tile ? count[u] : 0;
      }
    }
    atomicAdd(totals + e, all), atomicAdd(before + e, mine);
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
        // Limits the padding so that the sum does not overflow. Rows beyond the limit are out of
        // range in any case.
        starts[e] = carry + sum - total + min(pad, int64_t{1} << 62);
      }
      carry += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
  }
  __syncthreads();

  if (tile < m.tiles) {
    // Each warp handles every kWarps-th expert. An expert's tokens are far apart in the mask, so a
    // square of the mask is first copied to shared memory. Its row pitch is an odd number of words,
    // so the lanes' reads have no bank conflicts.
    __shared__ uint8_t piece[kPiece][kPiece + 4];
    constexpr int kEach = kPiece / kWarps;
    const int64_t begin = tile * m.tile, end = min(begin + m.tile, m.tokens);
    for (int first_expert = 0; first_expert < m.experts; first_expert += kPiece) {
      const int experts = min(kPiece, m.experts - first_expert);
      int64_t next[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int e = first_expert + warp + i * kWarps;
        next[i] = e < m.experts ? starts[e] + before[e] : 0;
      }
      for (int64_t first = begin; first < end; first += kPiece) {
        __syncthreads();  // waits until all threads have read the previous square
        bool has[kPiece * kPiece / kPlaceThreads];
#pragma unroll
        for (int i = 0; i < kPiece * kPiece / kPlaceThreads; ++i) {
          const int at = i * kPlaceThreads + static_cast<int>(threadIdx.x);
          has[i] = m.has(min(first + at / kPiece, end - 1),
                         first_expert + min(at % kPiece, experts - 1));
        }
#pragma unroll
        for (int i = 0; i < kPiece * kPiece / kPlaceThreads; ++i) {
          const int at = i * kPlaceThreads + static_cast<int>(threadIdx.x);
          piece[at / kPiece][at % kPiece] = has[i] && first + at / kPiece < end ? 1 : 0;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int e = warp + i * kWarps;
          if (e >= experts) break;
#pragma unroll
          for (int half = 0; half < kPiece; half += 32) {
            const int64_t token = first + half + lane;
            const bool is = piece[half + lane][e] != 0;
            const unsigned peers = __ballot_sync(0xFFFFFFFFu, is);
            const int64_t row = next[i] + __popc(peers & ((1u << lane) - 1));
            const int64_t pair = token * m.experts + first_expert + e;
            const bool fits = is && row >= 0 && row < out.rows;
            if (is && !fits) note(out.errors, ValueRule::kMaskedRow, pair, row, out.rows);
            next[i] += __popc(peers);
            if (kChecks || token >= end) continue;
            out.map[(first_expert + e) * m.tokens + token] = fits ? static_cast<int32_t>(row) : -1;
            if (fits) out.move_prob(row, pair);
          }
        }
      }
    }
    return;
  }
  for (int e = 0; e <= m.experts && !kChecks;
       ++e) {  // the rows without a pair before each expert's rows and after the last expert's
    const int64_t from = e > 0 ? max(starts[e - 1] + totals[e - 1], int64_t{0}) : 0;
    const int64_t to = e < m.experts ? min(starts[e], out.rows) : out.rows;
    for (int64_t row = from + tile - m.tiles; row < to; row += kGapBlocks) {
      for (int64_t w = threadIdx.x; w < words; w += kPlaceThreads) output[row * words + w] = Word{};
      if (threadIdx.x == 0) out.zero_prob(row);
    }
  }
}

}  // namespace te_fl::cuda
