// The kernel parameters of an attention call, and the FP32 device code that forward and backward
// share.
#pragma once

#include "attention/attention_choice.hpp"
#include "common/element.cuh"
#include "common/quantised.cuh"
#include "te_fl/attention/problem.hpp"
#include "te_fl/numeric/philox.hpp"

namespace te_fl::cuda {

constexpr int kTileRows = 32;  // queries, or keys, of a tile
constexpr int kLanes = 8;      // threads that share a row of the tile
constexpr int kMaxHeadDim = 256;
static_assert(kTileRows * kLanes == kThreads);

// A view of q, k, v, o or the gradient of one of them. Strides are in elements.
struct HeadData {
  void* data = nullptr;
  int dtype = TE_FL_F32;
  int64_t batch = 0, seq = 0, head = 0, element = 0;  // strides of the dimensions
  int dim = 0;
  const float* factor = nullptr;  // FP8 input: its scale_inv; FP8 output: its scale
  float* amax = nullptr;          // of an output: raised to the largest magnitude written, unless
                                  // NULL

  __device__ int64_t offset(int64_t b, int64_t s, int64_t h) const {
    return b * batch + s * seq + h * head;
  }
  __device__ float read_factor() const { return factor != nullptr ? *factor : 1.0f; }
  __device__ float at(int64_t i) const { return element_at(data, dtype, i) * read_factor(); }
  __device__ static float element_at(const void* data, int dtype, int64_t i) {
    switch (dtype) {
      case TE_FL_F32:
        return static_cast<const float*>(data)[i];
      case TE_FL_BF16:
        return to_f32(static_cast<const bf16*>(data)[i]);
      case TE_FL_F8E4M3:
        return to_f32(static_cast<const e4m3*>(data)[i]);
      case TE_FL_F8E5M2:
        return to_f32(static_cast<const e5m2*>(data)[i]);
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
      case TE_FL_F8E4M3:
        static_cast<e4m3*>(data)[i] = from_f32<e4m3>(x * *factor);
        return;
      case TE_FL_F8E5M2:
        static_cast<e5m2*>(data)[i] = from_f32<e5m2>(x * *factor);
        return;
      default:
        static_cast<fp16*>(data)[i] = from_f32<fp16>(x);
    }
  }
};

// The quantisation to FP8 of P or dS, an intermediate result between two matrix products. The call
// supplies the scale.
struct Rounding {
  const float* scale = nullptr;  // NULL: values are not quantised
  float* amax = nullptr;         // raised to the largest magnitude of the values, unless NULL
  bool is_e5m2 = false;
};
// The scale of a Rounding and its reciprocal, loaded into registers.
struct RoundingScale {
  float scale = 1.0f, inverse = 1.0f;
  bool used = false, is_e5m2 = false;

  // `largest`: an upper bound of the values' magnitude, or 0 if unknown. The scale is limited so
  // that `largest` times the scale does not exceed the FP8 type's largest number.
  __device__ explicit RoundingScale(const Rounding& r, float largest = 0.0f)
      : used(r.scale != nullptr), is_e5m2(r.is_e5m2) {
    if (!used) return;
    scale = *r.scale;
    if (largest > 0.0f) {
      scale = fminf(scale, (is_e5m2 ? kLargest<e5m2> : kLargest<e4m3>) / largest);
    }
    inverse = 1.0f / scale;
  }
  __device__ float operator()(float x) const {
    if (!used) return x;
    const float scaled = x * scale;
    const float code = is_e5m2 ? to_f32(from_f32<e5m2>(scaled)) : to_f32(from_f32<e4m3>(scaled));
    return code * inverse;
  }
};
// Combines the threads' maxima `most` into `*amax`. All threads of the block call it.
__device__ inline void join_amax(float* amax, float most) {
  if (amax == nullptr) return;
  most = warp_max(most);
  if (threadIdx.x % 32 == 0) atomic_amax(amax, most);
}

// A view of a tensor [1|B, 1|H, Sq, Sk], such as a bias. The stride of a dimension of extent 1 is
// 0.
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

// One bit per (query, key) pair, in scratch. Each 64-bit word of by_query holds 64 keys of one
// query: bit n is key n of a tile of 64 keys. The words form an array [matrices, tiles of 64 keys,
// queries rounded up to a multiple of 128]. by_key is the transpose: each word holds 64 queries of
// one key. Batch b and head h use matrix b * batch + h * head.
struct PairBits {
  uint64_t* by_query = nullptr;  // NULL: this object has no bits
  uint64_t* by_key = nullptr;    // NULL if the kernels read by_query only
  int64_t matrices = 0, queries = 0, keys = 0, batch = 0, head = 0;

