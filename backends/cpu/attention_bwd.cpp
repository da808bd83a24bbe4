// The attention backward. The tiles of keys of a sequence and key-value head are divided into n
// "shares": share i has tiles i, i + n, and so on. A task processes one share. For each tile of
// keys it visits all queries that see the tile, in all query heads that use the key-value head, so
// it computes the final dK and dV of the tile. dQ is accumulated in one FP32 buffer per share; a
// final pass adds these buffers in order.
#include <cmath>

#include "attention.hpp"

namespace te_fl::cpu {
namespace {

using backend::AttentionProblem;
using backend::SequenceSpan;

// The division of the work and of the scratch, derived from metadata only.
struct Division {
  explicit Division(const AttentionProblem& p) : d(padded(p.head_dim)), dv(padded(p.head_dim_v)) {
    const int64_t groups = p.batch * p.kv_heads;
    const int64_t threads = ThreadPool::instance().num_threads();
    const int64_t key_tiles = count_tiles(p.thd ? p.k.seqlen : p.seqlen_kv, kKeys);
    const int64_t work = attention_work(p);
    if (work > kAttentionGrain && threads > 1 && groups > 0) {
      shares =
          std::clamp<int64_t>(count_tiles(4 * threads, groups), 1, std::max<int64_t>(1, key_tiles));
    }
    slots = attention_slots(std::max<int64_t>(1, groups * shares), work);
    query_tiles = p.heads * (count_tiles(p.q.seqlen, kQueries) * p.q.batch + (p.thd ? p.batch : 0));
    delta = p.q.batch * p.q.seqlen * p.heads;
    // The buffers k, v, dk, dv; q, do and their transposes; p, dp, and softcap's slope.
    slot = 2 * kKeys * (d + dv) + 2 * kQueries * (d + dv) +
           (p.softcap > 0 ? 3 : 2) * kKeys * kQueries + tile_buffer_floats(p);
    if (has_no_rows(p)) query_tiles = slot = 0;  // without tokens, heads may have any size
  }
  int64_t total() const {
    return shares * query_tiles * kQueries * d + padded(delta) + slots * slot;
  }

  int64_t d, dv;
  int64_t shares = 1;
  int64_t slots = 1;
  int64_t query_tiles = 0;  // upper bound over all heads
  int64_t delta = 0;        // number of (query, head) rows
  int64_t slot = 0;         // floats of scratch per slot
};

class Backward {
 public:
  Backward(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a)
      : a_(a),
        call_(ctx, backend::attention_problem(a)),
        p_(call_.p),
        div_(p_),
        q_(*a.q, a.layout),
        k_(*a.k, a.layout),
        v_(*a.v, a.layout),
        o_(*a.o, a.layout),
        d_o_(*a.d_o, a.layout),
        dq_(*a.dq, a.layout),
        dk_(*a.dk, a.layout),
        dv_(*a.dv, a.layout),
        lse_(*a.softmax_lse, p_.thd),
        scratch_(ctx, div_.total()) {
    Carver carve(scratch_.data());
    dq_sums_ = carve.take(div_.shares * div_.query_tiles * kQueries * div_.d);
    delta_ = carve.take(div_.delta);
    slots_ = carve.take(0);
    for (const SequenceSpan& s : call_.spans) {
      first_tile_.push_back(tiles_);
      tiles_ += count_tiles(s.q_len, kQueries) * p_.heads;
    }
  }

  void run() {
    if (p_.variable_length()) {
      dq_.zero_all();
      dk_.zero_all();
      dv_.zero_all();
    }
    if (a_.dbias != nullptr) zero_dbias();
    compute_delta();
    if (a_.dsink != nullptr) sink_gradients();
    const int64_t groups = p_.batch * p_.kv_heads;
    run_slots(div_.slots, groups * div_.shares, [&](int64_t slot, int64_t task) {
      share(task % groups / p_.kv_heads, task % p_.kv_heads, task / groups,
            slots_ + slot * div_.slot);
    });
    store_dq();
  }

