// Rotary position embedding, on separate or packed Q, K, V.
//
// For each pair (a, b): y_a = x_a cos f_a - x_b sin f_a, and y_b = x_b cos f_b + x_a sin f_b. The
// backward is the transpose of this map, which also holds if the two angles of a pair differ.
// choose_rope() (rope_choice.hpp) divides the work of a launch.
#include "te_fl/ops/rope.h"

#include <string>

#include "common/overlap.hpp"
#include "common/value_checks.hpp"
#include "plugin/families.hpp"
#include "pointwise/rope_choice.hpp"
#include "pointwise/rope_kernels.cuh"
#include "te_fl/backend/describe.hpp"
#include "te_fl/backend/row_layouts.hpp"

namespace te_fl::cuda {
namespace {

// ---- arguments

struct NamedTable {
  const char* name;
  const te_fl_tensor* freqs;
};

Rotation make_rotation(const te_fl_tensor& freqs, bool interleaved, bool backward) {
  return {backend::data<const float>(freqs), freqs.dl.shape[3], freqs.dl.shape[0], interleaved,
          backward};
}

// Launches a kernel that checks a call's positions in device memory, if it has any, and records
// errors (value_errors.hpp). Positions beyond the table give NaN.
void check_positions(const te_fl_context& ctx, const char* op, const Positions& p, int64_t tokens,
                     const NamedTable& first, const NamedTable& second = {}) {
  PositionRules rules{nullptr, p.cu,      p.batch,  p.sbhd ? p.extent0 : p.extent1,
                      tokens,  p.cp_size, p.cp_rank};
  for (int i = 0; i < 2; ++i) {
    const NamedTable& table = i == 0 ? first : second;
    rules.tables[i] = table.name;
    rules.rows[i] = table.freqs != nullptr ? table.freqs->dl.shape[0] : 0;
  }
  if ((p.cu == nullptr && p.starts == nullptr) || p.batch == 0) return;
  rules.starts = p.starts;
  const ValueErrorSink errors = open_value_errors(ctx, op);
  position_check_kernel<<<blocks_for(p.batch), kThreads, 0, stream_of(ctx)>>>(rules, errors);
  check_launch("position_check_kernel");
  if (validates(ctx)) refuse_noted(ctx);
}

template <class Args>
Positions make_positions(const Args& a) {
  Positions p;
  p.cp_size = a.cp_size;
  p.cp_rank = a.cp_rank;
  p.sbhd = a.layout == TE_FL_LAYOUT_SBHD;
  if (a.start_positions != nullptr) p.starts = backend::data<const int32_t>(*a.start_positions);
  return p;
}

// ---- launches

// Copies the division of work from `choice` into the kernel parameter `plan`.
void divide(RopePlan& plan, const RopeChoice& choice) {
  static_assert(rope_choice::kBlockThreads == kThreads && rope_choice::kPackElements == kGroup &&
                rope_choice::kMostTokens == kMostTokens);
  plan.same = choice.same;
  plan.shared = choice.shared;
  plan.columns = static_cast<uint32_t>(choice.columns);
  plan.tokens_each = static_cast<uint32_t>(choice.tokens);
  plan.items = static_cast<uint32_t>(choice.items);
  plan.by_items = FastDiv(choice.items);
  plan.by_heads = FastDiv(plan.heads);
  plan.by_columns = FastDiv(std::max<int64_t>(choice.columns, 1));
}

template <class T, class Heads>
void launch(const te_fl_context& ctx, RopePlan& plan, const RopeChoice& choice,
            const Positions& positions, const Heads& heads) {
  // In layout sbhd without starts, tokens with the same position are adjacent.
  const bool repeats = positions.cu == nullptr && positions.starts == nullptr && positions.sbhd;
  plan.repeat = repeats ? positions.extent1 : 1;
  divide(plan, choice);
  const auto kernel = choice.kernel == RopeKernel::kPacks ? rope_kernel<T, Heads, true>
                                                          : rope_kernel<T, Heads, false>;
  const auto blocks = static_cast<unsigned>(ceil_div(plan.tokens, plan.tokens_each));
  kernel<<<blocks, kThreads, static_cast<size_t>(choice.shared_bytes()), stream_of(ctx)>>>(
      heads, plan, positions);
}

template <bool kBackward>
void rope(const te_fl_context& ctx, const te_fl_rope_rope_args& a) {
  const bool thd = a.layout == TE_FL_LAYOUT_THD;
  const te_fl_tensor& x = *a.input;
  Positions p = make_positions(a);
  int64_t tokens = x.dl.shape[0];
  if (thd) {
    p.cu = backend::data<const int32_t>(*a.cu_seqlens);
    p.batch = a.cu_seqlens->dl.shape[0] - 1;
  } else {
    p.extent0 = x.dl.shape[0], p.extent1 = x.dl.shape[1];
    p.batch = p.sbhd ? p.extent1 : p.extent0;
    tokens *= x.dl.shape[1];
  }
  const NamedTable freqs{"freqs", a.freqs};
  const int64_t heads = x.dl.shape[x.dl.ndim - 2], dim = x.dl.shape[x.dl.ndim - 1];
  const Rotation rotation = make_rotation(*a.freqs, a.interleaved != 0, kBackward);
  check_positions(ctx, kBackward ? "fused_rope_backward" : "fused_rope_forward", p, tokens, freqs);
  const RopeChoice choice = choose_rope(rope_problem(a));
  if (choice.kernel == RopeKernel::kNone) return;
  with_type(dtype_of(x), [&]<class T>(T) {
    const Separate<T> all{backend::data<const T>(x), backend::data<T>(*a.output), heads,
                          static_cast<int>(dim)};
    RopePlan plan;
    plan.rotation[0] = rotation;
    plan.tokens = tokens;
    plan.heads = static_cast<uint32_t>(heads);
    launch<T>(ctx, plan, choice, p, all);
  });
  check_launch("rope");
}

template <class Args>
Packed make_packed(const Args& a, const te_fl_tensor& qkv) {
  const backend::PackedHeads heads = backend::packed_heads(a, qkv);
  return {qkv.dl.shape[0] * qkv.dl.shape[1], heads.groups, heads.q_heads, heads.k_dim, heads.v_dim};
}

template <class Args>
Positions packed_positions(const te_fl_context& ctx, const char* op, const Args& a,
                           const te_fl_tensor& qkv) {
  Positions p = make_positions(a);
  p.extent0 = qkv.dl.shape[0], p.extent1 = qkv.dl.shape[1];
  p.batch = p.sbhd ? p.extent1 : p.extent0;
  check_positions(ctx, op, p, p.extent0 * p.extent1, {"q_freqs", a.q_freqs},
                  {"k_freqs", a.k_freqs});
  return p;
}

template <class T, class Heads>
void launch_packed(const te_fl_context& ctx, const RopeChoice& choice, const Packed& p,
                   const Positions& positions, const Rotation& q, const Rotation& k, Heads heads) {
  heads.groups = p.groups;
  heads.q_heads = static_cast<int>(p.q_heads);
  heads.k_dim = static_cast<int>(p.k_dim);
  heads.v_dim = static_cast<int>(p.v_dim);
  heads.by_group = FastDiv(p.q_heads + 2);
  RopePlan plan;
  plan.rotation[0] = q;
  plan.rotation[1] = k;
  plan.tokens = p.tokens;
  plan.heads = static_cast<uint32_t>(p.groups * (p.q_heads + 2));
  launch<T>(ctx, plan, choice, positions, heads);
}

void qkv_forward(const te_fl_context& ctx, const te_fl_fused_qkv_rope_forward_args& a) {
  const Packed p = make_packed(a, *a.qkv_input);
  const Rotation q = make_rotation(*a.q_freqs, a.interleaved != 0, false);
  const Rotation k = make_rotation(*a.k_freqs, a.interleaved != 0, false);
  const Positions positions = packed_positions(ctx, "fused_qkv_rope_forward", a, *a.qkv_input);
  const RopeChoice choice = choose_rope(rope_problem(a));
  if (choice.kernel == RopeKernel::kNone) return;
  with_type(dtype_of(*a.qkv_input), [&]<class T>(T) {
    launch_packed<T>(
        ctx, choice, p, positions, q, k,
        Joined<T, false>{backend::data<const T>(*a.qkv_input), backend::data<T>(*a.q_out),
                         backend::data<T>(*a.k_out), backend::data<T>(*a.v_out)});
  });
  check_launch("qkv_rope_forward");
}
void qkv_backward(const te_fl_context& ctx, const te_fl_fused_qkv_rope_backward_args& a) {
  const Packed p = make_packed(a, *a.qkv_grad);
  const Rotation q = make_rotation(*a.q_freqs, a.interleaved != 0, true);
  const Rotation k = make_rotation(*a.k_freqs, a.interleaved != 0, true);
  const Positions positions = packed_positions(ctx, "fused_qkv_rope_backward", a, *a.qkv_grad);
  const RopeChoice choice = choose_rope(rope_problem(a));
  if (choice.kernel == RopeKernel::kNone) return;
  with_type(dtype_of(*a.qkv_grad), [&]<class T>(T) {
    launch_packed<T>(
        ctx, choice, p, positions, q, k,
        Joined<T, true>{backend::data<T>(*a.qkv_grad), backend::data<const T>(*a.q_grad),
                        backend::data<const T>(*a.k_grad), backend::data<const T>(*a.v_grad)});
  });
  check_launch("qkv_rope_backward");
}

// True if a token has too many elements for the kernels' 32-bit item counters.
bool is_large(int64_t heads, int64_t dim) { return heads * dim >= int64_t{1} << 30; }
constexpr Refusal kLargeToken = "a token has 2^30 elements or more";

Refusal refuse_rope(const te_fl_rope_rope_args& a) {
  if (!all_dense(a.input, a.output, a.freqs, a.start_positions, a.cu_seqlens))
    return kNotContiguous;
  const te_fl_dltensor& x = a.input->dl;
  if (x.ndim >= 2 && is_large(x.shape[x.ndim - 2], x.shape[x.ndim - 1])) return kLargeToken;
  return overlaps_askew(*a.output, *a.input) ? kOverlaps : nullptr;
}
template <class Args>
Refusal refuse_packed(const Args& a, const te_fl_tensor* whole, const te_fl_tensor* q,
                      const te_fl_tensor* k, const te_fl_tensor* v) {
  if (!all_dense(whole, q, k, v, a.q_freqs, a.k_freqs, a.start_positions)) return kNotContiguous;
  if (is_large(whole->dl.shape[2], whole->dl.shape[3])) return kLargeToken;
  return overlaps(*whole, *q) || overlaps(*whole, *k) || overlaps(*whole, *v) ? kOverlaps : nullptr;
}
Refusal refuse_qkv_forward(const te_fl_fused_qkv_rope_forward_args& a) {
  return refuse_packed(a, a.qkv_input, a.q_out, a.k_out, a.v_out);
}
Refusal refuse_qkv_backward(const te_fl_fused_qkv_rope_backward_args& a) {
  return refuse_packed(a, a.qkv_grad, a.q_grad, a.k_grad, a.v_grad);
}

template <class Args>
std::string words_of_rope(const te_fl_context&, const Args& a) {
  return "rope kernel " + choose_rope(rope_problem(a)).text();
}
template <class Args, auto F, auto Refuses>
void append_rope(std::vector<te_fl_op_desc>& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().describe = backend::describe_thunk<Args, words_of_rope<Args>>;
}

}  // namespace

void append_rope(std::vector<te_fl_op_desc>& ops) {
  using Rope = te_fl_rope_rope_args;
  using Forward = te_fl_fused_qkv_rope_forward_args;
  using Backward = te_fl_fused_qkv_rope_backward_args;
  append_rope<Rope, rope<false>, refuse_rope>(ops, "fused_rope_forward");
  append_rope<Rope, rope<true>, refuse_rope>(ops, "fused_rope_backward");
  append_rope<Forward, qkv_forward, refuse_qkv_forward>(ops, "fused_qkv_rope_forward");
  append_rope<Backward, qkv_backward, refuse_qkv_backward>(ops, "fused_qkv_rope_backward");
}

}  // namespace te_fl::cuda
