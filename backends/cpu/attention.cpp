// The attention ops: which calls are supported, and functions that forward and backward share.
#include "attention.hpp"

#include <cmath>
#include <cstring>
#include <utility>

#include "families.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::cpu {

using backend::AttentionProblem;
using backend::KeyRange;
using backend::SequenceSpan;

// ---- operands

void HeadRows::zero_all() const {
  ThreadPool::instance().parallel_for(view_.batch * view_.seqlen,
                                      grain_of_rows(view_.heads * view_.dim),
                                      [&](int64_t begin, int64_t end) {
                                        for (int64_t r = begin; r < end; ++r) {
                                          for (int64_t h = 0; h < view_.heads; ++h) {
                                            std::memset(at(r / view_.seqlen, r % view_.seqlen, h),
                                                        0, static_cast<size_t>(view_.dim * bytes_));
                                          }
                                        }
                                      });
}

void LseRows::fill(float value) const {
  const int64_t* shape = t_.dl.shape;
  const int64_t inner = thd_ ? 1 : shape[2];
  for (int64_t x = 0; x < shape[0] * shape[1]; ++x) {
    float* row = backend::data<float>(t_) + x / shape[1] * backend::stride(t_, 0) +
                 x % shape[1] * backend::stride(t_, 1);
    for (int64_t i = 0; i < inner; ++i) row[thd_ ? 0 : i * backend::stride(t_, 2)] = value;
  }
}

void load_rows(const HeadRows& rows, int64_t b, int64_t first, int64_t h, int64_t count,
               float* to) {
  const int64_t ld = padded(rows.dim());
  for (int64_t i = 0; i < count; ++i) rows.load(b, first + i, h, to + i * ld);
}

void transpose_rows(const float* rows, int64_t ld, int64_t count, int64_t dim, float* to) {
  for (int64_t d0 = 0; d0 < dim; d0 += 16) {
    const int64_t d1 = std::min(dim, d0 + 16);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = d0; d < d1; ++d) to[d * kQueries + i] = rows[i * ld + d];
    }
    for (int64_t d = d0; d < d1; ++d) {
      std::fill(to + d * kQueries + count, to + d * kQueries + padded(count), 0.0f);
    }
  }
}

// ---- tiles

QueryTile::QueryTile(const AttentionProblem& p, const SequenceSpan& s, int64_t batch, int64_t head,
                     int64_t tile)
    : span(s),
      b(batch),
      h(head),
      first(tile * kQueries),
      count(std::min(kQueries, s.q_len - first)),
      cols(padded(count)) {
  keys_begin = s.kv_len;
  for (int64_t c = 0; c < cols; ++c) {
    const KeyRange r = c < count ? p.mask.keys(first + c, s.q_len, s.kv_len) : KeyRange{};
    begin[c] = static_cast<int32_t>(std::min(r.begin, s.kv_len));
    end[c] = static_cast<int32_t>(r.empty() ? begin[c] : r.end);
    if (!r.empty()) {
      keys_begin = std::min(keys_begin, r.begin);
      keys_end = std::max(keys_end, r.end);
    }
    alibi_from[c] = static_cast<float>(-backend::alibi_distance(first + c, 0, s.q_len, s.kv_len));
  }
}

bool QueryTile::sees_all(int64_t key, int64_t keys) const {
  for (int64_t c = 0; c < count; ++c) {
    if (begin[c] > key || end[c] < key + keys) return false;
  }
  return true;
}

AttentionCall::AttentionCall(const te_fl_context& ctx, AttentionProblem problem)
    : p(std::move(problem)),
      spans(backend::host_sequences(p)),
      extents(backend::logical_extents(p, spans)) {
  const uint64_t threshold = numeric::dropout_threshold(p.dropout_p);
  drops = threshold != 0;
  const backend::RandomState random(*ctx.rng);
  dropout.seed = random.seed;
  dropout.offset = random.offset;
  dropout.threshold = static_cast<uint32_t>(threshold);
  dropout.kept = static_cast<float>(1.0 / (1.0 - double{p.dropout_p}));
}

int64_t AttentionCall::most_query_tiles() const {
  int64_t most = 0;
  for (const SequenceSpan& s : spans) most = std::max(most, count_tiles(s.q_len, kQueries));
  return most;
}

