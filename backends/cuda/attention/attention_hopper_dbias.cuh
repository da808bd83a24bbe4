// The gradient of the attention bias on Hopper's tensor cores: the sum of the gradients of the
// scores over the sequences and heads that share the bias. The dq kernel stores the gradients of
// the scores in scratch; if the scratch is too small for them, a kernel in this file recomputes
// them.
#pragma once

#include "attention/attention_hopper.cuh"

namespace te_fl::cuda::flash {

// The two values of a query that the backward needs: the log-sum-exp times log2(e), which is
// infinite if all of the row's P is 0, and delta = rowsum(dO O).
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
// Returns the address of a tile of the stored gradients of the scores. Each product thread has 16
// bytes for each of the four wgmma steps of dS K.
__device__ inline uint4* score_gradients(const Attention& p, const AttentionGradients& g, int64_t b,
                                         int64_t h, int i0, int j0) {
  const int64_t rows = ceil_div(p.seqlen_q, kFixed), tiles = ceil_div(p.seqlen_kv, kPassing);
  const int64_t tile = ((b * p.heads + h) * rows + i0 / kFixed) * tiles + j0 / kPassing;
  return g.score_gradients + tile * (4 * kProducts);
}

// Turns dP into dS, in place. sums[i]: the log-sum-exp and delta of query i of the thread's two
// queries. `keep_at`: shared memory address of dropout's bits.
__device__ inline void query_gradients(const Attention& p, const QuerySums (&sums)[2],
                                       uint32_t keep_at, const float (&scores)[kPairs],
                                       float (&dp)[kPairs]) {
  if (p.threshold != 0) {
    const RowBits keep(keep_at);
    each_score([&](int n, int i, int c) { dp[n] = keep.at(i, c) ? dp[n] * p.kept : 0.0f; });
  }
  each_score([&](int n, int i, int) {
    dp[n] = approx_exp2(scores[n] - sums[i].lse) * (dp[n] - sums[i].delta);
  });
}

// A tile of dbias (128 queries by 64 keys of one matrix), and the sequences and heads that are
// summed into it.
struct BiasTile {
  int i0, j0;
  int64_t matrix_b, matrix_h, first_b, last_b, first_h, heads;

  __device__ BiasTile(const Attention& p, const AttentionGradients& g, int64_t b, int64_t h)
      : i0(0), j0(0), matrix_b(b), matrix_h(h) {
    first_b = g.dbias_batches == 1 ? 0 : matrix_b;
    last_b = g.dbias_batches == 1 ? p.batch : matrix_b + 1;
    first_h = g.dbias_heads == 1 ? 0 : matrix_h;
    heads = g.dbias_heads == 1 ? p.heads : 1;
  }
  // True if a query of the tile sees a key of the tile in a sequence with the lengths `s`.
  __device__ bool seen(const Attention& p, const Span& s) const {
    const Range r = seen_by(i0, s.q_len, [&](int64_t i) { return visible_keys(p, s, i); });
    return r.begin < j0 + kPassing && r.end > j0;
  }
};

// Stores a product thread's sums of a tile to dbias.
template <class T>
__device__ inline void store_bias(const Attention& p, const AttentionGradients& g,
                                  const BiasTile& work, const float (&sum)[kPairs]) {
  const int row = work.i0 + Place::row(), column = work.j0 + Place::col();
  const int64_t first =
      g.dbias.offset(work.matrix_b, work.matrix_h, 0, 0) + row * g.dbias.row + column * g.dbias.col;
  const bool pairs = g.dbias.col == 1 && g.dbias.dtype == p.q.dtype &&
                     (g.dbias.row % 2 | g.dbias.head % 2 | g.dbias.batch % 2) == 0 &&
                     reinterpret_cast<uintptr_t>(g.dbias.data) % 4 == 0;
  if (pairs && work.i0 + kFixed <= p.seqlen_q && work.j0 + kPassing <= p.seqlen_kv) {
    T* const rows[2] = {static_cast<T*>(g.dbias.data) + first,
                        static_cast<T*>(g.dbias.data) + first + 8 * g.dbias.row};
#pragma unroll
    for (int n = 0; n < kPairs; n += 2) {
      *reinterpret_cast<uint32_t*>(rows[n / 2 % 2] + n / 4 * 8) =
          hopper::pack<T>(sum[n], sum[n + 1]);
    }
    return;
  }
  HeadData out;
  out.data = g.dbias.data;
  out.dtype = g.dbias.dtype;
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int i = n / 2 % 2 * 8, j = n / 4 * 8 + n % 2;
    if (row + i >= p.seqlen_q || column + j >= p.seqlen_kv) continue;
    out.put(first + i * g.dbias.row + j * g.dbias.col, sum[n]);
  }
}

