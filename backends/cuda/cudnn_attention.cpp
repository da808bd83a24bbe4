#include "cudnn_attention.hpp"

#include <limits>

#include "cudnn_numbers.hpp"

namespace te_fl::cuda {
namespace {

using Tensor = CudnnGraph::Tensor;
using Lengths = CudnnGraph::Lengths;
using Pointwise = CudnnGraph::Pointwise;
namespace pw = cudnn_pointwise;
namespace id = attention_id;
constexpr int kF32 = cudnn_data::kF32, kI32 = cudnn_data::kI32, kBool = cudnn_data::kBool;

constexpr Extents swapped(Extents e) noexcept { return {e[0], e[1], e[3], e[2]}; }

std::string text_of(const CudnnAttention& p, const char* op) {
  std::string text = std::string(op) + " batch=" + std::to_string(p.batch) +
                     " heads=" + std::to_string(p.heads) + "/" + std::to_string(p.kv_heads) +
                     " q=" + std::to_string(p.seqlen_q) + "x" + std::to_string(p.dim) +
                     " kv=" + std::to_string(p.seqlen_kv) + "x" + std::to_string(p.dim_v);
  text += p.dtype == cudnn_data::kF16 ? " f16" : " bf16";
  if (p.mask.causal) text += p.mask.bottom_right ? " causal_bottom_right" : " causal";
  if (p.mask.window_left >= 0 || p.mask.window_right >= 0) {
    text +=
        " window=" + std::to_string(p.mask.window_left) + "," + std::to_string(p.mask.window_right);
  }
  if (p.ragged) text += " thd";
  if (p.lengths) text += " lengths";
  if (p.deterministic) text += " deterministic";
  return text;
}

// The nodes that forward and backward share.
struct Attention {
  const CudnnAttention& p;
  CudnnGraph graph;
  Extents scores, rows;
  Tensor lengths_q, lengths_kv;

  Attention(const CudnnAttention& problem, const char* op)
      : p(problem),
        graph(text_of(problem, op)),
        scores{problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_kv},
        rows{problem.batch, problem.heads, problem.seqlen_q, 1} {
    if (!p.lengths) return;
    const Extents dims{p.batch, 1, 1, 1}, strides{1, 1, 1, 1};
    lengths_q = graph.tensor(id::kLengthsQ, kI32, dims, strides);
    lengths_kv = graph.tensor(id::kLengthsKv, kI32, dims, strides);
  }

  Tensor offsets(int tensor) {
    if (!p.ragged) return {};
    return graph.tensor(id::kOffsets + tensor, cudnn_data::kI64, {p.batch + 1, 1, 1, 1},
                        {1, 1, 1, 1});
  }
  // One of q, k, v, o and their gradients.
  Tensor heads(int tensor, const Extents& dims, const Extents& strides) {
    return graph.tensor(tensor, p.dtype, dims, strides, offsets(tensor));
  }
  // Of k or v with the last two dimensions exchanged, [batch, heads, dim, seqlen].
  Tensor transposed(int tensor, const Extents& dims, const Extents& strides) {
    return heads(tensor, swapped(dims), swapped(strides));
  }
  Extents q_dims() const { return {p.batch, p.heads, p.seqlen_q, p.dim}; }
  Extents k_dims() const { return {p.batch, p.kv_heads, p.seqlen_kv, p.dim}; }
  Extents v_dims() const { return {p.batch, p.kv_heads, p.seqlen_kv, p.dim_v}; }
  Extents o_dims() const { return {p.batch, p.heads, p.seqlen_q, p.dim_v}; }
  Tensor stats() {
    const Extents by_token{p.heads * p.seqlen_q, 1, p.heads, 1};
    return graph.tensor(id::kStats, kF32, rows, p.ragged ? by_token : packed(rows),
                        offsets(id::kStats));
  }