float AttentionCall::sink(int64_t h) const {
  if (p.softmax_type == TE_FL_SOFTMAX_TYPE_OFF_BY_ONE) return 0.0f;
  if (p.softmax_type == TE_FL_SOFTMAX_TYPE_VANILLA) return -INFINITY;
  return backend::data<const float>(*p.softmax_sink)[h * backend::stride(*p.softmax_sink, 0)];
}

namespace {

// Loads a tile of a [1|B, 1|H, Sq, Sk] tensor transposed; `convert` turns each element into a
// float.
template <class T, class Convert>
void load_tile(const te_fl_tensor& t, const QueryTile& q, int64_t key, int64_t keys, float* to,
               Convert&& convert) {
  const T* base = backend::data<const T>(t);
  const int64_t step = backend::stride(t, 3);
  for (int64_t c = 0; c < q.cols; ++c) {
    const T* row =
        base + backend::broadcast_offset(t, q.b, q.h, q.first + std::min(c, q.count - 1), key);
    for (int64_t j = 0; j < keys; ++j) to[j * kQueries + c] = convert(row[j * step]);
  }
}

void load_bias(const te_fl_tensor& t, const QueryTile& q, int64_t key, int64_t keys, float* to) {
  const auto number = [](auto x) { return numeric::to_float(x); };
  switch (dtype_of(t)) {
    case TE_FL_F32:
      return load_tile<float>(t, q, key, keys, to, [](float x) { return x; });
    case TE_FL_F16:
      return load_tile<numeric::half>(t, q, key, keys, to, number);
    default:
      return load_tile<numeric::bfloat16>(t, q, key, keys, to, number);
  }
}

}  // namespace

ScoreRules AttentionCall::rules(const QueryTile& q, int64_t key, int64_t keys,
                                const TileBuffers& buffers) const {
  ScoreRules r{};
  r.first_key = key;
  r.keys = keys;
  r.cols = q.cols;
  if (!q.sees_all(key, keys)) {
    r.begin = q.begin;
    r.end = q.end;
  }
  if (p.bias != nullptr) {
    load_bias(*p.bias, q, key, keys, buffers.bias);
    r.bias = buffers.bias;
  }
  if (p.mask.arbitrary) {
    load_tile<uint8_t>(*p.attn_mask, q, key, keys, buffers.hidden,
                       [](uint8_t x) { return x != 0 ? 1.0f : 0.0f; });
    r.hidden = buffers.hidden;
  }
  if (p.alibi_slopes != nullptr) {
    const te_fl_tensor& t = *p.alibi_slopes;
    const int64_t offset = t.dl.ndim == 2
                               ? q.b * backend::stride(t, 0) + q.h * backend::stride(t, 1)
                               : q.h * backend::stride(t, 0);
    r.slope = backend::data<const float>(t)[offset];
    r.alibi_from = q.alibi_from;
  }
  r.softcap = p.softcap;
  return r;
}

const float* AttentionCall::dropout_factors(const QueryTile& q, int64_t key, int64_t keys,
                                            const TileBuffers& buffers) const {
  if (!drops) return nullptr;
  uint64_t elements[kQueries];
  const int64_t head = q.b * p.heads + q.h;
  for (int64_t c = 0; c < q.cols; ++c) {
    elements[c] = static_cast<uint64_t>((head * extents.q + q.first + c) * extents.kv + key);
  }
  dropout_tile(dropout, elements, keys, q.cols, buffers.factors);
  return buffers.factors;
}

// ---- scratch

int64_t tile_buffer_floats(const AttentionProblem& p) {
  return kKeys * kQueries *
         ((p.bias != nullptr ? 1 : 0) + (p.mask.arbitrary ? 1 : 0) + (p.dropout_p > 0 ? 1 : 0));
}

AttentionCall::TileBuffers Carver::tile_buffers(const AttentionProblem& p) {
  AttentionCall::TileBuffers buffers;
  if (p.bias != nullptr) buffers.bias = take(kKeys * kQueries);
  if (p.mask.arbitrary) buffers.hidden = take(kKeys * kQueries);
  if (p.dropout_p > 0) buffers.factors = take(kKeys * kQueries);
  return buffers;
}

