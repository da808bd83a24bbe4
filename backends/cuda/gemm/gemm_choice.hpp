// Chooses the kernels of a call of generic_gemm: a pure function of the call's metadata and of what
// the device grants, which run, workspace, prepare and describe share. Plain C++, so that it can be
// tested where there is no GPU.
#pragma once

#include "gemm/gemm_path.hpp"

namespace te_fl::cuda {

// The limits of a GPU.
struct GemmDevice {
  int architecture = 90;        // 10 * major + minor
  int multiprocessors = 132;    // of GPUs that fused_gemm.cu has code for
  bool has_tensor_maps = true;  // the driver encodes them
};
inline constexpr int kFusedArchitecture = 90;  // Hopper

// An activation follows the product; only then do the fused and the composed way come up.
inline bool activates(const te_fl_generic_gemm_args& args) {
  return args.gelu != 0 || args.pre_gelu_in != nullptr;
}

// The product of a call whose GELU, or its gradient, is computed by a second kernel: its result is
// the pre-activation, or lies in scratch.
class ComposedProduct {
 public:
  // Decides from metadata. `call` outlives this.
  explicit ComposedProduct(const te_fl_generic_gemm_args& call);
  ComposedProduct(const ComposedProduct&) = delete;
  ComposedProduct& operator=(const ComposedProduct&) = delete;

  // True if the call is served so: the pre-activation is not quantised, and FP32, of D's dtype or
  // beside a quantised D; nothing is added to the result, and only a gradient's columns are summed.
  explicit operator bool() const { return composed_; }
  // Its D may be scratch, which has no address here.
  const te_fl_generic_gemm_args& product() const { return product_; }

 protected:
  bool forward() const { return call_.gelu != 0; }

  const te_fl_generic_gemm_args& call_;
  te_fl_generic_gemm_args product_{};
  te_fl_tensor rounded_{};  // the product in scratch

 private:
  bool composed_ = false;
};

// The call has passed the checks of its op. `algorithm` stays empty: it is for the library to say.
GemmPath choose_gemm(const te_fl_generic_gemm_args& args, const GemmDevice& device);

}  // namespace te_fl::cuda
