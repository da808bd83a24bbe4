// Graph nodes that the FP8 and the 16-bit attention graphs share.
#pragma once

#include <limits>

#include "attention/cudnn_attention_graph.hpp"
#include "attention/cudnn_numbers.hpp"

namespace te_fl::cuda::attention_graph {

using Tensor = CudnnGraph::Tensor;
using Lengths = CudnnGraph::Lengths;
using Pointwise = CudnnGraph::Pointwise;
namespace pw = cudnn_pointwise;
namespace id = attention_id;
constexpr int kF32 = cudnn_data::kF32, kI32 = cudnn_data::kI32, kBool = cudnn_data::kBool;

constexpr Extents swapped(Extents e) noexcept { return {e[0], e[1], e[3], e[2]}; }

// Returns a description of the attention problem for error messages.
std::string describe_problem(const CudnnAttention& p, const char* op);

struct Attention {
  const CudnnAttention& p;
  CudnnGraph graph;
  Extents scores, rows;
  Tensor lengths_q, lengths_kv;

  Attention(const CudnnAttention& problem, const char* op)
      : p(problem),
        graph(describe_problem(problem, op)),
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
  // Adds q, k, v, o or one of their gradients to the graph. `tensor`: its id.
  Tensor heads(int tensor, const Extents& dims, const Extents& strides) {
    return graph.tensor(tensor, p.dtype, dims, strides, offsets(tensor));
  }
  // k or v with the last two dimensions exchanged: [batch, heads, dim, seqlen].
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
  // `score` where `keep` is true, else -inf.
  Tensor select(const Tensor& score, const Tensor& keep) {
    return graph.pointwise({pw::kSelect}, score,
                           graph.constant(-std::numeric_limits<float>::infinity()), keep,
                           between());
  }

  // Q K^T times the scale.
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
  Tensor length(const Tensor& lengths, int64_t extent) {
    return lengths ? lengths : graph.constant(static_cast<int32_t>(extent));
  }
  // Hides the pairs of query i and key j with j > i + diagonal + right. `diagonal`: kv length minus
  // q length if the mask is aligned to the bottom right corner, else 0.
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
  // Hides the pairs of query i and key j with j < i + diagonal - left. `diagonal`: as in
  // mask_right().
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

}  // namespace te_fl::cuda::attention_graph
