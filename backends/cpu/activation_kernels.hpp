// Activations and their derivatives on FP32 buffers of n elements. Every buffer must be padded (see
// convert.hpp). Inputs and outputs may be the same buffer.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

enum class Act { kGelu, kQgelu, kRelu, kSrelu, kSilu, kSigmoid, kClamped, kSitu };

// Parameters of gated activations: limit, alpha and offset are used by kClamped (op
// clamped_swiglu), beta1 and beta2 by kSitu (op situglu).
struct GateOptions {
  float limit = 0.0f;
  float alpha = 0.0f;
  float offset = 0.0f;
  float beta1 = 0.0f;
  float beta2 = 0.0f;
};

// y = act(x). Not for kClamped and kSitu.
void act_forward(Act act, const float* x, int64_t n, float* y);
// dx = dy act'(x). Not for kClamped and kSitu.
void act_backward(Act act, const float* dy, const float* x, int64_t n, float* dx);
// y = act(a) b.
void gated_forward(Act act, GateOptions options, const float* a, const float* b, int64_t n,
                   float* y);
// da = dy act'(a) b, db = dy act(a). Either may be NULL.
void gated_backward(Act act, GateOptions options, const float* dy, const float* a, const float* b,
                    int64_t n, float* da, float* db);

}  // namespace te_fl::cpu
