// Rotary position embedding of sequences of equal length, on separate or packed Q, K, V.
#include "te_fl/ops/rope.h"

#include <algorithm>

#include "families.hpp"
#include "launch.hpp"
#include "overlap.hpp"
#include "te_fl/backend/row_layouts.hpp"

namespace te_fl::opencl {
namespace {

using backend::PackedHeads;

// The location of a tensor's heads; offset and strides in elements.
struct Place {
  const te_fl_tensor* tensor;
  int64_t offset, token_stride, group_stride;
};

// The parameters that all tensors of a call share.
struct Sequences {
  int64_t extent0, extent1;
  int32_t layout, interleaved, backward, cp_size, cp_rank;
};

// Rotates the heads of x into y. If freqs is NULL, copies them instead.
void rotate(const DeviceCall& call, const Sequences& s, const Place& x, const Place& y,
            const te_fl_tensor* freqs, int64_t heads, int64_t per_group, int64_t dim) {
  const int64_t columns = freqs != nullptr ? freqs->dl.shape[3] : 0;
  const int64_t tokens = s.extent0 * s.extent1;
  Launch(call.device, call.stream(), "rope", define("TX", x.tensor), "rope")
      .data(x.tensor)
      .data(y.tensor)
      .data(freqs)
      .value(tokens)
      .value(heads)
      .value(dim)
      .value(columns)
      .value(x.offset)
      .value(x.token_stride)
      .value(x.group_stride)
      .value(y.offset)
      .value(y.token_stride)
      .value(y.group_stride)
      .value(per_group)
      .value(s.extent0)
      .value(s.extent1)
      .value<int32_t>(s.layout == TE_FL_LAYOUT_SBHD ? 1 : 0)
      .value(s.interleaved)
      .value(s.backward)
      .value<int64_t>(s.cp_size)
      .value<int64_t>(s.cp_rank)
      .items(tokens * heads * (dim - columns / 2));
}

template <bool kBackward>
void rope(const DeviceCall& call, const te_fl_rope_rope_args& a) {
  const te_fl_tensor& x = *a.input;
  const int64_t heads = x.dl.shape[2], dim = x.dl.shape[3];
  const Sequences s{x.dl.shape[0],     x.dl.shape[1], a.layout, a.interleaved != 0 ? 1 : 0,
                    kBackward ? 1 : 0, a.cp_size,     a.cp_rank};
  rotate(call, s, {a.input, 0, heads * dim, 0}, {a.output, 0, heads * dim, 0}, a.freqs, heads,
         std::max<int64_t>(heads, 1), dim);
}

Refusal refuse_rope(const te_fl_rope_rope_args& a) {
  if (a.layout == TE_FL_LAYOUT_THD) return "rotates sequences of equal length, not thd";
  if (a.start_positions != nullptr) return "rotates from position 0, without start_positions";
  if (!all_dense(a.input, a.freqs, a.output)) return kNotContiguous;
  return overlaps_askew(*a.output, a.input) ? kOverlaps : nullptr;
}

// Returns the location of Q, K or V in the packed tensor; `offset`: its first element in a group.
Place make_part(const PackedHeads& p, const te_fl_tensor* t, int64_t offset) {
  return {t, offset, p.groups * p.width(), p.width()};
}

template <class Args>
Sequences make_sequences(const Args& a, const te_fl_tensor& qkv, bool backward) {
  return {qkv.dl.shape[0],  qkv.dl.shape[1], a.layout, a.interleaved != 0 ? 1 : 0,
          backward ? 1 : 0, a.cp_size,       a.cp_rank};
}

void qkv_forward(const DeviceCall& call, const te_fl_fused_qkv_rope_forward_args& a) {
  const PackedHeads p = backend::packed_heads(a, *a.qkv_input);
  const Sequences s = make_sequences(a, *a.qkv_input, false);
  const int64_t q = p.q_heads * p.k_dim, g = p.groups;
  rotate(call, s, make_part(p, a.qkv_input, 0), {a.q_out, 0, g * q, q}, a.q_freqs, g * p.q_heads,
         std::max<int64_t>(p.q_heads, 1), p.k_dim);
  rotate(call, s, make_part(p, a.qkv_input, q), {a.k_out, 0, g * p.k_dim, p.k_dim}, a.k_freqs, g, 1,
         p.k_dim);
  rotate(call, s, make_part(p, a.qkv_input, q + p.k_dim), {a.v_out, 0, g * p.v_dim, p.v_dim},
         nullptr, g, 1, p.v_dim);
}

void qkv_backward(const DeviceCall& call, const te_fl_fused_qkv_rope_backward_args& a) {
  const PackedHeads p = backend::packed_heads(a, *a.qkv_grad);
  const Sequences s = make_sequences(a, *a.qkv_grad, true);
  const int64_t q = p.q_heads * p.k_dim, g = p.groups;
  rotate(call, s, {a.q_grad, 0, g * q, q}, make_part(p, a.qkv_grad, 0), a.q_freqs, g * p.q_heads,
         std::max<int64_t>(p.q_heads, 1), p.k_dim);
  rotate(call, s, {a.k_grad, 0, g * p.k_dim, p.k_dim}, make_part(p, a.qkv_grad, q), a.k_freqs, g, 1,
         p.k_dim);
  rotate(call, s, {a.v_grad, 0, g * p.v_dim, p.v_dim}, make_part(p, a.qkv_grad, q + p.k_dim),
         nullptr, g, 1, p.v_dim);
}

Refusal refuse_qkv_forward(const te_fl_fused_qkv_rope_forward_args& a) {
  if (a.start_positions != nullptr) return "rotates from position 0, without start_positions";
  return all_dense(a.qkv_input, a.q_freqs, a.k_freqs, a.q_out, a.k_out, a.v_out) ? nullptr
                                                                                 : kNotContiguous;
}
Refusal refuse_qkv_backward(const te_fl_fused_qkv_rope_backward_args& a) {
  if (a.start_positions != nullptr) return "rotates from position 0, without start_positions";
  return all_dense(a.q_grad, a.k_grad, a.v_grad, a.q_freqs, a.k_freqs, a.qkv_grad) ? nullptr
                                                                                   : kNotContiguous;
}

}  // namespace

void append_rope(Ops& ops) {
  using Rope = te_fl_rope_rope_args;
  using Forward = te_fl_fused_qkv_rope_forward_args;
  using Backward = te_fl_fused_qkv_rope_backward_args;
  ops.push_back(descriptor<Rope, rope<false>, refuse_rope>("fused_rope_forward"));
  ops.push_back(descriptor<Rope, rope<true>, refuse_rope>("fused_rope_backward"));
  ops.push_back(descriptor<Forward, qkv_forward, refuse_qkv_forward>("fused_qkv_rope_forward"));
  ops.push_back(descriptor<Backward, qkv_backward, refuse_qkv_backward>("fused_qkv_rope_backward"));
}

}  // namespace te_fl::opencl
