// Rotary position embedding, on separate or packed Q, K, V.
//
// y_a = x_a cos f_a - x_b sin f_a, y_b = x_b cos f_b + x_a sin f_b for each pair (a, b). The
// backward is the transpose of that map, also where the two angles of a pair differ.
#include "te_fl/ops/rope.h"

#include <string>

#include "families.hpp"
#include "overlap.hpp"
#include "store.cuh"

namespace te_fl::cuda {
namespace {

using backend::invalid;
using backend::shape_text;

// Where a token gets its angles. Each rank holds chunks cp_rank and 2 cp_size - 1 - cp_rank of the
// sequence's 2 cp_size chunks.
struct Positions {
  int64_t extent0 = 1, extent1 = 1;  // of the tensor's leading dimensions
  bool sbhd = true;
  const int32_t* starts = nullptr;  // by sequence; 0 without
  const int32_t* cu = nullptr;      // thd: prefix sums of whole sequences, batch + 1
  int64_t batch = 0, cp_size = 1, cp_rank = 0;

  __device__ int64_t local(int64_t s, int64_t length) const {
    if (cp_size == 1) return s;
    const int64_t chunk = length / 2;
    return s < chunk ? cp_rank * chunk + s : (2 * cp_size - 1 - cp_rank) * chunk + s - chunk;
  }
  // -1: a thd token outside every sequence.
  __device__ int64_t of(int64_t token) const {
    if (cu == nullptr) {
      const int64_t s = sbhd ? token / extent1 : token % extent1;
      const int64_t b = sbhd ? token % extent1 : token / extent1;
      return (starts != nullptr ? starts[b] : 0) + local(s, sbhd ? extent0 : extent1);
    }
    int64_t low = 0, high = batch;  // the last sequence that begins at or before the token
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (cu[middle + 1] / cp_size <= token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == batch || token < cu[low] / cp_size) return -1;
    const int64_t begin = cu[low] / cp_size;
    return (starts != nullptr ? starts[low] : 0) +
           local(token - begin, cu[low + 1] / cp_size - begin);
  }
};

struct Rotation {
  const float* angles;
  int64_t columns, rows;
  bool interleaved, backward;

  // Element d of a head; x(i) reads element i of it.
  template <class X>
  __device__ float at(int64_t d, int64_t position, X&& x) const {
    if (position < 0) return 0.0f;
    if (d >= columns) return x(d);
    const int64_t half = columns / 2;
    const bool first = interleaved ? d % 2 == 0 : d < half;
    const int64_t other = interleaved ? d ^ 1 : first ? d + half : d - half;
    if (position >= rows) return NAN;
    const float* row = angles + position * columns;
    float sine, cosine, sine_other, cosine_other;
    sincosf(row[d], &sine, &cosine);
    if (!backward) return first ? x(d) * cosine - x(other) * sine : x(d) * cosine + x(other) * sine;
    sincosf(row[other], &sine_other, &cosine_other);
    return first ? x(d) * cosine + x(other) * sine_other : x(d) * cosine - x(other) * sine_other;
  }
};

__global__ void __launch_bounds__(kThreads)
    rope_kernel(Source in, Target out, Positions positions, Rotation rotation, int64_t tokens,
                int64_t heads, int64_t dim) {
  const int64_t size = tokens * heads * dim;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t head = i / dim, d = i - head * dim;
    const float v = rotation.at(d, positions.of(head / heads),
                                [&](int64_t j) { return in.at(head * dim + j); });
    out.store(i, 1, &v);
  }
}

// Packed QKV: in each group q_heads queries of k_dim elements, a key of k_dim, a value of v_dim.
struct Packed {
  int64_t tokens, groups, q_heads, k_dim, v_dim;
  __host__ __device__ int64_t width() const { return q_heads * k_dim + k_dim + v_dim; }
};

template <bool kBackward, class Whole, class Q, class K, class V>
__global__ void __launch_bounds__(kThreads)
    packed_kernel(Whole packed, Q q, K k, V v, Packed p, Positions positions, Rotation rotate_q,
                  Rotation rotate_k) {
  const int64_t width = p.width(), size = p.tokens * p.groups * width;
  const int64_t queries = p.q_heads * p.k_dim;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t group = i / width, at = i - group * width;
    const int64_t position = positions.of(group / p.groups);
    // Where the element is, and its head begins, in the separate tensor.
    const bool is_q = at < queries, is_k = !is_q && at < queries + p.k_dim;
    const int64_t d = is_q ? at % p.k_dim : is_k ? at - queries : at - queries - p.k_dim;
    const int64_t head = is_q   ? (group * p.q_heads + at / p.k_dim) * p.k_dim
                         : is_k ? group * p.k_dim
                                : group * p.v_dim;
    if constexpr (kBackward) {
      const auto read = [&](int64_t j) { return is_q ? q.at(head + j) : k.at(head + j); };
      const float value =
          is_q || is_k ? (is_q ? rotate_q : rotate_k).at(d, position, read) : v.at(head + d);
      packed.store(i, 1, &value);
    } else {
      const auto read = [&](int64_t j) { return packed.at(i - d + j); };
      const float value =
          is_q || is_k ? (is_q ? rotate_q : rotate_k).at(d, position, read) : packed.at(i);
      (is_q ? q : is_k ? k : v).store(head + d, 1, &value);
    }
  }
}

