// The kernels of attention on Hopper's tensor cores, as their callers see them. What they take is
// choose_attention()'s to say (attention_choice.hpp).
#pragma once

#include "attention/attention.cuh"

namespace te_fl::cuda {

// Fills the scratch of p.hide and p.keep, where there is one.
void pack_pair_bits(cudaStream_t stream, const Attention& p);

void hopper_attention_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o,
                              float* lse);
// dq, dk, dv and, where asked for, dbias; g.delta is written first. dsink is left to the caller.
void hopper_attention_backward(const te_fl_context& ctx, const Attention& p,
                               const AttentionGradients& g);

namespace flash {
// One block for 128 rows of a head: x counts those of all sequences, y the heads.
inline dim3 fixed_grid(int64_t rows, int64_t heads, int64_t batch) {
  return dim3(static_cast<unsigned>(ceil_div(rows, kFixed) * batch), static_cast<unsigned>(heads));
}
}  // namespace flash

}  // namespace te_fl::cuda
