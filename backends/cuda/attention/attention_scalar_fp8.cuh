// FP8 outputs of the scalar attention kernels: the memory that the kernels write, and the
// quantisation that follows the kernels.
#pragma once

#include "attention/attention.cuh"
#include "common/quantised.cuh"

namespace te_fl::cuda {

// FP32 results in scratch that are quantised to a tensor's FP8 data after the attention kernels.
struct StagedCodes {
  const float* values = nullptr;  // compact, in the tensor's logical order
  Quantised q;
  int64_t count = 0;
  int ndim = 0;
  int64_t shape[4] = {}, stride[4] = {};  // stride: of the row-wise FP8 data, in elements

  __device__ int64_t offset(int64_t e) const {
    int64_t at = 0;
    for (int d = ndim - 1; d >= 0; --d) {
      at += e % shape[d] * stride[d];
      e /= shape[d];
    }
    return at;
  }
};

// The quantised outputs of one call: o or the gradients, and s_quant or dp_quant. If the call
// supplies the scale, the attention kernels write FP8 data directly. If the scale must be computed,
// or the tensor also has column-wise data, they write FP32 to scratch, which write_codes()
// quantises.
class CodesOutputs {
 public:
  // Returns the bytes of scratch for one output, which are 0 if the kernels write its FP8 data
  // directly. Reads metadata only.
  static size_t bytes(const te_fl_tensor& t);

  // `scratch`: as many bytes as the sum of bytes() over all outputs, 256-byte aligned.
  CodesOutputs(const te_fl_context& ctx, void* scratch)
      : ctx_(ctx), scratch_(static_cast<char*>(scratch)) {}

  // Returns the memory that the kernels write for output `t`, which may have any dtype. Throws
  // INVALID_ARGUMENT (clean: nothing has been written) if members of t.quant that the call needs
  // are NULL. Call it for all outputs before prepare().
  HeadData heads(const te_fl_tensor& t, int32_t layout);
  // Returns the quantisation of P or dS, whose scale is that of `t`. `t` NULL: no quantisation.
  // `written`: the call also writes scale_inv and amax of `t`.
  Rounding rounding(const te_fl_tensor* t, bool written);

  void prepare() const;      // must be called before the kernels
  void write_codes() const;  // call after the kernels: writes scale_inv, amax, and staged FP8 data

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
