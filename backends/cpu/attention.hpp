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

// Keys of one tile: a tile of scores is 32 KiB.
inline constexpr int64_t kKeys = 128;

// Calls below this many multiplications stay on the calling thread.
inline constexpr int64_t kAttentionGrain = 1 << 18;

constexpr int64_t tiles_of(int64_t n, int64_t tile) { return (n + tile - 1) / tile; }

// q, k, v, o or a gradient of one, whose heads have unit stride.
class HeadRows {
 public:
  HeadRows(const te_fl_tensor& t, int32_t layout)
      : view_(backend::heads_view("tensor", t, layout)),
        dtype_(dtype_of(t)),
        bytes_(element_bytes(t)),
        base_(backend::data<char>(t)) {}

  int64_t dim() const { return view_.dim; }
  // One head's elements at position s of sequence b (thd: s counts tokens); dst is padded.
  void load(int64_t b, int64_t s, int64_t h, float* dst) const {
    load_f32(dtype_, at(b, s, h), view_.dim, dst);
  }
  void store(int64_t b, int64_t s, int64_t h, const float* src) const {
    store_f32(dtype_, src, view_.dim, at(b, s, h));
  }
  void zero_all() const;
  // Loads the elements of this and of `other` at one place, a chunk at a time: f(padded count).
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

// softmax_lse as (b, h, i), or by token for thd.
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
  int64_t cols;            // count rounded up to whole vectors
  int64_t keys_begin = 0;  // keys that at least one query sees
  int64_t keys_end = 0;
  alignas(64) int32_t begin[kQueries];  // keys that each query sees
  alignas(64) int32_t end[kQueries];
  alignas(64) float alibi_from[kQueries];  // key position level with each query

  bool sees_all(int64_t key, int64_t keys) const;
};

// A call's decoded parts. Sets up the rules and the dropout of a tile.
struct AttentionCall {
  AttentionCall(const te_fl_context& ctx, backend::AttentionProblem problem);

  backend::AttentionProblem p;
  std::vector<backend::SequenceSpan> spans;
  backend::LogicalExtents extents;
  bool drops;
  DropoutRules dropout;

  // Buffers of [kKeys, kQueries] that rules() and dropout_factors() fill; null where never needed.
  struct TileBuffers {
    float* bias = nullptr;
    float* hidden = nullptr;
    float* factors = nullptr;
  };
  ScoreRules rules(const QueryTile& q, int64_t key, int64_t keys, const TileBuffers& buffers) const;
  // Null without dropout.
  const float* dropout_factors(const QueryTile& q, int64_t key, int64_t keys,
                               const TileBuffers& buffers) const;
  int64_t most_query_tiles() const;  // of one head of any sequence
  float sink(int64_t h) const;       // its logit; -inf for a vanilla softmax
};

// Floats that TileBuffers take.
int64_t tile_buffer_floats(const backend::AttentionProblem& p);
// Hands out pieces of one slot's scratch, each on a cache line.
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

// The call's workspace if it is large enough (the number of threads may have grown since it was
// asked for), else memory of its own.
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

// Counts the tasks of `count` that run at a time, each with scratch of its own.
int64_t attention_slots(int64_t count, int64_t multiplications);

// Runs f(slot, task) for every task; tasks are taken in order by whichever slot is free.
template <class F>
void run_slots(int64_t slots, int64_t tasks, F&& f) {
  std::atomic<int64_t> next{0};
  ThreadPool::instance().parallel_tasks(slots, [&](int64_t slot) {
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(slot, t);
  });
}

// Multiplications of one of the matrix products.
inline int64_t attention_work(const backend::AttentionProblem& p) {
  const int64_t keys = p.thd ? (p.batch > 0 ? tiles_of(p.k.seqlen, p.batch) : 0) : p.seqlen_kv;
  return p.q.batch * p.q.seqlen * p.heads * keys * p.head_dim;
}

// True if neither queries nor keys are there, so that no scratch is needed.
inline bool has_no_rows(const backend::AttentionProblem& p) {
  return p.q.batch * p.q.seqlen * p.heads == 0 && p.k.batch * p.k.seqlen * p.kv_heads == 0;
}

// Copies rows [first, first + count) of a head into [count, padded dim], or transposed into
// [dim, kQueries] with zeros behind. `row` is a buffer of one padded row.
void load_rows(const HeadRows& rows, int64_t b, int64_t first, int64_t h, int64_t count, float* to);
void transpose_rows(const float* rows, int64_t ld, int64_t count, int64_t dim, float* to);

}  // namespace te_fl::cpu
