// The backward of attention on Hopper's tensor cores, in kernels that each sum in a fixed order:
// one has 128 queries and sums dq over the keys that pass; one has 128 keys and sums dk and dv over
// the queries; one has a tile of dbias. Each forms P and dS anew, from the forward's log-sum-exp.
#include "attention_hopper.cuh"
#include "attention_launch.hpp"
#include "shared_memory.hpp"

namespace te_fl::cuda {
namespace flash {
namespace {

// ---- delta = rowsum(dO O) and the log-sum-exp for powers of 2, 16 threads a row

constexpr int kDeltaLanes = 16, kDeltaRows = kThreads / kDeltaLanes;

template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_delta_kernel(const __grid_constant__ Attention p,
                           const __grid_constant__ AttentionGradients g) {
  const int64_t b = blockIdx.z, h = blockIdx.y;
  const Span s = p.span(b);
  const int64_t i = int64_t{blockIdx.x} * kDeltaRows + threadIdx.x / kDeltaLanes;
  const int d = static_cast<int>(threadIdx.x) % kDeltaLanes * kGroup;
  float sum = 0.0f;
  if (i < s.q_len && d < g.o.dim) {
    float o[kGroup], d_o[kGroup];
    load_group(static_cast<const T*>(g.o.data) + g.o.offset(b, s.q_begin + i, h) + d, kGroup, o);
    load_group(static_cast<const T*>(g.d_o.data) + g.d_o.offset(b, s.q_begin + i, h) + d, kGroup,
               d_o);
#pragma unroll
    for (int n = 0; n < kGroup; ++n) sum = fmaf(o[n], d_o[n], sum);
  }
#pragma unroll
  for (int step = kDeltaLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (i >= s.q_len || d != 0) return;
  const int64_t at = p.lse_index(s, b, h, i);
  const bool empty = g.lse[at] == -INFINITY;  // then P is 0
  g.delta[at] = empty ? 0.0f : sum;
  g.log2_sum[at] = empty ? INFINITY : g.lse[at] * kLog2e;
}

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
// Of 64 queries from i0 to shared memory: log-sum-exps and then deltas; zeros past the sequence,
// whose scores are hidden.
__device__ inline void copy_sums(const Attention& p, const AttentionGradients& g, const Span& s,
                                 int64_t b, int64_t h, int i0, uint32_t to) {
  const int query = filler() % kPassing;
  const float* const from = filler() < kPassing ? g.log2_sum : g.delta;
  const bool there = i0 + query < s.q_len;
  hopper::copy_word_async(to + filler() * 4, from + (there ? p.lse_index(s, b, h, i0 + query) : 0),
                          there);
}

// ---- dq

constexpr int kStages = 3;
// Of a thread; a block of the query side has 512 for one of each warp group.
constexpr int kQueryProductRegisters = 176, kQueryFillRegisters = 256 - kQueryProductRegisters;
using QueryRing = Ring<kStages, kFillers<true>>;

template <int kDim>
struct QueryShared {
  using Part = Stage<kDim, true>;
  static constexpr int kDO = matrix_bytes<kDim>(kFixed);  // after Q
  static constexpr int kStagesAt = 2 * kDO;
  static constexpr int kBarriers = kStagesAt + kStages * Part::kBytes;
  static constexpr int kBytes = kBarriers + kStages * 2 * 8;
};

template <class T, int kDim, bool kDraws>
__device__ inline void query_fill(const Attention& p, const AttentionGradients& g, const Span& s,
                                  int64_t b, int64_t h, int i0, const Tiles& tiles, uint32_t shared,
                                  QueryRing& ring) {
  using Shared = QueryShared<kDim>;
  using Part = typename Shared::Part;
  constexpr int kFilling = kFillers<true>;
  const TermFiller<T, kDim, true, kDraws> terms(p);
  const T* const k = head_of<T>(p.k, b, s.kv_begin, p.kv_head(h));
  const T* const v = head_of<T>(p.v, b, s.kv_begin, p.kv_head(h));
  const int keys = static_cast<int>(s.kv_len);
  fill_ring<Part::kBytes>(
      ring, shared + Shared::kStagesAt, tiles.count,
      [&](int n, uint32_t at) {
        if (n == 0) {
          const int queries = static_cast<int>(s.q_len);
          copy_rows<T, kFixed, kDim, kFilling>(p.q, head_of<T>(p.q, b, s.q_begin, h), i0, queries,
                                               shared);
          copy_rows<T, kFixed, kDim, kFilling>(g.d_o, head_of<T>(g.d_o, b, s.q_begin, h), i0,
                                               queries, shared + Shared::kDO);
        }
        const int j0 = tiles.begin + n * kPassing;
        copy_rows<T, kPassing, kDim, kFilling>(p.k, k, j0, keys, at);
        copy_rows<T, kPassing, kDim, kFilling>(p.v, v, j0, keys, at + Part::kSecond);
        terms.copy(b, h, i0, j0, at);
      },
      [&](int n, uint32_t at) {
        terms.form(b, h, i0, tiles.begin + n * kPassing, at + Part::kKeep);
      });
}

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

template <class T, int kDim>
__device__ inline void query_multiply(const Attention& p, const AttentionGradients& g,
                                      const Span& s, int64_t b, int64_t h, int i0,
                                      const Tiles& tiles, uint32_t shared, QueryRing& ring) {
  using Shared = QueryShared<kDim>;
  using Part = typename Shared::Part;
  const int row = i0 + Place::row();
  const int64_t rows = p.thd ? s.q_len : p.seqlen_q;
  const QuerySums sums[2] = {{p, g, s, b, h, row}, {p, g, s, b, h, row + 8}};
  Terms<T, kDim, true> terms(p, s);
  terms.head(b, h);
  terms.seen[0] = keys_of(p, s, row);
  terms.seen[1] = keys_of(p, s, row + 8);
  float dq[kDim / 2] = {}, scores[kPairs], dp[kPairs];
  uint32_t packed[4][4];
  const uint32_t stages = shared + Shared::kStagesAt;
  const auto apply = [&](int n, uint32_t at) {
    terms.apply([&] { terms.add_bias(at + Part::kBias, scores); }, at + Part::kHide, row,
                tiles.begin + n * kPassing, scores);
  };
  // dP becomes dS, which is packed.
  const auto pack = [&](int n, uint32_t at) {
    query_gradients(p, sums, at + Part::kKeep, scores, dp);
#pragma unroll
    for (int k = 0; k < 4; ++k) pack_step<T>(dp, k, packed[k]);
    if (g.score_gradients != nullptr) {
      uint4* const tile = score_gradients(p, g, b, h, i0, tiles.begin + n * kPassing);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        tile[k * kProducts] = make_uint4(packed[k][0], packed[k][1], packed[k][2], packed[k][3]);
      }
    }
  };
  if (tiles.count > 0) {
    const uint32_t at = stages + ring.stage * Part::kBytes;
    ring.wait_full();
    __syncwarp();
    hopper::begin_products();
    start_shared<T, kDim>(shared, at, scores);
    hopper::end_products();
    start_shared<T, kDim>(shared + Shared::kDO, at + Part::kSecond, dp);
    hopper::end_products();
    hopper::wait_for_sums<1>(scores);
    apply(0, at);
    hopper::wait_for_sums(dp);
    pack(0, at);
  }
  // While the tensor cores sum a tile's part of dq, the next one's scores are formed.
  for (int n = 1; n < tiles.count; ++n) {
    const QueryRing last = ring;
    ring.next();
    const uint32_t at = stages + ring.stage * Part::kBytes;
    ring.wait_full();
    __syncwarp();
    hopper::begin_products();
    start_shared<T, kDim>(shared, at, scores);
    hopper::end_products();
    start_across<T>(packed, stages + last.stage * Part::kBytes, dq);
    hopper::end_products();
    start_shared<T, kDim>(shared + Shared::kDO, at + Part::kSecond, dp);
    hopper::end_products();
    hopper::wait_for_sums<2>(scores);
    apply(n, at);
    hopper::wait_for_sums<1>(dq);
    last.release();
    hopper::wait_for_sums(dp);
    pack(n, at);
  }
  if (tiles.count > 0) {
    __syncwarp();
    hopper::begin_products();
    start_across<T>(packed, stages + ring.stage * Part::kBytes, dq);
    hopper::end_products();
    hopper::wait_for_sums(dq);
    ring.release();
  }
  T* const to = const_cast<T*>(head_of<T>(g.dq, b, s.q_begin, h));
  const bool written[2] = {row < rows, row + 8 < rows};
  store_rows<T, kDim>(g.dq, {to + row * g.dq.seq, to + (row + 8) * g.dq.seq}, written, dq,
                      {p.scale, p.scale});
}

template <class T, int kDim, bool kDraws>
__global__ void __launch_bounds__(kBlockThreads<true>, 1)
    attention_hopper_dq_kernel(const __grid_constant__ Attention p,
                               const __grid_constant__ AttentionGradients g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const BlockWork work(p);
  const int64_t b = work.b, h = blockIdx.y, i0 = work.tile * kFixed;
  const Span s = p.span(b);
  if (i0 >= (p.thd ? s.q_len : p.seqlen_q)) return;
  const uint32_t shared = hopper::shared_address(memory);
  QueryRing ring(shared + QueryShared<kDim>::kBarriers, forms_words<kDraws>(p));
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  const Tiles tiles(seen_by(i0, s.q_len, [&](int64_t i) { return keys_of(p, s, i); }));
  if (threadIdx.x >= kProducts) {
    hopper::give_registers_back<kQueryFillRegisters>();
    query_fill<T, kDim, kDraws>(p, g, s, b, h, static_cast<int>(i0), tiles, shared, ring);
    hopper::wait_copies();
  } else {
    hopper::take_registers<kQueryProductRegisters>();
    query_multiply<T, kDim>(p, g, s, b, h, static_cast<int>(i0), tiles, shared, ring);
  }
#endif
}

// ---- dk and dv

using KeyRing = Ring<kStages, kFillers<false>>;
// Of a thread; the block has 504 for one of each warp group. Sums of two products fill those of
// wide heads.
template <int kDim>
constexpr int kKeyProductRegisters = kDim > 64 ? 224 : 176;
template <int kDim>
constexpr int kKeyFillRegisters = 504 - 2 * kKeyProductRegisters<kDim>;

template <int kDim>
struct KeyShared {
  using Part = Stage<kDim, false>;
  static constexpr int kV = matrix_bytes<kDim>(kFixed);  // after K
  static constexpr int kStagesAt = 2 * kV;
  static constexpr int kBarriers = kStagesAt + kStages * Part::kBytes;
  static constexpr int kBytes = kBarriers + kStages * 2 * 8;
};

// The stages of a block: every head that shares the keys, and of each the queries that see them.
struct KeyWork {
  Tiles tiles;
  int64_t first_head;
  int count;
  __device__ KeyWork(const Attention& p, const Span& s, int64_t kv_head, int64_t j0)
      : tiles(seen_by(j0, s.kv_len, [&](int64_t j) { return queries_of(p, s, j); })),
        first_head(kv_head * (p.heads / p.kv_heads)),
        count(static_cast<int>(p.heads / p.kv_heads) * tiles.count) {}
  __device__ int64_t head(int n) const { return first_head + n / tiles.count; }
  __device__ int query(int n) const { return tiles.begin + n % tiles.count * kPassing; }
};

template <class T, int kDim, bool kDraws>
__device__ inline void key_fill(const Attention& p, const AttentionGradients& g, const Span& s,
                                int64_t b, int64_t kv_head, int j0, const KeyWork& work,
                                uint32_t shared, KeyRing& ring) {
  using Shared = KeyShared<kDim>;
  using Part = typename Shared::Part;
  constexpr int kFilling = kFillers<false>;
  const TermFiller<T, kDim, false, kDraws> terms(p);
  const int queries = static_cast<int>(s.q_len), keys = static_cast<int>(s.kv_len);
  fill_ring<Part::kBytes>(
      ring, shared + Shared::kStagesAt, work.count,
      [&](int n, uint32_t at) {
        if (n == 0) {
          copy_rows<T, kFixed, kDim, kFilling>(p.k, head_of<T>(p.k, b, s.kv_begin, kv_head), j0,
                                               keys, shared);
          copy_rows<T, kFixed, kDim, kFilling>(p.v, head_of<T>(p.v, b, s.kv_begin, kv_head), j0,
                                               keys, shared + Shared::kV);
        }
        const int64_t h = work.head(n);
        const int i0 = work.query(n);
        copy_rows<T, kPassing, kDim, kFilling>(p.q, head_of<T>(p.q, b, s.q_begin, h), i0, queries,
                                               at);
        copy_rows<T, kPassing, kDim, kFilling>(g.d_o, head_of<T>(g.d_o, b, s.q_begin, h), i0,
                                               queries, at + Part::kSecond);
        copy_sums(p, g, s, b, h, i0, at + Part::kSums);
        terms.copy(b, h, i0, j0, at);
      },
      [&](int n, uint32_t at) {
        terms.form(b, work.head(n), work.query(n), j0, at + Part::kKeep);
      });
}

// From scores and dP, as A of the next products: P after dropout but for its factor, and dS.
template <class T, class Part>
__device__ inline void key_gradients(const Attention& p, uint32_t stage, float (&scores)[kPairs],
                                     float (&dp)[kPairs], uint32_t (&packed_p)[4][4],
                                     uint32_t (&packed_ds)[4][4]) {
  const bool drops = p.threshold != 0;
  const float kept = drops ? p.kept : 1.0f;
  uint64_t bits[2] = {~uint64_t{0}, ~uint64_t{0}};
  if (drops) {
    const RowBits keep(stage + Part::kKeep);
    bits[0] = keep.rows[0], bits[1] = keep.rows[1];
  }
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const uint32_t at = stage + Part::kSums + (8 * t + Place::col()) * 4;
    const float2 lse = shared_pair(at), delta = shared_pair(at + kPassing * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = 4 * t + 2 * i;
      const float p0 = exp2_of(scores[n] - lse.x), p1 = exp2_of(scores[n + 1] - lse.y);
      const auto keep = static_cast<uint32_t>(t < 4 ? bits[i] : bits[i] >> 32) >> (8 * t % 32);
      const bool keep0 = (keep & 1) != 0, keep1 = (keep & 2) != 0;
      const float d0 = p0 * ((keep0 ? dp[n] * kept : 0.0f) - delta.x);
      const float d1 = p1 * ((keep1 ? dp[n + 1] * kept : 0.0f) - delta.y);
      packed_p[t / 2][t % 2 * 2 + i] = hopper::pack<T>(keep0 ? p0 : 0.0f, keep1 ? p1 : 0.0f);
      packed_ds[t / 2][t % 2 * 2 + i] = hopper::pack<T>(d0, d1);
    }
  }
}

template <class T, int kDim>
__device__ inline void key_multiply(const Attention& p, const AttentionGradients& g, const Span& s,
                                    int64_t b, int64_t kv_head, int j0, const KeyWork& work,
                                    uint32_t shared, KeyRing& ring) {
  using Shared = KeyShared<kDim>;
  using Part = typename Shared::Part;
  const int row = j0 + Place::row();
  const int64_t rows = p.thd ? s.kv_len : p.seqlen_kv;
  Terms<T, kDim, false> terms(p, s);
  terms.seen[0] = queries_of(p, s, row);
  terms.seen[1] = queries_of(p, s, row + 8);
  float dk[kDim / 2] = {}, dv[kDim / 2] = {};
  for (int n = 0; n < work.count; ++n, ring.next()) {
    const uint32_t at = shared + Shared::kStagesAt + ring.stage * Part::kBytes;
    terms.head(b, work.head(n));
    ring.wait_full();
    float scores[kPairs], dp[kPairs];
    __syncwarp();
    hopper::begin_products();
    start_shared<T, kDim>(shared, at, scores);
    hopper::end_products();
    start_shared<T, kDim>(shared + Shared::kV, at + Part::kSecond, dp);
    hopper::end_products();
    hopper::wait_for_sums<1>(scores);
    terms.apply([&] { terms.add_bias(at + Part::kBias, scores); }, at + Part::kHide, row,
                work.query(n), scores);
    hopper::wait_for_sums(dp);
    uint32_t packed_p[4][4], packed_ds[4][4];
    key_gradients<T, Part>(p, at, scores, dp, packed_p, packed_ds);
    __syncwarp();
    hopper::begin_products();
    start_across<T>(packed_p, at + Part::kSecond, dv);
    start_across<T>(packed_ds, at, dk);
    hopper::end_products();
    hopper::wait_for_sums(dv);
    hopper::wait_for_sums(dk);
    ring.release();
  }
  const bool written[2] = {row < rows, row + 8 < rows};
  const float kept = p.threshold != 0 ? p.kept : 1.0f;
  T* const to_k = const_cast<T*>(head_of<T>(g.dk, b, s.kv_begin, kv_head));
  T* const to_v = const_cast<T*>(head_of<T>(g.dv, b, s.kv_begin, kv_head));
  store_rows<T, kDim>(g.dk, {to_k + row * g.dk.seq, to_k + (row + 8) * g.dk.seq}, written, dk,
                      {p.scale, p.scale});
  store_rows<T, kDim>(g.dv, {to_v + row * g.dv.seq, to_v + (row + 8) * g.dv.seq}, written, dv,
                      {kept, kept});
}

template <class T, int kDim, bool kDraws>
__global__ void __launch_bounds__(kBlockThreads<false>, 1)
    attention_hopper_dkv_kernel(const __grid_constant__ Attention p,
                                const __grid_constant__ AttentionGradients g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const BlockWork place(p);
  // The first keys are those that most queries see.
  const int64_t b = place.b, kv_head = blockIdx.y,
                j0 = (gridDim.x / p.batch - 1 - place.tile) * kFixed;
  const Span s = p.span(b);
  if (j0 >= (p.thd ? s.kv_len : p.seqlen_kv)) return;
  const uint32_t shared = hopper::shared_address(memory);
  KeyRing ring(shared + KeyShared<kDim>::kBarriers, forms_words<kDraws>(p));
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  const KeyWork work(p, s, kv_head, j0);
  if (threadIdx.x >= kProducts) {
    hopper::give_registers_back<kKeyFillRegisters<kDim>>();
    key_fill<T, kDim, kDraws>(p, g, s, b, kv_head, static_cast<int>(j0), work, shared, ring);
    hopper::wait_copies();
  } else {
    hopper::take_registers<kKeyProductRegisters<kDim>>();
    key_multiply<T, kDim>(p, g, s, b, kv_head, static_cast<int>(j0), work, shared, ring);
  }
#endif
}

// ---- dbias: tiles of 128 queries by 64 keys of one matrix of it, over the heads and sequences
// that share it. A block has several tiles of the same queries, so that its stages are seldom
// empty.

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

// The same from the gradients of the scores that the kernel of dq has kept, a block a tile.
template <class T>
__global__ void __launch_bounds__(kProducts)
    attention_hopper_dbias_sum_kernel(const __grid_constant__ Attention p,
                                      const __grid_constant__ AttentionGradients g) {
  const BiasWork work(p, g, 1);
  float sum[kPairs] = {};
  for (int64_t b = work.first_b; b < work.last_b; ++b) {
    if (!work.seen(p, p.span(b))) continue;
    for (int64_t h = work.first_h; h < work.first_h + work.heads; ++h) {
      const uint4* const tile = score_gradients(p, g, b, h, work.i0, work.j0);
      uint4 parts[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) parts[k] = __ldcs(tile + k * kProducts);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t pairs[4] = {parts[k].x, parts[k].y, parts[k].z, parts[k].w};
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

// ---- launches

template <auto kKernel, auto kDrawing, size_t kBytes, bool kKeysPass>
void launch(const te_fl_context& ctx, const char* name, const dim3& grid, const Attention& p,
            const AttentionGradients& g) {
  static SharedMemory drawing, plain;
  const bool drawn = draws(p);
  const auto kernel = drawn ? kDrawing : kKernel;
  (drawn ? drawing : plain).require(ctx.device.index, kernel, kBytes);
  kernel<<<grid, kBlockThreads<kKeysPass>, kBytes, stream_of(ctx)>>>(p, g);
  check_launch(name);
}

template <class T, int kDim>
void backward(const te_fl_context& ctx, const Attention& p, const AttentionGradients& g) {
  const cudaStream_t stream = stream_of(ctx);
  pack_pair_bits(stream, p);
  if (p.seqlen_q > 0) {
    const dim3 rows(static_cast<unsigned>(ceil_div(p.seqlen_q, kDeltaRows)),
                    static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch));
    attention_delta_kernel<T><<<rows, kThreads, 0, stream>>>(p, g);
    check_launch("attention_delta_kernel");
    launch<attention_hopper_dq_kernel<T, kDim, false>, attention_hopper_dq_kernel<T, kDim, true>,
           QueryShared<kDim>::kBytes, true>(ctx, "attention_hopper_dq_kernel",
                                            fixed_grid(p.seqlen_q, p.heads, p.batch), p, g);
  }
  if (p.seqlen_kv == 0) return;
  launch<attention_hopper_dkv_kernel<T, kDim, false>, attention_hopper_dkv_kernel<T, kDim, true>,
         KeyShared<kDim>::kBytes, false>(ctx, "attention_hopper_dkv_kernel",
                                         fixed_grid(p.seqlen_kv, p.kv_heads, p.batch), p, g);
  if (g.dbias.data == nullptr || p.seqlen_q == 0) return;
  const auto tiles = [&](int count) {  // of a block
    return dim3(static_cast<unsigned>(ceil_div(p.seqlen_q, kFixed) *
                                      ceil_div(p.seqlen_kv, count * kPassing)),
                static_cast<unsigned>(g.dbias_heads), static_cast<unsigned>(g.dbias_batches));
  };
  if (g.score_gradients == nullptr) {
    launch<attention_hopper_dbias_kernel<T, kDim, false>,
           attention_hopper_dbias_kernel<T, kDim, true>, BiasShared<kDim>::kBytes, true>(
        ctx, "attention_hopper_dbias_kernel", tiles(kBiasTiles), p, g);
    return;
  }
  attention_hopper_dbias_sum_kernel<T><<<tiles(1), kProducts, 0, stream>>>(p, g);
  check_launch("attention_hopper_dbias_sum_kernel");
}

}  // namespace
}  // namespace flash

void hopper_attention_backward(const te_fl_context& ctx, const Attention& p,
                               const AttentionGradients& g) {
  const bool wide = std::max(p.q.dim, p.v.dim) > 64, half = p.q.dtype == TE_FL_F16;
  const auto run = half   ? wide ? flash::backward<fp16, 128> : flash::backward<fp16, 64>
                     : wide ? flash::backward<bf16, 128>
                          : flash::backward<bf16, 64>;
  run(ctx, p, g);
}

}  // namespace te_fl::cuda
