// Chooses the kernels of a generic_gemm call. The choice is a pure function of the call's metadata
// and the device's limits, which run, workspace, prepare and describe share. Plain C++, so tests
// run without a GPU.
#pragma once

#include "gemm/gemm_path.hpp"

namespace te_fl::cuda {

// The limits of a GPU.
struct GemmDevice {
  int architecture = 90;        // compute capability, 10 * major + minor
  int multiprocessors = 132;    // default: of a GPU that fused_gemm.cu has code for
  bool has_tensor_maps = true;  // the driver can encode tensor maps
};
inline constexpr int kFusedArchitecture = 90;  // compute capability of Hopper

// True if the product has an activation. Only then are the fused and composed paths candidates.
inline bool activates(const te_fl_generic_gemm_args& args) {
  return args.gelu != 0 || args.pre_gelu_in != nullptr;
}

// A call that computes GELU or its gradient with a second kernel. Its product is written to the
// pre-activation output or to scratch.
class ComposedProduct {
 public:
  // Decides from metadata. `call` must outlive this object.
  explicit ComposedProduct(const te_fl_generic_gemm_args& call);
  ComposedProduct(const ComposedProduct&) = delete;
  ComposedProduct& operator=(const ComposedProduct&) = delete;

  // True if the composed path serves the call. The pre-activation must not be quantised, and must
  // be FP32 or of D's dtype, unless D is quantised. Nothing may be added to the result, and d_sum
  // is possible for the gradient only.
  explicit operator bool() const { return composed_; }
  // The call of the product alone. Its D has no address here if it is scratch.
  const te_fl_generic_gemm_args& product() const { return product_; }

 protected:
  bool forward() const { return call_.gelu != 0; }

  const te_fl_generic_gemm_args& call_;
  te_fl_generic_gemm_args product_{};
  te_fl_tensor rounded_{};  // describes the product in scratch

 private:
  bool composed_ = false;
};

// The call must have passed its op's checks. `algorithm` stays empty, because the library decides
// it.
GemmPath choose_gemm(const te_fl_generic_gemm_args& args, const GemmDevice& device);

}  // namespace te_fl::cuda
