// generic_gemm on cuBLASLt. A row-major matrix is the column-major transpose, so the library
// computes D^T = op(B)^T op(A)^T: B is its left operand, A its right one.
//
// choose_gemm() (gemm_choice.hpp) picks one of four paths, from metadata and alignment:
//   direct: the library reads the operands and writes D, with the epilogues that it has for the
//   dtypes. This includes row-wise FP8 with a supplied scale.
//   fused (fused_gemm.hpp): GELU or its gradient in the epilogue of the plugin's own GEMM kernel.
//   composed (gemm_composed.hpp): a product by the direct or general path, then GELU or its
//   gradient in a second kernel.
//   general: the product is written to FP32 scratch, and one kernel applies the epilogue, rounds
//   once and writes D in any dtype and scaling mode. Operands that the library cannot read (mixed
//   dtypes, E5M2 x E5M2, FP8 with awkward extents) are first converted or padded in scratch.
// MXFP8 operands are dequantised to BF16 in scratch, on the direct and the general path.
#include <memory>
#include <optional>

#include "common/column_sums.hpp"
#include "common/overlap.hpp"
#include "common/store.cuh"
#include "device/device.hpp"
#include "device/device_attributes.hpp"
#include "device/driver.hpp"
#include "gemm/cublaslt.hpp"
#include "gemm/fused_gemm.hpp"
#include "gemm/gemm_call.hpp"
#include "gemm/gemm_choice.hpp"
#include "gemm/gemm_composed.hpp"
#include "gemm/gemm_limits.hpp"
#include "gemm/gemm_operand.cuh"
#include "plugin/families.hpp"
#include "pointwise/activation.cuh"
#include "quantize/dequantize.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::cuda {
namespace {

using backend::invalid;
using Args = te_fl_generic_gemm_args;

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
  const int64_t element = p.convert == Convert::kWiden ? 4 : p.convert == Convert::kBf16 ? 2 : 1;
  if (p.convert != Convert::kNone) {
    s.a = take(p.m * p.padded_k * element);
    s.b = take(p.padded_n * p.padded_k * element);
  }
  // bias_grad and d_sum use the same scratch, one after the other.
  const size_t bias_grad = args.bias_grad != nullptr ? column_sums_bytes(p.k, p.m) : 0;
  const size_t d_sum = args.d_sum != nullptr ? column_sums_bytes(p.m, p.n) : 0;
  s.partials = reinterpret_cast<float*>(take(static_cast<int64_t>(std::max(bias_grad, d_sum))));
  return s;
}

// Returns the path of a call. It depends on the device only if the call has an activation.
GemmPath choose_path(const te_fl_context& ctx, const Args& args) {
  GemmDevice device{architecture(ctx.device.index), 0, false};
  if (activates(args) && device.architecture == kFusedArchitecture) {
    device.multiprocessors = multiprocessors(ctx.device.index);
    device.has_tensor_maps = driver().encode_tensor_map != nullptr;
  }
  return choose_gemm(args, device);
}
size_t required_workspace(const GemmPath& path, const Args& args) {
  switch (path.kind) {
    case GemmPath::Kind::kFused:
      return FusedProduct(args, path).scratch_bytes();
    case GemmPath::Kind::kComposed: {
      const Composed composed(args);
      return scratch(composed.product(), path.problem, nullptr).bytes + composed.scratch_bytes();
    }
    default:
      return scratch(args, path.problem, nullptr).bytes;
  }
}

// Returns the plan that the host caches for the call's signature; NULL if there is none or it does
// not fit this call.
const Plan* kept_plan(const te_fl_context& ctx, const Args& args) {
  const auto* plan = static_cast<const Plan*>(ctx.plan);
  return plan != nullptr && plan->in_place == adds_in_place(args) ? plan : nullptr;
}

size_t workspace(const te_fl_context& ctx, const Args& args) {
  const Plan* plan = kept_plan(ctx, args);
  return plan != nullptr ? plan->scratch_bytes : required_workspace(choose_path(ctx, args), args);
}

