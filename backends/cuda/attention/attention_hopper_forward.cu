// The attention forward for Hopper's tensor cores. A block keeps 128 queries of one head, loops
// over tiles of 64 keys, and computes the softmax online.
#include "attention/attention_hopper.cuh"
#include "attention/attention_hopper.hpp"
#include "device/shared_memory.hpp"

namespace te_fl::cuda {
namespace flash {
namespace {

constexpr int kStages = 4;
// Registers per thread, of the product threads and of the fillers. Summed over one thread of each
// warpgroup they may be at most 512.
constexpr int kProductRegisters = 184, kFillRegisters = 256 - kProductRegisters;
using ForwardRing = Ring<kStages, kFillers<true>>;

template <int kDim>
struct ForwardShared {
  using Part = Stage<kDim, true>;
  static constexpr int kBarriers = kStages * Part::kBytes;
  static constexpr int kBytes = kBarriers + kStages * 2 * 8;
};

// The online softmax of a thread's two rows. Scores and `top` are multiplied by log2(e).
struct RowsSoftmax {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // sum: this thread's part of the row's sum

  // Adds a tile of scores, which become exp(score - top). Returns in `shrink` the factors by which
  // the earlier sums of the two rows must be multiplied.
  __device__ void add(float (&s)[kPairs], float (&shrink)[2]) {
    float most[2] = {top[0], top[1]}, base[2];
    each_score([&](int n, int i, int) { most[i] = fmaxf(most[i], s[n]); });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
      base[i] = most[i] == -INFINITY ? 0.0f : most[i];  // all scores so far are hidden, -inf or NaN
      shrink[i] = approx_exp2(top[i] - base[i]);
      if (top[i] == -INFINITY) shrink[i] = 1.0f;  // the sum may already be NaN
      top[i] = most[i];
      sum[i] *= shrink[i];
    }
    each_score([&](int n, int i, int) {
      s[n] = approx_exp2(s[n] - base[i]);
      sum[i] += s[n];
    });
  }
  // Completes the sums over all threads that share the rows.
  __device__ void end_rows() {
#pragma unroll
    for (float& x : sum) {
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
    }
  }
};

template <class T, int kDim, bool kDraws>
__device__ inline void forward_fill(const Attention& p, const Span& s, int64_t b, int64_t h, int i0,
                                    const Tiles& tiles, uint32_t shared, ForwardRing& ring) {
  using Part = Stage<kDim, true>;
  constexpr int kFilling = kFillers<true>;
  const TermFiller<T, kDim, true, kDraws> terms(p);
  const T* const k = head_at<T>(p.k, b, s.kv_begin, p.kv_head(h));
  const T* const v = head_at<T>(p.v, b, s.kv_begin, p.kv_head(h));
  const int keys = static_cast<int>(s.kv_len);
  fill_ring<Part::kBytes>(
      ring, shared, tiles.count,
      [&](int n, uint32_t at) {
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
__device__ inline void forward_multiply(const Attention& p, const HeadData& o, float* lse,
                                        const Span& s, int64_t b, int64_t h, int i0,
                                        const Tiles& tiles, uint32_t shared, ForwardRing& ring) {
  using Part = Stage<kDim, true>;
  const int row = i0 + Place::row();
  const int64_t rows = p.thd ? s.q_len : p.seqlen_q;  // rows beyond q_len get zeros
  const bool there[2] = {row < s.q_len, row + 8 < s.q_len};
  const T* const q = head_at<T>(p.q, b, s.q_begin, h);
  const HeldRows<T, kDim> held({q + row * p.q.seq, q + (row + 8) * p.q.seq}, there, p.q.dim);
  Terms<T, kDim, true> terms(p, s);
  terms.head(b, h);
  terms.seen[0] = visible_keys(p, s, row);
  terms.seen[1] = visible_keys(p, s, row + 8);
  RowsSoftmax softmax;
  float out[kDim / 2] = {}, scores[kPairs], shrink[2];
  uint32_t packed[4][4];
  // Turns the scores of tile n, whose stage is at shared memory address `at`, into unnormalised
  // probabilities.
  const auto weigh = [&](int n, uint32_t at) {
    terms.apply([&] { terms.add_bias(at + Part::kBias, scores); }, at + Part::kHide, row,
                tiles.begin + n * kPassing, scores);
    softmax.add(scores, shrink);
    if (p.threshold == 0) return;
    const RowBits keep(at + Part::kKeep);
    each_score([&](int m, int i, int c) {
      if (!keep.at(i, c)) scores[m] = 0.0f;
    });
  };
  const auto pack = [&] {
#pragma unroll
    for (int k = 0; k < 4; ++k) pack_step<T>(scores, k, packed[k]);
  };
  if (tiles.count > 0) {
    const uint32_t at = shared + ring.stage * Part::kBytes;
    ring.wait_full();
    __syncwarp();
    hopper::begin_products();
    start_held<T, kDim>(held, at, scores);
    hopper::end_products();
    hopper::wait_for_sums(scores);
    weigh(0, at);
    pack();
  }
  // While the tensor cores accumulate P V of one tile, the loop computes the next tile's softmax.
  for (int n = 1; n < tiles.count; ++n) {
    const ForwardRing last = ring;
    ring.next();
    const uint32_t at = shared + ring.stage * Part::kBytes;
    ring.wait_full();
    __syncwarp();
    hopper::begin_products();
    start_held<T, kDim>(held, at, scores);
    hopper::end_products();
    start_across<T>(packed, shared + last.stage * Part::kBytes + Part::kSecond, out);
    hopper::end_products();
    hopper::wait_for_sums<1>(scores);
    weigh(n, at);
    hopper::wait_for_sums(out);
    last.release();
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int m = 0; m < kDim / 2; ++m) out[m] *= shrink[m / 2 % 2];
    }
    pack();
  }
  if (tiles.count > 0) {
    __syncwarp();
    hopper::begin_products();
    start_across<T>(packed, shared + ring.stage * Part::kBytes + Part::kSecond, out);
    hopper::end_products();
    hopper::wait_for_sums(out);
    ring.release();
  }
  softmax.end_rows();
  T* const to = const_cast<T*>(head_at<T>(o, b, s.q_begin, h));
  const bool written[2] = {row < rows, row + 8 < rows};
  const float kept = p.threshold != 0 ? p.kept : 1.0f, sink = p.sink_logit(h) * kLog2e;
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float top = softmax.top[i], sum = softmax.sum[i];
    const bool empty = top == -INFINITY && !isnan(sum);
    const float most = fmaxf(top, sink), base = most == -INFINITY ? 0.0f : most;
    const float part = top == -INFINITY ? 1.0f : approx_exp2(top - base);
    const float total = sum * part + approx_exp2(sink - base);
    factor[i] = empty ? 0.0f : part / total * kept;
    if (lse != nullptr && written[i] && Place::col() == 0) {
      lse[p.lse_index(s, b, h, row + 8 * i)] = empty ? -INFINITY : (most + log2f(total)) * kLn2;
    }
  }
  store_rows<T, kDim>(o, {to + row * o.seq, to + (row + 8) * o.seq}, written, out, factor);
}

template <class T, int kDim, bool kDraws>
__global__ void __launch_bounds__(kBlockThreads<true>, 1)
    attention_hopper_forward_kernel(const __grid_constant__ Attention p,
                                    const __grid_constant__ HeadData o, float* lse) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const BlockWork work(p);
  const int64_t b = work.b, h = blockIdx.y, i0 = work.tile * kFixed;
  const Span s = p.span(b);
  if (i0 >= (p.thd ? s.q_len : p.seqlen_q)) return;
  const uint32_t shared = hopper::shared_address(memory);
  ForwardRing ring(shared + ForwardShared<kDim>::kBarriers, forms_words<kDraws>(p));
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  const Tiles tiles(seen_by(i0, s.q_len, [&](int64_t i) { return visible_keys(p, s, i); }));
  if (threadIdx.x >= kProducts) {
    hopper::give_registers_back<kFillRegisters>();
    forward_fill<T, kDim, kDraws>(p, s, b, h, static_cast<int>(i0), tiles, shared, ring);
    hopper::wait_copies();
  } else {
    hopper::take_registers<kProductRegisters>();
    forward_multiply<T, kDim>(p, o, lse, s, b, h, static_cast<int>(i0), tiles, shared, ring);
  }
#endif
}

template <class T, int kDim>
void launch_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o, float* lse) {
  constexpr size_t kBytes = ForwardShared<kDim>::kBytes;
  static SharedMemory drawing, plain;
  const bool drawn = draws(p);
  const auto kernel = drawn ? attention_hopper_forward_kernel<T, kDim, true>
                            : attention_hopper_forward_kernel<T, kDim, false>;
  (drawn ? drawing : plain).require(ctx.device.index, kernel, kBytes);
  kernel<<<fixed_grid(p.seqlen_q, p.heads, p.batch), kBlockThreads<true>, kBytes, stream_of(ctx)>>>(
      p, o, lse);
  check_launch("attention_hopper_forward_kernel");
}

}  // namespace
}  // namespace flash

void hopper_attention_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o,
                              float* lse) {
  if (p.thd) clear_heads(stream_of(ctx), o, 1, p.seqlen_q, p.heads, lse);
  pack_pair_bits(stream_of(ctx), p);
  const bool wide = std::max(p.q.dim, p.v.dim) > 64, half = p.q.dtype == TE_FL_F16;
  const auto launch =
      half   ? wide ? flash::launch_forward<fp16, 128> : flash::launch_forward<fp16, 64>
        : wide ? flash::launch_forward<bf16, 128>
             : flash::launch_forward<bf16, 64>;
  launch(ctx, p, o, lse);
}

}  // namespace te_fl::cuda
