#pragma once

// The positions of an op's parts in a row, for ops whose rows hold several tensors: gated
// activations and packed Q, K, V. Header-only.

#include <cstdint>

#include "te_fl/plugin.h"

namespace te_fl::backend {

// Positions of the columns in a row that holds the halves a and b of `half` columns each. With
// `interleave` 0 half b follows half a. Otherwise blocks of `interleave` columns of a and b
// alternate.
struct HalvesOfRow {
  int64_t half, interleave;

  int64_t place_of_a(int64_t col) const {
    return interleave == 0 ? col : col / interleave * 2 * interleave + col % interleave;
  }
  // Distance from a column of a to the same column of b.
  int64_t distance() const { return interleave == 0 ? half : interleave; }
  // Number of contiguous columns of a, starting at col.
  int64_t run(int64_t col) const {
    return interleave == 0 ? half - col : interleave - col % interleave;
  }
};

// The last two extents of a packed Q, K, V tensor: [groups, width]. Each group has q_heads queries
// of k_dim elements, one key of k_dim elements and one value of v_dim elements.
struct PackedHeads {
  int64_t groups, q_heads, k_dim, v_dim;
  int64_t width() const noexcept { return (q_heads + 1) * k_dim + v_dim; }
};

// Returns the heads of a call on packed Q, K, V. `packed` is qkv_input or qkv_grad.
template <class Args>
PackedHeads packed_heads(const Args& args, const te_fl_tensor& packed) {
  return {packed.dl.shape[2], args.q_dim / args.k_dim, args.k_dim, args.v_dim};
}

}  // namespace te_fl::backend
