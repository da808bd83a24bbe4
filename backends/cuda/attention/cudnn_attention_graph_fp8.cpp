#include "attention/cudnn_attention_graph.hpp"
#include "attention/cudnn_attention_nodes.hpp"

namespace te_fl::cuda {

using namespace attention_graph;  // NOLINT: this file builds the graphs

namespace {

constexpr int kE4M3 = cudnn_data::kE4M3, kE5M2 = cudnn_data::kE5M2;

struct Fp8 : Attention {
  Fp8(const CudnnAttention& problem, const char* op) : Attention(problem, op) {}

  Tensor scalar(int tensor) { return graph.tensor(tensor, kF32, {1, 1, 1, 1}, {1, 1, 1, 1}); }
  // Returns the inverse scale of a tensor as a graph tensor. Repeated calls return the same graph
  // tensor.
  Tensor inverse(int tensor) { return factor(inverses_[tensor], id::kInverse + tensor); }
  Tensor times(const Tensor& x, const Tensor& by) { return apply(pw::kMul, x, by); }
  // Quantises x into y, which is an output in memory or an operand of the next matrix product.
  void store(const Tensor& x, int tensor, const Tensor& y) {
    graph.pointwise({pw::kMul}, x, scalar(id::kScale + tensor), y);
  }
  void amax(const Tensor& x, int tensor) {
    graph.reduce(cudnn_reduction::kAmax, x, scalar(id::kAmax + tensor));
  }
  Tensor add_scores(const Tensor& q, const Tensor& kt) {
    Tensor s = scaled_scores(q, kt);
    s = times(times(s, inverse(id::kQ)), inverse(id::kK));
    return masked(s);
  }
  // Computes the matrix product of the FP8 tensors a and b, dequantised with the inverse scales of
  // a_id and b_id, into `out`. If `out` has fewer heads than q, sums over the query heads of each
  // group.
  void product(const Tensor& a, int a_id, const Tensor& b, int b_id, const Tensor& out, int out_id,
               const Lengths& lengths) {
    Extents dims = out.dims;
    dims[1] = p.heads;
    Tensor x = graph.matmul(a, b, graph.between(kF32, dims), lengths);
    if (out.dims[1] != p.heads) {
      x = graph.reduce(cudnn_reduction::kAdd, x, graph.between(kF32, out.dims));
    }
    x = times(times(x, inverse(a_id)), inverse(b_id));
    store(x, out_id, out);
    amax(x, out_id);
  }
  Tensor gradient(int tensor, const Extents& dims, const Extents& strides) {
    return graph.tensor(tensor, kE5M2, dims, strides, offsets(tensor));
  }
  Tensor flipped(const Tensor& x, int dtype) {
    return graph.view(x, graph.between(dtype, swapped(scores), swapped(packed(scores))));
  }

 private:
  Tensor factor(Tensor& slot, int tensor) {
    if (!slot) slot = scalar(tensor);
    return slot;
  }
  Tensor inverses_[32];
};

}  // namespace

CudnnPlan attention_fp8_forward_plan(const CudnnAttention& p, void* device_properties) {
  Fp8 a(p, "fused_attn_fwd");
  CudnnGraph& g = a.graph;
  const Tensor q = a.heads(id::kQ, a.q_dims(), p.q);
  const Tensor kt = a.transposed(id::kK, a.k_dims(), p.k);
  const Tensor s = a.add_scores(q, kt);
  const Tensor peak = g.reduce(cudnn_reduction::kMax, s, g.between(kF32, a.rows));
  const Tensor e = a.apply(pw::kExp, a.apply(pw::kSub, s, peak));
  const Tensor sum = g.reduce(cudnn_reduction::kAdd, e, g.between(kF32, a.rows));
  const Tensor stats = p.stats ? a.stats() : g.between(kF32, a.rows);
  g.pointwise({pw::kAdd}, peak, a.apply(pw::kLog, sum), stats);
  const Tensor probability = g.pointwise({pw::kDiv}, e, sum, a.between());
  a.amax(probability, id::kP);
  const Tensor codes = g.between(kE4M3, a.scores);
  a.store(probability, id::kP, codes);
  a.product(codes, id::kP, a.heads(id::kV, a.v_dims(), p.v), id::kV,
            a.heads(id::kO, a.o_dims(), p.o), id::kO, {.rows = a.lengths_q, .inner = a.lengths_kv});
  return std::move(g).plan(device_properties);
}

CudnnPlan attention_fp8_backward_plan(const CudnnAttention& p, void* device_properties) {
  Fp8 b(p, "fused_attn_bwd");
  CudnnGraph& g = b.graph;
  const Tensor q = b.heads(id::kQ, b.q_dims(), p.q);
  const Tensor kt = b.transposed(id::kK, b.k_dims(), p.k);
  const Tensor vt = b.transposed(id::kV, b.v_dims(), p.v);
  const Tensor o = b.heads(id::kO, b.o_dims(), p.o);
  const Tensor d_o = b.gradient(id::kDO, b.o_dims(), p.d_o);
  // Computes rowsum(dO O), which dS needs.
  Tensor row_sums = g.pointwise({pw::kMul}, d_o, o, g.between(kF32, b.o_dims()));
  row_sums = g.reduce(cudnn_reduction::kAdd, row_sums, g.between(kF32, b.rows));
  row_sums = b.times(b.times(row_sums, b.inverse(id::kDO)), b.inverse(id::kO));
  // Recomputes the probabilities and computes dV.
  const Tensor above = b.apply(pw::kSub, b.add_scores(q, kt), b.stats());
  const Tensor probability = b.apply(pw::kExp, above);
  const Tensor codes = g.between(kE4M3, b.scores);
  b.store(probability, id::kP, codes);
  const Lengths by_key{.rows = b.lengths_kv, .inner = b.lengths_q};
  b.product(b.flipped(codes, kE4M3), id::kP, d_o, id::kDO, b.gradient(id::kDV, b.v_dims(), p.dv),
            id::kDV, by_key);
  // Computes dS times the softmax scale.
  Tensor ds = g.matmul(d_o, vt, b.between(), {.rows = b.lengths_q, .cols = b.lengths_kv});
  ds = b.times(b.times(ds, b.inverse(id::kDO)), b.inverse(id::kV));
  ds = b.times(b.apply(pw::kSub, ds, row_sums), probability);
  ds = b.times(ds, g.constant(p.scale));
  b.amax(ds, id::kDS);
  const Tensor ds_codes = g.between(kE5M2, b.scores);
  b.store(ds, id::kDS, ds_codes);
  const Tensor k = g.view(kt, g.between(p.dtype, swapped(kt.dims), swapped(kt.strides)));
  b.product(ds_codes, id::kDS, k, id::kK, b.gradient(id::kDQ, b.q_dims(), p.dq), id::kDQ,
            {.rows = b.lengths_q, .inner = b.lengths_kv});
  b.product(b.flipped(ds_codes, kE5M2), id::kDS, q, id::kQ, b.gradient(id::kDK, b.k_dims(), p.dk),
            id::kDK, by_key);
  return std::move(g).plan(device_properties);
}

}  // namespace te_fl::cuda
