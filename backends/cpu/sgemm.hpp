// Matrix products on the backend's thread pool.
#pragma once

#include <cstdint>
#include <string>

#include "function_ref.hpp"

namespace te_fl::cpu {

// Conventions of all functions in this header:
// - C = alpha op(A) op(B) + beta C, all row-major. op(A) is m x k, op(B) k x n, and C m x n. A is
//   stored as m x k, or as k x m if trans_a; B as k x n, or as n x k if trans_b. A leading
//   dimension is the row stride of a stored matrix in elements. Accumulation is in FP32.
// - If beta is 0, C is not read. If k or alpha is 0, A and B are not read and C is scaled by beta.
//   If m or n is 0, nothing is accessed and pointers may be NULL.
// - C must not overlap A or B.
// - The division of work depends only on the shapes and on ThreadPool::instance().num_threads(), so
//   equal arguments give equal bits. Inside a pool task, the work is not divided and runs on the
//   calling thread. Thread-safe; a call blocks until C is complete.
// - Throws std::invalid_argument for a negative size or a leading dimension shorter than a row,
//   std::runtime_error if the GEMM library cannot be opened (see gemm_available), and
//   std::bad_alloc.

// True if the GEMM library can be opened; the first call opens it. Otherwise *reason (may be NULL)
// receives the cause and the package to install. A backend calls this before it registers a GEMM.
bool gemm_available(std::string* reason);

void sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

// A and B are BF16 bit patterns, C is FP32. About twice as fast as sgemm if the processor has BF16
// dot products (gemm_bf16_is_native); otherwise the operands are converted to FP32, which is exact.
// The native instructions treat subnormal BF16 inputs as zero.
void bf16gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
              const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float beta, float* c,
              int64_t ldc);

// True if bf16gemm is faster than sgemm on this processor. Opens the GEMM library; false if it
// cannot be opened.
bool gemm_bf16_is_native();

struct SgemmOperands {
  const float* a;
  const float* b;
  float* c;
};

// `batch` products of one shape, such as the heads of an attention layer. operands(i) returns the
// matrices of product i. It is called at least once per product, on any thread, and must be pure.
// Products may share A and B; their C must not overlap.
void sgemm_batched(int64_t batch, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                   float alpha, int64_t lda, int64_t ldb, float beta, int64_t ldc,
                   FunctionRef<SgemmOperands(int64_t)> operands);

}  // namespace te_fl::cpu
