// The kernel that copies each token's row to the output rows that row_id_map assigns to it.
#pragma once

#include "moe/row_launch.cuh"

namespace te_fl::cuda {

// The routing probability of each (token, expert) pair, [tokens, pairs per token]. For a pair with
// probability 0, a row of zeros is written instead of the token's row.
struct PairProbs {
  const void* data = nullptr;  // NULL: the token's row is copied for every pair
  int bytes = 4;  // bytes per probability: F32, F16 or BF16. A value is zero if all its bits but
                  // the sign are 0.

  __device__ bool zero(int64_t pair) const {
    if (data == nullptr) return false;
    if (bytes == 4) return (static_cast<const uint32_t*>(data)[pair] & 0x7FFFFFFFu) == 0;
    return (static_cast<const uint16_t*>(data)[pair] & 0x7FFFu) == 0;
  }
};

// Copies the row of each token to all rows that the map [each, tokens] assigns to it. Reads each
// part of a row (RowCut) once, and the token's map entries once per part. kLists: a warp copies one
// part, and its lanes read the map entries together.
template <class Word, bool kLists>
__global__ void __launch_bounds__(kThreads)
    scatter_rows_kernel(const Word* input, const int32_t* map, Word* output, RowParts p,
                        int64_t tokens, int64_t each, int64_t rows, PairProbs probs) {
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t item = thread >> p.lanes_log2;
  if (item >= p.size) return;
  uint32_t part = 0;
  const int64_t token = p.first + p.parts(static_cast<uint32_t>(item), part);
  const int64_t lane = thread & ((1 << p.lanes_log2) - 1);
  const int64_t word = (int64_t{part} * kAtOnce << p.lanes_log2) + lane;
  const auto holds = [&](int u) { return word + (u << p.lanes_log2) < p.pieces; };
  const Word* const from = input + token * p.pieces + word;
  Word held[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (holds(u)) held[u] = from[u << p.lanes_log2];
  }
  const auto put = [&](int64_t row, bool zero) {
    Word* const to = output + row * p.pieces + word;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (holds(u)) __stcs(to + (u << p.lanes_log2), zero ? Word{} : held[u]);
    }
  };
  if constexpr (kLists) {
    for (int64_t s = 0; s < each; s += 32) {
      const int32_t mine = s + lane < each ? map[(s + lane) * tokens + token] : -1;
      const bool is = mine >= 0 && mine < rows;
      unsigned there = __ballot_sync(0xFFFFFFFFu, is);
      const unsigned zeros = __ballot_sync(0xFFFFFFFFu, is && probs.zero(token * each + s + lane));
      for (; there != 0; there &= there - 1) {
        const int of = __ffs(static_cast<int>(there)) - 1;
        put(__shfl_sync(0xFFFFFFFFu, mine, of), (zeros >> of & 1u) != 0);
      }
    }
  } else {
    for (int64_t s = 0; s < each; s += kAtOnce) {
      int64_t row[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) row[k] = s + k < each ? map[(s + k) * tokens + token] : -1;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (row[k] >= 0 && row[k] < rows) put(row[k], probs.zero(token * each + s + k));
      }
    }
  }
}

inline void scatter_rows(const te_fl_context& ctx, const char* op, const te_fl_tensor& input,
                         const te_fl_tensor& map, const te_fl_tensor& output,
                         const PairProbs& probs = {}) {
  const int64_t bytes = row_bytes_of(input), each = map.dl.shape[0], tokens = map.dl.shape[1];
  if (each == 0) return;
  with_word(word_bytes(bytes, input, output), [&]<class Word>(Word) {
    for_parts(tokens, bytes / static_cast<int64_t>(sizeof(Word)), [&](const RowParts& p) {
      const auto kernel = each > kFewPlaces && p.lanes_log2 == 5 ? scatter_rows_kernel<Word, true>
                                                                 : scatter_rows_kernel<Word, false>;
      kernel<<<block_count(p.size << p.lanes_log2, kThreads), kThreads, 0, stream_of(ctx)>>>(
          backend::data<const Word>(input), backend::data<const int32_t>(map),
          backend::data<Word>(output), p, tokens, each, output.dl.shape[0], probs);
      check_launch(op);
    });
  });
}

}  // namespace te_fl::cuda
