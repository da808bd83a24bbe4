// The scalars of FP8 attention on cuDNN, in scratch: what the plan reads beyond the tensors' own
// scales, and where its amaxes go before they join the running ones.
#pragma once

#include <cuda_runtime_api.h>

#include "te_fl/plugin.h"

namespace te_fl::cuda {

struct Fp8Scratch {
  float scale_p;     // of the probabilities' codes
  float inverse_p;   // of that
  float scale_ds;    // of scale * dS, so that its codes are those of dS under dp_quant's scale
  float inverse_ds;  // of that
  float amax_p, amax_ds;
  float amax[3];  // of o; of dq, dk, dv
};

// An output with a given scale. Pointers may be NULL but for `scale`.
struct Fp8Output {
  const float* scale = nullptr;
  float* scale_inv = nullptr;
  float* amax = nullptr;
};
inline Fp8Output fp8_output(const te_fl_tensor& t) {
  return {t.quant->scale, static_cast<float*>(t.quant->scale_inv), t.quant->amax};
}

struct Fp8Job {
  Fp8Scratch* scratch;
  float scale;           // of the scores
  Fp8Output p;           // backward: read only, scale_inv and amax NULL
  Fp8Output ds;          // scale NULL in the forward
  float most_scale_p;    // scale_p is the probabilities' own scale, but at most this
  Fp8Output outputs[3];  // o; dq, dk, dv
  int count;
};

// Enqueue one kernel each, before the plan and after it.
void fp8_begin(cudaStream_t stream, const Fp8Job& job);
void fp8_end(cudaStream_t stream, const Fp8Job& job);

}  // namespace te_fl::cuda