  __device__ uint64_t* words_by_query(int64_t matrix, int64_t i, int64_t j) const {
    const int64_t tiles = ceil_div(keys, flash::kPassing);
    return by_query + (matrix * tiles + j / flash::kPassing) * round_up(queries, flash::kFixed) + i;
  }
  __device__ uint64_t* words_by_key(int64_t matrix, int64_t i, int64_t j) const {
    const int64_t tiles = ceil_div(queries, flash::kPassing);
    return by_key + (matrix * tiles + i / flash::kPassing) * round_up(keys, flash::kFixed) + j;
  }
  // Returns the 128 words of a tile. kKeysPass: one word for each query from i0, with the bits of
  // 64 keys from j0. Otherwise: one word for each key from j0, with the bits of 64 queries from i0.
  template <bool kKeysPass>
  __device__ const uint64_t* tile(int64_t b, int64_t h, int64_t i0, int64_t j0) const {
    const int64_t matrix = b * batch + h * head;
    return kKeysPass ? words_by_query(matrix, i0, j0) : words_by_key(matrix, i0, j0);
  }
};

struct Attention {
  HeadData q, k, v;
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_kv;  // thd: seqlens count all tokens
  int64_t max_q, max_kv;  // thd: the call's max_seqlens; 0: computed here
  bool thd;
  backend::MaskRule mask;
  int softmax_type;
  float scale;
  float softcap;       // 0: off; else a scaled score x becomes softcap * tanh(x / softcap)
  uint64_t threshold;  // dropout's threshold
  float kept;          // 1 / (1 - p), the factor of probabilities that dropout keeps
  uint64_t seed, rng_offset;
  const uint64_t *seed_address, *offset_address;  // as in te_fl_rng; may be NULL
  ScoreData bias, attn_mask;
  const float* alibi;
  int64_t alibi_batch, alibi_head;
  const float* sink;
  int64_t sink_stride;
  Lengths q_lengths, kv_lengths;
  // Bits of the pairs that the mask tensor hides, and of those that dropout keeps. Only the
  // tensor-core kernels use them.
  PairBits hide, keep;

