// generic_gemm on cuBLASLt. Row-major matrices are column-major ones of the transpose, so the
// library computes D^T = op(B)^T op(A)^T: B is its left operand, A its right one.
//
// A call takes one of two ways, decided by metadata (Way):
//   direct: the library reads the operands and writes D, with the epilogues it has for the dtypes;
//   general: the product goes to FP32 scratch, and one kernel applies the epilogue, rounds once and
//     writes D in any dtype and scaling mode. Operands that the library cannot take (mixed dtypes,
//     E5M2 x E5M2, FP8 with awkward extents) are converted or padded in scratch first.
#include <memory>

#include "activation.cuh"
#include "cublaslt.hpp"
#include "families.hpp"
#include "overlap.hpp"
#include "store.cuh"
#include "te_fl/ops/gemm.h"

namespace te_fl::cuda {
namespace {

using backend::invalid;
using Args = te_fl_generic_gemm_args;

constexpr size_t kLibraryWorkspace = 32u << 20;

bool is_fp8(int dtype) { return dtype == TE_FL_F8E4M3 || dtype == TE_FL_F8E5M2; }
bool is_block(const te_fl_tensor& t) {
  const uint32_t scaling = backend::scaling(t);
  return scaling == TE_FL_SCALING_BLOCK_1X128 || scaling == TE_FL_SCALING_BLOCK_128X128;
}
int64_t bytes_of(int dtype) { return dtype == TE_FL_F32 ? 4 : is_fp8(dtype) ? 1 : 2; }
bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
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
  bool direct = false;  // the library writes D
  int64_t padded_n = 0, padded_k = 0;
};

Operand operand(const te_fl_tensor& t, bool along) {
  Operand o;
  o.tensor = &t;
  o.dtype = dtype_of(t);
  o.along = along;
  if (backend::scaling(t) == TE_FL_SCALING_NONE) return o;
  const te_fl_quant& quant = *t.quant;
  o.codes = along ? backend::data<const void>(t) : quant.columnwise_data;
  const void* scale = along ? quant.scale_inv : quant.columnwise_scale_inv;
  if (scale == nullptr && quant.scaling == TE_FL_SCALING_TENSOR) {
    scale = along ? quant.columnwise_scale_inv : quant.scale_inv;
  }
  o.scale_inv = static_cast<const float*>(scale);
  return o;
}

bool direct_epilogue(const Args& args, bool fp8) {
  const int d = dtype_of(*args.d);
  if (is_fp8(d)) return false;
  const bool half = d == TE_FL_F16 || d == TE_FL_BF16;
  if (args.bias != nullptr && (dtype_of(*args.bias) != d || (fp8 && !half))) return false;
  // The library adds one matrix, of D's type.
  if (args.residual != nullptr &&
      (args.accumulate || args.pre_gelu_in != nullptr || dtype_of(*args.residual) != d ||
       !aligned16(backend::data<const void>(*args.residual)))) {
    return false;
  }
  // The library's forward GELU takes the chip's approximate tanh: 6e-4 off on an H200 (cuBLASLt
  // 13), which is beyond the tolerance of BF16.
  if (args.gelu) return false;
  const te_fl_tensor* aux = args.pre_gelu_in;
  if (aux != nullptr) {
    // The library's gradient of GELU wants its saved input in D's type and rows of whole 16 bytes.
    if (args.accumulate || !half || fp8 || args.alpha != 1.0f) return false;
    if (dtype_of(*aux) != d || backend::as_matrix(*args.d).cols % 8 != 0 ||
        !aligned16(backend::data<const void>(*aux))) {
      return false;
    }
  }
  return true;
}

Problem describe(const Args& args) {
  Problem p;
  const backend::Matrix d = backend::as_matrix(*args.d), a = backend::as_matrix(*args.a);
  p.m = d.rows;
  p.n = d.cols;
  p.k = args.trans_a ? a.rows : a.cols;
  p.a = operand(*args.a, args.trans_a == 0);
  p.b = operand(*args.b, args.trans_b != 0);
  p.padded_n = p.n;
  p.padded_k = p.k;
  const bool a_plain = backend::scaling(*args.a) == TE_FL_SCALING_NONE;
  const bool b_plain = backend::scaling(*args.b) == TE_FL_SCALING_NONE;
  const bool a_block = is_block(*args.a), b_block = is_block(*args.b);
  if (a_plain && b_plain) {
    if (p.a.dtype != p.b.dtype) p.convert = Convert::kWiden;
  } else if (a_plain || b_plain || a_block != b_block ||
             (p.a.dtype == TE_FL_F8E5M2 && p.b.dtype == TE_FL_F8E5M2)) {
    p.convert = Convert::kWiden;
  } else if (a_block) {
    const bool whole = p.k % 128 == 0 && p.n % 16 == 0 && p.m % 8 == 0 &&
                       p.a.dtype == TE_FL_F8E4M3 && p.b.dtype == TE_FL_F8E4M3;
    const bool present = p.a.codes != nullptr && p.b.codes != nullptr && aligned16(p.a.codes) &&
                         aligned16(p.b.codes) && aligned16(p.a.scale_inv) &&
                         aligned16(p.b.scale_inv);
    if (whole && present) {
      p.fp8 = p.block = true;
    } else {
      p.convert = Convert::kWiden;
    }
  } else {
    p.fp8 = true;
    p.padded_n = round_up(p.n, 16);
    p.padded_k = round_up(p.k, 16);
    if (p.padded_n != p.n || p.padded_k != p.k || !aligned16(p.a.codes) || !aligned16(p.b.codes)) {
      p.convert = Convert::kPad;
    }
  }
  const int d_dtype = dtype_of(*args.d);
  const bool d_fits = p.convert == Convert::kNone
                          ? !p.fp8 || aligned16(backend::data<void>(*args.d))
                          : p.convert == Convert::kWiden && d_dtype == TE_FL_F32;
  const bool types = p.fp8 || p.convert == Convert::kWiden || d_dtype == p.a.dtype ||
                     (d_dtype == TE_FL_F32 && (p.a.dtype == TE_FL_F16 || p.a.dtype == TE_FL_BF16));
  p.direct = p.k > 0 && d_fits && types && direct_epilogue(args, p.fp8);
  return p;
}

// ---- scratch

struct Scratch {
  char* library = nullptr;
  float* product = nullptr;
  void* a = nullptr;
  void* b = nullptr;
  float* partials = nullptr;
  size_t bytes = 0;
};
Scratch scratch(const Args& args, const Problem& p, void* base) {
  Scratch s;
  const auto take = [&](int64_t bytes) {
    char* at = static_cast<char*>(base) + s.bytes;
    s.bytes += static_cast<size_t>(round_up(bytes, 256));
    return at;
  };
  take(kStoreWorkspace);
  s.library = take(kLibraryWorkspace);
  if (!p.direct) s.product = reinterpret_cast<float*>(take(p.m * p.padded_n * 4));
  const int64_t element = p.convert == Convert::kWiden ? 4 : 1;
  if (p.convert != Convert::kNone) {
    s.a = take(p.m * p.padded_k * element);
    s.b = take(p.padded_n * p.padded_k * element);
  }
  if (args.bias_grad != nullptr) {
    s.partials = reinterpret_cast<float*>(take(static_cast<int64_t>(column_sums_bytes(p.k, p.m))));
  }
  return s;
}

size_t workspace(const te_fl_context&, const Args& args) {
  return scratch(args, describe(args), nullptr).bytes;
}

// ---- operands in scratch

__global__ void pad_kernel(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out,
                           int64_t out_rows, int64_t out_cols) {
  const int64_t n = out_rows * out_cols, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    const int64_t row = i / out_cols, col = i - row * out_cols;
    out[i] = row < rows && col < cols ? in[row * cols + col] : 0;
  }
}

