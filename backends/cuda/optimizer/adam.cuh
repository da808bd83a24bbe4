// Device code shared by the Adam kernels with and without FP8 parameters: the update of one
// element, and loads and stores of four elements.
#pragma once

#include "common/store.cuh"
#include "te_fl/ops/optimizer.h"

namespace te_fl::cuda {

struct Adam {
  float lr, beta1, beta2, less1, less2, epsilon, weight_decay, correction1, correction2;
  bool l2, corrects;
  const float* lr_tensor;      // replaces lr unless NULL
  const int64_t* step_tensor;  // its value determines the bias corrections, unless NULL

  // Replaces the learning rate and the corrections by the tensors' values. All threads of the block
  // must call it.
  __device__ void read_tensors() {
    if (lr_tensor != nullptr) lr = *lr_tensor;
    if (step_tensor == nullptr || !corrects) return;
    __shared__ float corrections[2];
    if (threadIdx.x < 2) {
      const double beta = threadIdx.x == 0 ? beta1 : beta2;
      corrections[threadIdx.x] =
          static_cast<float>(1.0 - pow(beta, static_cast<double>(*step_tensor)));
    }
    __syncthreads();
    correction1 = corrections[0];
    correction2 = corrections[1];
  }
  // Uses explicitly rounded operations, so that both kernels give identical bits.
  __device__ void step(float g, float& p, float& m, float& v) const {
    const float grad = l2 ? fmaf(weight_decay, p, g) : g;
    m = fmaf(beta1, m, __fmul_rn(less1, grad));
    v = fmaf(beta2, v, __fmul_rn(__fmul_rn(less2, grad), grad));
    float update = __fdiv_rn(__fdiv_rn(m, correction1),
                             __fadd_rn(__fsqrt_rn(__fdiv_rn(v, correction2)), epsilon));
    if (!l2) update = fmaf(weight_decay, p, update);
    p = fmaf(-lr, update, p);
  }
};

constexpr int kFour = 4;  // elements that a thread loads and stores with one access

// Four elements as loaded. 16-bit types use half of it.
struct Four {
  uint4 raw;
};
__device__ inline Four load_four(const void* data, int dtype, int64_t i) {
  Four f;
  if (dtype == TE_FL_F32) {
    f.raw = *reinterpret_cast<const uint4*>(static_cast<const float*>(data) + i);
  } else {
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + i);
    f.raw = make_uint4(raw.x, raw.y, 0, 0);
  }
  return f;
}
__device__ inline void unpack_four(const Four& f, int dtype, float (&v)[kFour]) {
  if (dtype == TE_FL_F32) {
    v[0] = __uint_as_float(f.raw.x), v[1] = __uint_as_float(f.raw.y);
    v[2] = __uint_as_float(f.raw.z), v[3] = __uint_as_float(f.raw.w);
  } else if (dtype == TE_FL_BF16) {
    v[0] = __uint_as_float(f.raw.x << 16), v[1] = __uint_as_float(f.raw.x & 0xFFFF0000u);
    v[2] = __uint_as_float(f.raw.y << 16), v[3] = __uint_as_float(f.raw.y & 0xFFFF0000u);
  } else {
    const float2 low = __half22float2(reinterpret_cast<const __half2&>(f.raw.x));
    const float2 high = __half22float2(reinterpret_cast<const __half2&>(f.raw.y));
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
}
__device__ inline void store_four(const Target& out, int64_t i, const float (&v)[kFour]) {
  if (out.dtype == TE_FL_F32) {
    *reinterpret_cast<float4*>(static_cast<float*>(out.data) + i) =
        make_float4(v[0], v[1], v[2], v[3]);
    return;
  }
  uint2 words;
  if (out.dtype == TE_FL_BF16) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(v[0], v[1]);
    const __nv_bfloat162 high = __floats2bfloat162_rn(v[2], v[3]);
    words =
        make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
  } else {
    const __half2 low = __floats2half2_rn(v[0], v[1]), high = __floats2half2_rn(v[2], v[3]);
    words =
        make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
  }
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(out.data) + i) = words;
}

// Adam that also writes fp8_params (adam_fp8.cu). The call must have passed its checks.
void adam_with_fp8(const te_fl_context& ctx, const te_fl_multi_tensor_adam_args& a,
                   const Adam& constants, const int32_t* noop);
// Returns why adam_with_fp8() does not support the call's fp8_params; NULL if it does.
Refusal refuse_fp8_params(const te_fl_multi_tensor_adam_args& a);

}  // namespace te_fl::cuda
