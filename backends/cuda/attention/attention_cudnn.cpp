// The ops fused_attn_fwd and fused_attn_bwd on cuDNN: makes a plan per signature, and runs calls
// with it.
#include <atomic>
#include <cfloat>
#include <memory>

#include "attention/cudnn_attention_graph.hpp"
#include "attention/cudnn_fp8_scalars.hpp"
#include "attention/cudnn_lengths.hpp"
#include "attention/cudnn_numbers.hpp"
#include "attention/cudnn_rules.hpp"
#include "plugin/families.hpp"
#include "te_fl/attention/problem.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::cuda {
namespace {

using backend::AttentionProblem;
using backend::HeadsView;
namespace id = attention_id;

constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

struct Plan {
  std::string refusal;  // empty, or the reason why cuDNN has no plan for this signature
  CudnnPlan plan;
  CudnnAttention shape;
  bool variable = false;  // cu_seqlens give each sequence its own length
  int64_t lse_size = 0;
  std::atomic<bool> captured{false};
  // Byte offsets into the scratch.
  size_t sum = 0, accumulator = 0, stats = 0, lengths = 0, offsets = 0, fp8 = 0, bytes = 0;
  bool is_fp8() const { return shape.dtype == cudnn_data::kE4M3; }
};

int ragged_tensors(const Plan& p, bool backward) {
  if (!p.shape.ragged) return 0;
  return (backward ? 8 : 4) + (p.shape.stats ? 1 : 0);
}
void lay_out(Plan& p, bool backward) {
  const CudnnAttention& s = p.shape;
  p.bytes = aligned(p.plan.workspace());
  const auto take = [&](int64_t bytes) {
    const size_t at = p.bytes;
    p.bytes += aligned(static_cast<size_t>(bytes));
    return at;
  };
  const int64_t rows = s.batch * s.heads * s.seqlen_q;
  if (p.is_fp8()) p.fp8 = take(sizeof(Fp8Scratch));
  if (backward && !p.is_fp8()) {
    p.sum = take(rows * 4);
    if (!s.deterministic) p.accumulator = take(rows * s.dim * 4);
    if (p.variable) p.stats = take(p.lse_size * 4);
  }
  if (s.lengths) p.lengths = take(s.batch * 2 * 4);
  if (s.ragged) p.offsets = take((s.batch + 1) * ragged_tensors(p, backward) * 8);
}

// Strides in cuDNN's order. A dimension of extent 1 gets the stride of a compact tensor; its stride
// is never used.
Extents strides_of(const HeadsView& v, bool ragged, int64_t most) {
  Extents e{v.stride_batch, v.stride_head, v.stride_seq, 1};
  if (v.seqlen == 1) e[2] = v.heads * v.dim;
  if (v.heads == 1) e[1] = v.dim;
  if (ragged) e[0] = most * e[2];
  if (!ragged && v.batch == 1) e[0] = v.seqlen * e[2];
  return e;
}

// Up to version 9.15.0, cuDNN's backward reads past the last key unless the number of keys is a
// multiple of 128 or the plan gets explicit sequence lengths.
bool wants_lengths(const AttentionProblem& p, bool backward) {
  return backward && p.seqlen_kv % 128 != 0 && cudnn()->number <= 91500;
}

int library_type(const te_fl_tensor& q) {
  switch (dtype_index(q.dl.dtype)) {
    case TE_FL_F16:
      return cudnn_data::kF16;
    case TE_FL_BF16:
      return cudnn_data::kBF16;
    default:
      return cudnn_data::kE4M3;
  }
}

template <class Args>
void describe(const Args& a, bool backward, Plan& out) {
  const AttentionProblem p = backend::attention_problem(a);
  out.variable = p.variable_length();
  out.lse_size = a.softmax_lse != nullptr ? backend::numel(*a.softmax_lse) : 0;
  CudnnAttention& s = out.shape;
  s.batch = p.batch;
  s.heads = p.heads;
  s.kv_heads = p.kv_heads;
  s.seqlen_q = p.seqlen_q;
  s.seqlen_kv = p.seqlen_kv;
  s.dim = p.head_dim;
  s.dim_v = p.head_dim_v;
  s.dtype = library_type(*a.q);
  s.mask = p.mask;
  s.scale = p.scale;
  s.ragged = p.thd;
  s.lengths = out.variable || wants_lengths(p, backward);
  s.stats = backward || a.softmax_lse != nullptr;
  const auto strides = [&](const te_fl_tensor& t, int64_t most) {
    return strides_of(backend::heads_view("tensor", t, a.layout), p.thd, most);
  };
  s.q = strides(*a.q, s.seqlen_q);
  s.k = strides(*a.k, s.seqlen_kv);
  s.v = strides(*a.v, s.seqlen_kv);
  s.o = strides(*a.o, s.seqlen_q);
  if constexpr (std::is_same_v<Args, te_fl_fused_attn_bwd_args>) {
    s.d_o = strides(*a.d_o, s.seqlen_q);
    s.dq = strides(*a.dq, s.seqlen_q);
    s.dk = strides(*a.dk, s.seqlen_kv);
    s.dv = strides(*a.dv, s.seqlen_kv);
  }
}

CudnnPlan plan_for(const CudnnAttention& s, bool backward, void* properties) {
  if (s.dtype != cudnn_data::kE4M3) {
    return backward ? attention_backward_plan(s, properties)
                    : attention_forward_plan(s, properties);
  }
  if (s.deterministic) {
    backend::unsupported("cuDNN's FP8 backward sums the gradient of q in no fixed order");
  }
  return backward ? attention_fp8_backward_plan(s, properties)
                  : attention_fp8_forward_plan(s, properties);
}

template <class Args>
constexpr bool kBackward = std::is_same_v<Args, te_fl_fused_attn_bwd_args>;

template <class Args>
te_fl_status prepare(void* self, const te_fl_context* ctx, const void* raw, void** plan) noexcept {
  return backend::guard(ctx->errors, [&] {
    refuse_after_fork();
    const backend::Widened<Args> args(raw);
    const DeviceGuard guard(ctx->device.index);
    auto made = std::make_unique<Plan>();
    describe(*args, kBackward<Args>, *made);
    made->shape.deterministic = kBackward<Args> && (ctx->flags & TE_FL_CALL_DETERMINISTIC) != 0;
    void* properties = static_cast<CudnnState*>(self)->properties(ctx->device.index);
    try {
      made->plan = plan_for(made->shape, kBackward<Args>, properties);
    } catch (const backend::Error& e) {
      if (TE_FL_STATUS_CODE(e.status()) != TE_FL_UNSUPPORTED) throw;
      made->refusal = e.what();  // cached, so that the next such call does not build the plan again
    }
    lay_out(*made, kBackward<Args>);
    *plan = made.release();
  });
}

void destroy_plan(void* self, void* raw) {
  std::unique_ptr<Plan> plan(static_cast<Plan*>(raw));
  if (!plan->captured) return;
  // A CUDA graph that captured the plan's kernels may be replayed until the plugin is unloaded.
  static_cast<CudnnState*>(self)->keep(std::make_shared<CudnnPlan>(std::move(plan->plan)));
}

const Plan& require_plan(const te_fl_context& ctx) {
  if (ctx.plan == nullptr) {
    throw backend::Error(TE_FL_INTERNAL | TE_FL_CLEAN,
                         "cuDNN's attention was called without its plan");
  }
  auto& plan = *static_cast<Plan*>(ctx.plan);
  if (!plan.refusal.empty()) backend::unsupported(plan.refusal);
  if ((ctx.flags & TE_FL_CALL_CAPTURING) != 0) plan.captured = true;
  return plan;
}

te_fl_status workspace(void*, const te_fl_context* ctx, const void*, size_t* bytes) noexcept {
  return backend::guard(ctx->errors, [&] { *bytes = require_plan(*ctx).bytes; });
}

class CudnnCall {
 public:
  template <class Args>
  CudnnCall(CudnnState& state, const te_fl_context& ctx, const Args& a)
      : state_(state),
        ctx_(ctx),
        plan_(require_plan(ctx)),
        stream_(static_cast<cudaStream_t>(ctx.stream)) {
    if (ctx.workspace_bytes < plan_.bytes) {
      backend::invalid("the workspace has " + std::to_string(ctx.workspace_bytes) +
                       " bytes, cuDNN's attention needs " + std::to_string(plan_.bytes));
    }
    const bool thd = plan_.shape.ragged;
    const auto side = [&](const te_fl_tensor* cu, const te_fl_tensor* padded, const te_fl_tensor& t,
                          int64_t most) {
      SideLengths s;
      if (cu != nullptr) {
        s.cu = backend::data<const int32_t>(*cu);
        s.stride = backend::stride(*cu, 0);
      }
      if (padded != nullptr) {
        s.padded = backend::data<const int32_t>(*padded);
        s.padded_stride = backend::stride(*padded, 0);
      }
      s.tokens = thd ? t.dl.shape[0] : most;
      s.most = most;
      return s;
    };
    job_.spans = {side(a.cu_seqlens_q, a.cu_seqlens_q_padded, *a.q, plan_.shape.seqlen_q),
                  side(a.cu_seqlens_kv, a.cu_seqlens_kv_padded, *a.k, plan_.shape.seqlen_kv),
                  plan_.shape.batch, thd};
  }