// A quantised or plain operand as numbers, [rows, cols] as stored.
struct Values {
  Source data;
  const float* scale_inv = nullptr;
  uint32_t scaling = TE_FL_SCALING_NONE;
  int64_t rows = 0, cols = 0;
  bool transposed = false;  // data and scales are those of the column-wise copy

  __device__ float at(int64_t row, int64_t col) const {
    const int64_t i = transposed ? col : row, j = transposed ? row : col;
    const int64_t lines = transposed ? cols : rows, length = transposed ? rows : cols;
    const float value = data.at(i * length + j);
    switch (scaling) {
      case TE_FL_SCALING_NONE:
        return value;
      case TE_FL_SCALING_TENSOR:
        return value * *scale_inv;
      case TE_FL_SCALING_BLOCK_1X128:
        return value * scale_inv[j / 128 * ((lines + 3) / 4 * 4) + i];
      default:
        return value * scale_inv[i / 128 * (((length + 127) / 128 + 3) / 4 * 4) + j / 128];
    }
  }
};

// The copy whose blocks run along the contraction if there is one, else the other.
Values values_of(const te_fl_tensor& t, bool along, const char* name) {
  Values v;
  const backend::Matrix m = backend::as_matrix(t);
  v.data = Source(t);
  v.scaling = backend::scaling(t);
  v.rows = m.rows;
  v.cols = m.cols;
  if (v.scaling == TE_FL_SCALING_NONE) return v;
  const te_fl_quant& quant = *t.quant;
  v.transposed = along ? v.data.data == nullptr : quant.columnwise_data != nullptr;
  if (v.transposed) v.data.data = quant.columnwise_data;
  const void* scale = v.transposed ? quant.columnwise_scale_inv : quant.scale_inv;
  if (scale == nullptr && v.scaling == TE_FL_SCALING_TENSOR) {
    scale = v.transposed ? quant.scale_inv : quant.columnwise_scale_inv;
  }
  v.scale_inv = static_cast<const float*>(scale);
  if (backend::numel(t) != 0 && (v.data.data == nullptr || scale == nullptr)) {
    invalid(std::string("generic_gemm: ") + name + " has no " +
            (v.data.data == nullptr ? "data" : "scale_inv") + "; quantise it first");
  }
  return v;
}

