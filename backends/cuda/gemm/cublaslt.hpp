// Access to cuBLASLt, which is opened on first use: a copy that the process has already loaded,
// else by soname.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <string>

namespace te_fl::cuda {

// The cuBLASLt functions that the plugin uses. Either all are found or the library is refused.
struct CublasLt {
  size_t number = 0;  // version(), queried once; 130001 is 13.0.1
  std::string path;   // path of the loaded copy
  size_t (*version)() = nullptr;
  const char* (*status_name)(cublasStatus_t) = nullptr;
  cublasStatus_t (*create)(cublasLtHandle_t*) = nullptr;
  cublasStatus_t (*desc_init)(cublasLtMatmulDesc_t, size_t, cublasComputeType_t,
                              cudaDataType_t) = nullptr;
  cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*,
                             size_t) = nullptr;
  cublasStatus_t (*layout_init)(cublasLtMatrixLayout_t, size_t, cudaDataType, uint64_t, uint64_t,
                                int64_t) = nullptr;
  cublasStatus_t (*preference_init)(cublasLtMatmulPreference_t, size_t) = nullptr;
  cublasStatus_t (*preference_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                   const void*, size_t) = nullptr;
  cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                              cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                              cublasLtMatmulHeuristicResult_t*, int*) = nullptr;
  cublasStatus_t (*algo_get)(const cublasLtMatmulAlgo_t*, cublasLtMatmulAlgoConfigAttributes_t,
                             void*, size_t, size_t*) = nullptr;
  cublasStatus_t (*algo_set)(cublasLtMatmulAlgo_t*, cublasLtMatmulAlgoConfigAttributes_t,
                             const void*, size_t) = nullptr;
  cublasStatus_t (*algo_check)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                               cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                               cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*,
                               cublasLtMatmulHeuristicResult_t*) = nullptr;
  cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                           cublasLtMatrixLayout_t, const void*, cublasLtMatrixLayout_t, const void*,
                           const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t,
                           const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) = nullptr;
};

// Returns the loaded library, or NULL if the library or one of its functions was not found;
// cublaslt_missing() then returns the reason.
const CublasLt* cublaslt() noexcept;
const char* cublaslt_missing() noexcept;

// Returns the cuBLASLt handle of a device, created on first use and never destroyed. Throws if
// creation fails. Thread-safe.
cublasLtHandle_t cublaslt_handle(int device);

// Throws unless `status` is success. The text names the function, the status and `what` (the call's
// shapes).
void check(cublasStatus_t status, const char* function, const std::string& what);

}  // namespace te_fl::cuda
