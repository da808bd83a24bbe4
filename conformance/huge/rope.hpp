// Rotary embedding of huge tensors, for separate and packed Q, K and V, in all layouts.
#pragma once

#include <cstring>

#include "conformance/huge/cases.hpp"

namespace te_fl::huge::rope_calls {

constexpr int64_t kLength = 256, kShift = 100;  // sequence length; change of thd's lengths
struct Heads {
  int64_t heads, dim, columns;  // only the first `columns` of each head are rotated
};
constexpr Heads kAligned{16, 128, 96}, kOdd{3, 50, 34};

// The RoPE angles of each position. The two columns that are rotated together have equal angles.
struct Angles {
  Tensor tensor;
  std::vector<float> values;
  int64_t columns;
  bool interleaved;

  Angles(Run& run, int64_t positions, int64_t r, bool neighbours, uint32_t seed)
      : columns(r), interleaved(neighbours) {
    const Pattern pattern(seed);
    for (int64_t i = 0; i < positions * r; ++i) {
      values.push_back(3 * pattern.at(i / r * 64 + (neighbours ? i % r / 2 : i % (r / 2))));
    }
    tensor = run.output({positions, 1, 1, r}, DType::kF32);
    std::vector<uint8_t> bytes(values.size() * 4);
    std::memcpy(bytes.data(), values.data(), bytes.size());
    run.repeat(tensor, bytes);
  }
  // Element d of a head with the elements x(0), x(1), ..., rotated by the angles of a position;
  // sign -1: rotated back.
  double rotated(int64_t position, int64_t d, double sign, const Value& x) const {
    if (d >= columns) return x(d);
    const bool first = interleaved ? d % 2 == 0 : d < columns / 2;
    const int64_t step = interleaved ? 1 : columns / 2, other = first ? d + step : d - step;
    const double angle = values[static_cast<size_t>(position * columns + d)];
    return x(d) * std::cos(angle) + sign * (first ? -x(other) : x(other)) * std::sin(angle);
  }
};

struct Layout {
  int kind;
  int64_t sequences;
  std::vector<int32_t> starts;  // for thd: start of each sequence

