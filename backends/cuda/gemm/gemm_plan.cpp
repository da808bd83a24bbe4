#include "gemm/gemm_plan.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "common/dtype_bytes.hpp"
#include "device/cuda_check.hpp"
#include "gemm/cublaslt.hpp"
#include "gemm/gemm_algorithm.hpp"
#include "gemm/gemm_space.hpp"
#include "gemm/gemm_tune.hpp"

namespace te_fl::cuda {
namespace {

using Args = te_fl_generic_gemm_args;

cudaStream_t stream_of(const te_fl_context& ctx) { return static_cast<cudaStream_t>(ctx.stream); }

cudaDataType library_type(int dtype) {
  switch (dtype) {
    case TE_FL_F32:
      return CUDA_R_32F;
    case TE_FL_F16:
      return CUDA_R_16F;
    case TE_FL_BF16:
      return CUDA_R_16BF;
    case TE_FL_F8E4M3:
      return CUDA_R_8F_E4M3;
    default:
      return CUDA_R_8F_E5M2;
  }
}

}  // namespace

Problem make_problem(const Plan& plan, const Args& args) {
  Problem p = plan.problem;
  p.a = make_operand(*args.a, p.a.along);
  p.b = make_operand(*args.b, p.b.along);
  return p;
}

std::string to_text(const Args& args, const Problem& p) {
  static constexpr const char* kNames[] = {"f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2"};
  return "generic_gemm m=" + std::to_string(p.m) + " n=" + std::to_string(p.n) +
         " k=" + std::to_string(p.k) + " a=" + kNames[p.a.dtype] + " b=" + kNames[p.b.dtype] +
         " d=" + kNames[dtype_of(*args.d)] + " trans_a=" + std::to_string(args.trans_a) +
         " trans_b=" + std::to_string(args.trans_b);
}

namespace {

// The call's data for error messages, which are formatted only if a library function fails.
struct FailingCall {
  const Args& args;
  const Problem& problem;
};
void check_call(cublasStatus_t status, const char* function, const FailingCall& call) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    cuda::check(status, function, to_text(call.args, call.problem));
  }
}

template <class T>
void set(Matmul& matmul, cublasLtMatmulDescAttributes_t attribute, const T& value,
         const FailingCall& call) {
  check_call(cublaslt()->desc_set(&matmul.desc, attribute, &value, sizeof value),
             "cublasLtMatmulDescSetAttribute", call);
}

