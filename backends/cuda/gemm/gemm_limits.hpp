// The FP8 GEMMs that cuBLASLt supports, by architecture and version. Plain C++, so tests run
// without a GPU.
#pragma once

#include <cstddef>

namespace te_fl::cuda {

inline constexpr int kFp8Architecture = 89;    // compute capability of Ada; Hopper's is 90
inline constexpr int kBlockArchitecture = 90;  // the only one with 1x128 and 128x128 block scaling
// The result of cublasLtGetVersion() in CUDA 12.9.
inline constexpr size_t kBlockLibraryVersion = 120900;

// Returns why cuBLASLt of version `library_version` does not support a GEMM on a GPU of
// `architecture`; NULL if it does. `fp8`: an operand is FP8. `blocks`: both operands are
// block-scaled FP8. `architecture`: 10 * major + minor.
constexpr const char* gemm_limit(int architecture, size_t library_version, bool fp8, bool blocks) {
  if (!fp8) return nullptr;
  if (architecture < kFp8Architecture) {
    return "generic_gemm: a or b is FP8, which GPUs have from compute capability 8.9 on (Ada, "
           "Hopper), and this one is older: use BF16, dequantise the operand first, or let another "
           "implementation run the op";
  }
  if (!blocks) return nullptr;
  if (architecture != kBlockArchitecture) {
    return "generic_gemm: a and b are scaled by blocks, which cuBLASLt multiplies on compute "
           "capability 9.0 only: quantise with delayed or current scaling";
  }
  if (library_version < kBlockLibraryVersion) {
    return "generic_gemm: a and b are scaled by blocks, which cuBLASLt multiplies from CUDA 12.9 "
           "on, and the one in use is older: install libcublas of CUDA 12.9 or newer, or quantise "
           "with delayed or current scaling";
  }
  return nullptr;
}

}  // namespace te_fl::cuda
