// Rotary position embedding, on separate or packed Q, K, V.
//
// For each pair (a, b): y_a = x_a cos f_a - x_b sin f_a, and y_b = x_b cos f_b + x_a sin f_b. The
// backward is the transpose of this map, which also holds if the two angles of a pair differ.
#include "te_fl/ops/rope.h"

#include <cmath>
#include <string>
#include <vector>

#include "element.hpp"
#include "families.hpp"
#include "te_fl/backend/row_layouts.hpp"
#include "te_fl/backend/values_in_memory.hpp"

namespace te_fl::reference {
namespace {

using backend::check_chunks;
using backend::invalid;
using backend::PackedHeads;

// Context parallelism: each rank holds the chunks cp_rank and 2 cp_size - 1 - cp_rank of the 2
// cp_size chunks of a sequence. position() is the global position of token s of `length` local
// tokens.
struct ContextParallel {
  int64_t size = 1;
  int64_t rank = 0;

  int64_t position(int64_t s, int64_t length) const {
    if (size == 1) return s;
    const int64_t chunk = length / 2;
    return s < chunk ? rank * chunk + s : (2 * size - 1 - rank) * chunk + s - chunk;
  }
};

// The position of each token, which determines its angles; -1 for a thd token outside every
// sequence.
struct Positions {
  std::vector<int64_t> of_token;  // indexed by the tensor's two (thd: one) leading dimensions
  int64_t largest = -1;

  void set(int64_t token, int64_t position) {
    of_token[static_cast<size_t>(token)] = position;
    if (position > largest) largest = position;
  }
};

// Access to start_positions[b], which is 0 if the call has no such tensor.
class Starts {
 public:
  Starts(const te_fl_tensor* t, int64_t batch) : t_(t) {
    if (t == nullptr) return;
    for (int64_t b = 0; b < batch; ++b) {
      if ((*this)[b] < 0) {
        invalid("start_positions[" + std::to_string(b) + "] is " + std::to_string((*this)[b]) +
                ", expected 0 or more");
      }
    }
  }
  int64_t operator[](int64_t b) const {
    return t_ == nullptr ? 0 : backend::data<const int32_t>(*t_)[b * backend::stride(*t_, 0)];
  }

 private:
  const te_fl_tensor* t_;
};

// The positions of a sbhd or bshd tensor, given its first two extents.
Positions dense_positions(int64_t extent0, int64_t extent1, int32_t layout,
                          const te_fl_tensor* start_positions, const ContextParallel& cp) {
  const bool sbhd = layout == TE_FL_LAYOUT_SBHD;
  const int64_t seqlen = sbhd ? extent0 : extent1;
  const Starts starts(start_positions, sbhd ? extent1 : extent0);
  Positions p;
  p.of_token.resize(static_cast<size_t>(extent0 * extent1));
  for (int64_t token = 0; token < extent0 * extent1; ++token) {
    const int64_t s = sbhd ? token / extent1 : token % extent1;
    const int64_t b = sbhd ? token % extent1 : token / extent1;
    p.set(token, starts[b] + cp.position(s, seqlen));
  }
  return p;
}

// The positions of a thd tensor. cu_seqlens counts whole sequences; a rank holds 1 / cp_size of
// each.
Positions packed_positions(int64_t tokens, const te_fl_tensor& cu,
                           const te_fl_tensor* start_positions, const ContextParallel& cp) {
  const int64_t batch = cu.dl.shape[0] - 1;
  const Starts starts(start_positions, batch);
  const auto prefix = [&](int64_t b) -> int64_t {
    return backend::data<const int32_t>(cu)[b * backend::stride(cu, 0)];
  };
  Positions p;
  p.of_token.assign(static_cast<size_t>(tokens), -1);
  for (int64_t b = 0; b < batch; ++b) {
    const std::string name = "sequence " + std::to_string(b) + " of cu_seqlens";
    if (prefix(b) < 0 || prefix(b + 1) < prefix(b) || prefix(b + 1) > tokens * cp.size) {
      invalid(name + " spans tokens " + std::to_string(prefix(b)) + " to " +
              std::to_string(prefix(b + 1)) + ", expected non-decreasing values from 0 to " +
              std::to_string(tokens * cp.size) + " (the input's tokens times cp_size)");
    }
    if (prefix(b) % cp.size != 0 || prefix(b + 1) % cp.size != 0) {
      invalid(name + " spans tokens " + std::to_string(prefix(b)) + " to " +
              std::to_string(prefix(b + 1)) + ", expected multiples of cp_size, " +
              std::to_string(cp.size));
    }
    const int64_t begin = prefix(b) / cp.size;
    const int64_t length = prefix(b + 1) / cp.size - begin;
    check_chunks(length, cp.size, name);
    for (int64_t s = 0; s < length; ++s) p.set(begin + s, starts[b] + cp.position(s, length));
  }
  return p;
}

// Rotates the leading elements of heads: holds the angle table and the pairing of elements.
class Rotation {
 public:
  Rotation(const char* name, const te_fl_tensor& freqs, bool interleaved, bool backward)
      : name_(name),
        freqs_(freqs),
        columns_(freqs.dl.shape[3]),
        interleaved_(interleaved),
        backward_(backward),
        angles_(Reader(freqs).all_double()) {}

