// Rotary position embedding, on separate or packed Q, K, V.
//
// Each output element is x * cosine + partner * sine. The tables of a position contain cosines and
// signed sines; for the backward (the transposed map) an element's sine is that of its partner's
// angle.
#include "te_fl/ops/rope.h"

#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "convert.hpp"
#include "families.hpp"
#include "rope_positions.hpp"
#include "te_fl/backend/row_layouts.hpp"
#include "tensor_view.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "rope.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// Rotates columns [0, columns) of one head. `cosine` and `sine` must have padded(columns) entries.
// x and y may be the same memory, because an element and its partner are read before either is
// written. Out: T, or float if y is a buffer.
template <class T, class Out>
void RotateHead(const T* x, const float* cosine, const float* sine, int64_t columns,
                bool interleaved, Out* y) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  if (interleaved) {
    for (int64_t i = 0; i < columns; i += lanes) {
      const int64_t n = std::min(lanes, columns - i);
      const VF v = n == lanes ? LoadF32(x + i) : LoadPart(x + i, static_cast<size_t>(n));
#if HWY_TARGET == HWY_SCALAR
      // With single-lane vectors, processes pair by pair.
      (void)v;
      if (i % 2 != 0) continue;
      const VF v0 = LoadF32(x + i), v1 = LoadF32(x + i + 1);
      StoreF32(hn::MulAdd(v1, LoadF32(sine + i), hn::Mul(v0, LoadF32(cosine + i))), y + i);
      StoreF32(hn::MulAdd(v0, LoadF32(sine + i + 1), hn::Mul(v1, LoadF32(cosine + i + 1))),
               y + i + 1);
#else
      const VF partner = hn::Shuffle2301(v);
      const VF r = hn::MulAdd(partner, LoadF32(sine + i), hn::Mul(v, LoadF32(cosine + i)));
      if (n == lanes) {
        StoreF32(r, y + i);
      } else {
        StorePart(r, y + i, static_cast<size_t>(n));
      }
#endif
    }
  } else {
    const int64_t half = columns / 2;
    for (int64_t i = 0; i < half; i += lanes) {
      const int64_t n = std::min(lanes, half - i);
      const auto rest = static_cast<size_t>(n);
      const bool whole = n == lanes;
      const VF a = whole ? LoadF32(x + i) : LoadPart(x + i, rest);
      const VF b = whole ? LoadF32(x + half + i) : LoadPart(x + half + i, rest);
      const VF ra = hn::MulAdd(b, LoadF32(sine + i), hn::Mul(a, LoadF32(cosine + i)));
      const VF rb = hn::MulAdd(a, LoadF32(sine + half + i), hn::Mul(b, LoadF32(cosine + half + i)));
      if (whole) {
        StoreF32(ra, y + i);
        StoreF32(rb, y + half + i);
      } else {
        StorePart(ra, y + i, rest);
        StorePart(rb, y + half + i, rest);
      }
    }
  }
}

// Rotates the first `columns` elements of a head, into y or, if y is NULL, as FP32 into `buffer`.
void RotateHeadByDtype(int dtype, const void* x, const float* cosine, const float* sine,
                       int64_t columns, bool interleaved, float* buffer, void* y) {
  const auto rotate = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const T* from = static_cast<const T*>(x);
    if (y == nullptr) {
      RotateHead(from, cosine, sine, columns, interleaved, buffer);
    } else {
      RotateHead(from, cosine, sine, columns, interleaved, static_cast<T*>(y));
    }
  };
  switch (dtype) {
    case TE_FL_F32:
      return rotate(static_cast<float*>(nullptr));
    case TE_FL_F16:
      return rotate(static_cast<numeric::half*>(nullptr));
    default:
      return rotate(static_cast<numeric::bfloat16*>(nullptr));
  }
}