// Dequantises an MXFP8 operand to a BF16 matrix of the stored shape. Reads the copy whose blocks
// run along K if the tensor has it, else the other.
void dequantise_operand(const te_fl_context& ctx, const Operand& o, void* out) {
  const backend::Matrix matrix = backend::as_matrix(*o.tensor);
  if (matrix.rows == 0 || matrix.cols == 0) return;
  te_fl_tensor codes = *o.tensor;
  const bool has_columns = codes.quant->columnwise_data != nullptr;
  if (codes.dl.data != nullptr && !o.along && has_columns) {
    codes.dl.data = nullptr;
    codes.dl.byte_offset = 0;
  }
  int64_t shape[] = {matrix.rows, matrix.cols};
  codes.dl.ndim = 2;
  codes.dl.shape = shape;
  codes.dl.strides = nullptr;
  te_fl_tensor values;
  values.provider = codes.provider;
  values.dl = codes.dl;
  values.dl.data = out;
  values.dl.byte_offset = 0;
  values.dl.dtype = {TE_FL_CODE_BFLOAT, 16, 1};
  te_fl_dequantize_args dequantise;
  dequantise.input = &codes;
  dequantise.output = &values;
  dequantize(ctx, dequantise);
}

void multiply(const te_fl_context& ctx, const Args& args, const Problem& p, const Scratch& s,
              const Plan* plan) {
  const cudaStream_t stream = stream_of(ctx);
  if (plan == nullptr) {
    cuda::check(cudaMemsetAsync(s.product, 0, static_cast<size_t>(p.m * p.padded_n) * 4, stream),
                "cudaMemsetAsync");
    return;
  }
  const void* left = p.fp8 ? p.b.codes : backend::data<const void>(*args.b);
  const void* right = p.fp8 ? p.a.codes : backend::data<const void>(*args.a);
  if (p.convert == Convert::kBf16) {
    dequantise_operand(ctx, p.a, s.a);
    dequantise_operand(ctx, p.b, s.b);
    left = s.b;
    right = s.a;
  } else if (p.convert != Convert::kNone) {
    convert(stream, p, p.a, s.a, p.m, p.m);
    convert(stream, p, p.b, s.b, p.n, p.padded_n);
    left = s.b;
    right = s.a;
  }
  void* out = p.direct ? backend::data<void>(*args.d) : s.product;
  run_plan(ctx, args, p, *plan, left, right, out, s.library);
}

// ---- the epilogue in a separate kernel

struct Epilogue {
  const float* product;
  int64_t pitch, cols;
  Source bias, pre_gelu_in, residual, previous;  // data is NULL if absent
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
      for (int i = 0; i < kGroup; ++i) v[i] *= Gelu::dual(other[i] * scale).derivative;
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

void apply_epilogue(const te_fl_context& ctx, const Args& args, const Problem& p,
                    const Scratch& s) {
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
  // Sums the columns first, because D may overwrite the residual's memory.
  if (args.d_sum != nullptr) column_sums(ctx, p.m, p.n, s.partials, *args.d_sum, false, e);
  store_output(ctx, *args.d, e);
}

// Writes scale_inv and amax of a quantised output. `found`: the amax that cuBLASLt has computed.
__global__ void finish_codes_kernel(const float* found, const float* scale, float* scale_inv,
                                    float* amax) {
  if (scale_inv != nullptr) *scale_inv = 1.0f / *scale;
  if (amax != nullptr) *amax = fmaxf(*amax, *found);
}
void finish_codes(const te_fl_context& ctx, const Args& args, const Problem& p) {
  const te_fl_quant& quant = *args.d->quant;
  finish_codes_kernel<<<1, 1, 0, stream_of(ctx)>>>(
      p.found_amax, quant.scale, static_cast<float*>(quant.scale_inv), quant.amax);
  check_launch("finish_codes_kernel");
}

// A Produce functor (store.cuh) for bias_grad: returns the elements of op(A), which are summed over
// K.
struct BiasGrad {
  Values a;
  bool along;  // A is stored as [M, K]
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    for (int i = 0; i < kGroup; ++i) {
      v[i] = i < n ? (along ? a.at(col + i, row) : a.at(row, col + i)) : 0.0f;
    }
  }
};
// Variant of BiasGrad for an A stored as [K, M], with row-wise data that is unquantised or has
// per-tensor scaling.
struct RowsBiasGrad {
  Source a;
  int64_t cols;
  const float* scale_inv;  // NULL: A is unquantised
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    a.load(row * cols + col, n, v);
    if (scale_inv == nullptr) return;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] *= *scale_inv;
  }
};
bool rows_bias_grad(const te_fl_tensor& a) {
  const uint32_t scaling = backend::scaling(a);
  if (scaling == TE_FL_SCALING_NONE) return true;
  return scaling == TE_FL_SCALING_TENSOR && a.dl.data != nullptr && a.quant->scale_inv != nullptr;
}

