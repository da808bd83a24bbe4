// A GEMM in the form in which cuBLASLt computes it, derived from a call's metadata and addresses.
// Plain C++, so tests run without a GPU.
#pragma once

#include <cstdint>

#include "common/dtype_bytes.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::cuda {

inline bool is_block(const te_fl_tensor& t) {
  const uint32_t scaling = backend::scaling(t);
  return scaling == TE_FL_SCALING_BLOCK_1X128 || scaling == TE_FL_SCALING_BLOCK_128X128;
}
inline bool is_mxfp8(const te_fl_tensor& t) { return backend::scaling(t) == TE_FL_SCALING_MXFP8; }
inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
// True if the matrix is empty, or is 16-byte aligned and its rows are multiples of 16 bytes: the
// library's best kernels, and bulk copies, require that.
inline bool has_whole_rows(const te_fl_tensor& t) {
  return backend::numel(t) == 0 || (backend::as_matrix(t).cols * bytes_of(dtype_of(t)) % 16 == 0 &&
                                    aligned16(backend::data<const void>(t)));
}

// One operand, stored row-major. `along`: K is contiguous, so the stored matrix is [M, K] for A and
// [N, K] for B.
struct Operand {
  const te_fl_tensor* tensor = nullptr;
  int dtype = TE_FL_F32;
  bool along = false;
  // FP8 data (row-wise or column-wise) in which K is contiguous: a contiguous matrix [M or N, K].
  // FP8 GEMMs read this data.
  const void* codes = nullptr;
  const float* scale_inv = nullptr;  // MXFP8: points to bytes instead
};

enum class Convert {
  kNone,   // the library reads the tensors
  kPad,    // FP8 data is copied with zero padding
  kWiden,  // values are converted to FP32
  kBf16    // MXFP8 operands are dequantised to BF16, which holds their values exactly
};

struct Problem {
  int64_t m = 0, n = 0, k = 0;
  Operand a, b;
  bool fp8 = false;  // the library multiplies FP8 operands
  // The dtype in which the library reads an operand.
  int library_dtype(const Operand& o) const {
    if (convert == Convert::kWiden) return TE_FL_F32;
    return convert == Convert::kBf16 ? TE_FL_BF16 : o.dtype;
  }
  bool block = false;  // the operands have block scaling
  Convert convert = Convert::kNone;
  bool direct = false;             // the library writes D
  const char* indirect = nullptr;  // reason if the library does not write D; static text
  bool codes = false;              // D is FP8
  float* found_amax = nullptr;     // address to which cuBLASLt writes D's amax
  bool bias_grad = false;          // the library also computes the bias gradient, from the operand
                                   // that it reads
  int64_t padded_n = 0, padded_k = 0;
};

// Decides, from metadata and addresses, which operands are converted and which part of the epilogue
// the library applies. The call must have passed its op's checks.
Problem make_problem(const te_fl_generic_gemm_args& args);
inline bool runs_library(const Problem& p) { return p.m > 0 && p.n > 0 && p.k > 0; }

// True if the residual and D have the same address. make_problem() depends on this, but the keys
// under which the host caches plans may not contain it.
inline bool adds_in_place(const te_fl_generic_gemm_args& args) {
  return args.residual != nullptr &&
         backend::data<const void>(*args.residual) == backend::data<const void>(*args.d);
}

// Returns the operand as cuBLASLt would read it. `along`: K is contiguous.
Operand make_operand(const te_fl_tensor& t, bool along);

}  // namespace te_fl::cuda
