// One attention call as the kernels see it, in FP32, and what forward and backward share.
#pragma once

#include "element.cuh"
#include "te_fl/attention/problem.hpp"
#include "te_fl/numeric/philox.hpp"

namespace te_fl::cuda {

constexpr int kTileRows = 32;  // queries, and keys, of a tile
constexpr int kLanes = 8;      // threads that share a row
constexpr int kMaxHeadDim = 256;
static_assert(kTileRows * kLanes == kThreads);

// q, k, v, o or a gradient of one; strides in elements.
struct HeadData {
  void* data = nullptr;
  int dtype = TE_FL_F32;
  int64_t batch = 0, seq = 0, head = 0, element = 0;  // strides
  int dim = 0;

  __device__ int64_t offset(int64_t b, int64_t s, int64_t h) const {
    return b * batch + s * seq + h * head;
  }
  __device__ float at(int64_t i) const { return element_at(data, dtype, i); }
  __device__ static float element_at(const void* data, int dtype, int64_t i) {
    switch (dtype) {
      case TE_FL_F32:
        return static_cast<const float*>(data)[i];
      case TE_FL_BF16:
        return to_f32(static_cast<const bf16*>(data)[i]);
      default:
        return to_f32(static_cast<const fp16*>(data)[i]);
    }
  }
  __device__ void put(int64_t i, float x) const {
    switch (dtype) {
      case TE_FL_F32:
        static_cast<float*>(data)[i] = x;
        return;
      case TE_FL_BF16:
        static_cast<bf16*>(data)[i] = from_f32<bf16>(x);
        return;
      default:
        static_cast<fp16*>(data)[i] = from_f32<fp16>(x);
    }
  }
};

// [1|B, 1|H, Sq, Sk]; stride 0 where the extent is 1.
struct ScoreData {
  void* data = nullptr;
  int dtype = TE_FL_F32;
  int64_t batch = 0, head = 0, row = 0, col = 0;
  __device__ int64_t offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return b * batch + h * head + i * row + j * col;
  }
};

struct Lengths {
  const int32_t* cu = nullptr;
  const int32_t* padded = nullptr;
  int64_t stride = 0, padded_stride = 0;
};

struct Span {
  int64_t q_begin, q_len, kv_begin, kv_len;
};

struct Attention {
  HeadData q, k, v;
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_kv;  // thd: tokens in all
  int64_t max_q, max_kv;                                // thd: as given, 0: to be found
  bool thd;
  backend::MaskRule mask;
  int softmax_type;
  float scale;
  uint64_t threshold;  // of dropout
  float kept;          // 1 / (1 - p)
  uint64_t seed, rng_offset;
  const uint64_t* rng_state;
  ScoreData bias, attn_mask;
  const float* alibi;
  int64_t alibi_batch, alibi_head;
  const float* sink;
  int64_t sink_stride;
  Lengths q_lengths, kv_lengths;