  Tensor between() { return graph.between(kF32, scores); }
  Tensor apply(int mode, const Tensor& x, const Tensor& b = {}) {
    return graph.pointwise({mode}, x, b, graph.between(kF32, x.dims));
  }
  Tensor index(const Tensor& score, int axis, int precision) {
    return graph.pointwise({pw::kIndex, precision, axis}, score, graph.between(kI32, scores));
  }
  Tensor shift(int mode, const Tensor& x, const Tensor& by, int dtype) {
    return graph.pointwise({mode, dtype, 3}, x, by, graph.between(dtype, scores));
  }
  Tensor truth(int mode, const Tensor& x, const Tensor& b) {
    return graph.pointwise({mode, kBool}, x, b, graph.between(kBool, scores));
  }
  // `score` where `keep`, else -inf.
  Tensor select(const Tensor& score, const Tensor& keep) {
    return graph.pointwise({pw::kSelect}, score,
                           graph.constant(-std::numeric_limits<float>::infinity()), keep,
                           between());
  }

  // Q K^T, scaled.
  Tensor scaled_scores(const Tensor& q, const Tensor& k_transposed) {
    const Tensor s =
        graph.matmul(q, k_transposed, between(), {.rows = lengths_q, .cols = lengths_kv});
    return apply(pw::kMul, s, graph.constant(p.scale));
  }

  Tensor mask_padding(const Tensor& score) {
    const Tensor row = index(score, 2, kI32), col = index(score, 3, kI32);
    const Tensor in_q = truth(pw::kLess, row, lengths_q), in_kv = truth(pw::kLess, col, lengths_kv);
    return select(score, truth(pw::kAnd, in_q, in_kv));
  }
  Tensor length(const Tensor& given, int64_t extent) {
    return given ? given : graph.constant(static_cast<int32_t>(extent));
  }
  // Keeps j <= i + diagonal + right.
  Tensor mask_right(const Tensor& score, int64_t right) {
    Tensor row = index(score, 2, kF32);
    const Tensor col = index(score, 3, kF32);
    if (p.mask.bottom_right) {
      row = shift(pw::kAdd, row, length(lengths_kv, p.seqlen_kv), kI32);
      row = shift(pw::kSub, row, length(lengths_q, p.seqlen_q), kI32);
    }
    if (right != 0) {
      row = shift(pw::kAdd, row, graph.constant(static_cast<int32_t>(right)), kI32);
    }
    return select(score, truth(pw::kGreaterEqual, row, col));
  }
  // Keeps j > i + diagonal - left - 1.
  Tensor mask_left(const Tensor& score, int64_t left) {
    const Tensor row = index(score, 2, kF32);
    Tensor col = index(score, 3, kF32);
    if (p.mask.bottom_right && p.lengths) {
      col = shift(pw::kAdd, col, graph.constant(static_cast<int32_t>(left + 1)), kI32);
      col = shift(pw::kSub, col, lengths_kv, kI32);
      col = shift(pw::kAdd, col, lengths_q, kI32);
    } else {
      const int64_t diagonal = p.mask.diagonal(p.seqlen_q, p.seqlen_kv);
      col = shift(pw::kAdd, col, graph.constant(static_cast<float>(left + 1 - diagonal)), kF32);
    }
    return select(score, truth(pw::kGreater, col, row));
  }
  Tensor masked(Tensor score) {
    if (p.lengths) score = mask_padding(score);
    const bool right = p.mask.window_right >= 0;
    if (p.mask.causal || right) score = mask_right(score, p.mask.causal ? 0 : p.mask.window_right);
    if (p.mask.window_left >= 0) score = mask_left(score, p.mask.window_left);
    return score;
  }
};

}  // namespace

CudnnPlan attention_forward_plan(const CudnnAttention& p, void* device_properties) {
  Attention a(p, "fused_attn_fwd");
  CudnnGraph& g = a.graph;
  const Tensor q = a.heads(id::kQ, a.q_dims(), p.q);
  const Tensor kt = a.transposed(id::kK, a.k_dims(), p.k);
  const Tensor s = a.masked(a.scaled_scores(q, kt));
  // softmax
  const Tensor peak = g.reduce(cudnn_reduction::kMax, s, g.between(kF32, a.rows));
  const Tensor e = a.apply(pw::kExp, a.apply(pw::kSub, s, peak));
  const Tensor sum = g.reduce(cudnn_reduction::kAdd, e, g.between(kF32, a.rows));
  // The library's pattern has the statistics also where nobody reads them.
  const Tensor stats = p.stats ? a.stats() : g.between(kF32, a.rows);
  g.pointwise({pw::kAdd}, peak, a.apply(pw::kLog, sum), stats);
  const Tensor probability = g.pointwise({pw::kDiv}, e, sum, g.between(p.dtype, a.scores));
  g.matmul(probability, a.heads(id::kV, a.v_dims(), p.v), a.heads(id::kO, a.o_dims(), p.o),
           {.rows = a.lengths_q, .inner = a.lengths_kv});
  return std::move(g).plan(device_properties);
}

namespace {

struct Backward : Attention {
  explicit Backward(const CudnnAttention& problem) : Attention(problem, "fused_attn_bwd") {}

