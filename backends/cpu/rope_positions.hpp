// Computes and checks the position of each token for the rotary embeddings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/backend.hpp"
#include "te_fl/ops/rope.h"

namespace te_fl::cpu {

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

struct Positions {
  std::vector<int64_t> of_token;  // -1: outside every sequence (thd)
  int64_t largest = -1;
  void set(int64_t token, int64_t position) {
    of_token[static_cast<size_t>(token)] = position;
    if (position > largest) largest = position;
  }
};

// The positions of a sbhd or bshd tensor, given its first two extents.
Positions dense_positions(int64_t extent0, int64_t extent1, int32_t layout,
                          const te_fl_tensor* start_positions, const ContextParallel& cp);
// The positions of a thd tensor. cu_seqlens counts whole sequences; a rank holds 1 / cp_size of
// each.
Positions packed_positions(int64_t tokens, const te_fl_tensor& cu_seqlens,
                           const te_fl_tensor* start_positions, const ContextParallel& cp);

// Throws unless the angles cover every position.
void check_freqs(const char* name, const te_fl_tensor& freqs, const Positions& positions);

}  // namespace te_fl::cpu