cublasLtEpilogue_t epilogue_of(const Args& args, const Problem& p) {
  // The library sums over the columns of its right operand, which is A.
  if (p.bias_grad) return CUBLASLT_EPILOGUE_BGRADB;
  const bool bias = args.bias != nullptr;
  return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

int32_t scale_mode(const te_fl_tensor& t) {
  switch (backend::scaling(t)) {
    case TE_FL_SCALING_BLOCK_1X128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case TE_FL_SCALING_BLOCK_128X128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    default:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

// Sets the pointers of one call in a copy of a plan's description.
void set_pointers(Matmul& matmul, const Args& args, const Problem& p, const FailingCall& call) {
  if (p.fp8) {
    set(matmul, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scale_inv, call);
    set(matmul, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scale_inv, call);
  }
  if (!p.direct) return;
  if (p.codes) {
    // The heuristic only requires that the amax pointer is not NULL.
    float* amax = p.found_amax != nullptr ? p.found_amax : args.d->quant->scale;
    set(matmul, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, args.d->quant->scale, call);
    set(matmul, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, amax, call);
  }
  const te_fl_tensor* bias = p.bias_grad ? args.bias_grad : args.bias;
  if (bias != nullptr) {
    set(matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, backend::data<const void>(*bias), call);
  }
}

uint32_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return address == 0 ? 256u
                      : static_cast<uint32_t>(std::min<uintptr_t>(address & (~address + 1), 256));
}

void describe_operation(Matmul& matmul, const Args& args, const Problem& p,
                        const FailingCall& call) {
  check_call(
      cublaslt()->desc_init(&matmul.desc, sizeof matmul.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
      "cublasLtMatmulDescInit", call);
  // cuBLASLt multiplies FP8 only as "TN": K is contiguous in both operands.
  const bool b_along = p.fp8 || p.b.along, a_along = p.fp8 || p.a.along;
  set(matmul, CUBLASLT_MATMUL_DESC_TRANSA, b_along ? CUBLAS_OP_T : CUBLAS_OP_N, call);
  set(matmul, CUBLASLT_MATMUL_DESC_TRANSB, a_along ? CUBLAS_OP_N : CUBLAS_OP_T, call);
  if (p.fp8) {
    const int8_t fast = !p.block && !args.use_split_accumulator;
    set(matmul, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast, call);
  }
  if (p.block) {
    set(matmul, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(*args.b), call);
    set(matmul, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(*args.a), call);
  }
  if (!p.direct) return;
  set(matmul, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(args, p), call);
  const te_fl_tensor* bias = p.bias_grad ? args.bias_grad : args.bias;
  if (bias != nullptr) {
    set(matmul, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
        static_cast<int32_t>(library_type(dtype_of(*bias))), call);
  }
}

// Returns the alignment in bytes of the memory that cuBLASLt reads for operand `o`. Converted
// operands are in scratch, which is 256-byte aligned.
uint32_t operand_alignment(const Problem& p, const Operand& o) {
  if (p.convert != Convert::kNone) return 256;
  return alignment_of(p.fp8 ? o.codes : backend::data<void>(*o.tensor));
}
uint32_t out_alignment(const Args& args, const Problem& p) {
  return p.direct ? alignment_of(backend::data<void>(*args.d)) : 256u;
}
uint32_t least_alignment(const Args& args, const Problem& p) {
  return std::min({operand_alignment(p, p.a), operand_alignment(p, p.b), out_alignment(args, p)});
}

// Returns text that contains everything on which the choice of an algorithm depends.
std::string problem_key(const Args& args, const Problem& p) {
  const uint32_t alignment = least_alignment(args, p);
  std::string key = to_text(args, p) + " align=" + std::to_string(alignment);
  if (p.block) {
    key += " scaling=" + std::to_string(backend::scaling(*args.a)) + "," +
           std::to_string(backend::scaling(*args.b));
  }
  if (p.fp8) key += args.use_split_accumulator ? " split" : " fast";
  if (p.convert == Convert::kBf16) key += " mxfp8";
  if (!p.direct) return key + " general";
  if (args.bias != nullptr) key += " bias";
  if (args.residual != nullptr) key += " residual";
  if (args.accumulate) key += " accumulate";
  if (p.bias_grad) key += " bias_grad";
  return key;
}

bool captures(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// True if algorithms for this problem may be measured. (Measuring also requires the setting, and a
// stream that is not being captured.)
bool measurable(const Problem& p) { return p.convert == Convert::kNone; }

}  // namespace

std::string describe_algorithm(const te_fl_context& ctx, const Args& args, const Problem& p) {
  if (!runs_library(p)) return {};
  return algorithm_words(ctx.device.index, problem_key(args, p), measurable(p));
}

Plan make_plan(const te_fl_context& ctx, const Args& args, const Problem& p) {
  const int device = ctx.device.index;
  const CublasLt& lt = *cublaslt();
  const FailingCall call{args, p};
  Plan plan{};
  plan.problem = p;
  plan.in_place = adds_in_place(args);
  Matmul& matmul = plan.matmul;
  matmul.codes = p.codes;
  describe_operation(matmul, args, p, call);
  set_pointers(matmul, args, p, call);
  const auto layout = [&](cublasLtMatrixLayoutOpaque_t& out, int dtype, int64_t rows,
                          int64_t cols) {
    check_call(lt.layout_init(&out, sizeof out, library_type(dtype), static_cast<uint64_t>(rows),
                              static_cast<uint64_t>(cols), std::max<int64_t>(rows, 1)),
               "cublasLtMatrixLayoutInit", call);
  };
  const bool b_along = p.fp8 || p.b.along, a_along = p.fp8 || p.a.along;
  const int64_t n = p.padded_n, k = p.padded_k;
  layout(matmul.left, p.library_dtype(p.b), b_along ? k : n, b_along ? n : k);
  layout(matmul.right, p.library_dtype(p.a), a_along ? k : p.m, a_along ? p.m : k);
  layout(matmul.out, p.direct ? dtype_of(*args.d) : TE_FL_F32, n, p.m);
  // For an FP8 output the library requires the layout of a 16-bit matrix to add, though nothing is
  // added here.
  if (p.codes)
    layout(matmul.added, args.bias != nullptr ? dtype_of(*args.bias) : TE_FL_BF16, n, p.m);

  cublasLtMatmulPreferenceOpaque_t preference;
  check_call(lt.preference_init(&preference, sizeof preference), "cublasLtMatmulPreferenceInit",
             call);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check_call(lt.preference_set(&preference, attribute, &value, sizeof value),
               "cublasLtMatmulPreferenceSetAttribute", call);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kLibraryWorkspace});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, operand_alignment(p, p.b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, operand_alignment(p, p.a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_alignment(args, p));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment(args, p));
  const std::string key = problem_key(args, p);
  if (find_gemm_choice(device, key, matmul.algo)) return plan;
  const bool tunes = tunes_gemm() && measurable(p) && !captures(stream_of(ctx));
  constexpr int kMostCandidates = 64;
  std::array<cublasLtMatmulHeuristicResult_t, kMostCandidates> found{};
  int count = 0;
  const cublasStatus_t status = lt.heuristic(
      cublaslt_handle(device), &matmul.desc, &matmul.left, &matmul.right, matmul.addend(),
      &matmul.out, &preference, tunes ? kMostCandidates : 1, found.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) {
    if (p.bias_grad) {
      Problem without = p;
      without.bias_grad = false;
      plan = make_plan(ctx, args, without);
      note_algorithm(device, key, plan.matmul.algo);
      return plan;
    }
    backend::unsupported("cuBLASLt has no algorithm for " + to_text(args, p));
  }
  check_call(status, "cublasLtMatmulAlgoGetHeuristic", call);
  matmul.algo = found[0].algo;
  if (tunes) {
    std::vector<cublasLtMatmulAlgo_t> candidates;
    const auto add = [&] {
      for (int i = 0; i < count; ++i) add_new(candidates, found[static_cast<size_t>(i)].algo);
    };
    add();
    // Each query of the heuristic returns few algorithms; a query without workspace returns others.
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{0});
    if (lt.heuristic(cublaslt_handle(device), &matmul.desc, &matmul.left, &matmul.right,
                     matmul.addend(), &matmul.out, &preference, kMostCandidates, found.data(),
                     &count) == CUBLAS_STATUS_SUCCESS) {
      add();
    }
    matmul.algo =
        tune_gemm(ctx, args, p, matmul, key, std::move(candidates), least_alignment(args, p));
  }
  note_algorithm(device, key, matmul.algo);
  return plan;
}

void run_plan(const te_fl_context& ctx, const Args& args, const Problem& p, const Plan& plan,
              const void* left, const void* right, void* out, void* workspace) {
  const FailingCall call{args, p};
  Matmul matmul = plan.matmul;  // other threads run the same plan with their own pointers
  set_pointers(matmul, args, p, call);
  const bool adds = p.direct && args.residual != nullptr;
  const float beta = adds ? 1.0f : p.direct && args.accumulate ? args.beta : 0.0f;
  const void* added = adds ? backend::data<const void>(*args.residual) : p.codes ? nullptr : out;
  check_call(
      cublaslt()->matmul(cublaslt_handle(ctx.device.index), &matmul.desc, &args.alpha, left,
                         &matmul.left, right, &matmul.right, &beta, added, matmul.addend(), out,
                         &matmul.out, &matmul.algo, workspace, kLibraryWorkspace, stream_of(ctx)),
      "cublasLtMatmul", call);
}

}  // namespace te_fl::cuda
