// The plan of one GEMM on cuBLASLt: operation, layouts and algorithm.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <string>

#include "gemm/gemm_problem.hpp"

namespace te_fl::cuda {

constexpr size_t kLibraryWorkspace = 32u << 20;

// cuBLASLt's descriptors of a GEMM, without the addresses of matrices.
struct Matmul {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t left, right, added, out;
  cublasLtMatmulAlgo_t algo;
  bool codes;  // as Problem::codes

  // Returns the layout of the added matrix C: the layout of the output, or `added` if the output is
  // FP8.
  cublasLtMatrixLayoutOpaque_t* addend() { return codes ? &added : &out; }
};

struct Plan {
  Matmul matmul;
  Problem problem;           // problem of the plan's call; bias_grad: the library computes it
  bool in_place = false;     // result of adds_in_place() for that call
  size_t scratch_bytes = 0;  // workspace of such a call; set by the caller
};

// Returns plan.problem with the pointers of the call `args`.
Problem make_problem(const Plan& plan, const te_fl_generic_gemm_args& args);

// Returns a description of cuBLASLt's algorithm for the GEMM, from algorithm_words()
// (gemm_algorithm.hpp); empty if cuBLASLt is not called.
std::string describe_algorithm(const te_fl_context& ctx, const te_fl_generic_gemm_args& args,
                               const Problem& p);

// "generic_gemm m=.. n=.. k=.. ..", for error messages.
std::string to_text(const te_fl_generic_gemm_args& args, const Problem& p);

// Makes a plan. The algorithm comes from the file of choices, a measurement or the heuristic.
// Throws UNSUPPORTED if cuBLASLt has no algorithm. Thread-safe.
Plan make_plan(const te_fl_context& ctx, const te_fl_generic_gemm_args& args, const Problem& p);

// Enqueues left x right -> out (+ beta x added) with the pointers of this call.
void run_plan(const te_fl_context& ctx, const te_fl_generic_gemm_args& args, const Problem& p,
              const Plan& plan, const void* left, const void* right, void* out, void* workspace);

}  // namespace te_fl::cuda