 private:
  struct Buffers {
    float *k, *v, *dk, *dv, *q, *q_t, *d_o, *d_o_t, *p, *dp;
    float* cap_slope;  // NULL without softcap
    AttentionCall::TileBuffers tile;
  };

  float* dq_sum(int64_t share, int64_t b, int64_t h, int64_t tile) {
    const int64_t of_head = count_tiles(call_.spans[static_cast<size_t>(b)].q_len, kQueries);
    const int64_t index = first_tile_[static_cast<size_t>(b)] + h * of_head + tile;
    return dq_sums_ + (share * div_.query_tiles + index) * kQueries * div_.d;
  }
  int64_t row(const SequenceSpan& s, int64_t b, int64_t h, int64_t i) const {
    return p_.thd ? (s.q_begin + i) * p_.heads + h : (b * p_.heads + h) * p_.seqlen_q + i;
  }
  // Calls f(span, b, h, i) for every query i of every head h and sequence b, on the thread pool.
  template <class F>
  void for_each_row(F&& f) {
    const int64_t heads = p_.batch * p_.heads;
    const int64_t length = call_.spans.empty() ? 0 : call_.most_query_tiles() * kQueries;
    ThreadPool::instance().parallel_for(
        heads * length, grain_of_rows(div_.dv), [&](int64_t begin, int64_t end) {
          for (int64_t r = begin; r < end; ++r) {
            const int64_t b = r / length / p_.heads, i = r % length;
            const SequenceSpan& s = call_.spans[static_cast<size_t>(b)];
            if (i < s.q_len) f(s, b, r / length % p_.heads, i);
          }
        });
  }

  // Computes delta = rowsum(dO O); 0 for queries that see no key.
  void compute_delta() {
    for_each_row([&](const SequenceSpan& s, int64_t b, int64_t h, int64_t i) {
      float& delta = delta_[row(s, b, h, i)];
      delta = 0.0f;
      if (lse_.at(s, b, h, i) == -INFINITY) return;
      alignas(64) float x[kChunk], y[kChunk];
      double sum = 0;
      o_.load_pieces(d_o_, b, s.q_begin + i, h, x, y, [&](int64_t n) {
        float part[8] = {};
        for (int64_t e = 0; e < n; e += 8) {
          for (int64_t l = 0; l < 8; ++l) part[l] += x[e + l] * y[e + l];
        }
        for (float l : part) sum += l;
      });
      delta = static_cast<float>(sum);
    });
  }

  void sink_gradients() {
    ThreadPool::instance().parallel_for(p_.heads, grain_of_rows(p_.q.batch * p_.q.seqlen),
                                        [&](int64_t begin, int64_t end) {
                                          for (int64_t h = begin; h < end; ++h) sink_gradient(h);
                                        });
  }
  void sink_gradient(int64_t h) {
    double sum = 0;
    const float sink = call_.sink(h);
    for (int64_t b = 0; b < p_.batch; ++b) {
      const SequenceSpan& s = call_.spans[static_cast<size_t>(b)];
      for (int64_t i = 0; i < s.q_len; ++i) {
        const float lse = lse_.at(s, b, h, i);
        if (lse != -INFINITY) sum -= std::exp(sink - lse) * delta_[row(s, b, h, i)];
      }
    }
    backend::data<float>(*a_.dsink)[h * backend::stride(*a_.dsink, 0)] = static_cast<float>(sum);
  }

  Buffers buffers(float* scratch) const {
    Carver carve(scratch);
    Buffers s;
    s.k = carve.take(kKeys * div_.d);
    s.v = carve.take(kKeys * div_.dv);
    s.dk = carve.take(kKeys * div_.d);
    s.dv = carve.take(kKeys * div_.dv);
    s.q = carve.take(kQueries * div_.d);
    s.q_t = carve.take(kQueries * div_.d);
    s.d_o = carve.take(kQueries * div_.dv);
    s.d_o_t = carve.take(kQueries * div_.dv);
    s.p = carve.take(kKeys * kQueries);
    s.dp = carve.take(kKeys * kQueries);
    s.cap_slope = p_.softcap > 0 ? carve.take(kKeys * kQueries) : nullptr;
    s.tile = carve.tile_buffers(p_);
    return s;
  }