// ---- the op

void need_workspace(const te_fl_context& ctx, const Args& args, size_t bytes) {
  if (ctx.workspace_bytes >= bytes) return;
  invalid("the workspace has " + std::to_string(ctx.workspace_bytes) + " bytes, " +
          to_text(args, make_problem(args)) + " needs " + std::to_string(bytes));
}

}  // namespace

size_t product_scratch(const te_fl_generic_gemm_args& args, const Problem& p) {
  return scratch(args, p, nullptr).bytes;
}

void enqueue_product(const te_fl_context& ctx, const te_fl_generic_gemm_args& args, Problem p,
                     const Plan* plan) {
  const Scratch s = scratch(args, p, ctx.workspace);
  need_workspace(ctx, args, s.bytes);
  if (p.codes) p.found_amax = static_cast<float*>(ctx.workspace);
  p.bias_grad = plan != nullptr && plan->problem.bias_grad;
  if (args.bias_grad != nullptr && !p.bias_grad) {
    const bool along = args.trans_a == 0, accumulate = args.accumulate_bias_grad != 0;
    if (!along && has_fast_column_sums(*args.a)) {
      fast_column_sums(ctx, *args.a, s.partials, *args.bias_grad, accumulate);
    } else if (!along && rows_bias_grad(*args.a)) {
      const te_fl_quant* quant = args.a->quant;
      column_sums(
          ctx, p.k, p.m, s.partials, *args.bias_grad, accumulate,
          RowsBiasGrad{Source(*args.a), p.m,
                       quant != nullptr ? static_cast<const float*>(quant->scale_inv) : nullptr});
    } else {
      column_sums(ctx, p.k, p.m, s.partials, *args.bias_grad, accumulate,
                  BiasGrad{make_values(*args.a, along), along});
    }
  }
  if (p.m > 0 && p.n > 0) multiply(ctx, args, p, s, plan);
  if (p.codes) finish_codes(ctx, args, p);
  if (!p.direct) apply_epilogue(ctx, args, p, s);
}

