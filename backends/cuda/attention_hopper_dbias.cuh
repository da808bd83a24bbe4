// The gradient of a bias on Hopper's tensor cores: the sum of the gradients of the scores over the
// sequences and heads that share it, which the kernel of dq keeps or, where there is no scratch for
// that, a kernel here computes again.
#pragma once

#include "attention_hopper.cuh"

namespace te_fl::cuda::flash {

// What the backward knows of a query: log-sum-exp times log2(e), infinite where P is 0, and delta.
struct QuerySums {
  float lse = INFINITY, delta = 0.0f;
  __device__ QuerySums(const Attention& p, const AttentionGradients& g, const Span& s, int64_t b,
                       int64_t h, int64_t i) {
    if (i >= s.q_len) return;
    const int64_t at = p.lse_index(s, b, h, i);
    lse = g.log2_sum[at];
    delta = g.delta[at];
  }
};
// This thread's first part of a tile of the gradients of the scores; the others follow kProducts
// apart. A tile is a part for each step of the product with k, of the threads that hold it.
__device__ inline uint4* score_gradients(const Attention& p, const AttentionGradients& g, int64_t b,
                                         int64_t h, int i0, int j0) {
  const int64_t rows = ceil_div(p.seqlen_q, kFixed), tiles = ceil_div(p.seqlen_kv, kPassing);
  const int64_t tile = ((b * p.heads + h) * rows + i0 / kFixed) * tiles + j0 / kPassing;
  return g.score_gradients + tile * (4 * kProducts) + threadIdx.x;
}

// Scores and dP become dS. sums[i]: of the thread's two queries.
__device__ inline void query_gradients(const Attention& p, const QuerySums (&sums)[2],
                                       uint32_t keep_at, const float (&scores)[kPairs],
                                       float (&dp)[kPairs]) {
  if (p.threshold != 0) {
    const RowBits keep(keep_at);
    each_score([&](int n, int i, int c) { dp[n] = keep.at(i, c) ? dp[n] * p.kept : 0.0f; });
  }
  each_score([&](int n, int i, int) {
    dp[n] = exp2_of(scores[n] - sums[i].lse) * (dp[n] - sums[i].delta);
  });
}

// A block's tiles of dbias, and what is summed into them.
struct BiasWork {
  int i0, j0, end;  // j0: the current tile's; end: past the last one's
  int64_t matrix_b, matrix_h, first_b, last_b, first_h, heads;

  // `count`: tiles of a block.
  __device__ BiasWork(const Attention& p, const AttentionGradients& g, int count) {
    const int run = count * kPassing, across = static_cast<int>(ceil_div(p.seqlen_kv, run));
    i0 = static_cast<int>(blockIdx.x) / across * kFixed;
    j0 = static_cast<int>(blockIdx.x) % across * run;
    end = min(j0 + run, static_cast<int>(p.seqlen_kv));
    matrix_b = blockIdx.z, matrix_h = blockIdx.y;
    first_b = g.dbias_batches == 1 ? 0 : matrix_b;
    last_b = g.dbias_batches == 1 ? p.batch : matrix_b + 1;
    first_h = g.dbias_heads == 1 ? 0 : matrix_h;
    heads = g.dbias_heads == 1 ? p.heads : 1;
  }
  __device__ bool more() const { return j0 < end; }
  __device__ void next() { j0 += kPassing; }
  // Whether a query of the tile sees a key of it in a sequence.
  __device__ bool seen(const Attention& p, const Span& s) const {
    const Range r = seen_by(i0, s.q_len, [&](int64_t i) { return keys_of(p, s, i); });
    return r.begin < j0 + kPassing && r.end > j0;
  }
};

template <class T>
__device__ inline void store_bias(const Attention& p, const AttentionGradients& g,
                                  const BiasWork& work, const float (&sum)[kPairs]) {
  HeadData out;
  out.data = g.dbias.data;
  out.dtype = g.dbias.dtype;
  const int row = work.i0 + Place::row(), column = work.j0 + Place::col();
  const int64_t first = g.dbias.offset(work.matrix_b, work.matrix_h, 0, 0);
  const bool pairs = g.dbias.col == 1 && out.dtype == p.q.dtype &&
                     (g.dbias.row % 2 | g.dbias.head % 2 | g.dbias.batch % 2) == 0 &&
                     reinterpret_cast<uintptr_t>(out.data) % 4 == 0;
#pragma unroll
  for (int n = 0; n < kPairs; n += 2) {
    const int i = row + n / 2 % 2 * 8, j = column + n / 4 * 8;
    if (i >= p.seqlen_q || j >= p.seqlen_kv) continue;
    const int64_t at = first + i * g.dbias.row + j * g.dbias.col;
    if (pairs && j + 1 < p.seqlen_kv) {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(out.data) + at) =
          hopper::pack<T>(sum[n], sum[n + 1]);
      continue;
    }
    out.put(at, sum[n]);
    if (j + 1 < p.seqlen_kv) out.put(at + g.dbias.col, sum[n + 1]);
  }
}

