#include <cmath>

#include "attention.hpp"

namespace te_fl::cpu {
namespace {

using backend::AttentionProblem;
using backend::SequenceSpan;

int64_t slots_for(const AttentionProblem& p) {
  // Uses an upper bound for all possible sequence lengths, because workspace() must not read
  // cu_seqlens.
  const int64_t tiles = p.heads * (count_tiles(p.q.seqlen, kQueries) * p.q.batch + p.batch);
  return attention_slots(tiles, attention_work(p));
}

// The division of the scratch, derived from metadata only.
struct Division {
  explicit Division(const AttentionProblem& p)
      : d(padded(p.head_dim)), dv(padded(p.head_dim_v)), slots(slots_for(p)) {
    // If several tiles of queries read the same keys and values, these are converted and packed
    // once, because the rows of one head are far apart in memory, often one per page. With few
    // queries packing would only cost time.
    packs =
        p.heads / p.kv_heads * p.q.seqlen > kQueries * std::max<int64_t>(1, p.thd ? p.batch : 1);
    packed_rows = packs ? p.k.batch * p.k.seqlen * p.kv_heads : 0;
    // The buffers: q and o transposed, rows of q or one row of o, scores; and k and v if they are
    // not packed.
    slot = kQueries * (d + dv) + kQueries * std::max(d, dv) + kKeys * kQueries +
           tile_buffer_floats(p) + (packs ? 0 : kKeys * (d + dv));
    if (has_no_rows(p)) slot = 0;  // without tokens, heads may have any size
  }
  int64_t total() const { return packed_rows * (d + dv) + slots * slot; }

  int64_t d, dv, slots;
  bool packs;
  int64_t packed_rows, slot;
};

class Forward {
 public:
  Forward(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a)
      : call_(ctx, backend::attention_problem(a)),
        q_(*a.q, a.layout),
        k_(*a.k, a.layout),
        v_(*a.v, a.layout),
        o_(*a.o, a.layout),
        div_(call_.p),
        scratch_(ctx, div_.total()) {
    Carver carve(scratch_.data());
    packed_k_ = carve.take(div_.packed_rows * div_.d);
    packed_v_ = carve.take(div_.packed_rows * div_.dv);
    slots_ = carve.take(0);
    if (a.softmax_lse != nullptr) lse_.emplace_back(*a.softmax_lse, call_.p.thd);
  }

  void run() {
    const AttentionProblem& p = call_.p;
    if (p.variable_length()) {
      o_.zero_all();
      for (const LseRows& lse : lse_) lse.fill(-INFINITY);
    }
    if (div_.packs) pack();
    const int64_t heads = p.batch * p.heads;
    const int64_t most = call_.most_query_tiles();
    // Runs the last tiles first, because under a causal mask they have the most keys.
    run_slots(div_.slots, heads * most, [&](int64_t slot, int64_t task) {
      const int64_t b = task % heads / p.heads;
      const int64_t index = most - 1 - task / heads;
      const SequenceSpan& span = call_.spans[static_cast<size_t>(b)];
      if (index * kQueries >= span.q_len) return;
      tile(QueryTile(p, span, b, task % p.heads, index), slots_ + slot * div_.slot);
    });
  }

