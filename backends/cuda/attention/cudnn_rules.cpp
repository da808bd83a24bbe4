#include "attention/cudnn_rules.hpp"

#include <algorithm>
#include <cstdint>

#include "attention/attention_choice.hpp"
#include "attention/cudnn.hpp"
#include "attention/cudnn_limits.hpp"
#include "common/dtype_bytes.hpp"
#include "common/overlap.hpp"
#include "device/device.hpp"
#include "te_fl/attention/mask.hpp"

namespace te_fl::cuda {
namespace {

constexpr int64_t kMostHeadDim = 256;

constexpr const char* kDtypes = "cuDNN's attention takes F16, BF16 and FP8";

bool half(const te_fl_tensor& t) {
  const int dtype = dtype_of(t);
  return dtype == TE_FL_F16 || dtype == TE_FL_BF16;
}
bool fp8(const te_fl_tensor& t) { return t.quant != nullptr; }

bool causal(int32_t mask_type) { return backend::mask_rule(mask_type, -1, -1).causal; }

template <class Args>
bool ranks_fit(const Args& a, std::initializer_list<const te_fl_tensor*> heads) {
  const int rank = a.layout == TE_FL_LAYOUT_THD ? 3 : 4;
  for (const te_fl_tensor* t : heads) {
    if (t->dl.ndim != rank) return false;
  }
  return true;
}

// Refuses `t` unless it has row-wise FP8 data of `dtype` with per-tensor scaling. `written`: `t` is
// an output, whose scale the call must supply.
Refusal refuse_codes(const te_fl_tensor* t, int dtype, bool written) {
  if (t == nullptr || t->quant == nullptr)
    return "FP8 attention in FP8 throughout: o and gradients too";
  const te_fl_quant& quant = *t->quant;
  if (quant.scaling != TE_FL_SCALING_TENSOR || dtype_of(*t) != dtype) {
    return "FP8 other than E4M3 (gradients: E5M2) scaled by tensor";
  }
  if (!written) return quant.scale_inv != nullptr ? nullptr : "FP8 without scale_inv";
  if (quant.scale == nullptr || (quant.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0) {
    return "an FP8 output without a given scale";
  }
  return quant.columnwise_data == nullptr ? nullptr : "an FP8 output with a column-wise copy";
}
// Returns why cuDNN cannot quantise the probabilities or their gradient as `t` (s_quant or
// dp_quant) describes, or NULL if it can.
Refusal refuse_inner(const te_fl_tensor* t, int dtype) {
  if (t == nullptr) return "FP8 attention without s_quant and dp_quant";
  return refuse_codes(t, dtype, true);
}

Refusal refuse_fp8_device(const te_fl_context& ctx) {
  return architecture(ctx.device.index) >= 90
             ? nullptr
             : "FP8 attention is cuDNN's from compute capability 9.0 on (Hopper), and this GPU is "
               "older: use BF16";
}

template <class Args>
Refusal refuse_fp8_problem(const Args& a) {
  if (a.layout == TE_FL_LAYOUT_THD) return "FP8 with layout thd";
  if (a.mask_type != TE_FL_MASK_TYPE_NONE && a.mask_type != TE_FL_MASK_TYPE_CAUSAL) {
    return "FP8 with a mask type other than none and causal";
  }
  if (a.window_left >= 0 || a.window_right >= 0) return "FP8 with a window";
  if (a.q->dl.shape[3] % 16 != 0 || a.v->dl.shape[3] % 16 != 0) {
    return "FP8 with a head size that is not a multiple of 16";
  }
  // cuDNN 9.19 finds no engine for one query.
  if (a.q->dl.shape[a.layout == TE_FL_LAYOUT_SBHD ? 0 : 1] == 1) return "FP8 with one query";
  return nullptr;
}
template <class Args>
Refusal refuse_fp8_training(const Args& a) {
  const bool fits = a.q->dl.shape[3] == 128 && a.v->dl.shape[3] == 128;
  if (!fits) return "FP8 backward with a head size other than 128";
  // Otherwise cuDNN 9.19 leaves most of dq's last rows unwritten.
  const int64_t queries = a.q->dl.shape[a.layout == TE_FL_LAYOUT_SBHD ? 0 : 1];
  return queries % 64 == 0 ? nullptr : "FP8 backward with queries that are not a multiple of 64";
}

// Rules that forward, backward and get_fused_attn_backend share.
template <class Args>
Refusal refuse_problem(const Args& a) {
  if (!half(*a.q) && !fp8(*a.q)) return kDtypes;
  if (fp8(*a.q)) {
    if (const Refusal why = refuse_fp8_problem(a)) return why;
  }
  if (a.dropout_p > 0)
    return "cuDNN's dropout does not draw the contract's random words (Philox 4x32-10 by element)";
  if (a.softmax_type != TE_FL_SOFTMAX_TYPE_VANILLA) return "a softmax with a sink";
  if (a.mask_type == TE_FL_MASK_TYPE_ARBITRARY) return "cuDNN takes no mask tensor";
  const int last = a.layout == TE_FL_LAYOUT_THD ? 2 : 3;
  const te_fl_tensor* const operands[] = {a.q, a.k, a.v};
  for (const te_fl_tensor* t : operands) {
    const int64_t dim = t->dl.shape[last];
    if (dim > kMostHeadDim) return "a head has more than 256 elements";
    if (dim % 8 != 0) return "a head's size is not a multiple of 8";
  }
  for (const te_fl_tensor* t : operands) {
    if (backend::numel(*t) == 0) return "an empty tensor";
    if (const Refusal why = refuse_rows(*t)) return why;
  }
  if (a.layout != TE_FL_LAYOUT_THD) {
    const int seq = a.layout == TE_FL_LAYOUT_SBHD ? 0 : 1;
    const int64_t seqlen_q = a.q->dl.shape[seq], seqlen_kv = a.k->dl.shape[seq];
    if (!backend::mask_rule(a.mask_type, -1, -1).padding && seqlen_q > seqlen_kv) {
      if (a.mask_type == TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT) {
        return "a bottom-right mask with more queries than keys";
      }
      if (a.window_left >= 0 || (a.window_right >= 0 && !causal(a.mask_type))) {
        return "a window with more queries than keys";
      }
    }
  }
  if (cudnn() == nullptr) return cudnn_missing();
  if (cudnn()->number == 91400 && a.window_left >= 0 && !causal(a.mask_type)) {
    const int seq = a.layout == TE_FL_LAYOUT_BSHD ? 1 : 0;  // thd: all tokens, an upper bound
    if (a.k->dl.shape[seq] > 1024) {
      return "cuDNN 9.14.0 masks long windows wrongly: install 9.14.1 or newer";
    }
  }
  return nullptr;
}

// Returns the number of elements that a tensor spans, from its first to its last.
int64_t extent(const te_fl_tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.dl.ndim; ++i) last += (t.dl.shape[i] - 1) * backend::stride(t, i);
  return last + 1;
}
int64_t max_sequence_length(std::initializer_list<const te_fl_tensor*> all) {
  int64_t longest = 0;
  for (const te_fl_tensor* t : all) longest = std::max(longest, extent(*t));
  return longest;
}
// Refuses a backward whose tensors or FP32 gradient scratch have 2^31 elements or more, because
// cuDNN 9.19 then silently gives wrong gradients of Q (measured with 8194 sequences of 128 x 16 x
// 128 elements: the last gradients are wrong). The size of the scratch is estimated as that of the
// largest gradient: every sequence has the longest length of queries or keys, rounded up to full
// tiles, and the gradients of K and V have as many heads as Q.
template <class Args>
Refusal refuse_long_backward(const Args& a, std::initializer_list<const te_fl_tensor*> all) {
  constexpr const char* kLong =
      "a backward of 2^31 elements or more, where cuDNN's gradients are "
      "wrong";
  constexpr int64_t kTile = 128;
  if (max_sequence_length(all) > INT32_MAX) return kLong;
  int64_t batch = 0, queries = 0, keys = 0;
  if (a.layout == TE_FL_LAYOUT_THD) {
    if constexpr (requires { a.cu_seqlens_q; }) {
      if (a.cu_seqlens_q != nullptr) batch = backend::numel(*a.cu_seqlens_q) - 1;
      queries = a.max_seqlen_q, keys = a.max_seqlen_kv;
    }
  } else {
    const int seq = a.layout == TE_FL_LAYOUT_SBHD ? 0 : 1;
    batch = a.q->dl.shape[1 - seq], queries = a.q->dl.shape[seq], keys = a.k->dl.shape[seq];
  }
  const int last = a.q->dl.ndim - 1;
  const int64_t width =
      a.q->dl.shape[last - 1] * std::max(a.q->dl.shape[last], a.v->dl.shape[last]);
  const int64_t longest = (std::max(queries, keys) + kTile - 1) / kTile * kTile;
  // Uses FP64, because the product of such extents may overflow 64 bits.
  const double scratch =
      static_cast<double>(batch) * static_cast<double>(longest) * static_cast<double>(width);
  return scratch > INT32_MAX ? kLong : nullptr;
}

// Applies the rules that need all arguments of a call, then refuse_problem().
template <class Args>
Refusal refuse_call(const Args& a, std::initializer_list<const te_fl_tensor*> others) {
  if (!half(*a.q) && !fp8(*a.q)) return kDtypes;
  if (a.bias != nullptr) return "a bias";
  if (a.alibi_slopes != nullptr) return "ALiBi slopes";
  if (!(a.scale > 0)) return "a scale that is not positive";
  if (!dense(a.softmax_lse)) return "softmax_lse is not contiguous";
  if (a.layout == TE_FL_LAYOUT_THD && (a.max_seqlen_q == 0 || a.max_seqlen_kv == 0)) {
    return "layout thd without max_seqlen_q and max_seqlen_kv";
  }
  for (const te_fl_tensor* t : others) {
    if (!fp8(*a.q) && dtype_of(*t) != dtype_of(*a.q)) return "tensors of another dtype than q";
    if (const Refusal why = refuse_rows(*t)) return why;
  }
  return refuse_problem(a);
}
// Smallest number of floating-point operations for which a cuDNN plan is built for an inference
// call. Inference shapes tend to change from call to call, and building a plan takes about 40 ms;
// the plugin's own kernels compute about a hundred calls of this size in that time.
constexpr double kWorthAPlan = 1u << 28;

double operations(const te_fl_fused_attn_fwd_args& a) {
  const bool thd = a.layout == TE_FL_LAYOUT_THD;
  const int64_t keys = thd ? a.max_seqlen_kv : a.k->dl.shape[a.layout == TE_FL_LAYOUT_SBHD ? 0 : 1];
  return 4.0 * static_cast<double>(backend::numel(*a.q)) * static_cast<double>(keys);
}

template <class Args>
Refusal refuse_fp8_inputs(const Args& a) {
  const te_fl_tensor* const inputs[] = {a.q, a.k, a.v};
  for (const te_fl_tensor* t : inputs) {
    if (const Refusal why = refuse_codes(t, TE_FL_F8E4M3, false)) return why;
  }
  return refuse_inner(a.s_quant, TE_FL_F8E4M3);
}
Refusal refuse_fp8_forward(const te_fl_fused_attn_fwd_args& a) {
  if (const Refusal why = refuse_fp8_inputs(a)) return why;
  return refuse_codes(a.o, TE_FL_F8E4M3, true);
}
Refusal refuse_fp8_backward(const te_fl_fused_attn_bwd_args& a) {
  if (const Refusal why = refuse_fp8_training(a)) return why;
  if (const Refusal why = refuse_fp8_inputs(a)) return why;
  if (const Refusal why = refuse_inner(a.dp_quant, TE_FL_F8E5M2)) return why;
  if (const Refusal why = refuse_codes(a.o, TE_FL_F8E4M3, false)) return why;
  if (const Refusal why = refuse_codes(a.d_o, TE_FL_F8E5M2, false)) return why;
  for (const te_fl_tensor* t : {a.dq, a.dk, a.dv}) {
    if (const Refusal why = refuse_codes(t, TE_FL_F8E5M2, true)) return why;
  }
  return nullptr;
}

}  // namespace

Refusal refuse_cudnn_forward(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a) {
  // The op's argument check reports calls with an invalid shape.
  if (!ranks_fit(a, {a.q, a.k, a.v, a.o})) return nullptr;
  for (const te_fl_tensor* in : {a.q, a.k, a.v}) {
    if (all_dense(in, a.o) && overlaps(*a.o, *in)) return kOverlaps;
  }
  if (const Refusal why = refuse_call(a, {a.o})) return why;
  if (fp8(*a.q)) {
    const int64_t longest = max_sequence_length({a.q, a.k, a.v, a.o});
    if (const Refusal why = refuse_long_fp8_forward(cudnn()->number, longest)) return why;
    const Refusal why = refuse_fp8_device(ctx);
    return why != nullptr ? why : refuse_fp8_forward(a);
  }
  if (a.softmax_lse == nullptr && operations(a) < kWorthAPlan) {
    return "too small an inference for a plan of cuDNN";
  }
  return nullptr;
}
Refusal refuse_cudnn_backward(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a) {
  if (!ranks_fit(a, {a.q, a.k, a.v, a.o, a.d_o, a.dq, a.dk, a.dv})) return nullptr;
  if (a.saved != nullptr && a.saved->opaque != 0) {
    return "saved is an opaque record, which only the implementation that made it can read";
  }
  if (a.layout != TE_FL_LAYOUT_THD) {
    const int seq = a.layout == TE_FL_LAYOUT_SBHD ? 0 : 1;
    if (a.q->dl.shape[seq] == 1 && a.k->dl.shape[seq] == 1) return "one query and one key";
  }
  if (const Refusal why = refuse_long_backward(a, {a.q, a.k, a.v, a.o, a.d_o, a.dq, a.dk, a.dv})) {
    return why;
  }
  if (const Refusal why = refuse_call(a, {a.o, a.d_o, a.dq, a.dk, a.dv})) return why;
  if (!fp8(*a.q)) return nullptr;
  const Refusal why = refuse_fp8_device(ctx);
  return why != nullptr ? why : refuse_fp8_backward(a);
}
Refusal refuse_cudnn_enquiry(const te_fl_context& ctx, const te_fl_get_fused_attn_backend_args& a) {
  if (!ranks_fit(a, {a.q, a.k, a.v})) return nullptr;
  if (const Refusal why = refuse_problem(a)) return why;
  if (a.is_training) {
    if (const Refusal why = refuse_long_backward(a, {a.q, a.k, a.v})) return why;
  }
  if (!fp8(*a.q)) return nullptr;
  // The output has the shape of q, with the head size of v.
  const int64_t out = backend::numel(*a.q) / a.q->dl.shape[3] * a.v->dl.shape[3];
  const int64_t longest = std::max(out, max_sequence_length({a.q, a.k, a.v}));
  if (const Refusal why = refuse_long_fp8_forward(cudnn()->number, longest)) return why;
  if (const Refusal why = refuse_fp8_device(ctx)) return why;
  return a.is_training ? refuse_fp8_training(a) : nullptr;
}

}  // namespace te_fl::cuda
