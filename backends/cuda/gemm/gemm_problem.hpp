// One product as cuBLASLt is to see it, decided from a call's metadata alone. Plain C++, so that it
// can be tested where there is no GPU.
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
inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// One operand. `stored` is what lies in memory, row-major [rows, cols]; along says that the
// contraction runs along its rows' elements ([M, K] for A, [N, K] for B).
struct Operand {
  const te_fl_tensor* tensor = nullptr;
  int dtype = TE_FL_F32;
  bool along = false;
  // The copy that has the contraction along its rows: FP8 reads this one, [lines, K] compact.
  const void* codes = nullptr;
  const float* scale_inv = nullptr;
};

enum class Convert {
  kNone,  // the library reads the tensors
  kPad,   // FP8 codes are copied with zero padding
  kWiden  // values are converted to FP32
};

struct Problem {
  int64_t m = 0, n = 0, k = 0;
  Operand a, b;
  bool fp8 = false;    // the library multiplies FP8
  bool block = false;  // by blocks
  Convert convert = Convert::kNone;
  bool direct = false;             // the library writes D
  const char* indirect = nullptr;  // or why not; static text
  bool codes = false;              // D is FP8
  float* found_amax = nullptr;     // where its amax goes, for the call that runs
  bool bias_grad = false;          // and the bias gradient, from the operand that it reads anyway
  int64_t padded_n = 0, padded_k = 0;
};

// Decides from metadata and addresses: which operands are converted, and what of the epilogue the
// library does. The call has passed the checks of its op.
Problem problem_of(const te_fl_generic_gemm_args& args);
inline bool runs_library(const Problem& p) { return p.m > 0 && p.n > 0 && p.k > 0; }

// D goes where the residual is: the one thing of a call that problem_of() reads and that hosts'
// keys for plans may leave out.
inline bool adds_in_place(const te_fl_generic_gemm_args& args) {
  return args.residual != nullptr &&
         backend::data<const void>(*args.residual) == backend::data<const void>(*args.d);
}

// The operand as the library would read it; `along`: the contraction runs along its rows' elements.
Operand operand_of(const te_fl_tensor& t, bool along);

}  // namespace te_fl::cuda
