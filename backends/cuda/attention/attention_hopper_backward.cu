// The attention backward for Hopper's tensor cores. Each kernel sums in a fixed order. A block of
// the first kernel keeps 128 queries and sums dq over the keys; a block of the second keeps 128
// keys and sums dk and dv over the queries; a block of the third computes tiles of dbias. Each
// kernel recomputes P and dS from the forward's log-sum-exp.
#include "attention/attention_hopper.hpp"
#include "attention/attention_hopper_dbias.cuh"
#include "device/shared_memory.hpp"

namespace te_fl::cuda {
namespace flash {
namespace {

// ---- delta = rowsum(dO O), and the log-sum-exp times log2(e); 16 threads per row

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
  const bool empty = g.lse[at] == -INFINITY;  // a row without keys: P is 0
  g.delta[at] = empty ? 0.0f : sum;
  g.log2_sum[at] = empty ? INFINITY : g.lse[at] * kLog2e;
}

// Copies log2_sum and then delta of 64 queries from i0 to shared memory. Queries past the
// sequence's end get zeros; their scores are hidden.
__device__ inline void copy_sums(const Attention& p, const AttentionGradients& g, const Span& s,
                                 int64_t b, int64_t h, int i0, uint32_t to) {
  const int query = filler() % kPassing;
  const float* const from = filler() < kPassing ? g.log2_sum : g.delta;
  const bool there = i0 + query < s.q_len;
  hopper::copy_word_async(to + filler() * 4, from + (there ? p.lse_index(s, b, h, i0 + query) : 0),
                          there);
}

// ---- dq

constexpr int kQueryStages = 3;
// Registers per thread, of the product threads and of the fillers. Summed over one thread of each
// warpgroup they may be at most 512.
constexpr int kQueryProductRegisters = 176, kQueryFillRegisters = 256 - kQueryProductRegisters;
using QueryRing = Ring<kQueryStages, kFillers<true>>;

template <int kDim>
struct QueryShared {
  using Part = Stage<kDim, true>;
  static constexpr int kDO = matrix_bytes<kDim>(kFixed);  // offset of dO, which follows Q
  static constexpr int kStagesAt = 2 * kDO;
  static constexpr int kBarriers = kStagesAt + kQueryStages * Part::kBytes;
  static constexpr int kBytes = kBarriers + kQueryStages * 2 * 8;
};

template <class T, int kDim, bool kDraws>
__device__ inline void query_fill(const Attention& p, const AttentionGradients& g, const Span& s,
                                  int64_t b, int64_t h, int i0, const Tiles& tiles, uint32_t shared,
                                  QueryRing& ring) {
  using Shared = QueryShared<kDim>;
  using Part = typename Shared::Part;
  constexpr int kFilling = kFillers<true>;
  const TermFiller<T, kDim, true, kDraws> terms(p);
  const T* const k = head_at<T>(p.k, b, s.kv_begin, p.kv_head(h));
  const T* const v = head_at<T>(p.v, b, s.kv_begin, p.kv_head(h));
  const int keys = static_cast<int>(s.kv_len);
  fill_ring<Part::kBytes>(
      ring, shared + Shared::kStagesAt, tiles.count,
      [&](int n, uint32_t at) {
        if (n == 0) {
          const int queries = static_cast<int>(s.q_len);
          copy_rows<T, kFixed, kDim, kFilling>(p.q, head_at<T>(p.q, b, s.q_begin, h), i0, queries,
                                               shared);
          copy_rows<T, kFixed, kDim, kFilling>(g.d_o, head_at<T>(g.d_o, b, s.q_begin, h), i0,
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
  terms.seen[0] = visible_keys(p, s, row);
  terms.seen[1] = visible_keys(p, s, row + 8);
  float dq[kDim / 2] = {}, scores[kPairs], dp[kPairs];
  uint32_t packed[4][4];
  const uint32_t stages = shared + Shared::kStagesAt;
  const auto apply = [&](int n, uint32_t at) {
    terms.apply([&] { terms.add_bias(at + Part::kBias, scores); }, at + Part::kHide, row,
                tiles.begin + n * kPassing, scores);
  };
  // Turns dP into dS and packs it.
  const auto pack = [&](int n, uint32_t at) {
    query_gradients(p, sums, at + Part::kKeep, scores, dp);
    terms.multiply_slopes(scores, dp);
#pragma unroll
    for (int k = 0; k < 4; ++k) pack_step<T>(dp, k, packed[k]);
    if (g.score_gradients != nullptr) {
      uint4* const tile = score_gradients(p, g, b, h, i0, tiles.begin + n * kPassing) + threadIdx.x;
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
  // While the tensor cores add one tile's contribution to dq, the loop computes the next tile's
  // scores.
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
  T* const to = const_cast<T*>(head_at<T>(g.dq, b, s.q_begin, h));
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
  const Tiles tiles(seen_by(i0, s.q_len, [&](int64_t i) { return visible_keys(p, s, i); }));
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

using KeyRing = Ring<kQueryStages, kFillers<false>>;
// Registers per thread, of the product threads and of the fillers. Summed over one thread of each
// of the three warpgroups they may be at most 504. With wide heads, the sums of two products take
// most of a product thread's registers.
template <int kDim>
constexpr int kKeyProductRegisters = kDim > 64 ? 224 : 176;
template <int kDim>
constexpr int kKeyFillRegisters = 504 - 2 * kKeyProductRegisters<kDim>;

template <int kDim>
struct KeyShared {
  using Part = Stage<kDim, false>;
  static constexpr int kV = matrix_bytes<kDim>(kFixed);  // offset of V, which follows K
  static constexpr int kStagesAt = 2 * kV;
  static constexpr int kBarriers = kStagesAt + kQueryStages * Part::kBytes;
  static constexpr int kBytes = kBarriers + kQueryStages * 2 * 8;
};
template <class T, int kDim, bool kSums>
constexpr size_t kKeyBytes =
    kSums&& KeptSum<T>::kBytes > KeyShared<kDim>::kBytes ? KeptSum<T>::kBytes
                                                         : KeyShared<kDim>::kBytes;

// The pipeline stages of a block of 128 keys: for each query head that uses these keys, the tiles
// of queries that see them.
struct KeyWork {
  Tiles tiles;
  int64_t first_head;
  int count;
  __device__ KeyWork(const Attention& p, const Span& s, int64_t kv_head, int64_t j0)
      : tiles(seen_by(j0, s.kv_len, [&](int64_t j) { return visible_queries(p, s, j); })),
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
          copy_rows<T, kFixed, kDim, kFilling>(p.k, head_at<T>(p.k, b, s.kv_begin, kv_head), j0,
                                               keys, shared);
          copy_rows<T, kFixed, kDim, kFilling>(p.v, head_at<T>(p.v, b, s.kv_begin, kv_head), j0,
                                               keys, shared + Shared::kV);
        }
        const int64_t h = work.head(n);
        const int i0 = work.query(n);
        copy_rows<T, kPassing, kDim, kFilling>(p.q, head_at<T>(p.q, b, s.q_begin, h), i0, queries,
                                               at);
        copy_rows<T, kPassing, kDim, kFilling>(g.d_o, head_at<T>(g.d_o, b, s.q_begin, h), i0,
                                               queries, at + Part::kSecond);
        copy_sums(p, g, s, b, h, i0, at + Part::kSums);
        terms.copy(b, h, i0, j0, at);
      },
      [&](int n, uint32_t at) {
        terms.form(b, work.head(n), work.query(n), j0, at + Part::kKeep);
      });
}

// Turns scores and dP into operands A of the matrix products for dv and dk: packed_p is P after
// dropout without the factor 1 / (1 - p); packed_ds is dS times softcap's derivative. kCapped: the
// call has a softcap. `inverse`: as in cap_slope().
template <class T, class Part, bool kCapped>
__device__ inline void key_gradients(const Attention& p, float inverse, uint32_t stage,
                                     float (&scores)[kPairs], float (&dp)[kPairs],
                                     uint32_t (&packed_p)[4][4], uint32_t (&packed_ds)[4][4]) {
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
      const float p0 = approx_exp2(scores[n] - lse.x), p1 = approx_exp2(scores[n + 1] - lse.y);
      const auto keep = static_cast<uint32_t>(t < 4 ? bits[i] : bits[i] >> 32) >> (8 * t % 32);
      const bool keep0 = (keep & 1) != 0, keep1 = (keep & 2) != 0;
      float d0 = p0 * ((keep0 ? dp[n] * kept : 0.0f) - delta.x);
      float d1 = p1 * ((keep1 ? dp[n + 1] * kept : 0.0f) - delta.y);
      if constexpr (kCapped) {
        d0 *= cap_slope(scores[n], inverse);
        d1 *= cap_slope(scores[n + 1], inverse);
      }
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
  terms.seen[0] = visible_queries(p, s, row);
  terms.seen[1] = visible_queries(p, s, row + 8);
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
    if (p.softcap > 0) {
      key_gradients<T, Part, true>(p, 1.0f / terms.cap, at, scores, dp, packed_p, packed_ds);
    } else {
      key_gradients<T, Part, false>(p, 0.0f, at, scores, dp, packed_p, packed_ds);
    }
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
  T* const to_k = const_cast<T*>(head_at<T>(g.dk, b, s.kv_begin, kv_head));
  T* const to_v = const_cast<T*>(head_at<T>(g.dv, b, s.kv_begin, kv_head));
  store_rows<T, kDim>(g.dk, {to_k + row * g.dk.seq, to_k + (row + 8) * g.dk.seq}, written, dk,
                      {p.scale, p.scale});
  store_rows<T, kDim>(g.dv, {to_v + row * g.dv.seq, to_v + (row + 8) * g.dv.seq}, written, dv,
                      {kept, kept});
}

// Computes dk and dv. kSums: the dq kernel has stored the gradients of the scores, and the blocks
// with blockIdx.y 0 sum them into dbias.
template <class T, int kDim, bool kDraws, bool kSums>
__global__ void __launch_bounds__(kBlockThreads<false>, 1)
    attention_hopper_dkv_kernel(const __grid_constant__ Attention p,
                                const __grid_constant__ AttentionGradients g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  if (kSums && blockIdx.y == 0) {
    const unsigned blocks = min(kSumBlocks<kDim>, gridDim.x);
    if (blockIdx.x < blocks) {
      KeptSum<T>(p, g, hopper::shared_address(memory)).run(blockIdx.x, blocks);
    }
    return;
  }
  const BlockWork place(p);
  // The first blocks process the first keys, because under a causal mask most queries see them.
  const int64_t b = place.b, kv_head = blockIdx.y - (kSums ? 1 : 0),
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
  dim3 keys = fixed_grid(p.seqlen_kv, p.kv_heads, p.batch);
  // Dropout's bits need less scratch than the gradients of the scores, so if the gradients are
  // stored, the bits are stored too and draws() is false.
  if (g.score_gradients != nullptr && !draws(p) && p.seqlen_q > 0) {
    constexpr auto kKernel = attention_hopper_dkv_kernel<T, kDim, false, true>;
    ++keys.y;
    launch<kKernel, kKernel, kKeyBytes<T, kDim, true>, false>(ctx, "attention_hopper_dkv_kernel",
                                                              keys, p, g);
    return;
  }
  launch<attention_hopper_dkv_kernel<T, kDim, false, false>,
         attention_hopper_dkv_kernel<T, kDim, true, false>, kKeyBytes<T, kDim, false>, false>(
      ctx, "attention_hopper_dkv_kernel", keys, p, g);
  if (g.dbias.data == nullptr || p.seqlen_q == 0) return;
  const dim3 tiles(static_cast<unsigned>(ceil_div(p.seqlen_q, kFixed) *
                                         ceil_div(p.seqlen_kv, kBiasTiles * kPassing)),
                   static_cast<unsigned>(g.dbias_heads), static_cast<unsigned>(g.dbias_batches));
  launch<attention_hopper_dbias_kernel<T, kDim, false>,
         attention_hopper_dbias_kernel<T, kDim, true>, BiasShared<kDim>::kBytes, true>(
      ctx, "attention_hopper_dbias_kernel", tiles, p, g);
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
