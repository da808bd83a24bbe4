// FP8 outputs of the plain attention kernels: the kernels' targets, and the steps after the
// kernels.
#pragma once

#include "attention/attention.cuh"
#include "common/quantised.cuh"

namespace te_fl::cuda {

// FP32 values in scratch that are quantised to the codes of a tensor after the kernels.
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

// The quantised outputs of one call: o or the gradients, and s_quant or dp_quant. The kernels write
// codes directly if the call supplies the scale. If the scale is computed, or the tensor has a
// column-wise copy, the kernels write FP32 to scratch, which write_codes() quantises.
class CodesOutputs {
 public:
  // Bytes of scratch for one output; 0 if the kernels write its codes directly. Reads metadata
  // only.
  static size_t bytes(const te_fl_tensor& t);

  // `scratch`: as many bytes as the sum of bytes() over all outputs, 256-byte aligned.
  CodesOutputs(const te_fl_context& ctx, void* scratch)
      : ctx_(ctx), scratch_(static_cast<char*>(scratch)) {}

  // The tensor that the kernels write for an output of any dtype. Throws INVALID_ARGUMENT (clean)
  // if parts of a quantised output are missing. Call it for all outputs before prepare().
  HeadData heads(const te_fl_tensor& t, int32_t layout);
  // The quantisation of P or dS. `t` NULL: not quantised. `written`: scale_inv and amax are
  // outputs.
  Rounding rounding(const te_fl_tensor* t, bool written);

  void prepare() const;      // must be called before the kernels
  void write_codes() const;  // call after them: writes scale_inv, amax, and codes from scratch

 private:
  static constexpr int kMost = 4;  // at most dq, dk, dv and dS
  const te_fl_context& ctx_;
  char* scratch_;
  Quantised scales_[kMost];
  int scale_count_ = 0;
  StagedCodes staged_[kMost];
  int staged_count_ = 0;
};

// A view of a quantised tensor that has its own strides; `layout` is the call's layout.
HeadData head_data(const te_fl_tensor& t, int32_t layout);

}  // namespace te_fl::cuda
