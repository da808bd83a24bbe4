// One product as cuBLASLt sees it, and the plan to run it: operation, layouts and algorithm.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <string>

#include "common/dtype_bytes.hpp"
#include "gemm/gemm_path.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::cuda {

constexpr size_t kLibraryWorkspace = 32u << 20;

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
  bool codes = false;              // which is FP8
  float* found_amax = nullptr;     // where its amax goes, for the call that runs
  bool bias_grad = false;          // and the bias gradient, from the operand that it reads anyway
  int64_t padded_n = 0, padded_k = 0;
};

Problem describe(const te_fl_generic_gemm_args& args);
inline bool runs_library(const Problem& p) { return p.m > 0 && p.n > 0 && p.k > 0; }

// A call as the library takes it, but for the pointers.
struct Matmul {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t left, right, added, out;
  cublasLtMatmulAlgo_t algo;
  bool codes;  // as in the problem

  // The layout of the matrix that is added: the output is its own, except where it is codes.
  cublasLtMatrixLayoutOpaque_t* addend() { return codes ? &added : &out; }
};

struct Plan {
  Matmul matmul;
  Problem problem;           // that it was made for; bias_grad: the library computes it
  bool in_place = false;     // adds_in_place() of that call
  size_t scratch_bytes = 0;  // of such a call, for the caller to keep
};

// The one thing of a call that describe() reads and that hosts' keys for plans may leave out: D
// goes where the residual is.
inline bool adds_in_place(const te_fl_generic_gemm_args& args) {
  return args.residual != nullptr &&
         backend::data<const void>(*args.residual) == backend::data<const void>(*args.d);
}
// What describe() gives for a call that a plan was made for, with the call's own pointers.
Problem problem_of(const Plan& plan, const te_fl_generic_gemm_args& args);

// This says how such a product goes, by what describe() found.
GemmPath path_of(const Problem& p);

// Which algorithm of the library such a product takes, as algorithm_words() (gemm_algorithm.hpp);
// empty if the library is not called.
std::string algorithm_of(const te_fl_context& ctx, const te_fl_generic_gemm_args& args,
                         const Problem& p);

// "generic_gemm m=.. n=.. k=.. ..", for errors.
std::string text_of(const te_fl_generic_gemm_args& args, const Problem& p);

// Asks for an algorithm: the file's, the measured one, the heuristic's. Throws UNSUPPORTED where
// the library has none. Thread-safe.
Plan make_plan(const te_fl_context& ctx, const te_fl_generic_gemm_args& args, const Problem& p);

// Enqueues left x right -> out (+ beta x added) with the pointers of this call.
void run_plan(const te_fl_context& ctx, const te_fl_generic_gemm_args& args, const Problem& p,
              const Plan& plan, const void* left, const void* right, void* out, void* workspace);

}  // namespace te_fl::cuda