  // Processes one share of sequence b and key-value head g: the tiles of keys share_index,
  // share_index + shares, and so on.
  void share(int64_t b, int64_t g, int64_t share_index, float* scratch) {
    const SequenceSpan& span = call_.spans[static_cast<size_t>(b)];
    const Buffers s = buffers(scratch);
    const int64_t sharing = p_.heads / p_.kv_heads;
    const int64_t query_tiles = count_tiles(span.q_len, kQueries);
    if (query_tiles > 0) {  // the heads of a group are adjacent
      std::fill_n(dq_sum(share_index, b, g * sharing, 0), sharing * query_tiles * kQueries * div_.d,
                  0.0f);
    }
    for (int64_t tile = share_index; tile < count_tiles(span.kv_len, kKeys); tile += div_.shares) {
      const int64_t key = tile * kKeys;
      const int64_t keys = std::min(kKeys, span.kv_len - key);
      load_rows(k_, b, span.kv_begin + key, g, keys, s.k);
      load_rows(v_, b, span.kv_begin + key, g, keys, s.v);
      std::fill_n(s.dk, kKeys * div_.d, 0.0f);
      std::fill_n(s.dv, kKeys * div_.dv, 0.0f);
      for (int64_t h = g * sharing; h < (g + 1) * sharing; ++h) {
        for (int64_t t = 0; t < query_tiles; ++t) {
          const QueryTile q(p_, span, b, h, t);
          if (q.keys_begin < key + keys && q.keys_end > key) {
            pair(q, key, keys, s, dq_sum(share_index, b, h, t));
          }
        }
      }
      for (int64_t j = 0; j < keys; ++j) {
        dk_.store(b, span.kv_begin + key + j, g, s.dk + j * div_.d);
        dv_.store(b, span.kv_begin + key + j, g, s.dv + j * div_.dv);
      }
    }
  }

  // Adds the contributions of one tile of queries and one tile of keys to dQ, dK and dV.
  void pair(const QueryTile& q, int64_t key, int64_t keys, const Buffers& s, float* dq_t) {
    alignas(64) float lse[kQueries], delta[kQueries];
    load_queries(q, s, lse, delta);
    const int64_t d = div_.d, dv = div_.dv;
    tile_product({keys, q.cols, p_.head_dim, s.k, d, 1, s.q_t, kQueries, s.p, kQueries, false});
    ScoreRules rules = call_.rules(q, key, keys, s.tile);
    rules.cap_slope = s.cap_slope;
    probabilities(rules, lse, s.p);
    tile_product(
        {keys, q.cols, p_.head_dim_v, s.v, dv, 1, s.d_o_t, kQueries, s.dp, kQueries, false});
    const float* dropout = call_.dropout_factors(q, key, keys, s.tile);
    score_gradients(keys, q.cols, delta, dropout, s.p, s.dp);
    if (a_.dbias != nullptr) store_dbias(q, key, keys, s.dp);
    if (s.cap_slope != nullptr) multiply_tile(keys, q.cols, s.cap_slope, s.dp);
    tile_product({keys, dv, q.count, s.p, kQueries, 1, s.d_o, dv, s.dv, dv, true});
    tile_product({keys, d, q.count, s.dp, kQueries, 1, s.q, d, s.dk, d, true});
    tile_product({p_.head_dim, q.cols, keys, s.k, 1, d, s.dp, kQueries, dq_t, kQueries, true});
  }