// ---- arguments

// Values of a small integer tensor on the host; the stream is waited for.
std::vector<int32_t> on_host(const te_fl_context& ctx, const te_fl_tensor& t) {
  std::vector<int32_t> values(static_cast<size_t>(backend::numel(t)));
  if (values.empty()) return values;
  check(cudaMemcpyAsync(values.data(), backend::data<const int32_t>(t),
                        values.size() * sizeof(int32_t), cudaMemcpyDeviceToHost, stream_of(ctx)),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream_of(ctx)), "cudaStreamSynchronize");
  return values;
}

void check_even_length(int64_t length, int64_t cp_size, const std::string& what) {
  if (cp_size > 1 && length % 2 != 0) {
    invalid(what + " has " + std::to_string(length) +
            " tokens on this rank, expected an even number: with cp_size > 1 a rank holds two "
            "chunks of equal length");
  }
}

int64_t last_position(const Positions& p, int64_t length) {
  if (length == 0) return -1;
  if (p.cp_size == 1) return length - 1;
  const int64_t chunk = length / 2;
  return std::max(p.cp_rank * chunk + chunk - 1,
                  (2 * p.cp_size - 1 - p.cp_rank) * chunk + chunk - 1);
}

// Checks what is on the device before anything is written, and finds the largest position. While
// the stream is captured the values cannot be seen: positions beyond the angles then give NaN.
int64_t check_positions(const te_fl_context& ctx, const Positions& p, int64_t tokens,
                        const te_fl_tensor* start_positions, const te_fl_tensor* cu_seqlens) {
  if (start_positions != nullptr &&
      (start_positions->dl.ndim != 1 || start_positions->dl.shape[0] != p.batch)) {
    invalid("start_positions has shape " + shape_text(*start_positions) + ", expected [" +
            std::to_string(p.batch) + "]: one for each sequence");
  }
  const int64_t dense_length = p.sbhd ? p.extent0 : p.extent1;
  if (cu_seqlens == nullptr) check_even_length(dense_length, p.cp_size, "each sequence");
  if ((ctx.flags & TE_FL_CALL_CAPTURING) != 0) return -1;
  std::vector<int32_t> starts(static_cast<size_t>(p.batch), 0);
  if (start_positions != nullptr) starts = on_host(ctx, *start_positions);
  for (size_t b = 0; b < starts.size(); ++b) {
    if (starts[b] < 0) {
      invalid("start_positions[" + std::to_string(b) + "] is " + std::to_string(starts[b]) +
              ", expected 0 or more");
    }
  }
  int64_t largest = -1;
  const auto reach = [&](size_t b, int64_t length) {
    if (length > 0) largest = std::max(largest, starts[b] + last_position(p, length));
  };
  if (cu_seqlens == nullptr) {
    for (size_t b = 0; b < starts.size(); ++b) reach(b, dense_length);
    return largest;
  }
  const std::vector<int32_t> cu = on_host(ctx, *cu_seqlens);
  for (size_t b = 0; b + 1 < cu.size(); ++b) {
    const std::string name = "sequence " + std::to_string(b) + " of cu_seqlens";
    const std::string spans =
        name + " spans tokens " + std::to_string(cu[b]) + " to " + std::to_string(cu[b + 1]);
    if (cu[b] < 0 || cu[b + 1] < cu[b] || cu[b + 1] > tokens * p.cp_size) {
      invalid(spans + ", expected non-decreasing values from 0 to " +
              std::to_string(tokens * p.cp_size) + " (the input's tokens times cp_size)");
    }
    if (cu[b] % p.cp_size != 0 || cu[b + 1] % p.cp_size != 0) {
      invalid(spans + ", expected multiples of cp_size, " + std::to_string(p.cp_size));
    }
    const int64_t length = (cu[b + 1] - cu[b]) / p.cp_size;
    check_even_length(length, p.cp_size, name);
    reach(b, length);
  }
  return largest;
}