Scratch::Scratch(const te_fl_context& ctx, int64_t floats) {
  const auto bytes = static_cast<size_t>(floats) * sizeof(float);
  if (ctx.workspace != nullptr && ctx.workspace_bytes >= bytes) {
    data_ = static_cast<float*>(ctx.workspace);
  } else {
    own_.reset(static_cast<float*>(::operator new[](bytes, std::align_val_t{64})));
    data_ = own_.get();
  }
}

int64_t attention_slots(int64_t count, int64_t multiplications) {
  const int64_t worth = std::max<int64_t>(1, multiplications / kAttentionGrain);
  return std::max<int64_t>(1,
                           std::min({count, worth, int64_t{ThreadPool::instance().num_threads()}}));
}

// ---- calls that are refused

namespace {

constexpr const char* kQuantized = "FP8 attention is not supported";
constexpr const char* kStridedHeads =
    "needs heads whose elements are adjacent in memory; make a compact copy with strided_copy";
constexpr const char* kBroadcastDbias = "sums no dbias over sequences or heads";
constexpr const char* kOpaque = "saved is an opaque record of another implementation";

bool unit_heads(const te_fl_tensor& t) noexcept {
  const int last = t.dl.ndim - 1;
  return last < 0 || t.dl.strides == nullptr || t.dl.strides[last] == 1 || t.dl.shape[last] <= 1;
}

Refusal refuse_heads(std::initializer_list<const te_fl_tensor*> tensors) noexcept {
  for (const te_fl_tensor* t : tensors) {
    if (t->quant != nullptr || !is_high(*t)) return kQuantized;
    if (!unit_heads(*t)) return kStridedHeads;
  }
  return nullptr;
}

Refusal fwd_refusal(const te_fl_fused_attn_fwd_args& a) {
  if (a.s_quant != nullptr) return kQuantized;
  return refuse_heads({a.q, a.k, a.v, a.o});
}

Refusal bwd_refusal(const te_fl_fused_attn_bwd_args& a) {
  if (a.s_quant != nullptr || a.dp_quant != nullptr) return kQuantized;
  if (a.saved != nullptr && a.saved->opaque != 0) return kOpaque;
  if (a.dbias != nullptr && a.dbias->dl.ndim == 4 && a.q->dl.ndim == 4) {
    const int batch = a.layout == TE_FL_LAYOUT_SBHD ? 1 : 0;
    const int64_t* shape = a.dbias->dl.shape;
    if (shape[0] != a.q->dl.shape[batch] || shape[1] != a.q->dl.shape[2]) return kBroadcastDbias;
  }
  return refuse_heads({a.d_o, a.q, a.k, a.v, a.o, a.dq, a.dk, a.dv});
}

void get_fused_attn_backend(const te_fl_context&, const te_fl_get_fused_attn_backend_args& a) {
  const AttentionProblem p = backend::attention_problem(a);
  const bool possible = refuse_heads({a.q, a.k, a.v}) == nullptr && !(p.thd && p.mask.arbitrary);
  *backend::data<int32_t>(*a.backend) = possible ? 1 : -1;
}

// Excludes FP8 from the accepted dtypes.
te_fl_op_desc unquantised(te_fl_op_desc desc) {
  desc.dtypes =
      TE_FL_MASK_HIGH | TE_FL_BIT(TE_FL_I32) | TE_FL_BIT(TE_FL_U8) | TE_FL_BIT(TE_FL_BOOL);
  desc.scalings = 1;
  return desc;
}

}  // namespace

void append_attention(std::vector<te_fl_op_desc>& ops) {
  using Fwd = te_fl_fused_attn_fwd_args;
  using Bwd = te_fl_fused_attn_bwd_args;
  te_fl_op_desc fwd = unquantised(descriptor<Fwd, fused_attn_fwd, fwd_refusal>("fused_attn_fwd"));
  fwd.workspace = backend::workspace_thunk<Fwd, attn_fwd_workspace>;
  te_fl_op_desc bwd = unquantised(descriptor<Bwd, fused_attn_bwd, bwd_refusal>("fused_attn_bwd"));
  bwd.workspace = backend::workspace_thunk<Bwd, attn_bwd_workspace>;
  fwd.later_args = bwd.later_args = "softcap";
  ops.push_back(fwd);
  ops.push_back(bwd);
  ops.push_back(unquantised(descriptor<te_fl_get_fused_attn_backend_args, get_fused_attn_backend>(
      "get_fused_attn_backend")));
}

}  // namespace te_fl::cpu