  // Loads q (times the scale) and dO, and transposes both. Rows that see no key become zeros.
  void load_queries(const QueryTile& q, const Buffers& s, float* lse, float* delta) {
    const int64_t at = q.span.q_begin + q.first;
    load_rows(q_, q.b, at, q.h, q.count, s.q);
    load_rows(d_o_, q.b, at, q.h, q.count, s.d_o);
    for (int64_t i = 0; i < q.count * div_.d; ++i) s.q[i] *= p_.scale;
    std::fill_n(lse, kQueries, INFINITY);
    std::fill_n(delta, kQueries, 0.0f);
    for (int64_t i = 0; i < q.count; ++i) {
      const float value = lse_.at(q.span, q.b, q.h, q.first + i);
      if (value == -INFINITY) {
        std::fill_n(s.q + i * div_.d, div_.d, 0.0f);
        std::fill_n(s.d_o + i * div_.dv, div_.dv, 0.0f);
        continue;
      }
      lse[i] = value;
      delta[i] = delta_[row(q.span, q.b, q.h, q.first + i)];
    }
    transpose_rows(s.q, div_.d, q.count, p_.head_dim, s.q_t);
    transpose_rows(s.d_o, div_.dv, q.count, p_.head_dim_v, s.d_o_t);
  }

  void zero_dbias() {
    const te_fl_tensor& t = *a_.dbias;
    for (int64_t r = 0; r < t.dl.shape[0] * t.dl.shape[1] * t.dl.shape[2]; ++r) {
      const int64_t i = r % t.dl.shape[2], h = r / t.dl.shape[2];
      for (int64_t j = 0; j < t.dl.shape[3]; ++j) {
        dbias_element(h / t.dl.shape[1], h % t.dl.shape[1], i, j, 0.0f);
      }
    }
  }
  void dbias_element(int64_t b, int64_t h, int64_t i, int64_t j, float value) {
    const te_fl_tensor& t = *a_.dbias;
    const int64_t offset = backend::broadcast_offset(t, b, h, i, j);
    store_f32(dtype_of(t), &value, 1, backend::data<char>(t) + offset * element_bytes(t));
  }
  void store_dbias(const QueryTile& q, int64_t key, int64_t keys, const float* ds) {
    for (int64_t i = 0; i < q.count; ++i) {
      for (int64_t j = 0; j < keys; ++j) {
        dbias_element(q.b, q.h, q.first + i, key + j, ds[j * kQueries + i]);
      }
    }
  }

  void store_dq() {
    const int64_t heads = p_.batch * p_.heads;
    const int64_t most = call_.most_query_tiles();
    ThreadPool::instance().parallel_for(
        heads * most, grain_of_rows(kQueries * div_.d * div_.shares),
        [&](int64_t begin, int64_t end) {
          std::vector<float> line(static_cast<size_t>(div_.d));
          for (int64_t x = begin; x < end; ++x) {
            const int64_t b = x / most / p_.heads;
            store_dq_tile(b, x / most % p_.heads, x % most, line.data());
          }
        });
  }
  void store_dq_tile(int64_t b, int64_t h, int64_t tile, float* line) {
    const SequenceSpan& span = call_.spans[static_cast<size_t>(b)];
    const int64_t first = tile * kQueries;
    if (first >= span.q_len) return;
    float* sum = dq_sum(0, b, h, tile);
    for (int64_t s = 1; s < div_.shares; ++s) {
      const float* more = dq_sum(s, b, h, tile);
      for (int64_t e = 0; e < kQueries * div_.d; ++e) sum[e] += more[e];
    }
    for (int64_t i = 0; i < std::min(kQueries, span.q_len - first); ++i) {
      for (int64_t d = 0; d < p_.head_dim; ++d) line[d] = sum[d * kQueries + i] * p_.scale;
      dq_.store(b, span.q_begin + first + i, h, line);
    }
  }

  const te_fl_fused_attn_bwd_args& a_;
  AttentionCall call_;
  const AttentionProblem& p_;
  Division div_;
  HeadRows q_, k_, v_, o_, d_o_, dq_, dk_, dv_;
  LseRows lse_;
  Scratch scratch_;
  float *dq_sums_, *delta_, *slots_;
  std::vector<int64_t> first_tile_;  // index of each sequence's first tile among all query tiles
  int64_t tiles_ = 0;
};

}  // namespace

void fused_attn_bwd(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a) {
  Backward(ctx, a).run();
}

size_t attn_bwd_workspace(const te_fl_context&, const te_fl_fused_attn_bwd_args& a) {
  return static_cast<size_t>(Division(backend::attention_problem(a)).total()) * sizeof(float);
}

}  // namespace te_fl::cpu
