// Matrix products on the backend's thread pool.
#pragma once

#include <cstdint>
#include <string>

#include "function_ref.hpp"

namespace te_fl::cpu {

// Conventions of every function here:
// - C = alpha op(A) op(B) + beta C, all row-major; op(A) is m x k, op(B) k x n, C m x n. A is
// stored
//   m x k, or k x m if trans_a; B k x n, or n x k if trans_b; a leading dimension is the distance
//   between stored rows in elements. Sums are in FP32.
// - If beta is 0, C is written without being read. If k or alpha is 0, A and B are not read and C
//   is scaled by beta. If m or n is 0 nothing is touched and pointers may be null.
// - C must not overlap A or B.
// - Work is split as a function of the shapes and ThreadPool::instance().num_threads() only, so
//   equal arguments give equal bits. Called from inside a pool task, it is not split and runs on
//   the calling thread. Any thread may call; a call blocks until C is complete.
// - Throws std::invalid_argument for a negative size or a leading dimension shorter than a row,
//   std::runtime_error if the GEMM library cannot be opened (see gemm_available), std::bad_alloc.

// True if the GEMM library can be opened, which the first call does; if not, why and what to
// install goes to *reason (may be null). A backend asks before it offers a GEMM.
bool gemm_available(std::string* reason);

void sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

// A and B are BF16 bit patterns, C is FP32. About twice sgemm's speed where the processor has BF16
// dot products (gemm_bf16_is_native); elsewhere the operands are widened to FP32, which is exact.
// The native instructions treat BF16 subnormal inputs as zero.
void bf16gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
              const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float beta, float* c,
              int64_t ldc);

// True if bf16gemm is faster than sgemm here. Opens the GEMM library; false if it cannot be.
bool gemm_bf16_is_native();

struct SgemmOperands {
  const float* a;
  const float* b;
  float* c;
};

// `batch` products of one shape, such as the heads of an attention layer. operands(i) names the
// matrices of product i; it is called at least once per product, on any thread, and must be pure.
// Products may share A and B; their C must not overlap.
void sgemm_batched(int64_t batch, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                   float alpha, int64_t lda, int64_t ldb, float beta, int64_t ldc,
                   FunctionRef<SgemmOperands(int64_t)> operands);

}  // namespace te_fl::cpu