  void* scratch(size_t offset) const { return static_cast<char*>(ctx_.workspace) + offset; }
  bool variable() const { return plan_.variable; }
  const CudnnAttention& shape() const { return plan_.shape; }

  void bind(int tensor, void* data) { bindings_[count_++] = {tensor, data}; }
  // Binds q, k, v, o, one of their gradients, or the softmax statistics. In layout thd, also binds
  // the sequences' offsets. `stride`: elements from one token to the next.
  void bind_ragged(int tensor, void* data, int64_t stride, bool query) {
    bind(tensor, data);
    if (!shape().ragged) return;
    auto* offsets =
        static_cast<int64_t*>(scratch(plan_.offsets)) + job_.count * (shape().batch + 1);
    bind(id::kOffsets + tensor, offsets);
    job_.tensors[job_.count++] = {offsets, stride, query};
  }
  void bind_heads(int tensor, const te_fl_tensor& t, const Extents& strides, bool query) {
    bind_ragged(tensor, backend::data<void>(t), strides[2], query);
  }

  bool fp8() const { return plan_.is_fp8(); }
  // bind_inverse() binds an FP8 input and its inverse scale; bind_codes() binds an FP8 output whose
  // scale the call supplies.
  void bind_inverse(int tensor, const te_fl_tensor& t) {
    bind(id::kInverse + tensor, t.quant->scale_inv);
  }
  void bind_codes(int tensor, const te_fl_tensor& t) {
    bind(id::kScale + tensor, t.quant->scale);
    bind(id::kAmax + tensor, &fp8_.scratch->amax[fp8_.count]);
    fp8_.outputs[fp8_.count++] = fp8_output(t);
  }
  // Binds the scales of the probabilities and, in the backward, of the gradient of the scores.
  void bind_inner(const te_fl_tensor& s_quant, const te_fl_tensor* dp_quant) {
    fp8_.scratch = static_cast<Fp8Scratch*>(scratch(plan_.fp8));
    fp8_.scale = shape().scale;
    fp8_.p = fp8_output(s_quant);
    bind(id::kInverse + id::kP, &fp8_.scratch->inverse_p);
    bind(id::kScale + id::kP, &fp8_.scratch->scale_p);
    if (dp_quant == nullptr) {
      // cuDNN's forward quantises exp(s - running row maximum), which reaches 1, and divides by the
      // row's sum after the matrix product P V. A scale above 448 would therefore saturate.
      // (Measured with cuDNN 9.19: with 448 / amax of the normalised probabilities as scale, o is
      // wrong by 60 %.)
      fp8_.most_scale_p = 448.0f;
      bind(id::kAmax + id::kP, &fp8_.scratch->amax_p);
      return;
    }
    fp8_.most_scale_p = FLT_MAX;
    fp8_.p.scale_inv = fp8_.p.amax = nullptr;  // the backward reads P's scale only
    fp8_.ds = fp8_output(*dp_quant);
    bind(id::kInverse + id::kDS, &fp8_.scratch->inverse_ds);
    bind(id::kScale + id::kDS, &fp8_.scratch->scale_ds);
    bind(id::kAmax + id::kDS, &fp8_.scratch->amax_ds);
  }

