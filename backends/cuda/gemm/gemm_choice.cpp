#include "gemm/gemm_choice.hpp"

#include "common/dtype_bytes.hpp"

namespace te_fl::cuda {
namespace {

using Args = te_fl_generic_gemm_args;

constexpr int64_t kExtent = 256;  // rows and columns of a cluster's tile in fused_gemm.cu

bool plain_bf16(const te_fl_tensor& t, uintptr_t alignment) {
  return t.quant == nullptr && dtype_of(t) == TE_FL_BF16 &&
         reinterpret_cast<uintptr_t>(backend::data<const void>(t)) % alignment == 0;
}

// ---- fused: GELU or its gradient in the product's own kernel

const char* refuse_operands(const Args& c, const Problem& p) {
  if (p.convert != Convert::kNone || p.block) return "operands of mixed dtypes or in blocks";
  if (p.m % kExtent != 0 || p.n % kExtent != 0 || p.k == 0)
    return "extents that are no multiples of 256";
  const bool backward = c.pre_gelu_in != nullptr;
  // Excludes FP8 with the split accumulator and FP8 backward calls: for these, the fused kernels
  // are slower than cuBLASLt followed by a separate elementwise kernel.
  if (p.fp8) {
    if (backward || c.use_split_accumulator != 0)
      return "FP8 with the split accumulator, or in the backward";
    const bool taken = p.k % 128 == 0 && p.a.dtype == TE_FL_F8E4M3 && p.b.dtype == TE_FL_F8E4M3;
    return taken ? nullptr : "FP8 other than E4M3, or a K that is no multiple of 128";
  }
  // Forward: both operands have K contiguous. Backward: A has K contiguous, B does not.
  const bool taken = p.k % 64 == 0 && plain_bf16(*c.a, 16) && plain_bf16(*c.b, 16) && p.a.along &&
                     p.b.along != backward;
  return taken ? nullptr : "operands that are not BF16 in rows as a layer has them";
}

const char* refuse_result(const Args& c, const Problem& p) {
  const te_fl_tensor& d = *c.d;
  if (p.fp8) {
    const bool codes = d.quant != nullptr && d.quant->scaling == TE_FL_SCALING_TENSOR &&
                       dtype_of(d) == TE_FL_F8E4M3;
    if (!codes) return "a result of FP8 operands that is not E4M3";
    return aligned16(backend::data<const void>(d)) && aligned16(d.quant->columnwise_data)
               ? nullptr
               : "codes that are not aligned to 16 bytes";
  }
  return plain_bf16(d, 16) ? nullptr : "a result that is not BF16";
}

const char* refuse_fused(const Args& c, const Problem& p, const GemmDevice& device) {
  if (device.architecture != kFusedArchitecture) {
    return "the kernel is for GPUs of compute capability 9.0 (Hopper)";
  }
  if (c.residual != nullptr || c.accumulate || c.bias_grad != nullptr)
    return "the GEMM adds something to the result, or computes a bias gradient";
  if (const char* why = refuse_operands(c, p)) return why;
  if (const char* why = refuse_result(c, p)) return why;
  const bool backward = c.pre_gelu_in != nullptr;
  if (backward ? !plain_bf16(*c.pre_gelu_in, 16)
               : c.pre_gelu_out == nullptr || !plain_bf16(*c.pre_gelu_out, 16) ||
                     c.d_sum != nullptr || (c.bias != nullptr && !plain_bf16(*c.bias, 4))) {
    return "a pre-activation or bias that is not BF16, or d_sum in a forward";
  }
  // With too few of the fused kernel's tiles, more of the GPU is idle than with cuBLASLt's smaller
  // tiles.
  if (!device.has_tensor_maps) return "the driver has no tensor maps";
  if (p.m / kExtent * (p.n / kExtent) < device.multiprocessors / 4)
    return "too few tiles for the chip";
  return nullptr;
}

bool finds_scale(const te_fl_tensor& d) {
  return d.quant != nullptr && (d.quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
}
FusedForm fused_form(const Args& c, const Problem& p) {
  if (c.pre_gelu_in != nullptr) return FusedForm::kBackward;
  if (!p.fp8) return FusedForm::kForward;
  return finds_scale(*c.d) ? FusedForm::kForwardMeasured : FusedForm::kForwardCodes;
}

// ---- composed

// Returns the tensor to whose dtype the result of the GEMM is rounded before the activation; NULL
// if the composed path does not support the call.
const te_fl_tensor* rounded_like(const Args& args) {
  if (args.residual != nullptr || args.accumulate) return nullptr;
  if (args.gelu && args.d_sum != nullptr) return nullptr;  // the op gelu does not sum columns
  const te_fl_tensor* t = args.gelu ? args.pre_gelu_out : args.pre_gelu_in;
  if (t == nullptr || t->quant != nullptr) return nullptr;
  // Rounding the pre-activation to FP32 loses no precision. A 16-bit pre-activation must not be
  // less precise than D.
  const int dtype = dtype_of(*t);
  const bool any = dtype == TE_FL_F32 || args.d->quant != nullptr || dtype_of(*args.d) == dtype;
  return any ? t : nullptr;
}

// Sets the members of `path` that describe the GEMM on cuBLASLt.
void add_product(GemmPath& path, const Problem& p) {
  path.problem = p;
  path.empty = !runs_library(p);
  path.fp8 = p.fp8;
  if (p.convert == Convert::kPad) path.converted = "padded to multiples of 16";
  if (p.convert == Convert::kWiden) path.converted = "widened to FP32";
  if (p.convert == Convert::kBf16) path.converted = "dequantised to BF16";
  path.indirect = p.indirect;
}

}  // namespace

ComposedProduct::ComposedProduct(const Args& call) : call_(call) {
  const te_fl_tensor* rounded = rounded_like(call);
  if (rounded == nullptr) return;
  product_ = call;
  product_.gelu = 0;
  product_.pre_gelu_out = product_.pre_gelu_in = product_.d_sum = nullptr;
  if (forward()) {
    product_.d = rounded;
  } else {
    rounded_ = *rounded;
    rounded_.dl.data = nullptr;
    rounded_.dl.byte_offset = 0;
    product_.d = &rounded_;
  }
  composed_ = true;
}

GemmPath choose_gemm(const Args& args, const GemmDevice& device) {
  GemmPath path;
  const Problem whole = make_problem(args);
  if (!activates(args)) {
    add_product(path, whole);
    return path;
  }
  path.unfused = refuse_fused(args, whole, device);
  if (path.unfused == nullptr) {
    path.kind = GemmPath::Kind::kFused;
    path.form = fused_form(args, whole);
    path.problem = whole;
    return path;
  }
  const ComposedProduct composed(args);
  if (composed) path.kind = GemmPath::Kind::kComposed;
  add_product(path, composed ? make_problem(composed.product()) : whole);
  return path;
}

}  // namespace te_fl::cuda