namespace {

// Runs a call without activation on the direct or the general path. `chosen`: the call's problem,
// or NULL if it is not yet known.
void run_product(const te_fl_context& ctx, const Args& args, const Problem* chosen) {
  const Plan* plan = kept_plan(ctx, args);
  const Problem p = plan != nullptr     ? make_problem(*plan, args)
                    : chosen != nullptr ? *chosen
                                        : make_problem(args);
  std::optional<Plan> own;
  if (plan == nullptr && runs_library(p)) plan = &own.emplace(make_plan(ctx, args, p));
  enqueue_product(ctx, args, p, plan);
}

void run_composed(const te_fl_context& ctx, const Args& args, const GemmPath& path) {
  Composed composed(args);
  const size_t first = scratch(composed.product(), path.problem, nullptr).bytes;
  need_workspace(ctx, args, first + composed.scratch_bytes());
  composed.bind(static_cast<char*>(ctx.workspace) + first);
  run_product(ctx, composed.product(), &path.problem);
  composed.activate(ctx);
}

void generic_gemm(const te_fl_context& ctx, const Args& args) {
  if (!activates(args)) return run_product(ctx, args, nullptr);  // a kept plan has the problem
  const GemmPath path = choose_path(ctx, args);
  switch (path.kind) {
    case GemmPath::Kind::kFused: {
      const FusedProduct fused(args, path);
      need_workspace(ctx, args, fused.scratch_bytes());
      return fused.run(ctx, ctx.workspace);
    }
    case GemmPath::Kind::kComposed:
      return run_composed(ctx, args, path);
    default:
      return run_product(ctx, args, &path.problem);
  }
}

std::string describe_choice(const te_fl_context& ctx, const Args& args) {
  GemmPath path = choose_path(ctx, args);
  if (path.kind == GemmPath::Kind::kComposed) {
    path.algorithm = describe_algorithm(ctx, ComposedProduct(args).product(), path.problem);
  } else if (path.kind == GemmPath::Kind::kProduct) {
    path.algorithm = describe_algorithm(ctx, args, path.problem);
  }
  return path.text();
}

}  // namespace

Refusal refuse_product(const te_fl_context& ctx, const te_fl_generic_gemm_args& args) {
  for (const te_fl_tensor* t : {args.a, args.b, args.pre_gelu_in}) {
    if (t == nullptr) continue;
    const uint32_t scaling = backend::scaling(*t);
    if (scaling == TE_FL_SCALING_NVFP4 ||
        (scaling == TE_FL_SCALING_MXFP8 && t == args.pre_gelu_in)) {
      return "does not read NVFP4, nor MXFP8 as pre_gelu_in";
    }
    if (scaling == TE_FL_SCALING_NONE && is_fp8(dtype_of(*t))) {
      return "reads FP8 with its scale only";
    }
  }
  if (!all_dense(args.a, args.b, args.bias, args.pre_gelu_in, args.bias_grad, args.residual,
                 args.d_sum)) {
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
  if (cublaslt() == nullptr) return cublaslt_missing();
  const auto reads_fp8 = [](const te_fl_tensor& t) { return is_fp8(dtype_of(t)) && !is_mxfp8(t); };
  const bool fp8 = reads_fp8(*args.a) || reads_fp8(*args.b);
  return gemm_limit(architecture(ctx.device.index), cublaslt()->number, fp8,
                    is_block(*args.a) && is_block(*args.b));
}

namespace {

te_fl_status prepare(void*, const te_fl_context* ctx, const void* raw, void** plan) noexcept {
  return backend::guard(ctx->errors, [&] {
    refuse_after_fork();
    const backend::Widened<Args> args(raw);
    const DeviceGuard guard(ctx->device.index);
    *plan = nullptr;
    const GemmPath path = choose_path(*ctx, *args);
    const Problem& p = path.problem;
    if (path.kind == GemmPath::Kind::kFused || !runs_library(p)) return;
    const ComposedProduct composed(*args);
    const bool composes = path.kind == GemmPath::Kind::kComposed;
    const Args& product = composes ? composed.product() : *args;
    auto made = std::make_unique<Plan>(make_plan(*ctx, product, p));
    made->scratch_bytes = required_workspace(path, *args);
    *plan = made.release();
  });
}
void destroy_plan(void*, void* plan) { delete static_cast<Plan*>(plan); }

}  // namespace

void append_gemm(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<Args, generic_gemm, refuse_product>("generic_gemm"));
  te_fl_op_desc& desc = ops.back();
  desc.later_args = "residual d_sum";
  desc.flags |= TE_FL_OP_CHEAP_EPILOGUES;
  desc.workspace = backend::workspace_thunk<Args, workspace>;
  desc.prepare = prepare;
  desc.destroy_plan = destroy_plan;
  desc.describe = backend::describe_thunk<Args, describe_choice>;
  append_grouped_gemm(ops);
}

}  // namespace te_fl::cuda