  __device__ void side(const Lengths& l, int64_t b, int64_t limit, int64_t& begin,
                       int64_t& len) const {
    begin = 0;
    len = limit;
    if (l.cu == nullptr) return;
    const int64_t first = l.cu[b * l.stride];
    len = l.cu[(b + 1) * l.stride] - first;
    if (thd) begin = l.padded != nullptr ? l.padded[b * l.padded_stride] : first;
    // Clamps cu_seqlens that exceed the tensors, so that no access is out of bounds.
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
  // Computes Sq and Sk of the logical [B, H, Sq, Sk] tensor of scores. The index of an element in
  // this tensor selects its dropout random number.
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
  // The score of a pair that the masks do not hide; `dot` is q k^T.
  __device__ float score(const Span& s, int64_t b, int64_t h, int64_t i, int64_t j,
                         float dot) const {
    float value = scale * dot;
    if (softcap > 0) value = softcap * tanhf(value / softcap);
    if (bias.data != nullptr) {
      value += HeadData::element_at(bias.data, bias.dtype, bias.offset(b, h, i, j));
    }
    if (alibi != nullptr) {
      value += alibi[b * alibi_batch + h * alibi_head] *
               static_cast<float>(backend::alibi_distance(i, j, s.q_len, s.kv_len));
    }
    return value;
  }
  // The derivative of the capped score with respect to scale * dot.
  __device__ float score_slope(float dot) const {
    if (softcap == 0) return 1.0f;
    const float part = tanhf(scale * dot / softcap);
    return fmaf(-part, part, 1.0f);
  }
  // Returns dropout's factor for one probability: 0 if it is dropped, else 1 / (1 - p). `row`: (b *
  // heads + h) * rows + i, with `rows` and `cols` from logical().
  __device__ float dropout(int64_t row, int64_t cols, int64_t j) const {
    if (threshold == 0) return 1.0f;
    const uint64_t key = seed_address != nullptr ? *seed_address : seed;
    const uint64_t base = rng_offset + (offset_address != nullptr ? *offset_address : 0);
    return numeric::dropout_word(key, base, static_cast<uint64_t>(row * cols + j)) >= threshold
               ? kept
               : 0.0f;
  }
};

template <class T>
__device__ inline void load_tile_as(const HeadData& t, int64_t b, int64_t h, int64_t origin,
                                    int64_t begin, int64_t end, float* tile) {
  const int pitch = t.dim + 1;
  const float factor = t.read_factor();
  const T* const data = static_cast<const T*>(t.data);
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * t.dim; i += kThreads) {
    const int row = i / t.dim, d = i - row * t.dim;
    const int64_t at = begin + row;
    float value = 0.0f;
    if (at < end) value = to_f32(data[t.offset(b, origin + at, h) + d * t.element]) * factor;
    tile[row * pitch + d] = value;
  }
}
// Loads rows [begin, begin + kTileRows) of a head into shared memory as FP32. Rows from `end` on
// become zeros.
__device__ inline void load_tile(const HeadData& t, int64_t b, int64_t h, int64_t origin,
                                 int64_t begin, int64_t end, float* tile) {
  switch (t.dtype) {
    case TE_FL_F32:
      return load_tile_as<float>(t, b, h, origin, begin, end, tile);
    case TE_FL_BF16:
      return load_tile_as<bf16>(t, b, h, origin, begin, end, tile);
    case TE_FL_F8E4M3:
      return load_tile_as<e4m3>(t, b, h, origin, begin, end, tile);
    case TE_FL_F8E5M2:
      return load_tile_as<e5m2>(t, b, h, origin, begin, end, tile);
    default:
      return load_tile_as<fp16>(t, b, h, origin, begin, end, tile);
  }
}
__device__ inline float dot(const float* a, const float* b, int n) {
  float sum = 0.0f;
  for (int d = 0; d < n; ++d) sum = fmaf(a[d], b[d], sum);
  return sum;
}
// The maximum over the kLanes threads that share a row.
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

__device__ inline int row_of_thread() { return static_cast<int>(threadIdx.x) / kLanes; }
__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % kLanes; }

// The range of keys that at least one of the queries [begin, begin + kTileRows) sees.
__device__ inline backend::KeyRange keys_of_tile(const Attention& p, const Span& s, int64_t begin) {
  const int64_t last = (begin + kTileRows < s.q_len ? begin + kTileRows : s.q_len) - 1;
  if (last < begin) return {};
  return {p.mask.keys(begin, s.q_len, s.kv_len).begin, p.mask.keys(last, s.q_len, s.kv_len).end};
}

// A thread's scores of query i and the keys k0 + lane + c kLanes of a tile.
struct TileScores {
  static constexpr int kCount = kTileRows / kLanes;
  float score[kCount], most = -INFINITY;  // a hidden key has score -inf
  bool hidden[kCount];