__global__ void widen_kernel(Values in, float* out) {
  const int64_t n = in.rows * in.cols, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    out[i] = in.at(i / in.cols, i % in.cols);
  }
}

void convert(cudaStream_t stream, const Problem& p, const Operand& o, const char* name, void* out,
             int64_t lines, int64_t padded_lines) {
  if (padded_lines == 0 || p.padded_k == 0) return;
  if (p.convert == Convert::kWiden) {
    const Values values = values_of(*o.tensor, o.along, name);
    widen_kernel<<<blocks_for(values.rows * values.cols), kThreads, 0, stream>>>(
        values, static_cast<float*>(out));
    return check_launch("widen_kernel");
  }
  pad_kernel<<<blocks_for(padded_lines * p.padded_k), kThreads, 0, stream>>>(
      static_cast<const uint8_t*>(o.codes), lines, p.k, static_cast<uint8_t*>(out), padded_lines,
      p.padded_k);
  check_launch("pad_kernel");
}

// ---- the library's call

struct Plan {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t left, right, out;
  cublasLtMatmulAlgo_t algo;
};

std::string text_of(const Args& args, const Problem& p) {
  static constexpr const char* kNames[] = {"f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2"};
  return "generic_gemm m=" + std::to_string(p.m) + " n=" + std::to_string(p.n) +
         " k=" + std::to_string(p.k) + " a=" + kNames[p.a.dtype] + " b=" + kNames[p.b.dtype] +
         " d=" + kNames[dtype_of(*args.d)] + " trans_a=" + std::to_string(args.trans_a) +
         " trans_b=" + std::to_string(args.trans_b);
}