  void run() {
    if (fp8()) fp8_begin(stream_, fp8_);
    if (shape().lengths) {
      job_.q = static_cast<int32_t*>(scratch(plan_.lengths));
      job_.kv = job_.q + shape().batch;
      bind(id::kLengthsQ, job_.q);
      bind(id::kLengthsKv, job_.kv);
      write_lengths(stream_, job_);
    }
    plan_.plan.run(state_, ctx_.device.index, stream_, {bindings_, count_}, ctx_.workspace);
    if (fp8()) fp8_end(stream_, fp8_);
  }

  void clear(const te_fl_tensor& t, const Extents& strides, int64_t heads, int64_t dim, bool query,
             float* lse) const {
    const HeadRows rows{backend::data<uint16_t>(t),
                        shape().ragged ? 0 : strides[0],
                        strides[1],
                        strides[2],
                        heads,
                        query ? shape().seqlen_q : shape().seqlen_kv,
                        dim};
    clear_rows(stream_, {job_.spans, shape().mask, rows, query, lse});
  }

  float* stats_copy(const float* lse, int64_t n) const {
    auto* out = static_cast<float*>(scratch(plan_.stats));
    copy_stats(stream_, lse, out, n);
    return out;
  }
  void bind_scratch() {
    bind(id::kSum, scratch(plan_.sum));
    if (!shape().deterministic) bind(id::kAccumulator, scratch(plan_.accumulator));
  }