  Layout(const Run& run, int k, int64_t token) : kind(k) {
    sequences = (run.rows(token, 1) + kLength - 1) / kLength;
    if (kind != TE_FL_LAYOUT_THD) return;
    sequences += sequences % 2;
    for (int64_t s = 0; s <= sequences; ++s) {
      starts.push_back(static_cast<int32_t>(s * kLength + (s % 2 != 0 ? kShift : 0)));
    }
  }
  int64_t tokens() const { return sequences * kLength; }
  Shape shape(int64_t heads, int64_t width) const {
    if (kind == TE_FL_LAYOUT_THD) return {tokens(), heads, width};
    return kind == TE_FL_LAYOUT_SBHD ? Shape{kLength, sequences, heads, width}
                                     : Shape{sequences, kLength, heads, width};
  }
  int64_t position(int64_t token) const {
    if (kind == TE_FL_LAYOUT_SBHD) return token / sequences;
    if (kind == TE_FL_LAYOUT_BSHD) return token % kLength;
    const int64_t pair = token % (2 * kLength), first = kLength + kShift;
    return pair < first ? pair : pair - first;
  }
};

inline void rope(Run& run, int layout_kind, const Heads& h, bool backward, bool interleaved) {
  const Pattern pattern(1);
  const Layout layout(run, layout_kind, h.heads * h.dim);
  const Shape shape = layout.shape(h.heads, h.dim);
  const Tensor x = run.input(shape, pattern), y = run.output(shape);
  const Angles angles(run, kLength + kShift, h.columns, interleaved, 7);
  Tensor starts;
  if (!layout.starts.empty()) starts = run.integers(layout.starts);
  te_fl_rope_rope_args args{};
  args.input = x, args.output = y, args.freqs = angles.tensor, args.cu_seqlens = starts;
  args.layout = layout_kind, args.interleaved = interleaved;
  run.call(backward ? "fused_rope_backward" : "fused_rope_forward", &args);
  run.expect(
      y, "output",
      [&](int64_t i) {
        const int64_t head = i / h.dim * h.dim;
        return angles.rotated(layout.position(i / (h.heads * h.dim)), i % h.dim, backward ? -1 : 1,
                              [&](int64_t d) { return pattern.at(head + d); });
      },
      0x1p-8, 1e-4);
}

// Packed groups: each has `heads` query heads, a key head and a value head.
struct Groups {
  int64_t groups, heads, dim, v_dim, columns;
  int64_t width() const { return (heads + 1) * dim + v_dim; }
};
constexpr Groups kAlignedGroups{8, 4, 64, 64, 64}, kOddGroups{3, 2, 22, 13, 10};

inline void qkv_forward(Run& run, int layout_kind, const Groups& g) {
  const Pattern pattern(1);
  const Layout layout(run, layout_kind, g.groups * g.width());
  const Tensor qkv = run.input(layout.shape(g.groups, g.width()), pattern);
  const Tensor q = run.output(layout.shape(g.groups * g.heads, g.dim)),
               k = run.output(layout.shape(g.groups, g.dim)),
               v = run.output(layout.shape(g.groups, g.v_dim));
  const Angles q_angles(run, kLength, g.columns, false, 7),
      k_angles(run, kLength, g.columns, false, 8);
  te_fl_fused_qkv_rope_forward_args args{};
  args.qkv_input = qkv, args.q_out = q, args.k_out = k, args.v_out = v;
  args.q_freqs = q_angles.tensor, args.k_freqs = k_angles.tensor;
  args.q_dim = g.heads * g.dim, args.k_dim = g.dim, args.v_dim = g.v_dim, args.layout = layout_kind;
  run.call("fused_qkv_rope_forward", &args);
  // Checks one output. In the packed input, its head `head` (of [.., heads of width `width`])
  // begins `first` elements after the start of its group.
  const auto part = [&](const Tensor& t, const char* name, int64_t heads, int64_t width,
                        int64_t first, const Angles* angles) {
    run.expect(
        t, name,
        [&](int64_t i) {
          const int64_t head = i / width, group = head / heads;
          const int64_t begin = group * g.width() + first + head % heads * width;
          const auto x = [&](int64_t d) { return pattern.at(begin + d); };
          if (angles == nullptr) return double{x(i % width)};
          return angles->rotated(layout.position(group / g.groups), i % width, 1, x);
        },
        0x1p-8, 1e-4);
  };
  part(q, "q_out", g.heads, g.dim, 0, &q_angles);
  part(k, "k_out", 1, g.dim, g.heads * g.dim, &k_angles);
  part(v, "v_out", 1, g.v_dim, (g.heads + 1) * g.dim, nullptr);
}

inline void qkv_backward(Run& run, int layout_kind, const Groups& g) {
  const Pattern dq(1), dk(2), dv(3);
  const Layout layout(run, layout_kind, g.groups * g.width());
  const Tensor q = run.input(layout.shape(g.groups * g.heads, g.dim), dq),
               k = run.input(layout.shape(g.groups, g.dim), dk),
               v = run.input(layout.shape(g.groups, g.v_dim), dv);
  const Tensor qkv = run.output(layout.shape(g.groups, g.width()));
  const Angles q_angles(run, kLength, g.columns, false, 7),
      k_angles(run, kLength, g.columns, false, 8);
  te_fl_fused_qkv_rope_backward_args args{};
  args.qkv_grad = qkv, args.q_grad = q, args.k_grad = k, args.v_grad = v;
  args.q_freqs = q_angles.tensor, args.k_freqs = k_angles.tensor;
  args.q_dim = g.heads * g.dim, args.k_dim = g.dim, args.v_dim = g.v_dim, args.layout = layout_kind;
  run.call("fused_qkv_rope_backward", &args);
  run.expect(
      qkv, "qkv_grad",
      [&](int64_t i) {
        const int64_t group = i / g.width(), at = i % g.width(), d = at % g.dim;
        const int64_t position = layout.position(group / g.groups);
        if (at < g.heads * g.dim) {
          const int64_t begin = (group * g.heads + at / g.dim) * g.dim;
          return q_angles.rotated(position, d, -1, [&](int64_t e) { return dq.at(begin + e); });
        }
        if (at < (g.heads + 1) * g.dim) {
          return k_angles.rotated(position, d, -1,
                                  [&](int64_t e) { return dk.at(group * g.dim + e); });
        }
        return double{dv.at(group * g.v_dim + at - (g.heads + 1) * g.dim)};
      },
      0x1p-8, 1e-4);
}

}  // namespace te_fl::huge::rope_calls
