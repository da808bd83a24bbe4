#pragma once

// Checks for backends with rotary embeddings. They check rules that depend on the values of
// scalars, which op schemas cannot express. All throw INVALID_ARGUMENT, clean, and read metadata
// only. Header-only.

#include <cstdint>
#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/ops/rope.h"

namespace te_fl::backend {

// Checks that a context-parallel rank's part of a sequence, of `length` positions, can be split
// into two chunks of equal length, as cp_size > 1 requires. `sequence` begins the message: "each
// sequence".
inline void check_chunks(int64_t length, int64_t cp_size, const std::string& sequence) {
  if (cp_size == 1 || length % 2 == 0) return;
  invalid(sequence + " has " + std::to_string(length) +
          " tokens on this rank, expected an even number: with cp_size > 1 a rank holds two chunks "
          "of equal length");
}

// Checks that the angles [positions, 1, 1, columns] have no more columns than a head.
inline void check_angle_columns(const char* name, const te_fl_tensor& angles, int64_t head_size) {
  const int64_t columns = angles.dl.shape[3];
  if (columns <= head_size) return;
  invalid(std::string(name) + " has " + std::to_string(columns) +
          " columns, expected an even number up to the head size, " + std::to_string(head_size));
}

// Checks that `positions` rows of angles include the largest position that a call needs (-1: it
// needs none).
inline void check_angle_rows(const char* name, int64_t positions, int64_t largest) {
  if (largest < positions) return;
  invalid(std::string(name) + " has " + std::to_string(positions) + " positions, but position " +
          std::to_string(largest) + " is needed");
}

// The last two extents of a packed Q, K, V tensor: [groups, width]. Each group has q_heads queries
// of k_dim elements, one key of k_dim elements and one value of v_dim elements.
struct PackedHeads {
  int64_t groups, q_heads, k_dim, v_dim;
  int64_t width() const noexcept { return (q_heads + 1) * k_dim + v_dim; }
};

namespace detail {

template <class Args>
PackedHeads check_width(const Args& args, const char* name, const te_fl_tensor& whole) {
  const PackedHeads heads{whole.dl.shape[2], args.q_dim / args.k_dim, args.k_dim, args.v_dim};
  if (whole.dl.shape[3] == heads.width()) return heads;
  invalid(std::string(name) + " has shape " + shape_text(whole) + ", expected " +
          std::to_string(heads.width()) + " in the last dimension: q_dim + k_dim + v_dim");
}

inline void check_part(const char* name, const te_fl_tensor& part, int64_t heads, int64_t size) {
  if (part.dl.shape[2] == heads && part.dl.shape[3] == size) return;
  invalid(std::string(name) + " has shape " + shape_text(part) + ", expected [.., " +
          std::to_string(heads) + ", " + std::to_string(size) + "]");
}

}  // namespace detail

// Returns the heads of a call on packed Q, K, V. Checks that all tensors agree with q_dim, k_dim
// and v_dim.
inline PackedHeads packed_heads(const te_fl_fused_qkv_rope_forward_args& args) {
  const PackedHeads heads = detail::check_width(args, "qkv_input", *args.qkv_input);
  detail::check_part("q_out", *args.q_out, heads.groups * heads.q_heads, heads.k_dim);
  detail::check_part("k_out", *args.k_out, heads.groups, heads.k_dim);
  detail::check_part("v_out", *args.v_out, heads.groups, heads.v_dim);
  return heads;
}
inline PackedHeads packed_heads(const te_fl_fused_qkv_rope_backward_args& args) {
  const PackedHeads heads = detail::check_width(args, "qkv_grad", *args.qkv_grad);
  detail::check_part("q_grad", *args.q_grad, heads.groups * heads.q_heads, heads.k_dim);
  detail::check_part("k_grad", *args.k_grad, heads.groups, heads.k_dim);
  detail::check_part("v_grad", *args.v_grad, heads.groups, heads.v_dim);
  return heads;
}

}  // namespace te_fl::backend