  // rowsum(dO O), in memory: later kernels of the plan read it.
  Tensor row_sums(const Tensor& d_o, const Tensor& o) {
    const Tensor product = graph.pointwise({pw::kMul}, d_o, o, graph.between(kF32, o_dims()));
    const Tensor sum = graph.reduce(cudnn_reduction::kAdd, product, graph.between(kF32, rows));
    return graph.pointwise({pw::kMul}, sum, graph.constant(1.0f),
                           graph.tensor(id::kSum, kF32, rows, packed(rows)));
  }
  // The transpose of a [batch, heads, seqlen_q, seqlen_kv] result, in the tensors' type.
  Tensor flipped(const Tensor& x) {
    return graph.view(x, graph.between(p.dtype, swapped(scores), swapped(packed(scores))));
  }
  // left^T right into dk or dv; the heads of a group are summed.
  void key_gradient(const Tensor& left, const Tensor& right, const Tensor& out) {
    const Lengths lengths{.rows = lengths_kv, .inner = lengths_q};
    if (p.heads == p.kv_heads) {
      graph.matmul(left, right, out, lengths);
      return;
    }
    const Extents all{p.batch, p.heads, p.seqlen_kv, out.dims[3]};
    const Tensor each = graph.matmul(left, right, graph.between(p.dtype, all), lengths);
    graph.reduce(cudnn_reduction::kAdd, each, out);
  }
  void query_gradient(const Tensor& ds, const Tensor& kt) {
    const Tensor k = graph.view(
        kt, graph.between(p.dtype, swapped(kt.dims), swapped(kt.strides), offsets(id::kK)));
    const Tensor dq = heads(id::kDQ, q_dims(), p.dq);
    const Lengths lengths{.rows = lengths_q, .inner = lengths_kv};
    if (p.deterministic) {  // dS goes through scratch of the library's, and one block sums a row
      graph.matmul(ds, k, dq, lengths);
      return;
    }
    const Tensor sum = graph.tensor(id::kAccumulator, kF32, q_dims(), packed(q_dims()));
    graph.pointwise({pw::kIdentity}, graph.matmul(ds, k, sum, lengths), dq);
  }
};

}  // namespace

CudnnPlan attention_backward_plan(const CudnnAttention& p, void* device_properties) {
  Backward b(p);
  const Tensor q = b.heads(id::kQ, b.q_dims(), p.q);
  const Tensor kt = b.transposed(id::kK, b.k_dims(), p.k);
  const Tensor vt = b.transposed(id::kV, b.v_dims(), p.v);
  const Tensor o = b.heads(id::kO, b.o_dims(), p.o);
  const Tensor d_o = b.heads(id::kDO, b.o_dims(), p.d_o);
  const Tensor row_sums = b.row_sums(d_o, o);
  // The probabilities anew, from the log-sum-exp.
  const Tensor above = b.apply(pw::kSub, b.scaled_scores(q, kt), b.stats());
  const Tensor probability = b.apply(pw::kExp, b.masked(above));
  b.key_gradient(b.flipped(probability), d_o, b.heads(id::kDV, b.v_dims(), p.dv));
  const Tensor dp =
      b.graph.matmul(d_o, vt, b.between(), {.rows = b.lengths_q, .cols = b.lengths_kv});
  const Tensor ds =
      b.apply(pw::kMul, b.apply(pw::kMul, b.apply(pw::kSub, dp, row_sums), probability),
              b.graph.constant(p.scale));
  b.key_gradient(b.flipped(ds), q, b.heads(id::kDK, b.k_dims(), p.dk));
  b.query_gradient(ds, kt);
  return std::move(b.graph).plan(device_properties);
}

}  // namespace te_fl::cuda