  void check(const Positions& positions) const {
    backend::check_angle_rows(name_, freqs_.dl.shape[0], positions.largest);
  }

  // Rotates one head of dim elements for a position. Position -1 gives zeros.
  void apply(const double* x, int64_t dim, int64_t position, float* y) const {
    for (int64_t i = columns_; i < dim; ++i) y[i] = position < 0 ? 0.0f : static_cast<float>(x[i]);
    for (int64_t i = 0; i < columns_ / 2; ++i) {
      const int64_t a = interleaved_ ? 2 * i : i;
      const int64_t b = interleaved_ ? 2 * i + 1 : i + columns_ / 2;
      if (position < 0) {
        y[a] = y[b] = 0.0f;
        continue;
      }
      const double fa = angles_[static_cast<size_t>(position * columns_ + a)];
      const double fb = angles_[static_cast<size_t>(position * columns_ + b)];
      const double sign_a = backward_ ? std::sin(fb) : -std::sin(fa);
      const double sign_b = backward_ ? -std::sin(fa) : std::sin(fb);
      y[a] = static_cast<float>(x[a] * std::cos(fa) + x[b] * sign_a);
      y[b] = static_cast<float>(x[b] * std::cos(fb) + x[a] * sign_b);
    }
  }

 private:
  const char* name_;
  const te_fl_tensor& freqs_;
  int64_t columns_;
  bool interleaved_;
  bool backward_;
  std::vector<double> angles_;
};

template <bool kBackward>
void rope(const te_fl_context&, const te_fl_rope_rope_args& a) {
  const te_fl_tensor& x = *a.input;
  const ContextParallel cp{a.cp_size, a.cp_rank};
  const Positions positions =
      a.layout == TE_FL_LAYOUT_THD
          ? packed_positions(x.dl.shape[0], *a.cu_seqlens, a.start_positions, cp)
          : dense_positions(x.dl.shape[0], x.dl.shape[1], a.layout, a.start_positions, cp);
  const int64_t heads = x.dl.shape[x.dl.ndim - 2];
  const int64_t dim = x.dl.shape[x.dl.ndim - 1];
  const Rotation rotation("freqs", *a.freqs, a.interleaved != 0, kBackward);
  rotation.check(positions);
  const std::vector<double> in = Reader(x).all_double();
  std::vector<float> out(in.size());
  for (size_t i = 0; i < positions.of_token.size() * static_cast<size_t>(heads); ++i) {
    const int64_t at = static_cast<int64_t>(i) * dim;
    rotation.apply(in.data() + at, dim, positions.of_token[i / static_cast<size_t>(heads)],
                   out.data() + at);
  }
  store_output(*a.output, out.data());
}

void qkv_forward(const te_fl_context&, const te_fl_fused_qkv_rope_forward_args& a) {
  const PackedHeads p = backend::packed_heads(a, *a.qkv_input);
  const int64_t* shape = a.qkv_input->dl.shape;
  const int64_t tokens = shape[0] * shape[1];
  const Positions positions = dense_positions(shape[0], shape[1], a.layout, a.start_positions,
                                              ContextParallel{a.cp_size, a.cp_rank});
  const Rotation rotate_q("q_freqs", *a.q_freqs, a.interleaved != 0, false);
  const Rotation rotate_k("k_freqs", *a.k_freqs, a.interleaved != 0, false);
  rotate_q.check(positions);
  rotate_k.check(positions);
  const std::vector<double> in = Reader(*a.qkv_input).all_double();
  std::vector<float> q(static_cast<size_t>(tokens * p.groups * p.q_heads * p.k_dim));
  std::vector<float> k(static_cast<size_t>(tokens * p.groups * p.k_dim));
  std::vector<float> v(static_cast<size_t>(tokens * p.groups * p.v_dim));
  for (int64_t i = 0; i < tokens * p.groups; ++i) {
    const int64_t position = positions.of_token[static_cast<size_t>(i / p.groups)];
    const double* x = in.data() + i * p.width();
    for (int64_t n = 0; n < p.q_heads; ++n, x += p.k_dim) {
      rotate_q.apply(x, p.k_dim, position, q.data() + (i * p.q_heads + n) * p.k_dim);
    }
    rotate_k.apply(x, p.k_dim, position, k.data() + i * p.k_dim);
    x += p.k_dim;
    for (int64_t d = 0; d < p.v_dim; ++d) v[i * p.v_dim + d] = static_cast<float>(x[d]);
  }
  store_output(*a.q_out, q.data());
  store_output(*a.k_out, k.data());
  store_output(*a.v_out, v.data());
}

void qkv_backward(const te_fl_context&, const te_fl_fused_qkv_rope_backward_args& a) {
  const PackedHeads p = backend::packed_heads(a, *a.qkv_grad);
  const int64_t* shape = a.qkv_grad->dl.shape;
  const int64_t tokens = shape[0] * shape[1];
  const Positions positions = dense_positions(shape[0], shape[1], a.layout, a.start_positions,
                                              ContextParallel{a.cp_size, a.cp_rank});
  const Rotation rotate_q("q_freqs", *a.q_freqs, a.interleaved != 0, true);
  const Rotation rotate_k("k_freqs", *a.k_freqs, a.interleaved != 0, true);
  rotate_q.check(positions);
  rotate_k.check(positions);
  const std::vector<double> q = Reader(*a.q_grad).all_double();
  const std::vector<double> k = Reader(*a.k_grad).all_double();
  const std::vector<double> v = Reader(*a.v_grad).all_double();
  std::vector<float> out(static_cast<size_t>(tokens * p.groups * p.width()));
  for (int64_t i = 0; i < tokens * p.groups; ++i) {
    const int64_t position = positions.of_token[static_cast<size_t>(i / p.groups)];
    float* y = out.data() + i * p.width();
    for (int64_t n = 0; n < p.q_heads; ++n, y += p.k_dim) {
      rotate_q.apply(q.data() + (i * p.q_heads + n) * p.k_dim, p.k_dim, position, y);
    }
    rotate_k.apply(k.data() + i * p.k_dim, p.k_dim, position, y);
    y += p.k_dim;
    for (int64_t d = 0; d < p.v_dim; ++d) y[d] = static_cast<float>(v[i * p.v_dim + d]);
  }
  store_output(*a.qkv_grad, out.data());
}

}  // namespace

void append_rope(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_rope_rope_args, rope<false>>("fused_rope_forward"));
  ops.push_back(descriptor<te_fl_rope_rope_args, rope<true>>("fused_rope_backward"));
  ops.push_back(
      descriptor<te_fl_fused_qkv_rope_forward_args, qkv_forward>("fused_qkv_rope_forward"));
  ops.push_back(
      descriptor<te_fl_fused_qkv_rope_backward_args, qkv_backward>("fused_qkv_rope_backward"));
}

}  // namespace te_fl::reference