// sin and cos of n angles, with an error of about 1e-7. Reduces angles to [-pi/4, pi/4] by Cody and
// Waite's method, with pi/2 in three FP32 parts. Beyond 8192 it uses the library functions.
void SinCos(const float* angle, int64_t n, float* sine, float* cosine) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF x = LoadF32(angle + i);
    if (!hn::AllTrue(DF(), hn::Lt(hn::Abs(x), SetF(8192.0f)))) {
      for (int64_t l = i; l < i + lanes; ++l) {
        sine[l] = std::sin(angle[l]);
        cosine[l] = std::cos(angle[l]);
      }
      continue;
    }
    const VF q = hn::Round(hn::Mul(x, SetF(0x1.45f306p-1f)));
    VF r = hn::NegMulAdd(q, SetF(0x1.92p+0f), x);
    r = hn::NegMulAdd(q, SetF(0x1.fb4p-12f), r);
    r = hn::NegMulAdd(q, SetF(0x1.4442dp-24f), r);
    const VF r2 = hn::Mul(r, r);
    VF s = SetF(-0x1.98cdf8p-13f);
    s = hn::MulAdd(s, r2, SetF(0x1.110584p-7f));
    s = hn::MulAdd(s, r2, SetF(-0x1.555540p-3f));
    s = hn::MulAdd(hn::Mul(s, r2), r, r);
    VF c = SetF(0x1.99f664p-16f);
    c = hn::MulAdd(c, r2, SetF(-0x1.6c0c5cp-10f));
    c = hn::MulAdd(c, r2, SetF(0x1.55554ap-5f));
    c = hn::MulAdd(c, r2, SetF(-0.5f));
    c = hn::MulAdd(c, r2, SetF(1.0f));
    const VU quadrant = hn::BitCast(DU(), hn::ConvertTo(DI(), q));
    const auto odd = hn::RebindMask(DF(), hn::Ne(hn::And(quadrant, SetU(1)), SetU(0)));
    const VU flip_sine = hn::ShiftLeft<30>(hn::And(quadrant, SetU(2)));
    const VU flip_cosine = hn::ShiftLeft<30>(hn::And(hn::Add(quadrant, SetU(1)), SetU(2)));
    StoreF32(FromBits(hn::Xor(Bits(hn::IfThenElse(odd, c, s)), flip_sine)), sine + i);
    StoreF32(FromBits(hn::Xor(Bits(hn::IfThenElse(odd, s, c)), flip_cosine)), cosine + i);
  }
  for (; i < n; ++i) {
    sine[i] = std::sin(angle[i]);
    cosine[i] = std::cos(angle[i]);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {
namespace {

HWY_EXPORT(RotateHeadByDtype);
HWY_EXPORT(SinCos);

using backend::PackedHeads;
using backend::stride;

// Computes the cosines and sines of one position at a time and rotates heads with them. Each thread
// has its own object.
class Rotation {
 public:
  Rotation(const te_fl_tensor& freqs, bool interleaved, bool backward)
      : freqs_(freqs),
        columns_(freqs.dl.shape[3]),
        interleaved_(interleaved),
        backward_(backward),
        cosine_(static_cast<size_t>(padded(columns_) + kPad), 0.0f),
        sine_(cosine_.size(), 0.0f),
        raw_(cosine_.size(), 0.0f) {}

  void move_to(int64_t position) {
    if (position == position_) return;
    position_ = position;
    const float* angles = backend::data<const float>(freqs_) + position * stride(freqs_, 0);
    HWY_DYNAMIC_DISPATCH(SinCos)(angles, columns_, raw_.data(), cosine_.data());
    const int64_t half = columns_ / 2;
    for (int64_t i = 0; i < half; ++i) {
      const auto a = static_cast<size_t>(interleaved_ ? 2 * i : i);
      const auto b = static_cast<size_t>(interleaved_ ? 2 * i + 1 : i + half);
      sine_[a] = backward_ ? raw_[b] : -raw_[a];
      sine_[b] = backward_ ? -raw_[a] : raw_[b];
    }
  }
  // Rotates one head of dim elements. Copies the elements beyond the angles.
  void apply(int dtype, const char* x, int64_t dim, int64_t bytes, char* y, bool stream) {
    HWY_DYNAMIC_DISPATCH(RotateHeadByDtype)
    (dtype, x, cosine_.data(), sine_.data(), columns_, interleaved_, raw_.data(),
     stream ? nullptr : y);
    if (stream) store_f32(dtype, raw_.data(), columns_, y, true);
    if (columns_ < dim && x != y) {
      std::memcpy(y + columns_ * bytes, x + columns_ * bytes,
                  static_cast<size_t>((dim - columns_) * bytes));
    }
  }

 private:
  const te_fl_tensor& freqs_;
  int64_t columns_;
  bool interleaved_, backward_;
  int64_t position_ = -1;
  std::vector<float> cosine_, sine_, raw_;  // raw_ holds unsigned sines first, then a rotated head
};

// Addresses the heads [token0, token1, head] of a [.., .., heads, dim] tensor (thd: [tokens, heads,
// dim]).
struct HeadGrid {
  explicit HeadGrid(const te_fl_tensor& t)
      : base(backend::data<char>(t)),
        bytes(element_bytes(t)),
        inner(t.dl.ndim == 4 ? t.dl.shape[1] : 1),
        stride0(stride(t, 0)),
        stride1(t.dl.ndim == 4 ? stride(t, 1) : 0),
        stride_head(stride(t, t.dl.ndim - 2)) {}
  char* at(int64_t token, int64_t head) const {
    return base + (token / inner * stride0 + token % inner * stride1 + head * stride_head) * bytes;
  }
  // Prefetches a head into the cache. `token` may be past the end.
  void prefetch(int64_t token, int64_t head, int64_t dim) const {
    const char* from = at(token, head);
    for (int64_t i = 0; i < dim * bytes; i += 64) __builtin_prefetch(from + i);
  }
  char* base;
  int64_t bytes, inner, stride0, stride1, stride_head;
};

bool unit_heads(const te_fl_tensor& t) noexcept {
  const int last = t.dl.ndim - 1;
  return last < 0 || t.dl.strides == nullptr || t.dl.strides[last] == 1 || t.dl.shape[last] <= 1;
}
// True if the memory spans of two tensors overlap. With strides, a span is larger than the dense
// size.
bool spans_meet(const te_fl_tensor& a, const te_fl_tensor& b) noexcept {
  const auto span = [](const te_fl_tensor& t) {
    int64_t last = 0;
    for (int i = 0; i < t.dl.ndim; ++i) {
      last += std::max<int64_t>(0, t.dl.shape[i] - 1) * stride(t, i);
    }
    return (last + 1) * element_bytes(t);
  };
  const char *x = backend::data<char>(a), *y = backend::data<char>(b);
  return x != nullptr && y != nullptr && x < y + span(b) && y < x + span(a);
}
bool same_layout(const te_fl_tensor& a, const te_fl_tensor& b) noexcept {
  if (backend::data<char>(a) != backend::data<char>(b) || a.dl.ndim != b.dl.ndim) return false;
  for (int i = 0; i < a.dl.ndim; ++i) {
    if (a.dl.shape[i] > 1 && stride(a, i) != stride(b, i)) return false;
  }
  return true;
}

constexpr const char* kStridedHeads =
    "needs heads and angles whose elements are adjacent in memory; make a compact copy with "
    "strided_copy";

Refusal rope_refusal(const te_fl_rope_rope_args& a) {
  if (!unit_heads(*a.input) || !unit_heads(*a.output) || !unit_heads(*a.freqs)) {
    return kStridedHeads;
  }
  return spans_meet(*a.output, *a.input) && !same_layout(*a.output, *a.input) ? kOverlaps : nullptr;
}

template <bool kBackward>
void rope(const te_fl_context&, const te_fl_rope_rope_args& a) {
  const te_fl_tensor& x = *a.input;
  const ContextParallel cp{a.cp_size, a.cp_rank};
  const Positions positions =
      a.layout == TE_FL_LAYOUT_THD
          ? packed_positions(x.dl.shape[0], *a.cu_seqlens, a.start_positions, cp)
          : dense_positions(x.dl.shape[0], x.dl.shape[1], a.layout, a.start_positions, cp);
  const int64_t heads = x.dl.shape[x.dl.ndim - 2], dim = x.dl.shape[x.dl.ndim - 1];
  check_freqs("freqs", *a.freqs, positions);
  const HeadGrid in(x), out(*a.output);
  const bool stream = in.base != out.base && exceeds_cache(backend::numel(x) * out.bytes);
  const auto tokens = static_cast<int64_t>(positions.of_token.size());
  Parts(tokens, grain_of_rows(heads * dim)).run([&](int64_t, int64_t begin, int64_t end) {
    Rotation rotation(*a.freqs, a.interleaved != 0, kBackward);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = positions.of_token[static_cast<size_t>(t)];
      if (position >= 0) rotation.move_to(position);
      for (int64_t h = 0; h < heads; ++h) {
        if (position < 0) {
          std::memset(out.at(t, h), 0, static_cast<size_t>(dim * out.bytes));
        } else {
          in.prefetch(t + 1, h, dim);
          rotation.apply(dtype_of(x), in.at(t, h), dim, out.bytes, out.at(t, h), stream);
        }
      }
    }
    if (stream) store_fence();
  });
}

// Rotates from the packed tensor into separate Q, K and V or, in the backward, from separate
// gradients into the packed gradient.
template <bool kBackward, class Args>
void packed_rope(const Args& a, const PackedHeads& p, const te_fl_tensor& qkv,
                 const te_fl_tensor& q, const te_fl_tensor& k, const te_fl_tensor& v) {
  const Positions positions =
      dense_positions(qkv.dl.shape[0], qkv.dl.shape[1], a.layout, a.start_positions,
                      ContextParallel{a.cp_size, a.cp_rank});
  check_freqs("q_freqs", *a.q_freqs, positions);
  check_freqs("k_freqs", *a.k_freqs, positions);
  const HeadGrid packed(qkv), q_grid(q), k_grid(k), v_grid(v);
  const int dtype = dtype_of(qkv);
  const int64_t step = p.k_dim * packed.bytes;
  const auto value_bytes = static_cast<size_t>(p.v_dim * packed.bytes);
  const auto tokens = static_cast<int64_t>(positions.of_token.size());
  const bool stream = exceeds_cache(backend::numel(qkv) * packed.bytes);
  const auto rotate = [&](Rotation& r, char* whole, char* part) {
    r.apply(dtype, kBackward ? part : whole, p.k_dim, packed.bytes, kBackward ? whole : part,
            stream);
  };
  Parts(tokens, grain_of_rows(p.groups * p.width())).run([&](int64_t, int64_t begin, int64_t end) {
    Rotation rotate_q(*a.q_freqs, a.interleaved != 0, kBackward);
    Rotation rotate_k(*a.k_freqs, a.interleaved != 0, kBackward);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = positions.of_token[static_cast<size_t>(t)];
      rotate_q.move_to(position);
      rotate_k.move_to(position);
      for (int64_t g = 0; g < p.groups; ++g) {
        char* whole = packed.at(t, g);
        if (kBackward) {
          for (int64_t n = 0; n < p.q_heads; ++n) {
            q_grid.prefetch(t + 1, g * p.q_heads + n, p.k_dim);
          }
          k_grid.prefetch(t + 1, g, p.k_dim);
          v_grid.prefetch(t + 1, g, p.v_dim);
        } else {
          packed.prefetch(t + 1, g, p.width());
        }
        for (int64_t n = 0; n < p.q_heads; ++n, whole += step) {
          rotate(rotate_q, whole, q_grid.at(t, g * p.q_heads + n));
        }
        rotate(rotate_k, whole, k_grid.at(t, g));
        whole += step;
        char* part = v_grid.at(t, g);
        std::memcpy(kBackward ? whole : part, kBackward ? part : whole, value_bytes);
      }
    }
    if (stream) store_fence();
  });
}

void qkv_forward(const te_fl_context&, const te_fl_fused_qkv_rope_forward_args& a) {
  packed_rope<false>(a, backend::packed_heads(a, *a.qkv_input), *a.qkv_input, *a.q_out, *a.k_out,
                     *a.v_out);
}

void qkv_backward(const te_fl_context&, const te_fl_fused_qkv_rope_backward_args& a) {
  packed_rope<true>(a, backend::packed_heads(a, *a.qkv_grad), *a.qkv_grad, *a.q_grad, *a.k_grad,
                    *a.v_grad);
}

template <class... Tensors>
Refusal strided_refusal(const Tensors&... tensors) {
  return (unit_heads(tensors) && ...) ? nullptr : kStridedHeads;
}
Refusal qkv_forward_refusal(const te_fl_fused_qkv_rope_forward_args& a) {
  return strided_refusal(*a.qkv_input, *a.q_freqs, *a.k_freqs, *a.q_out, *a.k_out, *a.v_out);
}
Refusal qkv_backward_refusal(const te_fl_fused_qkv_rope_backward_args& a) {
  return strided_refusal(*a.qkv_grad, *a.q_freqs, *a.k_freqs, *a.q_grad, *a.k_grad, *a.v_grad);
}

}  // namespace

void append_rope(std::vector<te_fl_op_desc>& ops) {
  using Rope = te_fl_rope_rope_args;
  ops.push_back(descriptor<Rope, rope<false>, rope_refusal>("fused_rope_forward"));
  ops.push_back(descriptor<Rope, rope<true>, rope_refusal>("fused_rope_backward"));
  ops.push_back(descriptor<te_fl_fused_qkv_rope_forward_args, qkv_forward, qkv_forward_refusal>(
      "fused_qkv_rope_forward"));
  ops.push_back(descriptor<te_fl_fused_qkv_rope_backward_args, qkv_backward, qkv_backward_refusal>(
      "fused_qkv_rope_backward"));
}

}  // namespace te_fl::cpu
#endif