// A call, described only if something of it fails.
struct What {
  const Args& args;
  const Problem& problem;
};
void check(cublasStatus_t status, const char* function, const What& what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    cuda::check(status, function, text_of(what.args, what.problem));
  }
}

template <class T>
void set(Plan& plan, cublasLtMatmulDescAttributes_t attribute, const T& value, const What& what) {
  check(cublaslt()->desc_set(&plan.desc, attribute, &value, sizeof value),
        "cublasLtMatmulDescSetAttribute", what);
}

cublasLtEpilogue_t epilogue_of(const Args& args) {
  if (args.pre_gelu_in != nullptr) return CUBLASLT_EPILOGUE_DGELU;
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

// The pointers that belong to one call, in a copy of a plan's description.
void set_pointers(Plan& plan, const Args& args, const Problem& p, const What& what) {
  if (p.fp8) {
    set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scale_inv, what);
    set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scale_inv, what);
  }
  if (!p.direct) return;
  if (args.bias != nullptr) {
    set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, backend::data<const void>(*args.bias), what);
  }
  const te_fl_tensor* aux = args.pre_gelu_in;
  if (aux != nullptr) {
    set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, backend::data<void>(*aux), what);
  }
}

uint32_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return address == 0 ? 256u
                      : static_cast<uint32_t>(std::min<uintptr_t>(address & (~address + 1), 256));
}

void describe_operation(Plan& plan, const Args& args, const Problem& p, const What& what) {
  check(cublaslt()->desc_init(&plan.desc, sizeof plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescInit", what);
  // FP8 is TN only: both operands are read with the contraction along their rows.
  const bool b_along = p.fp8 || p.b.along, a_along = p.fp8 || p.a.along;
  set(plan, CUBLASLT_MATMUL_DESC_TRANSA, b_along ? CUBLAS_OP_T : CUBLAS_OP_N, what);
  set(plan, CUBLASLT_MATMUL_DESC_TRANSB, a_along ? CUBLAS_OP_N : CUBLAS_OP_T, what);
  if (p.fp8) {
    const int8_t fast = !p.block && !args.use_split_accumulator;
    set(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast, what);
  }
  if (p.block) {
    set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(*args.b), what);
    set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(*args.a), what);
  }
  if (!p.direct) return;
  set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(args), what);
  if (args.bias != nullptr) {
    set(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
        static_cast<int32_t>(library_type(dtype_of(*args.bias))), what);
  }
  if (args.pre_gelu_in != nullptr) {
    set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.n, what);
  }
}

