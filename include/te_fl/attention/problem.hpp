// Decodes and checks one attention call. Reads metadata only and allocates nothing unless it
// throws, so supports() may use it. te_fl/attention.hpp describes the semantics.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "te_fl/attention/mask.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/ops/attention.h"

namespace te_fl::backend {

// One of q, k, v, o or their gradients, viewed as [batch, seqlen, heads, dim] with strides in
// elements. With layout thd, batch is 1 and seqlen is the total number of tokens.
struct HeadsView {
  int64_t batch = 0;
  int64_t seqlen = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t stride_batch = 0;
  int64_t stride_seq = 0;
  int64_t stride_head = 0;
  int64_t stride_dim = 0;
  constexpr int64_t offset(int64_t b, int64_t s, int64_t h, int64_t d) const noexcept {
    return b * stride_batch + s * stride_seq + h * stride_head + d * stride_dim;
  }
};

// One checked call. The pointers are those of the call; NULL for an argument that was not given.
struct AttentionProblem {
  int64_t batch = 0;     // number of sequences; 0 for an enquiry with layout thd
  int64_t heads = 0;     // heads of q and o
  int64_t kv_heads = 0;  // heads of k and v; divides `heads`
  int64_t seqlen_q = 0;  // thd: max_seqlen_q of the call; 0: the longest in cu_seqlens
  int64_t seqlen_kv = 0;
  int64_t head_dim = 0;    // head size of q and k
  int64_t head_dim_v = 0;  // head size of v and o
  HeadsView q, k, v;
  bool thd = false;
  bool fp8 = false;  // q, k and v are quantised
  MaskRule mask;
  int32_t softmax_type = TE_FL_SOFTMAX_TYPE_VANILLA;
  float scale = 1;
  float softcap = 0;  // 0: no cap on the scores
  float dropout_p = 0;
  const te_fl_tensor* bias = nullptr;
  const te_fl_tensor* alibi_slopes = nullptr;
  const te_fl_tensor* attn_mask = nullptr;
  const te_fl_tensor* cu_seqlens_q = nullptr;
  const te_fl_tensor* cu_seqlens_kv = nullptr;
  const te_fl_tensor* cu_seqlens_q_padded = nullptr;
  const te_fl_tensor* cu_seqlens_kv_padded = nullptr;
  const te_fl_tensor* softmax_sink = nullptr;