// ---- dbias from the gradients of the scores that the kernel of dq has kept

// A block has a tile. (Summed instead by the last block of dq that shares it, while the parts are
// in the L2 cache, it keeps that block from its products: the whole took a tenth longer.)
template <class T>
__global__ void __launch_bounds__(kProducts)
    attention_hopper_dbias_sum_kernel(const __grid_constant__ Attention p,
                                      const __grid_constant__ AttentionGradients g) {
  const BiasWork work(p, g, 1);
  constexpr int kAtOnce = 4;  // matrices whose parts are on their way at a time
  float sum[kPairs] = {};
  const int64_t first = work.first_b * work.heads, last = work.last_b * work.heads;
  for (int64_t m = first; m < last; m += kAtOnce) {
    uint4 parts[kAtOnce][4];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int64_t b = (m + a) / work.heads, h = work.first_h + (m + a) % work.heads;
      const bool there = m + a < last && work.seen(p, p.span(b));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        parts[a][k] = make_uint4(0, 0, 0, 0);
        if (there) {
          parts[a][k] = __ldcs(score_gradients(p, g, b, h, work.i0, work.j0) + k * kProducts);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t pairs[4] = {parts[a][k].x, parts[a][k].y, parts[a][k].z, parts[a][k].w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 v = hopper::unpack<T>(pairs[n]);
          sum[8 * k + 2 * n] += v.x;
          sum[8 * k + 2 * n + 1] += v.y;
        }
      }
    }
  }
  store_bias<T>(p, g, work, sum);
}

// ---- dbias computed again: tiles of 128 queries by 64 keys of one matrix of it, over the heads
// and sequences that share it. A block has several tiles of the same queries, so that its stages
// are seldom empty.

constexpr int kBiasStages = 2, kBiasTiles = 8;  // of a block
constexpr int kBiasProductRegisters = 152, kBiasFillRegisters = 256 - kBiasProductRegisters;
using BiasRing = Ring<kBiasStages, kFillers<true>>;

template <int kDim>
struct BiasShared {
  using Part = Stage<kDim, true>;
  static constexpr int kMatrix = matrix_bytes<kDim>(kFixed), kSecond = matrix_bytes<kDim>(kPassing);
  // Of a stage: q, dO, k, v, and bits.
  static constexpr int kDO = kMatrix, kK = 2 * kMatrix, kV = kK + kSecond, kKeep = kV + kSecond,
                       kHide = kKeep + kBitsBytes, kStageBytes = kHide + kBitsBytes;
  static constexpr int kBarriers = kBiasStages * kStageBytes;
  static constexpr int kBytes = kBarriers + kBiasStages * 2 * 8;
  static_assert(kStageBytes % 1024 == 0);
};

// Of the current tile.
template <class T, int kDim, bool kDraws>
__device__ inline void bias_fill(const Attention& p, const AttentionGradients& g,
                                 const BiasWork& work,
                                 const TermFiller<T, kDim, true, kDraws>& terms, uint32_t shared,
                                 BiasRing& ring) {
  using Shared = BiasShared<kDim>;
  constexpr int kFilling = kFillers<true>;
  for (int64_t b = work.first_b; b < work.last_b; ++b) {
    const Span s = p.span(b);
    if (!work.seen(p, s)) continue;
    const int queries = static_cast<int>(s.q_len), keys = static_cast<int>(s.kv_len);
    fill_ring<Shared::kStageBytes>(
        ring, shared, static_cast<int>(work.heads),
        [&](int n, uint32_t at) {
          const int64_t h = work.first_h + n, kv_head = p.kv_head(h);
          copy_rows<T, kFixed, kDim, kFilling>(p.q, head_of<T>(p.q, b, s.q_begin, h), work.i0,
                                               queries, at);
          copy_rows<T, kPassing, kDim, kFilling>(p.k, head_of<T>(p.k, b, s.kv_begin, kv_head),
                                                 work.j0, keys, at + Shared::kK);
          copy_rows<T, kFixed, kDim, kFilling>(g.d_o, head_of<T>(g.d_o, b, s.q_begin, h), work.i0,
                                               queries, at + Shared::kDO);
          copy_rows<T, kPassing, kDim, kFilling>(p.v, head_of<T>(p.v, b, s.kv_begin, kv_head),
                                                 work.j0, keys, at + Shared::kV);
          terms.copy_pair_bits(b, h, work.i0, work.j0, at + Shared::kKeep, at + Shared::kHide);
        },
        [&](int n, uint32_t at) {
          terms.form(b, work.first_h + n, work.i0, work.j0, at + Shared::kKeep);
        });
  }
}