Plan make_plan(int device, const Args& args, const Problem& p) {
  const CublasLt& lt = *cublaslt();
  const What what{args, p};
  Plan plan{};
  describe_operation(plan, args, p, what);
  set_pointers(plan, args, p, what);
  const bool widen = p.convert == Convert::kWiden;
  const auto layout = [&](cublasLtMatrixLayoutOpaque_t& out, int dtype, int64_t rows,
                          int64_t cols) {
    check(lt.layout_init(&out, sizeof out, library_type(dtype), static_cast<uint64_t>(rows),
                         static_cast<uint64_t>(cols), std::max<int64_t>(rows, 1)),
          "cublasLtMatrixLayoutInit", what);
  };
  const bool b_along = p.fp8 || p.b.along, a_along = p.fp8 || p.a.along;
  const int64_t n = p.padded_n, k = p.padded_k;
  layout(plan.left, widen ? TE_FL_F32 : p.b.dtype, b_along ? k : n, b_along ? n : k);
  layout(plan.right, widen ? TE_FL_F32 : p.a.dtype, a_along ? k : p.m, a_along ? p.m : k);
  layout(plan.out, p.direct ? dtype_of(*args.d) : TE_FL_F32, n, p.m);

  cublasLtMatmulPreferenceOpaque_t preference;
  check(lt.preference_init(&preference, sizeof preference), "cublasLtMatmulPreferenceInit", what);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(lt.preference_set(&preference, attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute", what);
  };
  const bool in_scratch = p.convert != Convert::kNone;
  const auto operand_alignment = [&](const Operand& o) {
    return in_scratch ? 256u : alignment_of(p.fp8 ? o.codes : backend::data<void>(*o.tensor));
  };
  const uint32_t out_alignment = p.direct ? alignment_of(backend::data<void>(*args.d)) : 256u;
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kLibraryWorkspace});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, operand_alignment(p.b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, operand_alignment(p.a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status =
      lt.heuristic(cublaslt_handle(device), &plan.desc, &plan.left, &plan.right, &plan.out,
                   &plan.out, &preference, 1, &found, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) {
    backend::unsupported("cuBLASLt has no algorithm for " + text_of(args, p));
  }
  check(status, "cublasLtMatmulAlgoGetHeuristic", what);
  plan.algo = found.algo;
  return plan;
}

bool runs_library(const Problem& p) { return p.m > 0 && p.n > 0 && p.k > 0; }

void multiply(const te_fl_context& ctx, const Args& args, const Problem& p, const Scratch& s) {
  const cudaStream_t stream = stream_of(ctx);
  if (!runs_library(p)) {
    cuda::check(cudaMemsetAsync(s.product, 0, static_cast<size_t>(p.m * p.padded_n) * 4, stream),
                "cudaMemsetAsync");
    return;
  }
  Plan plan = ctx.plan != nullptr ? *static_cast<const Plan*>(ctx.plan)
                                  : make_plan(ctx.device.index, args, p);
  const What what{args, p};
  set_pointers(plan, args, p, what);
  const void* left = p.fp8 ? p.b.codes : backend::data<const void>(*args.b);
  const void* right = p.fp8 ? p.a.codes : backend::data<const void>(*args.a);
  if (p.convert != Convert::kNone) {
    convert(stream, p, p.a, "a", s.a, p.m, p.m);
    convert(stream, p, p.b, "b", s.b, p.n, p.padded_n);
    left = s.b;
    right = s.a;
  }
  void* out = p.direct ? backend::data<void>(*args.d) : s.product;
  const bool adds = p.direct && args.residual != nullptr;
  const float beta = adds ? 1.0f : p.direct && args.accumulate ? args.beta : 0.0f;
  const void* added = adds ? backend::data<const void>(*args.residual) : out;
  check(cublaslt()->matmul(cublaslt_handle(ctx.device.index), &plan.desc, &args.alpha, left,
                           &plan.left, right, &plan.right, &beta, added, &plan.out, out, &plan.out,
                           &plan.algo, s.library, kLibraryWorkspace, stream),
        "cublasLtMatmul", what);
}

// ---- the epilogue in a kernel of its own

struct Epilogue {
  const float* product;
  int64_t pitch, cols;
  Source bias, pre_gelu_in, residual, previous;  // data NULL: absent
  const float* pre_gelu_scale_inv;
  float beta;
  bool gelu;

  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float other[kGroup];
    load_group(product + row * pitch + col, n, v);
    if (bias.data != nullptr) {
      bias.load(col, n, other);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] += other[i];
    }
    if (gelu) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = Gelu::value(v[i]);
    }
    if (pre_gelu_in.data != nullptr) {
      pre_gelu_in.load(row * cols + col, n, other);
      const float scale = pre_gelu_scale_inv != nullptr ? *pre_gelu_scale_inv : 1.0f;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] *= Gelu::derivative(other[i] * scale);
    }
    if (residual.data != nullptr) {
      residual.load(row * cols + col, n, other);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] += other[i];
    }
    if (previous.data != nullptr) {
      previous.load(row * cols + col, n, other);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = fmaf(beta, other[i], v[i]);
    }
  }
};