// ---- dbias from the gradients of the scores that the dq kernel has stored

// Number of blocks of the dk/dv kernel that compute dbias. The kernel's other blocks are bound by
// the tensor cores and leave memory bandwidth unused, which a few multiprocessors can use with bulk
// copies. (A separate kernel would take a fifth of the backward's time.)
template <int kDim>
constexpr unsigned kSumBlocks = kDim > 64 ? 28 : 36;

template <class T>
class KeptSum {
 public:
  static constexpr int kStages = 3, kAtOnce = 4;  // kAtOnce: tiles per stage, each of another
                                                  // matrix
  static constexpr int kTileBytes = 4 * kProducts * 16, kStageBytes = kAtOnce * kTileBytes;
  static constexpr int kBytes = kStages * kStageBytes + kStages * 2 * 8;

  __device__ KeptSum(const Attention& p, const AttentionGradients& g, uint32_t shared)
      : p_(p),
        g_(g),
        shared_(shared),
        full_(shared + kStages * kStageBytes),
        empty_(full_ + kStages * 8),
        varies_(p.q_lengths.cu != nullptr || p.kv_lengths.cu != nullptr) {}
  // Computes every dbias tile whose index is congruent to `block` modulo `blocks`. All threads of
  // the block call it.
  __device__ void run(unsigned block, unsigned blocks) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        hopper::init_barrier(full_ + s * 8, 1);
        hopper::init_barrier(empty_ + s * 8, kProducts);
      }
      hopper::fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x > kProducts) return;
    const auto tiles = static_cast<unsigned>(ceil_div(p_.seqlen_kv, kPassing));
    const auto rows = static_cast<unsigned>(ceil_div(p_.seqlen_q, kFixed));
    const auto heads = static_cast<unsigned>(g_.dbias_heads);
    const unsigned all = static_cast<unsigned>(g_.dbias_batches) * heads * rows * tiles;
    for (unsigned n = block; n < all; n += blocks) {
      const unsigned row = n / tiles, matrix = row / rows;
      BiasTile tile(p_, g_, matrix / heads, matrix % heads);
      tile.i0 = static_cast<int>(row % rows) * kFixed;
      tile.j0 = static_cast<int>(n % tiles) * kPassing;
      if (threadIdx.x == kProducts) {
        each_stage(tile, [&](int first, unsigned kept) { copy(tile, first, kept); });
        continue;
      }
      float sum[kPairs] = {};
      each_stage(tile, [&](int, unsigned kept) { add(kept, sum); });
      store_bias<T>(p_, g_, tile, sum);
    }
  }

 private:
  // Calls f(m, mask) for each group of kAtOnce matrices: m is the first matrix, and bit i of `mask`
  // is set if the gradients of matrix m + i are stored.
  template <class F>
  __device__ void each_stage(const BiasTile& tile, const F& f) {
    const int heads = static_cast<int>(tile.heads);
    const int count = static_cast<int>(tile.last_b - tile.first_b) * heads;
    const bool seen = !varies_ && tile.seen(p_, p_.span(tile.first_b));
    for (int first = 0; first < count; first += kAtOnce) {
      unsigned kept = 0;
      for (int m = 0; m < min(kAtOnce, count - first); ++m) {
        const bool there =
            varies_ ? tile.seen(p_, p_.span(tile.first_b + (first + m) / heads)) : seen;
        kept |= (there ? 1u : 0u) << m;
      }
      if (kept == 0) continue;
      f(first, kept);
      if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
    }
  }
  __device__ void copy(const BiasTile& tile, int first, unsigned kept) const {
    const int heads = static_cast<int>(tile.heads);
    hopper::wait_for(empty_ + stage_ * 8, parity_ ^ 1);
    hopper::expect_bytes(full_ + stage_ * 8, __popc(kept) * kTileBytes);
    for (int m = 0; m < kAtOnce; ++m) {
      if ((kept >> m & 1) == 0) continue;
      hopper::load_bytes(score_gradients(p_, g_, tile.first_b + (first + m) / heads,
                                         tile.first_h + (first + m) % heads, tile.i0, tile.j0),
                         shared_ + stage_ * kStageBytes + m * kTileBytes, full_ + stage_ * 8,
                         kTileBytes);
    }
  }
  __device__ void add(unsigned kept, float (&sum)[kPairs]) const {
    hopper::wait_for(full_ + stage_ * 8, parity_);
    for (int m = 0; m < kAtOnce; ++m) {
      if ((kept >> m & 1) == 0) continue;
      const uint32_t part = shared_ + stage_ * kStageBytes + m * kTileBytes + threadIdx.x * 16;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t pairs[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                     : "r"(part + k * kProducts * 16)
                     : "memory");
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 v = hopper::unpack<T>(pairs[n]);
          sum[8 * k + 2 * n] += v.x;
          sum[8 * k + 2 * n + 1] += v.y;
        }
      }
    }
    hopper::arrive(empty_ + stage_ * 8);
  }

  const Attention& p_;
  const AttentionGradients& g_;
  uint32_t shared_, full_, empty_;
  bool varies_;  // true if the sequences have different lengths
  int stage_ = 0;
  uint32_t parity_ = 0;
};

