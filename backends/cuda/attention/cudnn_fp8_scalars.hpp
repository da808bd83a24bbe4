// Scalars of FP8 attention on cuDNN, in scratch: scales of the intermediate tensors P and dS, which
// the plan reads, and amaxes, which the plan writes. fp8_end() merges the amaxes into those of the
// call's outputs.
#pragma once

#include <cuda_runtime_api.h>

#include "te_fl/plugin.h"

namespace te_fl::cuda {

struct Fp8Scratch {
  float scale_p;     // scale of the FP8 probabilities
  float inverse_p;   // 1 / scale_p
  float scale_ds;    // FP8 scale for (softmax scale * dS): the scale of dp_quant divided by the
                     // softmax scale
  float inverse_ds;  // 1 / scale_ds
  float amax_p, amax_ds;
  float amax[3];  // of o, or of dq, dk, dv
};

// An FP8 output whose scale the call supplies. scale_inv and amax may be NULL.
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
  float scale;           // softmax scale of the scores
  Fp8Output p;           // backward: read only, with scale_inv and amax NULL
  Fp8Output ds;          // forward: its scale is NULL
  float most_scale_p;    // upper bound of scale_p, which otherwise is the scale of `p`
  Fp8Output outputs[3];  // o, or dq, dk, dv
  int count;
};

// Each function enqueues one kernel. Call fp8_begin() before the plan runs and fp8_end() after it.
void fp8_begin(cudaStream_t stream, const Fp8Job& job);
void fp8_end(cudaStream_t stream, const Fp8Job& job);

}  // namespace te_fl::cuda