  __device__ void side(const Lengths& l, int64_t b, int64_t limit, int64_t& begin,
                       int64_t& len) const {
    begin = 0;
    len = limit;
    if (l.cu == nullptr) return;
    const int64_t first = l.cu[b * l.stride];
    len = l.cu[(b + 1) * l.stride] - first;
    if (thd) begin = l.padded != nullptr ? l.padded[b * l.padded_stride] : first;
    // Lengths that do not fit the tensors never lead outside them.
    if (begin < 0 || begin > limit) begin = limit;
    if (len > limit - begin) len = limit - begin;
    if (len < 0) len = 0;
  }
  __device__ Span span(int64_t b) const {
    Span s;
    side(q_lengths, b, seqlen_q, s.q_begin, s.q_len);
    side(kv_lengths, b, seqlen_kv, s.kv_begin, s.kv_len);
    return s;
  }
  // Extents of the logical [B, H, Sq, Sk] matrix that numbers dropout's random words.
  __device__ void logical(int64_t& rows, int64_t& cols) const {
    rows = thd ? max_q : seqlen_q;
    cols = thd ? max_kv : seqlen_kv;
    if (!thd || (max_q != 0 && max_kv != 0)) return;
    for (int64_t b = 0; b < batch; ++b) {
      const Span s = span(b);
      if (max_q == 0 && s.q_len > rows) rows = s.q_len;
      if (max_kv == 0 && s.kv_len > cols) cols = s.kv_len;
    }
  }
  __device__ int64_t kv_head(int64_t h) const { return h / (heads / kv_heads); }
  __device__ int64_t lse_index(const Span& s, int64_t b, int64_t h, int64_t i) const {
    return thd ? (s.q_begin + i) * heads + h : (b * heads + h) * seqlen_q + i;
  }
  __device__ float sink_logit(int64_t h) const {
    if (softmax_type == TE_FL_SOFTMAX_TYPE_OFF_BY_ONE) return 0.0f;
    if (softmax_type == TE_FL_SOFTMAX_TYPE_LEARNABLE) return sink[h * sink_stride];
    return -INFINITY;
  }
  __device__ bool masked(const Span& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (mask.masked(i, j, s.q_len, s.kv_len)) return true;
    return mask.arbitrary &&
           static_cast<const uint8_t*>(attn_mask.data)[attn_mask.offset(b, h, i, j)] != 0;
  }
  // Of an unmasked pair.
  __device__ float score(const Span& s, int64_t b, int64_t h, int64_t i, int64_t j,
                         float dot) const {
    float value = scale * dot;
    if (bias.data != nullptr) {
      value += HeadData::element_at(bias.data, bias.dtype, bias.offset(b, h, i, j));
    }
    if (alibi != nullptr) {
      value += alibi[b * alibi_batch + h * alibi_head] *
               static_cast<float>(backend::alibi_distance(i, j, s.q_len, s.kv_len));
    }
    return value;
  }
  // 0 for a dropped probability, else 1 / (1 - p). `row`: (b H + h) rows + i.
  __device__ float dropout(int64_t row, int64_t cols, int64_t j) const {
    if (threshold == 0) return 1.0f;
    const uint64_t key = rng_state != nullptr ? rng_state[0] : seed;
    const uint64_t base = rng_offset + (rng_state != nullptr ? rng_state[1] : 0);
    return numeric::dropout_word(key, base, static_cast<uint64_t>(row * cols + j)) >= threshold
               ? kept
               : 0.0f;
  }
};

// Rows [begin, begin + kTileRows) of a head as FP32 in shared memory, zeros from `end` on.
__device__ inline void load_tile(const HeadData& t, int64_t b, int64_t h, int64_t origin,
                                 int64_t begin, int64_t end, float* tile) {
  const int pitch = t.dim + 1;
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * t.dim; i += kThreads) {
    const int row = i / t.dim, d = i - row * t.dim;
    const int64_t at = begin + row;
    tile[row * pitch + d] = at < end ? t.at(t.offset(b, origin + at, h) + d * t.element) : 0.0f;
  }
}
__device__ inline float dot(const float* a, const float* b, int n) {
  float sum = 0.0f;
  for (int d = 0; d < n; ++d) sum = fmaf(a[d], b[d], sum);
  return sum;
}
// Over the kLanes threads of a row.
__device__ inline float row_max(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
  }
  return v;
}
__device__ inline float row_sum(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

inline size_t tile_bytes(int64_t dim) { return static_cast<size_t>(kTileRows * (dim + 1)) * 4; }

// Fills [tokens, heads, dim] of every sequence with zeros, and lse, if any, with -inf.
void clear_heads(cudaStream_t stream, const HeadData& t, int64_t batch, int64_t seqlen,
                 int64_t heads, float* lse);

void attention_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o, float* lse);

struct AttentionGradients {
  HeadData o, d_o, dq, dk, dv;
  ScoreData dbias;  // data NULL: not asked for
  int64_t dbias_batches, dbias_heads;
  float* dsink;
  int64_t dsink_stride;
  const float* lse;
  float* delta;  // scratch, one per row of lse
};
void attention_backward(const te_fl_context& ctx, const Attention& p, const AttentionGradients& g);

}  // namespace te_fl::cuda