// ---- dbias from recomputed gradients of the scores, over the heads and sequences that share it

// The tiles that a block computes: several tiles of the same 128 queries, so that the pipeline
// drains less often.
struct BiasWork : BiasTile {
  int end;  // one past the last tile's last key; j0: first key of the current tile

  // `count`: number of tiles per block.
  __device__ BiasWork(const Attention& p, const AttentionGradients& g, int count)
      : BiasTile(p, g, blockIdx.z, blockIdx.y) {
    const int run = count * kPassing, across = static_cast<int>(ceil_div(p.seqlen_kv, run));
    i0 = static_cast<int>(blockIdx.x) / across * kFixed;
    j0 = static_cast<int>(blockIdx.x) % across * run;
    end = min(j0 + run, static_cast<int>(p.seqlen_kv));
  }
  __device__ bool more() const { return j0 < end; }
  __device__ void next() { j0 += kPassing; }
};

constexpr int kBiasStages = 2, kBiasTiles = 8;  // kBiasTiles: number of tiles per block
constexpr int kBiasProductRegisters = 152, kBiasFillRegisters = 256 - kBiasProductRegisters;
using BiasRing = Ring<kBiasStages, kFillers<true>>;

template <int kDim>
struct BiasShared {
  using Part = Stage<kDim, true>;
  static constexpr int kMatrix = matrix_bytes<kDim>(kFixed), kSecond = matrix_bytes<kDim>(kPassing);
  // The parts of a stage: q, dO, k, v, and bits.
  static constexpr int kDO = kMatrix, kK = 2 * kMatrix, kV = kK + kSecond, kKeep = kV + kSecond,
                       kHide = kKeep + kBitsBytes, kStageBytes = kHide + kBitsBytes;
  static constexpr int kBarriers = kBiasStages * kStageBytes;
  static constexpr int kBytes = kBarriers + kBiasStages * 2 * 8;
  static_assert(kStageBytes % 1024 == 0);
};

// Fills the ring with the stages of the current tile.
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
          copy_rows<T, kFixed, kDim, kFilling>(p.q, head_at<T>(p.q, b, s.q_begin, h), work.i0,
                                               queries, at);
          copy_rows<T, kPassing, kDim, kFilling>(p.k, head_at<T>(p.k, b, s.kv_begin, kv_head),
                                                 work.j0, keys, at + Shared::kK);
          copy_rows<T, kFixed, kDim, kFilling>(g.d_o, head_at<T>(g.d_o, b, s.q_begin, h), work.i0,
                                               queries, at + Shared::kDO);
          copy_rows<T, kPassing, kDim, kFilling>(p.v, head_at<T>(p.v, b, s.kv_begin, kv_head),
                                                 work.j0, keys, at + Shared::kV);
          terms.copy_pair_bits(b, h, work.i0, work.j0, at + Shared::kKeep, at + Shared::kHide);
        },
        [&](int n, uint32_t at) {
          terms.form(b, work.first_h + n, work.i0, work.j0, at + Shared::kKeep);
        });
  }
}

// A thread's bias elements of the current tile, two 16-bit elements per word; zeros outside the
// matrix.
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
    terms.seen[0] = visible_keys(p, s, row);
    terms.seen[1] = visible_keys(p, s, row + 8);
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
