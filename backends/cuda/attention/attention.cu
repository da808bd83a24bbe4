// The ops fused_attn_fwd, fused_attn_bwd and get_fused_attn_backend on the plugin's own kernels:
// checks the calls and decodes their arguments for the kernels.
#include <algorithm>

#include "attention/attention_choice.hpp"
#include "attention/attention_scalar_fp8.cuh"
#include "common/overlap.hpp"
#include "device/device.hpp"
#include "plugin/families.hpp"
#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {

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

namespace {

using backend::AttentionProblem;

// The setting TE_FL_CUDA_ATTENTION_SCRATCH_MB, in bytes. Set before the first call.
size_t most_attention_scratch = 0;

// Returns a view of the input `t`. For FP8, its member `factor` points to the tensor's scale_inv;
// code times scale_inv is the value.
HeadData read_heads(const te_fl_tensor& t, int32_t layout) {
  HeadData d = head_data(t, layout);
  if (backend::scaling(t) == TE_FL_SCALING_NONE) return d;
  d.factor = static_cast<const float*>(t.quant->scale_inv);
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
Attention make_attention(const te_fl_context& ctx, const Args& a, const AttentionProblem& p) {
  Attention r{};
  r.q = read_heads(*a.q, a.layout);
  r.k = read_heads(*a.k, a.layout);
  r.v = read_heads(*a.v, a.layout);
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
  r.softcap = p.softcap;
  r.threshold = numeric::dropout_threshold(p.dropout_p);
  r.kept = 1.0f / (1.0f - p.dropout_p);
  r.seed = ctx.rng->seed;
  r.rng_offset = ctx.rng->offset;
  r.seed_address = ctx.rng->seed_address;
  r.offset_address = ctx.rng->offset_address;
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

// Returns why the scalar kernels (attention_scalar.cu) cannot compute the call, or NULL if they
// can. Reads metadata only.
template <class Args>
Refusal refuse_heads(const Args& a) {
  const te_fl_tensor* const operands[] = {a.q, a.k, a.v};
  for (const te_fl_tensor* t : operands) {
    if (t->dl.ndim < 3) return nullptr;  // an error of the shape is reported elsewhere
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
// Refuses FP8 inputs that have column-wise data only.
Refusal refuse_columns(std::initializer_list<const te_fl_tensor*> inputs) {
  for (const te_fl_tensor* t : inputs) {
    if (t->dl.data == nullptr && backend::numel(*t) > 0) return "reads row-wise data only";
  }
  return nullptr;
}
Refusal refuse_forward(const te_fl_fused_attn_fwd_args& a) {
  if (Refusal why = refuse_columns({a.q, a.k, a.v})) return why;
  for (const te_fl_tensor* in : {a.q, a.k, a.v}) {
    if (all_dense(in, a.o) && overlaps(*a.o, *in)) return kOverlaps;
  }
  return refuse_batch(a);
}
Refusal refuse_backward(const te_fl_fused_attn_bwd_args& a) {
  if (a.saved != nullptr && a.saved->opaque != 0) {
    return "saved is an opaque record, which only the implementation that made it can read";
  }
  if (Refusal why = refuse_columns({a.d_o, a.q, a.k, a.v, a.o})) return why;
  return refuse_batch(a);
}

// Sets the kernels' pointers to the buffers in the call's scratch, which starts at `at`. The
// pointer to a buffer of 0 bytes stays NULL.
void place_scratch(const AttentionProblem& problem, const AttentionScratch& s, char* at,
                   Attention& p, bool backward) {
  const auto place = [&](PairBits& bits, size_t bytes, int64_t batches, int64_t heads) {
    if (bytes == 0) return;
    bits.matrices = batches * heads;
    bits.queries = problem.seqlen_q;
    bits.keys = problem.seqlen_kv;
    bits.batch = batches == 1 ? 0 : heads;
    bits.head = heads == 1 ? 0 : 1;
    bits.by_query = reinterpret_cast<uint64_t*>(at);
    if (backward) {
      const size_t first = pair_bits_bytes(bits.matrices, bits.queries, bits.keys);
      bits.by_key = reinterpret_cast<uint64_t*>(at + first);
    }
    at += bytes;
  };
  if (problem.attn_mask != nullptr) {
    const int64_t* shape = problem.attn_mask->dl.shape;
    place(p.hide, s.hide, shape[0], shape[1]);
  }
  place(p.keep, s.keep, problem.batch, problem.heads);
}

AttentionScratch make_scratch(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a,
                            const AttentionProblem& p) {
  if (!choose_attention(architecture(ctx.device.index), a).tensor_cores()) return {};
  return forward_scratch(p);
}
size_t forward_workspace(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a) {
  return make_scratch(ctx, a, backend::attention_problem(a)).bytes() + CodesOutputs::bytes(*a.o);
}

void fused_attn_fwd(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a) {
  const AttentionProblem problem = backend::attention_problem(a);
  Attention p = make_attention(ctx, a, problem);
  const AttentionScratch scratch = make_scratch(ctx, a, problem);
  auto* const memory = static_cast<char*>(ctx.workspace);
  place_scratch(problem, scratch, memory, p, false);
  CodesOutputs outputs(ctx, memory + scratch.bytes());
  const HeadData o = outputs.heads(*a.o, a.layout);
  const Rounding rounding = outputs.rounding(a.s_quant, true);
  float* lse = a.softmax_lse != nullptr ? backend::data<float>(*a.softmax_lse) : nullptr;
  outputs.prepare();
  attention_forward(ctx, p, o, lse, rounding,
                    choose_attention(architecture(ctx.device.index), a).tensor_cores());
  outputs.write_codes();
  if (a.saved != nullptr) a.saved->opaque = 0;
}

// Returns the bytes of two FP32 sums per row of the scores. These sums are at the start of the
// call's workspace, before the scratch that make_scratch() describes.
size_t row_sum_bytes(const te_fl_fused_attn_bwd_args& a) {
  const int64_t bytes = backend::numel(*a.softmax_lse) * static_cast<int64_t>(2 * sizeof(float));
  return static_cast<size_t>(round_up(bytes, 256));
}
// Returns the sizes of the tensor-core kernels' scratch, which follows the row sums in the
// workspace. All are 0 for the scalar kernels.
AttentionScratch make_scratch(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a,
                            const AttentionProblem& p) {
  if (!choose_attention(architecture(ctx.device.index), a).tensor_cores()) return {};
  return backward_scratch(p, a.dbias != nullptr, most_attention_scratch);
}
size_t backward_workspace(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a) {
  return row_sum_bytes(a) + make_scratch(ctx, a, backend::attention_problem(a)).bytes() +
         CodesOutputs::bytes(*a.dq) + CodesOutputs::bytes(*a.dk) + CodesOutputs::bytes(*a.dv);
}

void fused_attn_bwd(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a) {
  const AttentionProblem problem = backend::attention_problem(a);
  Attention p = make_attention(ctx, a, problem);
  AttentionGradients g{};
  g.o = read_heads(*a.o, a.layout);
  g.d_o = read_heads(*a.d_o, a.layout);
  const AttentionScratch scratch = make_scratch(ctx, a, problem);
  char* const memory = static_cast<char*>(ctx.workspace) + row_sum_bytes(a);
  place_scratch(problem, scratch, memory, p, true);
  if (scratch.score_gradients > 0) {
    g.score_gradients = reinterpret_cast<uint4*>(memory + scratch.hide + scratch.keep);
  }
  CodesOutputs outputs(ctx, memory + scratch.bytes());
  g.dq = outputs.heads(*a.dq, a.layout);
  g.dk = outputs.heads(*a.dk, a.layout);
  g.dv = outputs.heads(*a.dv, a.layout);
  g.p_codes = outputs.rounding(a.s_quant, false);
  g.ds_codes = outputs.rounding(a.dp_quant, true);
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
  g.log2_sum = g.delta + backend::numel(*a.softmax_lse);
  outputs.prepare();
  attention_backward(ctx, p, g, choose_attention(architecture(ctx.device.index), a).tensor_cores());
  outputs.write_codes();
}

template <class Args>
std::string describe_choice(const te_fl_context& ctx, const Args& a) {
  return "attention kernels " + choose_attention(architecture(ctx.device.index), a).text();
}

void get_fused_attn_backend(const te_fl_context&, const te_fl_get_fused_attn_backend_args& a) {
  const AttentionProblem p = backend::attention_problem(a);
  const bool possible = !(p.thd && p.mask.arbitrary) && refuse_heads(a) == nullptr;
  *backend::data<int32_t>(*a.backend) = !possible ? -1 : p.fp8 ? 2 : 1;
}

std::string enquiry_words(const te_fl_context&, const te_fl_get_fused_attn_backend_args&) {
  return "no kernel: the host answers from metadata";
}

constexpr uint32_t kDtypes = TE_FL_MASK_HIGH | TE_FL_MASK_FP8 | TE_FL_BIT(TE_FL_I32) |
                             TE_FL_BIT(TE_FL_U8) | TE_FL_BIT(TE_FL_BOOL);

}  // namespace

void configure_attention(size_t most_scratch) { most_attention_scratch = most_scratch; }

void append_attention(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(
      descriptor<te_fl_fused_attn_fwd_args, fused_attn_fwd, refuse_forward>("fused_attn_fwd"));
  ops.back().dtypes = kDtypes;
  ops.back().later_args = "softcap";
  ops.back().workspace = backend::workspace_thunk<te_fl_fused_attn_fwd_args, forward_workspace>;
  ops.back().describe =
      backend::describe_thunk<te_fl_fused_attn_fwd_args, describe_choice<te_fl_fused_attn_fwd_args>>;
  ops.push_back(
      descriptor<te_fl_fused_attn_bwd_args, fused_attn_bwd, refuse_backward>("fused_attn_bwd"));
  ops.back().dtypes = kDtypes;
  ops.back().later_args = "softcap";
  ops.back().workspace = backend::workspace_thunk<te_fl_fused_attn_bwd_args, backward_workspace>;
  ops.back().describe =
      backend::describe_thunk<te_fl_fused_attn_bwd_args, describe_choice<te_fl_fused_attn_bwd_args>>;
  ops.push_back(descriptor<te_fl_get_fused_attn_backend_args, get_fused_attn_backend>(
      "get_fused_attn_backend"));
  ops.back().describe = backend::describe_thunk<te_fl_get_fused_attn_backend_args, enquiry_words>;
}

}  // namespace te_fl::cuda
