// generic_gemm for F32, F16, BF16 or per-tensor FP8 operands, with FP32 accumulation.
#include "te_fl/ops/gemm.h"

#include "clblast.hpp"
#include "families.hpp"
#include "gemm_choice.hpp"
#include "overlap.hpp"
#include "store.hpp"

namespace te_fl::opencl {
namespace {

using Args = te_fl_generic_gemm_args;

enum : uint32_t {  // same values as in gemm.cl
  kHasBias = 1,
  kHasPreGeluOut = 2,
  kHasPreGeluIn = 4,
  kHasResidual = 8,
  kGelu = 16,
  kAccumulate = 32,
  kScaledA = 64,
  kScaledB = 128,
  kScaledIn = 256,
  kAccumulateGrad = 512,
};

bool quantised(const te_fl_tensor* t) {
  return t != nullptr && backend::scaling(*t) != TE_FL_SCALING_NONE;
}

// An operand in the form that the kernel reads.
struct Operand {
  const void* data = nullptr;
  const void* scale_inv = nullptr;
  bool transposed = false;
};

// Uses the row-wise data of a quantised operand if it exists, else the column-wise data, which is
// transposed.
Operand operand(const te_fl_tensor* t, bool transposed) {
  if (t == nullptr) return {};
  if (!quantised(t)) return {backend::data<const void>(*t), nullptr, transposed};
  const te_fl_quant& q = *t->quant;
  const bool rows = t->dl.data != nullptr;
  return {rows ? backend::data<const void>(*t) : q.columnwise_data, q.scale_inv,
          rows ? transposed : !transposed};
}

// True if the kernel may read vectors of four elements in every row.
bool whole_vectors(const Operand& x, int64_t row) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && row % 4 == 0;
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

uint32_t pack_flags(const Args& args) {
  uint32_t flags = 0;
  const auto set = [&](bool when, uint32_t flag) { flags |= when ? flag : 0; };
  set(args.bias != nullptr, kHasBias);
  set(args.pre_gelu_out != nullptr, kHasPreGeluOut);
  set(args.pre_gelu_in != nullptr, kHasPreGeluIn);
  set(args.residual != nullptr, kHasResidual);
  set(args.gelu != 0, kGelu);
  set(args.accumulate != 0 && args.beta != 0.0f, kAccumulate);  // d is not read if beta is 0
  set(quantised(args.a), kScaledA);
  set(quantised(args.b), kScaledB);
  set(quantised(args.pre_gelu_in), kScaledIn);
  set(args.accumulate_bias_grad != 0, kAccumulateGrad);
  return flags;
}

bool is_f32(const te_fl_tensor* t) { return dtype_index(t->dl.dtype) == TE_FL_F32; }

GemmProblem make_problem(const Args& args) {
  const backend::Matrix d = backend::as_matrix(*args.d), stored_a = backend::as_matrix(*args.a);
  const int64_t k = args.trans_a ? stored_a.rows : stored_a.cols;
  GemmProblem p{.m = d.rows, .n = d.cols, .k = k};
  p.f32 = is_f32(args.a) && is_f32(args.b);
  p.plain = p.f32 && is_f32(args.d) && args.bias == nullptr && args.pre_gelu_out == nullptr &&
            args.pre_gelu_in == nullptr && args.residual == nullptr && args.gelu == 0;
  return p;
}

// The compile options of gemm.cl for this kernel, and its tile and group sizes.
struct Shape {
  std::string options;
  int64_t tile = 64;
  size_t group = kGroup;
};
Shape shape_of(GemmKernel kernel, bool vectors) {
  if (kernel == GemmKernel::kRows) return {};
  const int64_t tile = kernel == GemmKernel::kTiles128 ? 128 : 64;
  return {"-DWIDE " + define("TILE", tile) + (vectors ? "-DVECTORS " : ""), tile,
          static_cast<size_t>(tile / 8 * (tile / 8))};
}

void generic_gemm(const DeviceCall& call, const Args& args) {
  const backend::Matrix d = backend::as_matrix(*args.d);
  const GemmProblem problem = make_problem(args);
  const int64_t k = problem.k;
  const Operand a = operand(args.a, args.trans_a != 0);
  const Operand b = operand(args.b, args.trans_b != 0);
  const Operand in = operand(args.pre_gelu_in, false);
  auto* workspace = static_cast<char*>(call.context.workspace);
  const Output out(*args.d, workspace);
  const te_fl_tensor& saved = args.pre_gelu_out != nullptr ? *args.pre_gelu_out : *args.d;
  const Output pre_gelu(saved, workspace + aligned(output_workspace(*args.d)));
  const std::string options = define("GROUP", kGroup) + define("TA", args.a) +
                              define("TB", args.b) + define("TD", out.type()) +
                              define("TBIAS", args.bias) + define("TOUT", pre_gelu.type()) +
                              define("TIN", args.pre_gelu_in) + define("TRES", args.residual) +
                              define("TGRAD", args.bias_grad) + define("TRANS_A", a.transposed) +
                              define("TRANS_B", b.transposed);
  const uint32_t flags = pack_flags(args);
  if (args.bias_grad != nullptr) {
    Launch(call.device, call.stream(), "gemm", options, "row_sums")
        .memory(a.data)
        .data(args.bias_grad)
        .memory(a.scale_inv)
        .value(d.rows)
        .value(k)
        .value(flags)
        .items(d.rows);
  }
  const GemmKernel kernel = choose_gemm(call.device.gemm, problem);
  if (kernel == GemmKernel::kClblast) {
    return clblast_sgemm(call, {.a = a.data,
                                .b = b.data,
                                .d = out.data(),
                                .trans_a = a.transposed,
                                .trans_b = b.transposed,
                                .m = d.rows,
                                .n = d.cols,
                                .k = k,
                                .alpha = args.alpha,
                                .beta = (flags & kAccumulate) != 0 ? args.beta : 0.0f});
  }
  const bool vectors =
      whole_vectors(a, a.transposed ? d.rows : k) && whole_vectors(b, b.transposed ? k : d.cols);
  const Shape shape = shape_of(kernel, vectors);
  Launch(call.device, call.stream(), "gemm", options + shape.options, "gemm")
      .memory(a.data)
      .memory(b.data)
      .memory(out.data())
      .data(args.bias)
      .memory(args.pre_gelu_out != nullptr ? pre_gelu.data() : nullptr)
      .memory(in.data)
      .data(args.residual)
      .memory(a.scale_inv)
      .memory(b.scale_inv)
      .memory(in.scale_inv)
      .value(d.rows)
      .value(d.cols)
      .value(k)
      .value(args.alpha)
      .value(args.beta)
      .value(flags)
      .groups((d.rows + shape.tile - 1) / shape.tile * ((d.cols + shape.tile - 1) / shape.tile),
              shape.group);
  out.write_codes(call);
  if (args.pre_gelu_out != nullptr) pre_gelu.write_codes(call);
}

Refusal refuse_gemm(const Device& device, const Args& args) {
  if (!all_dense(args.a, args.b, args.bias, args.pre_gelu_in, args.residual, args.bias_grad)) {
    return kNotContiguous;
  }
  // The kernel reads pre_gelu_in at the index of the result, so column-wise data, which is
  // transposed, is not supported.
  if (quantised(args.pre_gelu_in) && args.pre_gelu_in->dl.data == nullptr) {
    return "reads the row-wise copy of pre_gelu_in";
  }
  for (const te_fl_tensor* out : {args.d, args.pre_gelu_out}) {
    if (out == nullptr) continue;
    if (const Refusal refusal = refuse_output(device, *out)) return refusal;
    for (const te_fl_tensor* t : {args.a, args.b, args.bias}) {
      if (overlaps(*out, t)) return kOverlaps;
    }
    for (const te_fl_tensor* t : {args.pre_gelu_in, args.residual}) {
      if (overlaps_askew(*out, t)) return kOverlaps;
    }
  }
  return nullptr;
}

size_t gemm_workspace(const Args& args) {
  const size_t saved = args.pre_gelu_out != nullptr ? output_workspace(*args.pre_gelu_out) : 0;
  return aligned(output_workspace(*args.d)) + saved;
}

te_fl_status describe(void* self, const te_fl_context* ctx, const void* raw,
                      const te_fl_error_sink* text) noexcept {
  return backend::guard(ctx->errors, [&] {
    const backend::Widened<Args> args(raw);
    backend::report(text, describe_choice(device_of(self, *ctx).gemm, make_problem(*args)).c_str());
  });
}

}  // namespace

void append_gemm(Ops& ops) {
  ops.push_back(descriptor<Args, generic_gemm, refuse_gemm, gemm_workspace>("generic_gemm"));
  ops.back().later_args = "residual";
  ops.back().describe = describe;
}

}  // namespace te_fl::opencl
