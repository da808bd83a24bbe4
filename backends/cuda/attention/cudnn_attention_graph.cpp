#include "attention/cudnn_attention_graph.hpp"

#include "attention/cudnn_attention_nodes.hpp"

namespace te_fl::cuda {
namespace attention_graph {

std::string describe_problem(const CudnnAttention& p, const char* op) {
  std::string text = std::string(op) + " batch=" + std::to_string(p.batch) +
                     " heads=" + std::to_string(p.heads) + "/" + std::to_string(p.kv_heads) +
                     " q=" + std::to_string(p.seqlen_q) + "x" + std::to_string(p.dim) +
                     " kv=" + std::to_string(p.seqlen_kv) + "x" + std::to_string(p.dim_v);
  text += p.dtype == cudnn_data::kF16 ? " f16" : p.dtype == cudnn_data::kBF16 ? " bf16" : " fp8";
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

}  // namespace attention_graph

using namespace attention_graph;  // NOLINT: this file builds the graphs

CudnnPlan attention_forward_plan(const CudnnAttention& p, void* device_properties) {
  Attention a(p, "fused_attn_fwd");
  CudnnGraph& g = a.graph;
  const Tensor q = a.heads(id::kQ, a.q_dims(), p.q);
  const Tensor kt = a.transposed(id::kK, a.k_dims(), p.k);
  const Tensor s = a.masked(a.scaled_scores(q, kt));
  // The softmax over the keys.
  const Tensor peak = g.reduce(cudnn_reduction::kMax, s, g.between(kF32, a.rows));
  const Tensor e = a.apply(pw::kExp, a.apply(pw::kSub, s, peak));
  const Tensor sum = g.reduce(cudnn_reduction::kAdd, e, g.between(kF32, a.rows));
  // cuDNN recognises the pattern only if it contains the statistics, even if the caller does not
  // read them.
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

  // rowsum(dO O), stored in memory because later kernels of the plan read it.
  Tensor row_sums(const Tensor& d_o, const Tensor& o) {
    const Tensor product = graph.pointwise({pw::kMul}, d_o, o, graph.between(kF32, o_dims()));
    const Tensor sum = graph.reduce(cudnn_reduction::kAdd, product, graph.between(kF32, rows));
    return graph.pointwise({pw::kMul}, sum, graph.constant(1.0f),
                           graph.tensor(id::kSum, kF32, rows, packed(rows)));
  }
  // Returns a transposed view of x, a [batch, heads, seqlen_q, seqlen_kv] intermediate, in the
  // dtype of q.
  Tensor flipped(const Tensor& x) {
    return graph.view(x, graph.between(p.dtype, swapped(scores), swapped(packed(scores))));
  }
  // Computes left^T right into dk or dv. Sums the heads of a group if k has fewer heads than q.
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
    if (p.deterministic) {  // cuDNN then keeps dS in its own scratch, and one block sums a row
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
  // Recomputes the probabilities from the log-sum-exp.
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
