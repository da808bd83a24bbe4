// Shared by the attention forward and backward: decoded calls, tiles of queries, scratch memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "attention_kernels.hpp"
#include "convert.hpp"
#include "te_fl/attention.hpp"
#include "tensor_view.hpp"

namespace te_fl::cpu {

void fused_attn_fwd(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a);
void fused_attn_bwd(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a);
size_t attn_fwd_workspace(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a);
size_t attn_bwd_workspace(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a);

// Keys per tile. A tile of scores, kKeys x kQueries floats, has 32 KiB.
inline constexpr int64_t kKeys = 128;

// A task of the thread pool has at least this many multiplications; smaller calls run on the
// calling thread.
inline constexpr int64_t kAttentionGrain = 1 << 18;

constexpr int64_t count_tiles(int64_t n, int64_t tile) { return (n + tile - 1) / tile; }

// A view of q, k, v, o or a gradient of one of them. The elements of a head must have stride 1.
class HeadRows {
 public:
  HeadRows(const te_fl_tensor& t, int32_t layout)
      : view_(backend::heads_view("tensor", t, layout)),
        dtype_(dtype_of(t)),
        bytes_(element_bytes(t)),
        base_(backend::data<char>(t)) {}

  int64_t dim() const { return view_.dim; }
  // Loads or stores one head at position s of sequence b (thd: s is a token). The FP32 buffer must
  // be padded.
  void load(int64_t b, int64_t s, int64_t h, float* dst) const {
    load_f32(dtype_, at(b, s, h), view_.dim, dst);
  }
  void store(int64_t b, int64_t s, int64_t h, const float* src) const {
    store_f32(dtype_, src, view_.dim, at(b, s, h));
  }
  void zero_all() const;
  // Loads one head at position s of sequence b in chunks: from this tensor into x, and from `other`
  // into y. Calls f(padded chunk length) after each chunk.
  template <class F>
  void load_pieces(const HeadRows& other, int64_t b, int64_t s, int64_t h, float* x, float* y,
                   F&& f) const {
    for (int64_t d = 0; d < view_.dim; d += kChunk) {
      const int64_t n = std::min(kChunk, view_.dim - d);
      load_f32(dtype_, at(b, s, h) + d * bytes_, n, x);
      load_f32(other.dtype_, other.at(b, s, h) + d * other.bytes_, n, y);
      f(padded(n));
    }
  }

 private:
  char* at(int64_t b, int64_t s, int64_t h) const {
    return base_ + view_.offset(view_.batch == 1 ? 0 : b, s, h, 0) * bytes_;
  }
  backend::HeadsView view_;
  int dtype_;
  int64_t bytes_;
  char* base_;
};

// Access to softmax_lse by (b, h, i), or by token for thd.
class LseRows {
 public:
  LseRows(const te_fl_tensor& t, bool thd) : t_(t), thd_(thd) {}
  float& at(const backend::SequenceSpan& span, int64_t b, int64_t h, int64_t i) const {
    float* base = backend::data<float>(t_);
    using backend::stride;
    return thd_ ? base[(span.q_begin + i) * stride(t_, 0) + h * stride(t_, 1)]
                : base[b * stride(t_, 0) + h * stride(t_, 1) + i * stride(t_, 2)];
  }
  void fill(float value) const;

 private:
  const te_fl_tensor& t_;
  bool thd_;
};

// Up to kQueries consecutive queries of one head.
struct QueryTile {
  QueryTile(const backend::AttentionProblem& p, const backend::SequenceSpan& span, int64_t b,
            int64_t h, int64_t tile);

  const backend::SequenceSpan& span;
  int64_t b, h, first, count;
  int64_t cols;            // `count` rounded up to a multiple of the vector length
  int64_t keys_begin = 0;  // range of keys that at least one query sees
  int64_t keys_end = 0;
  alignas(64) int32_t begin[kQueries];  // range of keys that each query sees
  alignas(64) int32_t end[kQueries];
  alignas(64) float alibi_from[kQueries];  // ALiBi: key position at distance 0 of each query

  bool sees_all(int64_t key, int64_t keys) const;
};

// A decoded call. Computes the score rules and the dropout factors of a tile.
struct AttentionCall {
  AttentionCall(const te_fl_context& ctx, backend::AttentionProblem problem);

  backend::AttentionProblem p;
  std::vector<backend::SequenceSpan> spans;
  backend::LogicalExtents extents;
  bool drops;
  DropoutRules dropout;

  // Buffers of [kKeys, kQueries] that rules() and dropout_factors() fill. NULL if the call never
  // needs them.
  struct TileBuffers {
    float* bias = nullptr;
    float* hidden = nullptr;
    float* factors = nullptr;
  };
  ScoreRules rules(const QueryTile& q, int64_t key, int64_t keys, const TileBuffers& buffers) const;
  // Returns the factors in one of the buffers; NULL if the call has no dropout.
  const float* dropout_factors(const QueryTile& q, int64_t key, int64_t keys,
                               const TileBuffers& buffers) const;
  int64_t most_query_tiles() const;  // of one head, maximum over the sequences
  float sink(int64_t h) const;       // the head's sink logit; -inf for a vanilla softmax
};

// Number of floats in TileBuffers.
int64_t tile_buffer_floats(const backend::AttentionProblem& p);
// Divides one slot's scratch into buffers that start on cache lines.
class Carver {
 public:
  explicit Carver(float* at) : at_(at) {}
  float* take(int64_t floats) {
    float* piece = at_;
    at_ += padded(floats);
    return piece;
  }
  AttentionCall::TileBuffers tile_buffers(const backend::AttentionProblem& p);

 private:
  float* at_;
};

// Uses the call's workspace if it is large enough, else allocates memory. (The number of threads
// may have grown since the workspace size was queried.)
class Scratch {
 public:
  Scratch(const te_fl_context& ctx, int64_t floats);
  float* data() const { return data_; }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Free> own_;
  float* data_;
};

// Returns the number of slots: how many of `count` tasks run concurrently. Each slot has its own
// scratch.
int64_t attention_slots(int64_t count, int64_t multiplications);

// Runs f(slot, task) for every task. A free slot takes the next task in order.
template <class F>
void run_slots(int64_t slots, int64_t tasks, F&& f) {
  std::atomic<int64_t> next{0};
  ThreadPool::instance().parallel_tasks(slots, [&](int64_t slot) {
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(slot, t);
  });
}

// Returns the number of multiplications in one matrix product, such as Q K^T, of the call.
inline int64_t attention_work(const backend::AttentionProblem& p) {
  const int64_t keys = p.thd ? (p.batch > 0 ? count_tiles(p.k.seqlen, p.batch) : 0) : p.seqlen_kv;
  return p.q.batch * p.q.seqlen * p.heads * keys * p.head_dim;
}

// True if the call has neither queries nor keys, and therefore needs no scratch.
inline bool has_no_rows(const backend::AttentionProblem& p) {
  return p.q.batch * p.q.seqlen * p.heads == 0 && p.k.batch * p.k.seqlen * p.kv_heads == 0;
}

// load_rows() copies rows [first, first + count) of a head to [count, padded dim]. transpose_rows()
// transposes such rows to [dim, kQueries] and fills the rest with zeros.
void load_rows(const HeadRows& rows, int64_t b, int64_t first, int64_t h, int64_t count, float* to);
void transpose_rows(const float* rows, int64_t ld, int64_t count, int64_t dim, float* to);

}  // namespace te_fl::cpu