  // True if cu_seqlens gives the lengths of the sequences; otherwise all lengths are Sq and Sk.
  constexpr bool variable_length() const noexcept { return thd || mask.padding; }
  constexpr int64_t kv_head(int64_t head) const noexcept { return head / (heads / kv_heads); }
};

// Decodes one tensor of a layout. Throws if its rank differs from the layout's.
inline HeadsView heads_view(const char* name, const te_fl_tensor& t, int32_t layout) {
  const bool thd = layout == TE_FL_LAYOUT_THD;
  if (t.dl.ndim != (thd ? 3 : 4)) {
    const char* form = thd                           ? "[T, H, D] (layout thd)"
                       : layout == TE_FL_LAYOUT_SBHD ? "[S, B, H, D] (layout sbhd)"
                                                     : "[B, S, H, D] (layout bshd)";
    invalid(std::string(name) + " has shape " + shape_text(t) + ", expected rank " +
            (thd ? "3: " : "4: ") + form);
  }
  const int batch = layout == TE_FL_LAYOUT_SBHD ? 1 : 0;
  const int seq = thd || layout == TE_FL_LAYOUT_SBHD ? 0 : 1;
  const int head = thd ? 1 : 2;
  HeadsView v;
  v.batch = thd ? 1 : t.dl.shape[batch];
  v.stride_batch = thd ? 0 : stride(t, batch);
  v.seqlen = t.dl.shape[seq];
  v.stride_seq = stride(t, seq);
  v.heads = t.dl.shape[head];
  v.stride_head = stride(t, head);
  v.dim = t.dl.shape[head + 1];
  v.stride_dim = stride(t, head + 1);
  return v;
}

namespace detail {

inline void expect_shape(const char* name, const te_fl_tensor& t,
                         std::initializer_list<int64_t> shape, const char* meaning) {
  bool same = t.dl.ndim == static_cast<int32_t>(shape.size());
  int i = 0;
  for (int64_t extent : shape) same = same && t.dl.shape[i++] == extent;
  if (same) return;
  std::string want = "[";
  for (int64_t extent : shape) {
    if (want.size() > 1) want += ",";
    want += std::to_string(extent);
  }
  invalid(std::string(name) + " has shape " + shape_text(t) + ", expected " + want + "] " +
          meaning);
}

// Checks that a tensor has shape [1|B, 1|H, Sq, Sk].
inline void expect_broadcast(const char* name, const te_fl_tensor& t, const AttentionProblem& p) {
  const int64_t* s = t.dl.shape;
  if (t.dl.ndim == 4 && (s[0] == 1 || s[0] == p.batch) && (s[1] == 1 || s[1] == p.heads) &&
      s[2] == p.seqlen_q && s[3] == p.seqlen_kv) {
    return;
  }
  invalid(std::string(name) + " has shape " + shape_text(t) + ", expected [1 or " +
          std::to_string(p.batch) + ", 1 or " + std::to_string(p.heads) + ", " +
          std::to_string(p.seqlen_q) + ", " + std::to_string(p.seqlen_kv) +
          "] ([1|B, 1|H, Sq, Sk] of q and k)");
}

inline void expect_same_shape(const char* name, const te_fl_tensor& t, const char* other_name,
                              const te_fl_tensor& other) {
  bool same = t.dl.ndim == other.dl.ndim;
  for (int i = 0; same && i < t.dl.ndim; ++i) same = t.dl.shape[i] == other.dl.shape[i];
  if (!same) {
    invalid(std::string(name) + " has shape " + shape_text(t) + ", expected " + shape_text(other) +
            ", the shape of " + other_name);
  }
}

[[noreturn]] inline void disagree(const char* name, const char* what, int64_t value,
                                  const std::string& rule) {
  invalid(std::string(name) + " has " + std::to_string(value) + " " + what + ", expected " + rule);
}

inline void check_heads(const AttentionProblem& p) {
  const HeadsView &q = p.q, &k = p.k, &v = p.v;
  if (q.heads < 1) disagree("q", "heads", q.heads, "at least 1");
  if (q.dim < 1) disagree("q", "elements per head", q.dim, "at least 1");
  if (k.heads < 1 || q.heads % k.heads != 0) {
    disagree("k", "heads", k.heads,
             "a divisor of q's " + std::to_string(q.heads) +
                 " heads (grouped queries share a key head evenly)");
  }
  if (k.dim != q.dim) {
    disagree("k", "elements per head", k.dim, std::to_string(q.dim) + " as q");
  }
  if (v.heads != k.heads) disagree("v", "heads", v.heads, std::to_string(k.heads) + " as k");
  if (v.dim < 1) disagree("v", "elements per head", v.dim, "at least 1");
  if (v.seqlen != k.seqlen) {
    disagree("v", p.thd ? "tokens" : "positions", v.seqlen, std::to_string(k.seqlen) + " as k");
  }
  if (k.batch != q.batch) disagree("k", "sequences", k.batch, std::to_string(q.batch) + " as q");
  if (v.batch != q.batch) disagree("v", "sequences", v.batch, std::to_string(q.batch) + " as q");
}

// Decodes the arguments that an enquiry has: q, k, v and the scalars.
template <class Args>
AttentionProblem describe_qkv(const Args& a) {
  AttentionProblem p;
  p.thd = a.layout == TE_FL_LAYOUT_THD;
  p.q = heads_view("q", *a.q, a.layout);
  p.k = heads_view("k", *a.k, a.layout);
  p.v = heads_view("v", *a.v, a.layout);
  check_heads(p);
  p.batch = p.thd ? 0 : p.q.batch;
  p.heads = p.q.heads;
  p.kv_heads = p.k.heads;
  p.seqlen_q = p.thd ? 0 : p.q.seqlen;
  p.seqlen_kv = p.thd ? 0 : p.k.seqlen;
  p.head_dim = p.q.dim;
  p.head_dim_v = p.v.dim;
  p.fp8 = a.q->quant != nullptr;
  p.mask = mask_rule(a.mask_type, a.window_left, a.window_right);
  p.softmax_type = a.softmax_type;
  p.dropout_p = a.dropout_p;
  return p;
}

inline void check_sequence_args(AttentionProblem& p, int64_t max_q, int64_t max_kv) {
  const te_fl_tensor* all[] = {p.cu_seqlens_q, p.cu_seqlens_kv, p.cu_seqlens_q_padded,
                               p.cu_seqlens_kv_padded};
  const char* names[] = {"cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded",
                         "cu_seqlens_kv_padded"};
  if (p.thd) {
    const te_fl_tensor& cu = *p.cu_seqlens_q;
    if (cu.dl.ndim != 1 || cu.dl.shape[0] < 1) {
      invalid("cu_seqlens_q has shape " + shape_text(cu) + ", expected [B+1]");
    }
    p.batch = cu.dl.shape[0] - 1;
    p.seqlen_q = max_q;
    p.seqlen_kv = max_kv;
  } else if ((max_q != 0 && max_q != p.seqlen_q) || (max_kv != 0 && max_kv != p.seqlen_kv)) {
    invalid("max_seqlen_q, max_seqlen_kv are " + std::to_string(max_q) + ", " +
            std::to_string(max_kv) + ", expected 0 or the extents of q and k, " +
            std::to_string(p.seqlen_q) + " and " + std::to_string(p.seqlen_kv) +
            ": only layout thd chooses them");
  }
  for (int i = 0; i < 4; ++i) {
    if (all[i] != nullptr) expect_shape(names[i], *all[i], {p.batch + 1}, "([B+1])");
  }
}

inline void check_score_args(const AttentionProblem& p) {
  if (p.bias != nullptr) expect_broadcast("bias", *p.bias, p);
  if (p.mask.arbitrary) expect_broadcast("attn_mask", *p.attn_mask, p);
  if (p.alibi_slopes != nullptr) {
    if (p.alibi_slopes->dl.ndim == 2) {
      expect_shape("alibi_slopes", *p.alibi_slopes, {p.batch, p.heads}, "([B, H])");
    } else {
      expect_shape("alibi_slopes", *p.alibi_slopes, {p.heads}, "([H], or [B, H])");
    }
  }
  if (p.softmax_type == TE_FL_SOFTMAX_TYPE_LEARNABLE) {
    expect_shape("softmax_sink", *p.softmax_sink, {p.heads}, "([H])");
  }
}

// Checks that s_quant or dp_quant comes with a given scale. Attention quantises P and dS tile by
// tile, so it cannot compute a scale from the whole matrix.
inline void expect_given_scale(const te_fl_tensor* t, const char* name) {
  if (t == nullptr || (t->quant->flags & TE_FL_QUANT_COMPUTE_SCALE) == 0) return;
  invalid(std::string(name) +
          " requests a computed scale, but attention never holds the whole matrix; "
          "give it a scale (delayed scaling)");
}

inline void expect_lse(const te_fl_tensor& lse, const AttentionProblem& p) {
  if (p.thd) {
    expect_shape("softmax_lse", lse, {p.q.seqlen, p.heads}, "([T, H])");
  } else {
    expect_shape("softmax_lse", lse, {p.batch, p.heads, p.seqlen_q}, "([B, H, Sq])");
  }
}

inline void expect_output(const char* name, const te_fl_tensor& t, const AttentionProblem& p,
                          int32_t layout) {
  const HeadsView v = heads_view(name, t, layout);
  if (v.batch == p.q.batch && v.seqlen == p.q.seqlen && v.heads == p.heads &&
      v.dim == p.head_dim_v) {
    return;
  }
  invalid(std::string(name) + " has shape " + shape_text(t) + ", expected q's with " +
          std::to_string(p.head_dim_v) + " elements per head (v's head size)");
}

template <class Args>
AttentionProblem describe_common(const Args& a) {
  AttentionProblem p = describe_qkv(a);
  p.scale = a.scale;
  p.softcap = a.softcap;
  p.bias = a.bias;
  p.alibi_slopes = a.alibi_slopes;
  p.attn_mask = a.attn_mask;
  p.cu_seqlens_q = a.cu_seqlens_q;
  p.cu_seqlens_kv = a.cu_seqlens_kv;
  p.cu_seqlens_q_padded = a.cu_seqlens_q_padded;
  p.cu_seqlens_kv_padded = a.cu_seqlens_kv_padded;
  p.softmax_sink = a.softmax_sink;
  check_sequence_args(p, a.max_seqlen_q, a.max_seqlen_kv);
  check_score_args(p);
  expect_output("o", *a.o, p, a.layout);
  expect_given_scale(a.s_quant, "s_quant");
  if (a.softmax_lse != nullptr) expect_lse(*a.softmax_lse, p);
  return p;
}

}  // namespace detail

// Decodes and checks a call. Throws Error (INVALID_ARGUMENT, clean), which names argument, value
// and rule.
inline AttentionProblem attention_problem(const te_fl_fused_attn_fwd_args& a) {
  return detail::describe_common(a);
}

inline AttentionProblem attention_problem(const te_fl_fused_attn_bwd_args& a) {
  AttentionProblem p = detail::describe_common(a);
  detail::expect_output("d_o", *a.d_o, p, a.layout);
  detail::expect_same_shape("dq", *a.dq, "q", *a.q);
  detail::expect_same_shape("dk", *a.dk, "k", *a.k);
  detail::expect_same_shape("dv", *a.dv, "v", *a.v);
  if (a.dbias != nullptr) detail::expect_same_shape("dbias", *a.dbias, "bias", *a.bias);
  if (a.dsink != nullptr) detail::expect_shape("dsink", *a.dsink, {p.heads}, "([H])");
  detail::expect_given_scale(a.dp_quant, "dp_quant");
  return p;
}

// Decodes and checks an enquiry, a call that only asks for support. The result lacks the optional
// tensors and, with layout thd, batch and lengths.
inline AttentionProblem attention_problem(const te_fl_get_fused_attn_backend_args& a) {
  return detail::describe_qkv(a);
}

// Offset in elements of element (b, h, i, j) in a tensor of shape [1|B, 1|H, Sq, Sk] (bias, dbias,
// attn_mask).
inline int64_t broadcast_offset(const te_fl_tensor& t, int64_t b, int64_t h, int64_t i,
                                int64_t j) noexcept {
  return (t.dl.shape[0] == 1 ? 0 : b * stride(t, 0)) + (t.dl.shape[1] == 1 ? 0 : h * stride(t, 1)) +
         i * stride(t, 2) + j * stride(t, 3);
}

}  // namespace te_fl::backend