 private:
  void tile(const QueryTile& t, float* scratch) {
    const AttentionProblem& p = call_.p;
    const int64_t d = div_.d, dv = div_.dv;
    Carver carve(scratch);
    float* q = carve.take(kQueries * d);
    float* o = carve.take(kQueries * dv);
    float* rows = carve.take(kQueries * std::max(d, dv));
    float* own_k = carve.take(div_.packs ? 0 : kKeys * d);
    float* own_v = carve.take(div_.packs ? 0 : kKeys * dv);
    float* scores = carve.take(kKeys * kQueries);
    const AttentionCall::TileBuffers buffers = carve.tile_buffers(p);

    load_rows(q_, t.b, t.span.q_begin + t.first, t.h, t.count, rows);
    for (int64_t i = 0; i < t.count * d; ++i) rows[i] *= p.scale;
    transpose_rows(rows, d, t.count, p.head_dim, q);
    SoftmaxState state;
    std::fill_n(state.top, kQueries, -INFINITY);
    std::fill_n(state.sum, kQueries, 0.0f);
    const int64_t kv_head = p.kv_head(t.h);
    for (int64_t key = t.keys_begin; key < t.keys_end; key += kKeys) {
      const int64_t keys = std::min(kKeys, t.keys_end - key);
      const int64_t at = t.span.kv_begin + key, row = packed_row(t.b, kv_head, at);
      const float* k = div_.packs ? packed_k_ + row * d : own_k;
      const float* v = div_.packs ? packed_v_ + row * dv : own_v;
      if (!div_.packs) {
        load_rows(k_, t.b, at, kv_head, keys, own_k);
        load_rows(v_, t.b, at, kv_head, keys, own_v);
      }
      tile_product({keys, t.cols, p.head_dim, k, d, 1, q, kQueries, scores, kQueries, false});
      const bool rescale =
          softmax_step(call_.rules(t, key, keys, buffers),
                       call_.dropout_factors(t, key, keys, buffers), scores, state);
      const bool first = key == t.keys_begin;
      if (rescale && !first) scale_columns(o, p.head_dim_v, t.cols, state.rescale);
      tile_product({p.head_dim_v, t.cols, keys, v, 1, dv, scores, kQueries, o, kQueries, !first});
    }
    write_rows(t, state, o, rows);
  }

  // Returns the index of the packed row of key-value head g at position s of sequence b (thd: of
  // token s).
  int64_t packed_row(int64_t b, int64_t g, int64_t s) const {
    const int64_t sequence = call_.p.thd ? 0 : b;
    return (sequence * call_.p.kv_heads + g) * call_.p.k.seqlen + s;
  }

  // Packs position by position, because the heads of a position are adjacent in memory. Also packs
  // the rows of padding, which are never read.
  void pack() {
    const AttentionProblem& p = call_.p;
    ThreadPool::instance().parallel_for(p.k.batch * p.k.seqlen,
                                        grain_of_rows(p.kv_heads * (div_.d + div_.dv)),
                                        [&](int64_t begin, int64_t end) {
                                          for (int64_t x = begin; x < end; ++x) {
                                            const int64_t b = x / p.k.seqlen, s = x % p.k.seqlen;
                                            for (int64_t g = 0; g < p.kv_heads; ++g) {
                                              const int64_t row = packed_row(b, g, s);
                                              k_.load(b, s, g, packed_k_ + row * div_.d);
                                              v_.load(b, s, g, packed_v_ + row * div_.dv);
                                            }
                                          }
                                        });
  }

  void write_rows(const QueryTile& t, const SoftmaxState& state, const float* o, float* row) {
    const AttentionProblem& p = call_.p;
    const float sink = call_.sink(t.h);
    for (int64_t i = 0; i < t.count; ++i) {
      const float top = state.top[i], sum = state.sum[i];
      float factor = 0.0f, lse = -INFINITY;
      const bool no_key = t.keys_begin >= t.keys_end || (top == -INFINITY && sum == 0.0f);
      if (!no_key) {
        // With a sink, the softmax denominator is sum * e^top + e^sink. Both terms are divided by
        // e^max(top, sink) to avoid overflow.
        const float base = std::max(top, sink);
        const float shrink = std::exp(top - base);
        const float total = sum * shrink + std::exp(sink - base);
        factor = shrink / total;
        lse = base + std::log(total);
      }
      for (int64_t d = 0; d < p.head_dim_v; ++d) {
        row[d] = no_key ? 0.0f : o[d * kQueries + i] * factor;
      }
      o_.store(t.b, t.span.q_begin + t.first + i, t.h, row);
      for (const LseRows& rows : lse_) rows.at(t.span, t.b, t.h, t.first + i) = lse;
    }
  }

  AttentionCall call_;
  HeadRows q_, k_, v_, o_;
  std::vector<LseRows> lse_;  // has one element if the call writes softmax_lse, else none
  Division div_;
  Scratch scratch_;
  float *packed_k_, *packed_v_, *slots_;
};

}  // namespace

void fused_attn_fwd(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a) {
  Forward(ctx, a).run();
  if (a.saved != nullptr) a.saved->opaque = 0;
}

size_t attn_fwd_workspace(const te_fl_context&, const te_fl_fused_attn_fwd_args& a) {
  const AttentionProblem p = backend::attention_problem(a);
  return static_cast<size_t>(Division(p).total()) * sizeof(float);
}

}  // namespace te_fl::cpu