// A thread's pairs of the current tile of the bias, zeros past the matrix.
template <class T>
struct HeldBias {
  uint32_t pairs[kPairs / 2];
  __device__ HeldBias(const Attention& p, const BiasWork& work) {
    const ScoreData& d = p.bias;
    const auto* const matrix =
        static_cast<const uint16_t*>(d.data) + work.matrix_b * d.batch + work.matrix_h * d.head;
#pragma unroll
    for (int n = 0; n < kPairs / 2; ++n) {
      const int i = work.i0 + Place::row() + n % 2 * 8, j = work.j0 + Place::col() + n / 2 * 8;
      const uint16_t* const from = matrix + i * d.row + j * d.col;
      const bool there = i < p.seqlen_q;
      const uint32_t low = there && j < p.seqlen_kv ? from[0] : 0;
      const uint32_t high = there && j + 1 < p.seqlen_kv ? from[d.col] : 0;
      pairs[n] = low | high << 16;
    }
  }
  __device__ void add(float (&s)[kPairs]) const {
#pragma unroll
    for (int n = 0; n < kPairs / 2; ++n) {
      const float2 v = hopper::unpack<T>(pairs[n]);
      s[2 * n] = fmaf(v.x, kLog2e, s[2 * n]);
      s[2 * n + 1] = fmaf(v.y, kLog2e, s[2 * n + 1]);
    }
  }
};

template <class T, int kDim>
__device__ inline void bias_multiply(const Attention& p, const AttentionGradients& g,
                                     const BiasWork& work, uint32_t shared, BiasRing& ring) {
  using Shared = BiasShared<kDim>;
  const int row = work.i0 + Place::row();
  const HeldBias<T> bias(p, work);
  float sum[kPairs] = {};
  for (int64_t b = work.first_b; b < work.last_b; ++b) {
    const Span s = p.span(b);
    if (!work.seen(p, s)) continue;
    Terms<T, kDim, true> terms(p, s);
    terms.seen[0] = keys_of(p, s, row);
    terms.seen[1] = keys_of(p, s, row + 8);
    for (int64_t h = work.first_h; h < work.first_h + work.heads; ++h, ring.next()) {
      const uint32_t at = shared + ring.stage * Shared::kStageBytes;
      terms.head(b, h);
      const QuerySums sums[2] = {{p, g, s, b, h, row}, {p, g, s, b, h, row + 8}};
      ring.wait_full();
      float scores[kPairs], dp[kPairs];
      __syncwarp();
      hopper::begin_products();
      start_shared<T, kDim>(at, at + Shared::kK, scores);
      hopper::end_products();
      start_shared<T, kDim>(at + Shared::kDO, at + Shared::kV, dp);
      hopper::end_products();
      hopper::wait_for_sums<1>(scores);
      terms.apply([&] { bias.add(scores); }, at + Shared::kHide, row, work.j0, scores);
      hopper::wait_for_sums(dp);
      query_gradients(p, sums, at + Shared::kKeep, scores, dp);
      ring.release();
#pragma unroll
      for (int n = 0; n < kPairs; ++n) sum[n] += dp[n];
    }
  }
  store_bias<T>(p, g, work, sum);
}

template <class T, int kDim, bool kDraws>
__global__ void __launch_bounds__(kBlockThreads<true>, 1)
    attention_hopper_dbias_kernel(const __grid_constant__ Attention p,
                                  const __grid_constant__ AttentionGradients g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = hopper::shared_address(memory);
  BiasRing ring(shared + BiasShared<kDim>::kBarriers, forms_words<kDraws>(p));
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  BiasWork work(p, g, kBiasTiles);
  if (threadIdx.x >= kProducts) {
    hopper::give_registers_back<kBiasFillRegisters>();
    const TermFiller<T, kDim, true, kDraws> terms(p);
    for (; work.more(); work.next()) {
      bias_fill<T, kDim, kDraws>(p, g, work, terms, shared, ring);
    }
    hopper::wait_copies();
  } else {
    hopper::take_registers<kBiasProductRegisters>();
    for (; work.more(); work.next()) {
      bias_multiply<T, kDim>(p, g, work, shared, ring);
    }
  }
#endif
}

}  // namespace te_fl::cuda::flash
