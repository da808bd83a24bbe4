// Chooses the kernels of a generic_gemm call. The choice is a pure function of the call's metadata
// and the device's limits; the op's functions run, workspace, prepare and describe all use it.
// Plain C++, so tests run without a GPU.
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

// True if the call has an activation (GELU or its gradient). Only then are the fused and composed
// paths candidates.
inline bool activates(const te_fl_generic_gemm_args& args) {
  return args.gelu != 0 || args.pre_gelu_in != nullptr;
}

// A call on the composed path: a GEMM, then a second kernel for GELU or its gradient. The GEMM
// writes to the pre-activation output or to scratch.
class ComposedProduct {
 public:
  // Decides from metadata. `call` must outlive this object.
  explicit ComposedProduct(const te_fl_generic_gemm_args& call);
  ComposedProduct(const ComposedProduct&) = delete;
  ComposedProduct& operator=(const ComposedProduct&) = delete;

  // True if the composed path supports the call. The pre-activation must not be quantised, and must
  // be FP32 or have D's dtype unless D is quantised. A residual and accumulation are not supported,
  // and d_sum only with GELU's gradient.
  explicit operator bool() const { return composed_; }
  // Returns the call of the GEMM alone. If its D is in scratch, the address is not yet set.
  const te_fl_generic_gemm_args& product() const { return product_; }

 protected:
  bool forward() const { return call_.gelu != 0; }

  const te_fl_generic_gemm_args& call_;
  te_fl_generic_gemm_args product_{};
  te_fl_tensor rounded_{};  // describes the product in scratch

 private:
  bool composed_ = false;
};

// Returns the kernels of a call that has passed its op's checks. GemmPath::algorithm stays empty,
// because cuBLASLt chooses the algorithm.
GemmPath choose_gemm(const te_fl_generic_gemm_args& args, const GemmDevice& device);

}  // namespace te_fl::cuda
