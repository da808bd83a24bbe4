// The kernels of a generic_gemm call, as choose_gemm() (gemm_choice.hpp) returns them, and their
// description as text. Plain C++, so tests run without a GPU.
#pragma once

#include <string>

#include "gemm/gemm_problem.hpp"

namespace te_fl::cuda {

// The variants of the kernel in fused_gemm.cu.
enum class FusedForm { kNone, kForward, kForwardCodes, kForwardMeasured, kBackward };

struct GemmPath {
  enum class Kind {
    kProduct,   // a GEMM by cuBLASLt, and a kernel for the rest of the epilogue if necessary
    kFused,     // GELU or its gradient in the epilogue of the plugin's GEMM kernel
    kComposed,  // the GEMM, then the kernel of GELU or its gradient
  };
  Kind kind = Kind::kProduct;
  const char* unfused = nullptr;    // call with GELU: why it is not fused; static text
  bool empty = false;               // M, N or K is 0
  bool fp8 = false;                 // the library multiplies FP8 operands
  const char* converted = nullptr;  // conversion of the operands for the library; static text
  const char* indirect = nullptr;   // reason if the library does not write D; static text
  std::string algorithm{};          // the library's algorithm and its origin; empty: the library is
                                    // not called
  FusedForm form = FusedForm::kNone;  // variant of the fused kernel, for kFused
  Problem problem{};                  // kProduct, kFused: the call; kComposed: its product

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