Rotation rotation_of(const char* name, const te_fl_tensor& freqs, bool interleaved, bool backward,
                     int64_t dim, int64_t largest) {
  const Rotation r{backend::data<const float>(freqs), freqs.dl.shape[3], freqs.dl.shape[0],
                   interleaved, backward};
  if (r.columns % 2 != 0 || r.columns > dim) {
    invalid(std::string(name) + " has " + std::to_string(r.columns) +
            " columns, expected an even number up to the head size, " + std::to_string(dim));
  }
  if (largest >= r.rows) {
    invalid(std::string(name) + " has " + std::to_string(r.rows) + " positions, but position " +
            std::to_string(largest) + " is needed");
  }
  return r;
}

template <class Args>
Positions positions_of(const Args& a) {
  if (a.cp_rank >= a.cp_size) {
    invalid("cp_rank is " + std::to_string(a.cp_rank) + ", expected less than cp_size, " +
            std::to_string(a.cp_size));
  }
  Positions p;
  p.cp_size = a.cp_size;
  p.cp_rank = a.cp_rank;
  p.sbhd = a.layout == TE_FL_LAYOUT_SBHD;
  if (a.start_positions != nullptr) p.starts = backend::data<const int32_t>(*a.start_positions);
  return p;
}

template <bool kBackward>
void rope(const te_fl_context& ctx, const te_fl_rope_rope_args& a) {
  const bool thd = a.layout == TE_FL_LAYOUT_THD;
  const te_fl_tensor& x = *a.input;
  if (x.dl.ndim != (thd ? 3 : 4)) {
    invalid("input has shape " + shape_text(x) + ", expected rank " +
            (thd ? "3: [T, H, D] (layout thd)" : "4: [S, B, H, D] or [B, S, H, D]"));
  }
  if (shape_text(*a.output) != shape_text(x)) {
    invalid("output has shape " + shape_text(*a.output) + ", expected " + shape_text(x) +
            " as input");
  }
  if (thd && a.cu_seqlens == nullptr) {
    invalid(
        "cu_seqlens is missing: layout thd needs the [B+1] prefix sums of the sequences' lengths");
  }
  if (!thd && a.cu_seqlens != nullptr) {
    invalid("cu_seqlens is given, but only layout thd reads it; leave it out");
  }
  Positions p = positions_of(a);
  int64_t tokens = x.dl.shape[0];
  if (thd) {
    if (a.cu_seqlens->dl.ndim != 1 || a.cu_seqlens->dl.shape[0] < 1) {
      invalid("cu_seqlens has shape " + shape_text(*a.cu_seqlens) + ", expected [B+1]");
    }
    p.cu = backend::data<const int32_t>(*a.cu_seqlens);
    p.batch = a.cu_seqlens->dl.shape[0] - 1;
  } else {
    p.extent0 = x.dl.shape[0], p.extent1 = x.dl.shape[1];
    p.batch = p.sbhd ? p.extent1 : p.extent0;
    tokens *= x.dl.shape[1];
  }
  const int64_t largest = check_positions(ctx, p, tokens, a.start_positions, a.cu_seqlens);
  const int64_t heads = x.dl.shape[x.dl.ndim - 2], dim = x.dl.shape[x.dl.ndim - 1];
  const Rotation rotation =
      rotation_of("freqs", *a.freqs, a.interleaved != 0, kBackward, dim, largest);
  const int64_t size = backend::numel(x);
  if (size == 0) return;
  rope_kernel<<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(Source(x), Target(*a.output), p,
                                                                 rotation, tokens, heads, dim);
  check_launch("rope");
}

void expect_tail(const char* name, const te_fl_tensor& t, int64_t heads, int64_t dim) {
  if (t.dl.shape[2] == heads && t.dl.shape[3] == dim) return;
  invalid(std::string(name) + " has shape " + shape_text(t) + ", expected [.., " +
          std::to_string(heads) + ", " + std::to_string(dim) + "]");
}

template <class Args>
Packed check_packed(const Args& a, const char* name, const te_fl_tensor& qkv) {
  if (a.layout == TE_FL_LAYOUT_THD) invalid("layout is thd, expected sbhd or bshd");
  if (a.q_dim % a.k_dim != 0) {
    invalid("q_dim is " + std::to_string(a.q_dim) + ", expected a multiple of k_dim, " +
            std::to_string(a.k_dim));
  }
  const Packed p{qkv.dl.shape[0] * qkv.dl.shape[1], qkv.dl.shape[2], a.q_dim / a.k_dim, a.k_dim,
                 a.v_dim};
  if (qkv.dl.shape[3] != p.width()) {
    invalid(std::string(name) + " has shape " + shape_text(qkv) + ", expected " +
            std::to_string(p.width()) + " in the last dimension: q_dim + k_dim + v_dim");
  }
  return p;
}