void finish(const te_fl_context& ctx, const Args& args, const Problem& p, const Scratch& s) {
  Epilogue e{s.product, p.padded_n, p.n, {}, {}, {}, {}, nullptr, args.beta, false};
  if (args.bias != nullptr) e.bias = Source(*args.bias);
  if (args.pre_gelu_out != nullptr) store_output(ctx, *args.pre_gelu_out, e);
  e.gelu = args.gelu != 0;
  if (args.pre_gelu_in != nullptr) {
    const te_fl_tensor& t = *args.pre_gelu_in;
    e.pre_gelu_in = Source(t);
    if (t.quant != nullptr) {
      e.pre_gelu_scale_inv = static_cast<const float*>(t.quant->scale_inv);
    }
  }
  if (args.residual != nullptr) e.residual = Source(*args.residual);
  if (args.accumulate && args.beta != 0.0f) e.previous = Source(*args.d);
  store_output(ctx, *args.d, e);
}

// Of op(A), summed over K.
struct BiasGrad {
  Values a;
  bool along;  // A is stored [M, K]
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    for (int i = 0; i < kGroup; ++i) {
      v[i] = i < n ? (along ? a.at(col + i, row) : a.at(row, col + i)) : 0.0f;
    }
  }
};
struct PlainBiasGrad {
  Source a;
  int64_t cols;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    a.load(row * cols + col, n, v);
  }
};

// ---- the op

void check_arguments(const Args& args) {
  if (args.accumulate && is_fp8(dtype_of(*args.d))) {
    invalid("d is FP8 with accumulate; accumulate into f32, f16 or bf16");
  }
  if (args.pre_gelu_out != nullptr && !args.gelu) {
    invalid("pre_gelu_out is given without gelu; set gelu or leave it out");
  }
  if (args.pre_gelu_in != nullptr && (args.gelu || args.bias != nullptr)) {
    invalid(std::string("pre_gelu_in is given with ") + (args.gelu ? "gelu" : "bias") +
            "; the gradient epilogue goes with neither gelu nor bias");
  }
  if (args.accumulate_bias_grad && args.bias_grad == nullptr) {
    invalid("accumulate_bias_grad is set without bias_grad; give the tensor or clear the flag");
  }
  if (backend::scaling(*args.a) == TE_FL_SCALING_BLOCK_128X128 &&
      backend::scaling(*args.b) == TE_FL_SCALING_BLOCK_128X128) {
    invalid("a and b are both scaled in 128x128 blocks; quantise one of them in 1x128 blocks");
  }
  if ((is_block(*args.a) || is_block(*args.b)) && (args.gelu || args.bias_grad != nullptr)) {
    invalid(std::string(args.gelu ? "gelu" : "bias_grad") +
            " with a block-scaled operand; its epilogues are none, bias and pre_gelu_in: call the "
            "op for it separately");
  }
  check_output(*args.d, "d");
  if (args.pre_gelu_out != nullptr) check_output(*args.pre_gelu_out, "pre_gelu_out");
}

void generic_gemm(const te_fl_context& ctx, const Args& args) {
  check_arguments(args);
  const Problem p = describe(args);
  const Scratch s = scratch(args, p, ctx.workspace);
  if (ctx.workspace_bytes < s.bytes) {
    invalid("the workspace has " + std::to_string(ctx.workspace_bytes) + " bytes, " +
            text_of(args, p) + " needs " + std::to_string(s.bytes));
  }
  if (args.bias_grad != nullptr) {
    const bool along = args.trans_a == 0, accumulate = args.accumulate_bias_grad != 0;
    if (!along && backend::scaling(*args.a) == TE_FL_SCALING_NONE) {
      column_sums(ctx, p.k, p.m, s.partials, *args.bias_grad, accumulate,
                  PlainBiasGrad{Source(*args.a), p.m});
    } else {
      column_sums(ctx, p.k, p.m, s.partials, *args.bias_grad, accumulate,
                  BiasGrad{values_of(*args.a, along, "a"), along});
    }
  }
  if (p.m > 0 && p.n > 0) multiply(ctx, args, p, s);
  if (!p.direct) finish(ctx, args, p, s);
}