 private:
  CudnnState& state_;
  const te_fl_context& ctx_;
  const Plan& plan_;
  cudaStream_t stream_;
  LengthsJob job_{};
  Fp8Job fp8_{};
  CudnnPlan::Binding bindings_[32];
  size_t count_ = 0;
};

void forward(CudnnState& state, const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a) {
  CudnnCall call(state, ctx, a);
  const CudnnAttention& s = call.shape();
  call.bind_heads(id::kQ, *a.q, s.q, true);
  call.bind_heads(id::kK, *a.k, s.k, false);
  call.bind_heads(id::kV, *a.v, s.v, false);
  call.bind_heads(id::kO, *a.o, s.o, true);
  float* lse = a.softmax_lse != nullptr ? backend::data<float>(*a.softmax_lse) : nullptr;
  if (lse != nullptr) call.bind_ragged(id::kStats, lse, s.heads, true);
  if (call.fp8()) {
    call.bind_inverse(id::kQ, *a.q);
    call.bind_inverse(id::kK, *a.k);
    call.bind_inverse(id::kV, *a.v);
    call.bind_inner(*a.s_quant, nullptr);
    call.bind_codes(id::kO, *a.o);
  }
  call.run();
  if (call.variable()) call.clear(*a.o, s.o, s.heads, s.dim_v, true, lse);
  if (a.saved != nullptr) a.saved->opaque = 0;
}

void backward(CudnnState& state, const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a) {
  CudnnCall call(state, ctx, a);
  const CudnnAttention& s = call.shape();
  call.bind_heads(id::kQ, *a.q, s.q, true);
  call.bind_heads(id::kK, *a.k, s.k, false);
  call.bind_heads(id::kV, *a.v, s.v, false);
  call.bind_heads(id::kO, *a.o, s.o, true);
  call.bind_heads(id::kDO, *a.d_o, s.d_o, true);
  call.bind_heads(id::kDQ, *a.dq, s.dq, true);
  call.bind_heads(id::kDK, *a.dk, s.dk, false);
  call.bind_heads(id::kDV, *a.dv, s.dv, false);
  auto* lse = backend::data<float>(*a.softmax_lse);
  if (call.variable()) lse = call.stats_copy(lse, backend::numel(*a.softmax_lse));
  call.bind_ragged(id::kStats, lse, s.heads, true);
  if (call.fp8()) {
    call.bind_inverse(id::kQ, *a.q);
    call.bind_inverse(id::kK, *a.k);
    call.bind_inverse(id::kV, *a.v);
    call.bind_inverse(id::kO, *a.o);
    call.bind_inverse(id::kDO, *a.d_o);
    call.bind_inner(*a.s_quant, a.dp_quant);
    call.bind_codes(id::kDQ, *a.dq);
    call.bind_codes(id::kDK, *a.dk);
    call.bind_codes(id::kDV, *a.dv);
  } else {
    call.bind_scratch();
  }
  call.run();
  if (!call.variable()) return;
  call.clear(*a.dq, s.dq, s.heads, s.dim, true, nullptr);
  call.clear(*a.dk, s.dk, s.kv_heads, s.dim, false, nullptr);
  call.clear(*a.dv, s.dv, s.kv_heads, s.dim_v, false, nullptr);
}

template <class Args, auto F>
te_fl_status run_with_state(void* self, const te_fl_context* ctx, const void* raw) noexcept {
  return backend::guard(ctx->errors, [&] {
    refuse_after_fork();
    const backend::Widened<Args> args(raw);
    const DeviceGuard guard(ctx->device.index);
    F(*static_cast<CudnnState*>(self), *ctx, *args);
  });
}

// Returns text that describes how cuDNN computes the call (for te_fl_op_desc.describe).
template <class Args>
std::string describe_choice(const te_fl_context& ctx, const Args& a) {
  const Cudnn* library = cudnn();
  if (library == nullptr) backend::unsupported(cudnn_missing());
  const size_t n = library->number;
  std::string t = "cuDNN " + std::to_string(n / 10000) + "." + std::to_string(n / 100 % 100) + "." +
                  std::to_string(n % 100) + ": graph of the " +
                  (kBackward<Args> ? "backward" : "forward");
  t += library_type(*a.q) == cudnn_data::kE4M3 ? " in FP8" : "";
  const AttentionProblem p = backend::attention_problem(a);
  if (p.variable_length()) t += ", lengths by cu_seqlens";
  const bool fixed = kBackward<Args> && (ctx.flags & TE_FL_CALL_DETERMINISTIC) != 0;
  if (fixed) t += ", deterministic";
  return t + ": no dropout, bias, ALiBi, sinks or mask tensor";
}

void enquire(CudnnState&, const te_fl_context&, const te_fl_get_fused_attn_backend_args& a) {
  (void)backend::attention_problem(a);
  *backend::data<int32_t>(*a.backend) = a.q->quant != nullptr ? 2 : 1;
}

constexpr int32_t kPriority = TE_FL_PRIORITY_VENDOR + 10;  // preferred to the plugin's own kernels

std::string enquiry_words(const te_fl_context&, const te_fl_get_fused_attn_backend_args&) {
  return "no kernel: the host answers from metadata";
}

template <class Args, auto F, auto Refuses>
te_fl_op_desc describe_op(const char* name, CudnnState& state) {
  te_fl_op_desc op;
  op.op_name = name;
  op.impl_id = "vendor.cuda.cudnn";
  op.kind = TE_FL_KIND_VENDOR;
  op.priority = kPriority;
  // The backward sums in a fixed order only if the call sets TE_FL_CALL_DETERMINISTIC.
  op.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_GRAPH_SAFE | TE_FL_OP_DETERMINISTIC;
  op.min_arch = 80;
  op.dtypes = TE_FL_BIT(TE_FL_F16) | TE_FL_BIT(TE_FL_BF16) | TE_FL_BIT(TE_FL_F32) |
              TE_FL_BIT(TE_FL_F8E4M3) | TE_FL_BIT(TE_FL_F8E5M2) | TE_FL_BIT(TE_FL_I32) |
              TE_FL_BIT(TE_FL_U8) | TE_FL_BIT(TE_FL_BOOL);
  op.scalings = TE_FL_BIT(TE_FL_SCALING_NONE) | TE_FL_BIT(TE_FL_SCALING_TENSOR);
  op.device_types = uint64_t{1} << TE_FL_DEVICE_CUDA;
  op.self = &state;
  op.run = run_with_state<Args, F>;
  op.supports = backend::refusal_thunk<Args, Refuses>;
  return op;
}
template <class Args, auto F, auto Refuses>
te_fl_op_desc describe_planned(const char* name, CudnnState& state) {
  te_fl_op_desc op = describe_op<Args, F, Refuses>(name, state);
  op.workspace = workspace;
  op.prepare = prepare<Args>;
  op.destroy_plan = destroy_plan;
  op.describe = backend::describe_thunk<Args, describe_choice<Args>>;
  return op;
}

}  // namespace

void append_attention_cudnn(std::vector<te_fl_op_desc>& ops, CudnnState& state) {
  using Forward = te_fl_fused_attn_fwd_args;
  using Backward = te_fl_fused_attn_bwd_args;
  using Enquiry = te_fl_get_fused_attn_backend_args;
  ops.push_back(describe_planned<Forward, forward, refuse_cudnn_forward>("fused_attn_fwd", state));
  ops.push_back(
      describe_planned<Backward, backward, refuse_cudnn_backward>("fused_attn_bwd", state));
  ops.push_back(
      describe_op<Enquiry, enquire, refuse_cudnn_enquiry>("get_fused_attn_backend", state));
  ops.back().describe = backend::describe_thunk<Enquiry, enquiry_words>;
}

}  // namespace te_fl::cuda
