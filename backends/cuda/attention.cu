// fused_attn_fwd, fused_attn_bwd and the enquiry about them: calls decoded for the plain CUDA
// kernels.
#include <algorithm>

#include "attention.cuh"
#include "families.hpp"
#include "overlap.hpp"

namespace te_fl::cuda {
namespace {

using backend::AttentionProblem;

HeadData head_data(const te_fl_tensor& t, int32_t layout) {
  const backend::HeadsView v = backend::heads_view("tensor", t, layout);
  HeadData d;
  d.data = backend::data<void>(t);
  d.dtype = dtype_of(t);
  d.batch = v.stride_batch;
  d.seq = v.stride_seq;
  d.head = v.stride_head;
  d.element = v.stride_dim;
  d.dim = static_cast<int>(v.dim);
  return d;
}

ScoreData score_data(const te_fl_tensor* t) {
  ScoreData d;
  if (t == nullptr) return d;
  d.data = backend::data<void>(*t);
  d.dtype = dtype_of(*t);
  d.batch = t->dl.shape[0] == 1 ? 0 : backend::stride(*t, 0);
  d.head = t->dl.shape[1] == 1 ? 0 : backend::stride(*t, 1);
  d.row = backend::stride(*t, 2);
  d.col = backend::stride(*t, 3);
  return d;
}

Lengths lengths(const te_fl_tensor* cu, const te_fl_tensor* padded) {
  Lengths l;
  if (cu != nullptr) {
    l.cu = backend::data<const int32_t>(*cu);
    l.stride = backend::stride(*cu, 0);
  }
  if (padded != nullptr) {
    l.padded = backend::data<const int32_t>(*padded);
    l.padded_stride = backend::stride(*padded, 0);
  }
  return l;
}

template <class Args>
Attention attention_of(const te_fl_context& ctx, const Args& a, const AttentionProblem& p) {
  Attention r{};
  r.q = head_data(*a.q, a.layout);
  r.k = head_data(*a.k, a.layout);
  r.v = head_data(*a.v, a.layout);
  r.batch = p.batch;
  r.heads = p.heads;
  r.kv_heads = p.kv_heads;
  r.thd = p.thd;
  r.seqlen_q = p.q.seqlen;
  r.seqlen_kv = p.k.seqlen;
  r.max_q = p.thd ? p.seqlen_q : 0;
  r.max_kv = p.thd ? p.seqlen_kv : 0;
  r.mask = p.mask;
  r.softmax_type = p.softmax_type;
  r.scale = p.scale;
  r.threshold = numeric::dropout_threshold(p.dropout_p);
  r.kept = 1.0f / (1.0f - p.dropout_p);
  r.seed = ctx.rng.seed;
  r.rng_offset = ctx.rng.offset;
  r.rng_state = ctx.rng.state;
  r.bias = score_data(p.bias);
  r.attn_mask = score_data(p.attn_mask);
  if (p.alibi_slopes != nullptr) {
    const te_fl_tensor& t = *p.alibi_slopes;
    r.alibi = backend::data<const float>(t);
    r.alibi_batch = t.dl.ndim == 2 ? backend::stride(t, 0) : 0;
    r.alibi_head = backend::stride(t, t.dl.ndim - 1);
  }
  if (p.softmax_sink != nullptr) {
    r.sink = backend::data<const float>(*p.softmax_sink);
    r.sink_stride = backend::stride(*p.softmax_sink, 0);
  }
  r.q_lengths = lengths(p.cu_seqlens_q, p.cu_seqlens_q_padded);
  r.kv_lengths = lengths(p.cu_seqlens_kv, p.cu_seqlens_kv_padded);
  return r;
}

// What the plain kernels do not take, from metadata that every call has.
template <class Args>
Refusal refuse_heads(const Args& a) {
  const te_fl_tensor* const operands[] = {a.q, a.k, a.v};
  for (const te_fl_tensor* t : operands) {
    if (t->quant != nullptr) return "FP8 attention: the plain kernels take F32, F16 and BF16";
    if (t->dl.ndim < 3) return nullptr;  // the shape's error is the answer
    if (t->dl.shape[t->dl.ndim - 1] > kMaxHeadDim) {
      return "a head has more than 256 elements";
    }
    if (t->dl.shape[t->dl.ndim - 2] > 65535) return "more than 65535 heads";
  }
  return nullptr;
}
template <class Args>
Refusal refuse_batch(const Args& a) {
  if (Refusal why = refuse_heads(a)) return why;
  const bool thd = a.layout == TE_FL_LAYOUT_THD;
  const te_fl_tensor* t = thd ? a.cu_seqlens_q : a.q;
  const int axis = !thd && a.layout == TE_FL_LAYOUT_SBHD ? 1 : 0;
  if (t != nullptr && t->dl.ndim > axis && t->dl.shape[axis] > 65535) {
    return "more than 65535 sequences";
  }
  if (!dense(a.softmax_lse)) return "softmax_lse is not contiguous";
  return nullptr;
}
Refusal refuse_forward(const te_fl_fused_attn_fwd_args& a) {
  if (a.o->quant != nullptr) return "FP8 attention: the plain kernels write F32, F16 and BF16";
  for (const te_fl_tensor* in : {a.q, a.k, a.v}) {
    if (all_dense(in, a.o) && overlaps(*a.o, *in)) return kOverlaps;
  }
  return refuse_batch(a);
}
Refusal refuse_backward(const te_fl_fused_attn_bwd_args& a) {
  if (a.saved != nullptr && a.saved->opaque != 0) {
    return "saved is an opaque record, which only the implementation that made it can read";
  }
  for (const te_fl_tensor* t : {a.d_o, a.o, a.dq, a.dk, a.dv}) {
    if (t->quant != nullptr) return "FP8 attention: the plain kernels take F32, F16 and BF16";
  }
  return refuse_batch(a);
}

void fused_attn_fwd(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a) {
  const AttentionProblem problem = backend::attention_problem(a);
  const Attention p = attention_of(ctx, a, problem);
  float* lse = a.softmax_lse != nullptr ? backend::data<float>(*a.softmax_lse) : nullptr;
  attention_forward(ctx, p, head_data(*a.o, a.layout), lse);
  if (a.saved != nullptr) a.saved->opaque = 0;
}

size_t backward_workspace(const te_fl_context&, const te_fl_fused_attn_bwd_args& a) {
  return static_cast<size_t>(backend::numel(*a.softmax_lse)) * sizeof(float);
}

void fused_attn_bwd(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a) {
  const AttentionProblem problem = backend::attention_problem(a);
  const Attention p = attention_of(ctx, a, problem);
  AttentionGradients g{};
  g.o = head_data(*a.o, a.layout);
  g.d_o = head_data(*a.d_o, a.layout);
  g.dq = head_data(*a.dq, a.layout);
  g.dk = head_data(*a.dk, a.layout);
  g.dv = head_data(*a.dv, a.layout);
  g.dbias = score_data(a.dbias);
  if (a.dbias != nullptr) {
    g.dbias_batches = a.dbias->dl.shape[0];
    g.dbias_heads = a.dbias->dl.shape[1];
  }
  if (a.dsink != nullptr) {
    g.dsink = backend::data<float>(*a.dsink);
    g.dsink_stride = backend::stride(*a.dsink, 0);
  }
  g.lse = backend::data<const float>(*a.softmax_lse);
  g.delta = static_cast<float*>(ctx.workspace);
  attention_backward(ctx, p, g);
}

void get_fused_attn_backend(const te_fl_context&, const te_fl_get_fused_attn_backend_args& a) {
  const AttentionProblem p = backend::attention_problem(a);
  const bool possible = !(p.thd && p.mask.arbitrary) && refuse_heads(a) == nullptr;
  *backend::data<int32_t>(*a.backend) = possible ? 1 : -1;
}

constexpr uint32_t kDtypes =
    TE_FL_MASK_HIGH | TE_FL_BIT(TE_FL_I32) | TE_FL_BIT(TE_FL_U8) | TE_FL_BIT(TE_FL_BOOL);

}  // namespace

void append_attention(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(
      descriptor<te_fl_fused_attn_fwd_args, fused_attn_fwd, refuse_forward>("fused_attn_fwd"));
  ops.back().dtypes = kDtypes;
  ops.push_back(
      descriptor<te_fl_fused_attn_bwd_args, fused_attn_bwd, refuse_backward>("fused_attn_bwd"));
  ops.back().dtypes = kDtypes;
  ops.back().workspace = backend::workspace_thunk<te_fl_fused_attn_bwd_args, backward_workspace>;
  ops.push_back(descriptor<te_fl_get_fused_attn_backend_args, get_fused_attn_backend>(
      "get_fused_attn_backend"));
}

}  // namespace te_fl::cuda