template <class Args>
Positions packed_positions(const te_fl_context& ctx, const Args& a, const te_fl_tensor& qkv,
                           int64_t& largest) {
  Positions p = positions_of(a);
  p.extent0 = qkv.dl.shape[0], p.extent1 = qkv.dl.shape[1];
  p.batch = p.sbhd ? p.extent1 : p.extent0;
  largest = check_positions(ctx, p, p.extent0 * p.extent1, a.start_positions, nullptr);
  return p;
}

void qkv_forward(const te_fl_context& ctx, const te_fl_fused_qkv_rope_forward_args& a) {
  const Packed p = check_packed(a, "qkv_input", *a.qkv_input);
  expect_tail("q_out", *a.q_out, p.groups * p.q_heads, p.k_dim);
  expect_tail("k_out", *a.k_out, p.groups, p.k_dim);
  expect_tail("v_out", *a.v_out, p.groups, p.v_dim);
  int64_t largest = -1;
  const Positions positions = packed_positions(ctx, a, *a.qkv_input, largest);
  const Rotation q =
      rotation_of("q_freqs", *a.q_freqs, a.interleaved != 0, false, p.k_dim, largest);
  const Rotation k =
      rotation_of("k_freqs", *a.k_freqs, a.interleaved != 0, false, p.k_dim, largest);
  const int64_t size = backend::numel(*a.qkv_input);
  if (size == 0) return;
  packed_kernel<false><<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(
      Source(*a.qkv_input), Target(*a.q_out), Target(*a.k_out), Target(*a.v_out), p, positions, q,
      k);
  check_launch("qkv_rope_forward");
}
void qkv_backward(const te_fl_context& ctx, const te_fl_fused_qkv_rope_backward_args& a) {
  const Packed p = check_packed(a, "qkv_grad", *a.qkv_grad);
  expect_tail("q_grad", *a.q_grad, p.groups * p.q_heads, p.k_dim);
  expect_tail("k_grad", *a.k_grad, p.groups, p.k_dim);
  expect_tail("v_grad", *a.v_grad, p.groups, p.v_dim);
  int64_t largest = -1;
  const Positions positions = packed_positions(ctx, a, *a.qkv_grad, largest);
  const Rotation q = rotation_of("q_freqs", *a.q_freqs, a.interleaved != 0, true, p.k_dim, largest);
  const Rotation k = rotation_of("k_freqs", *a.k_freqs, a.interleaved != 0, true, p.k_dim, largest);
  const int64_t size = backend::numel(*a.qkv_grad);
  if (size == 0) return;
  packed_kernel<true><<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(
      Target(*a.qkv_grad), Source(*a.q_grad), Source(*a.k_grad), Source(*a.v_grad), p, positions, q,
      k);
  check_launch("qkv_rope_backward");
}

Refusal refuse_rope(const te_fl_rope_rope_args& a) {
  if (!all_dense(a.input, a.output, a.freqs, a.start_positions, a.cu_seqlens))
    return kNotContiguous;
  // Both elements of a pair are read by two threads: not in place.
  return overlaps(*a.output, *a.input) ? kOverlaps : nullptr;
}
template <class Args>
Refusal refuse_packed(const Args& a, const te_fl_tensor* whole, const te_fl_tensor* q,
                      const te_fl_tensor* k, const te_fl_tensor* v) {
  if (!all_dense(whole, q, k, v, a.q_freqs, a.k_freqs, a.start_positions)) return kNotContiguous;
  return overlaps(*whole, *q) || overlaps(*whole, *k) || overlaps(*whole, *v) ? kOverlaps : nullptr;
}
Refusal refuse_qkv_forward(const te_fl_fused_qkv_rope_forward_args& a) {
  return refuse_packed(a, a.qkv_input, a.q_out, a.k_out, a.v_out);
}
Refusal refuse_qkv_backward(const te_fl_fused_qkv_rope_backward_args& a) {
  return refuse_packed(a, a.qkv_grad, a.q_grad, a.k_grad, a.v_grad);
}

}  // namespace

void append_rope(std::vector<te_fl_op_desc>& ops) {
  using Rope = te_fl_rope_rope_args;
  using Forward = te_fl_fused_qkv_rope_forward_args;
  using Backward = te_fl_fused_qkv_rope_backward_args;
  ops.push_back(descriptor<Rope, rope<false>, refuse_rope>("fused_rope_forward"));
  ops.push_back(descriptor<Rope, rope<true>, refuse_rope>("fused_rope_backward"));
  ops.push_back(descriptor<Forward, qkv_forward, refuse_qkv_forward>("fused_qkv_rope_forward"));
  ops.push_back(descriptor<Backward, qkv_backward, refuse_qkv_backward>("fused_qkv_rope_backward"));
}

}  // namespace te_fl::cuda
