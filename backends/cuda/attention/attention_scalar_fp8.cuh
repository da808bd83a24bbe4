// Outputs in codes of attention in plain CUDA: what its kernels write, and what is
// left to do after them.
#pragma once

#include "attention/attention.cuh"
#include "common/quantised.cuh"

namespace te_fl::cuda {

// FP32 values in scratch that become the codes of a tensor.
struct StagedCodes {
  const float* values = nullptr;  // compact, in the tensor's logical order
  Quantised q;
  int64_t count = 0;
  int ndim = 0;
  int64_t shape[4] = {}, stride[4] = {};  // stride: of the row-wise codes, in elements

  __device__ int64_t offset(int64_t e) const {
    int64_t at = 0;
    for (int d = ndim - 1; d >= 0; --d) {
      at += e % shape[d] * stride[d];
      e /= shape[d];
    }
    return at;
  }
};

// The quantised outputs of one call: o or the gradients, and s_quant or dp_quant. Codes under a
// given scale are written by the kernels where they belong. Those of a computed scale, and those
// with a column-wise copy, are FP32 in scratch until the end.
class CodesOutputs {
 public:
  // Scratch of one output; 0 if the kernels write it. Metadata only.
  static size_t bytes(const te_fl_tensor& t);

  // `scratch`: the sum of bytes() of all outputs, 256-byte aligned.
  CodesOutputs(const te_fl_context& ctx, void* scratch)
      : ctx_(ctx), scratch_(static_cast<char*>(scratch)) {}

  // The kernels' target for an output of any dtype. Throws (INVALID_ARGUMENT, clean) if parts of
  // a quantised one are missing; call it for all outputs before prepare().
  HeadData heads(const te_fl_tensor& t, int32_t layout);
  // Serves P or dS; NULL: not quantised. `written`: scale_inv and amax are results.
  Rounding rounding(const te_fl_tensor* t, bool written);

  void prepare() const;      // before the kernels
  void write_codes() const;  // after them: scale_inv, amax, codes from scratch

 private:
  static constexpr int kMost = 4;  // dq, dk, dv, dS
  const te_fl_context& ctx_;
  char* scratch_;
  Quantised scales_[kMost];
  int scale_count_ = 0;
  StagedCodes staged_[kMost];
  int staged_count_ = 0;
};

// A tensor of codes that is read or written as `layout` says, in its own strides.
HeadData head_data(const te_fl_tensor& t, int32_t layout);

}  // namespace te_fl::cuda
