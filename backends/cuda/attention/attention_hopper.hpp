// Host interface of the attention kernels for Hopper's tensor cores. choose_attention()
// (attention_choice.hpp) says which calls they accept.
#pragma once

#include "attention/attention.cuh"

namespace te_fl::cuda {

// Computes the bits of p.hide and p.keep into their scratch. Skips those whose by_query is NULL.
void pack_pair_bits(cudaStream_t stream, const Attention& p);

void hopper_attention_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o,
                              float* lse);
// Computes dq, dk, dv and, if requested, dbias. Also writes g.delta, from which the caller computes
// dsink.
void hopper_attention_backward(const te_fl_context& ctx, const Attention& p,
                               const AttentionGradients& g);

namespace flash {
// The grid with one block per 128 rows of a head: x counts the blocks of all sequences, y the
// heads.
inline dim3 fixed_grid(int64_t rows, int64_t heads, int64_t batch) {
  return dim3(static_cast<unsigned>(ceil_div(rows, kFixed) * batch), static_cast<unsigned>(heads));
}
}  // namespace flash

}  // namespace te_fl::cuda
