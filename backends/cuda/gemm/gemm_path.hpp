// The kernels by which a call of generic_gemm goes, as choose_gemm() (gemm_choice.hpp) returns it
// and as words. Plain C++, so that it can be tested where there is no GPU.
#pragma once

#include <string>

#include "gemm/gemm_problem.hpp"

namespace te_fl::cuda {

// The kernels of fused_gemm.cu.
enum class FusedForm { kNone, kForward, kForwardCodes, kForwardMeasured, kBackward };

struct GemmPath {
  enum class Kind {
    kProduct,   // one product, and what is left of the epilogue
    kFused,     // GELU or its gradient in the product's own kernel
    kComposed,  // the product, then the kernel of GELU or of its gradient
  };
  Kind kind = Kind::kProduct;
  const char* unfused = nullptr;    // of a call with GELU: why no kernel does both; static text
  bool empty = false;               // there is nothing to multiply
  bool fp8 = false;                 // the library multiplies FP8
  const char* converted = nullptr;  // the operands' form for the library; static text
  const char* indirect = nullptr;  // the reason for which the library does not write D; static text
  std::string algorithm{};         // the library's, and who chose it; empty: it is not called
  FusedForm form = FusedForm::kNone;  // of kFused
  Problem problem{};  // of kProduct and kFused the call, of kComposed the product that comes first

  std::string text() const {
    if (kind == Kind::kFused) return "fused_gemm: product and GELU in one kernel of the plugin";
    std::string t = product();
    if (kind == Kind::kComposed) t += ", then the kernel of GELU";
    if (!algorithm.empty()) t += "; algorithm " + algorithm;
    if (unfused != nullptr) t += std::string("; not fused_gemm: ") + unfused;
    return t;
  }

 private:
  std::string product() const {
    std::string t = empty ? "zeros" : fp8 ? "cuBLASLt in FP8" : "cuBLASLt";
    if (converted != nullptr && !empty) t += std::string(" on operands ") + converted;
    if (indirect == nullptr) {
      const char* const written = kind == Kind::kComposed ? "product" : "result";
      return empty ? t : t + ", which writes the " + written;
    }
    return t + " into FP32 scratch, then the epilogue's kernel: " + indirect;
  }
};

}  // namespace te_fl::cuda