Refusal refuse(const Args& args) {
  for (const te_fl_tensor* t : {args.a, args.b, args.pre_gelu_in}) {
    if (t == nullptr) continue;
    const uint32_t scaling = backend::scaling(*t);
    if (scaling == TE_FL_SCALING_MXFP8 || scaling == TE_FL_SCALING_NVFP4) {
      return "does not read MXFP8 and NVFP4";
    }
    if (scaling == TE_FL_SCALING_NONE && is_fp8(dtype_of(*t))) {
      return "reads FP8 with its scale only";
    }
  }
  if (!all_dense(args.a, args.b, args.bias, args.pre_gelu_in, args.bias_grad, args.residual)) {
    return kNotContiguous;
  }
  if (args.pre_gelu_in != nullptr && args.pre_gelu_in->dl.data == nullptr &&
      backend::numel(*args.pre_gelu_in) != 0) {
    return "generic_gemm: row-wise data missing of pre_gelu_in";
  }
  for (const te_fl_tensor* out : {args.d, args.pre_gelu_out}) {
    if (out == nullptr) continue;
    if (const Refusal why = refuse_output(*out)) return why;
    for (const te_fl_tensor* in : {args.a, args.b, args.bias, args.pre_gelu_in}) {
      if (in != nullptr && overlaps(*out, *in)) return kOverlaps;
    }
  }
  if (args.residual != nullptr && overlaps_askew(*args.d, *args.residual)) return kOverlaps;
  const auto missing = [](const te_fl_tensor& t, const void* copy) {
    return backend::scaling(t) == TE_FL_SCALING_TENSOR && backend::numel(t) != 0 && copy == nullptr;
  };
  const void* a_columns = args.a->quant != nullptr ? args.a->quant->columnwise_data : nullptr;
  const void* b_columns = args.b->quant != nullptr ? args.b->quant->columnwise_data : nullptr;
  if (args.trans_a && missing(*args.a, a_columns)) {
    return "generic_gemm: column-wise data missing of a, which trans_a needs";
  }
  if (!args.trans_a && missing(*args.a, args.a->dl.data)) {
    return "generic_gemm: row-wise data missing of a";
  }
  if (!args.trans_b && missing(*args.b, b_columns)) {
    return "generic_gemm: column-wise data missing of b, which is needed without trans_b";
  }
  if (args.trans_b && missing(*args.b, args.b->dl.data)) {
    return "generic_gemm: row-wise data missing of b";
  }
  return cublaslt() != nullptr ? nullptr : cublaslt_missing();
}

te_fl_status prepare(void*, const te_fl_context* ctx, const void* raw, void** plan) noexcept {
  return backend::guard(ctx->errors, [&] {
    refuse_after_fork();
    const backend::Widened<Args> args(raw);
    const DeviceGuard guard(ctx->device.index);
    check_arguments(*args);
    const Problem p = describe(*args);
    *plan = runs_library(p) ? new Plan(make_plan(ctx->device.index, *args, p)) : nullptr;
  });
}
void destroy_plan(void*, void* plan) { delete static_cast<Plan*>(plan); }

}  // namespace

void append_gemm(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<Args, generic_gemm, refuse>("generic_gemm"));
  te_fl_op_desc& desc = ops.back();
  desc.param_version = 2;
  desc.workspace = backend::workspace_thunk<Args, workspace>;
  desc.prepare = prepare;
  desc.destroy_plan = destroy_plan;
}

}  // namespace te_fl::cuda