  __device__ TileScores(const Attention& p, const Span& s, int64_t b, int64_t h, int64_t i,
                        int64_t k0, const float* q_tile, const float* k_tile) {
    const int r = row_of_thread(), pitch = p.q.dim + 1;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const int key = lane_of_thread() + c * kLanes;
      hidden[c] = i >= s.q_len || p.masked(s, b, h, i, k0 + key);
      score[c] = -INFINITY;
      if (hidden[c]) continue;
      score[c] =
          p.score(s, b, h, i, k0 + key, dot(q_tile + r * pitch, k_tile + key * pitch, p.q.dim));
      most = fmaxf(most, score[c]);
    }
  }
};

// The running maximum and sum of a row's softmax. All threads of the row hold the same values.
struct RowSoftmax {
  float top = -INFINITY, sum = 0.0f;

  // exp(score - top) of a key that is not hidden. If the maximum is -inf, every score is NaN or
  // -inf.
  static __device__ float exponential(float score, float top) {
    return top == -INFINITY ? (isnan(score) ? score : 0.0f) : expf(score - top);
  }
  // Raises the maximum to `new_top`. Returns the factor by which earlier sums must be multiplied.
  __device__ float raise(float new_top) {
    const float shrink = new_top == -INFINITY ? 1.0f : expf(top - new_top);
    top = new_top;
    return shrink;
  }
  __device__ bool empty() const { return top == -INFINITY && !isnan(sum); }
};
// The maximum and sum of a row's softmax with the sink logit included.
struct RowTotal {
  float top, factor, total;  // factor: rescales sums of exp(score - row.top) to the new top

  __device__ RowTotal(const RowSoftmax& row, float sink) : top(fmaxf(row.top, sink)) {
    factor = top == -INFINITY ? 1.0f : expf(row.top - top);
    total = row.sum * factor + (top == -INFINITY ? 0.0f : expf(sink - top));
  }
  __device__ float lse() const { return top + logf(total); }
};

inline size_t score_bytes() { return size_t{kTileRows} * (kTileRows + 1) * 4; }
inline dim3 tiles(int64_t rows, int64_t heads, int64_t batch) {
  return dim3(static_cast<unsigned>(ceil_div(rows, kTileRows)), static_cast<unsigned>(heads),
              static_cast<unsigned>(batch));
}
inline size_t tile_bytes(int64_t dim) { return static_cast<size_t>(kTileRows * (dim + 1)) * 4; }

// Fills [tokens, heads, dim] of every sequence with zeros, and lse with -inf unless it is NULL.
void clear_heads(cudaStream_t stream, const HeadData& t, int64_t batch, int64_t seqlen,
                 int64_t heads, float* lse);

// Launches the forward kernels. `rounding` quantises P; P V is accumulated in FP32 in every case.
// `tensor_cores`: the result of choose_attention().
void attention_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o, float* lse,
                       const Rounding& rounding, bool tensor_cores);
// attention_forward() calls this if `rounding` has a scale. The kernel passes over the keys twice,
// because it needs a row's largest score before it quantises P.
void quantised_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o, float* lse,
                       const Rounding& rounding);

struct AttentionGradients {
  HeadData o, d_o, dq, dk, dv;
  ScoreData dbias;  // data NULL: the call does not ask for dbias
  int64_t dbias_batches, dbias_heads;
  float* dsink;
  int64_t dsink_stride;
  const float* lse;
  float* delta;  // scratch, one element per row of lse
  // Used by the tensor-core kernels only:
  float* log2_sum;  // scratch, one per row of lse: lse times log2(e)
  // Scratch for the gradients of the scores, in q's dtype; dbias is their sum. Tiles of 128 queries
  // by 64 keys, in [batch, heads, tiles of queries, tiles of keys]. NULL: dbias recomputes them.
  uint4* score_gradients;
  Rounding p_codes, ds_codes;  // dbias and dsink use the unquantised values
};
void attention_backward(const te_fl_context& ctx, const Attention& p, const AttentionGradients& g,
                        bool tensor_cores);

}  // namespace te_fl::cuda
