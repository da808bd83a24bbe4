#include "gemm/fused_gemm.cuh"

#include <algorithm>

#include "common/hopper_launch.cuh"
#include "common/store.cuh"
#include "device/device.hpp"
#include "device/driver.hpp"
#include "gemm/fused_gemm.hpp"
#include "pointwise/activation.hpp"

namespace te_fl::cuda {
namespace {

constexpr int64_t kExtent = 256;  // of a cluster, both ways

bool plain_bf16(const te_fl_tensor& t, uintptr_t alignment) {
  return t.quant == nullptr && dtype_of(t) == TE_FL_BF16 &&
         reinterpret_cast<uintptr_t>(backend::data<const void>(t)) % alignment == 0;
}

template <class Type, bool kBackward, class Out>
void launch(const te_fl_context& ctx, const CUtensorMap (&maps)[3], const FusedGemm& g) {
  constexpr auto kKernel = fused::fused_gemm_kernel<Type, kBackward, Out>;
  const int clusters =
      std::min(clusters_of<kKernel>(ctx.device.index, fused::kTileThreads, fused::kShared),
               g.rows / int{kExtent} * (g.cols / int{kExtent}));
  kKernel<<<2 * clusters, fused::kTileThreads, fused::kShared, stream_of(ctx)>>>(maps[0], maps[1],
                                                                                 maps[2], g);
  check_launch("fused_gemm_kernel");
}

}  // namespace

FusedProduct::FusedProduct(const te_fl_context& ctx, const te_fl_generic_gemm_args& call)
    : call_(call) {
  if (call.gelu == 0 && call.pre_gelu_in == nullptr) {
    refusal_ = "no GELU";
    return;
  }
  if (architecture(ctx.device.index) != 90) {
    refusal_ = "the kernel is for GPUs of compute capability 9.0 (Hopper)";
    return;
  }
  problem_ = describe(call);
  refusal_ = refuse(ctx);
  if (refusal_ == nullptr) form_ = form_of();
}

const char* FusedProduct::refuse_operands() const {
  const Problem& p = problem_;
  if (p.convert != Convert::kNone || p.block) return "operands of mixed dtypes or in blocks";
  if (p.m % kExtent != 0 || p.n % kExtent != 0 || p.k == 0)
    return "extents that are no multiples of 256";
  const bool backward = call_.pre_gelu_in != nullptr;
  // Not the gradient in FP8: with the split accumulator these kernels are slower than the library's
  // and a pass.
  if (p.fp8) {
    if (backward || call_.use_split_accumulator != 0)
      return "FP8 with the split accumulator, or in the backward";
    const bool taken = p.k % 128 == 0 && p.a.dtype == TE_FL_F8E4M3 && p.b.dtype == TE_FL_F8E4M3;
    return taken ? nullptr : "FP8 other than E4M3, or a K that is no multiple of 128";
  }
  // Forward both along K, backward B across it.
  const bool taken = p.k % 64 == 0 && plain_bf16(*call_.a, 16) && plain_bf16(*call_.b, 16) &&
                     p.a.along && p.b.along != backward;
  return taken ? nullptr : "operands that are not BF16 in rows as a layer has them";
}

const char* FusedProduct::refuse_result() const {
  const te_fl_tensor& d = *call_.d;
  if (problem_.fp8) {
    const bool codes = d.quant != nullptr && d.quant->scaling == TE_FL_SCALING_TENSOR &&
                       dtype_of(d) == TE_FL_F8E4M3;
    if (!codes) return "a result of FP8 operands that is not E4M3";
    return aligned16(backend::data<const void>(d)) && aligned16(d.quant->columnwise_data)
               ? nullptr
               : "codes that are not aligned to 16 bytes";
  }
  return plain_bf16(d, 16) ? nullptr : "a result that is not BF16";
}

const char* FusedProduct::refuse(const te_fl_context& ctx) const {
  const te_fl_generic_gemm_args& c = call_;
  if (c.residual != nullptr || c.accumulate || c.bias_grad != nullptr)
    return "something is added to the result, or a bias gradient asked for";
  if (const char* why = refuse_operands()) return why;
  if (const char* why = refuse_result()) return why;
  const bool backward = c.pre_gelu_in != nullptr;
  if (backward ? !plain_bf16(*c.pre_gelu_in, 16)
               : c.pre_gelu_out == nullptr || !plain_bf16(*c.pre_gelu_out, 16) ||
                     c.d_sum != nullptr || (c.bias != nullptr && !plain_bf16(*c.bias, 4))) {
    return "a pre-activation or bias that is not BF16, or d_sum in a forward";
  }
  // Fewer tiles leave more of the chip idle than the library's smaller ones do.
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ctx.device.index),
        "cudaDeviceGetAttribute");
  if (driver().encode_tensor_map == nullptr) return "the driver has no tensor maps";
  if (problem_.m / kExtent * (problem_.n / kExtent) < sms / 4) return "too few tiles for the chip";
  return nullptr;
}

FusedProduct::Form FusedProduct::form_of() const {
  if (call_.pre_gelu_in != nullptr) return Form::kBackward;
  if (!problem_.fp8) return Form::kForward;
  return finds_scale() ? Form::kForwardMeasured : Form::kForwardCodes;
}

bool FusedProduct::finds_scale() const {
  return call_.d->quant != nullptr && (call_.d->quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
}

size_t FusedProduct::scratch_bytes() const {
  if (form_ == Form::kForwardMeasured) return gelu_measured_workspace();
  if (call_.d_sum == nullptr) return 0;
  return static_cast<size_t>(problem_.m / fused::kUnitRows * problem_.n) * sizeof(float);
}

void FusedProduct::run(const te_fl_context& ctx, void* scratch) const {
  const Problem& p = problem_;
  const bool backward = call_.pre_gelu_in != nullptr;
  FusedGemm g;
  g.rows = static_cast<int>(p.m);
  g.cols = static_cast<int>(p.n);
  g.lines = static_cast<int>(p.k / (p.fp8 ? 128 : 64));
  g.alpha = call_.alpha;
  g.out = backend::data<void>(*call_.d);
  if (p.fp8) {
    g.scale_a = p.a.scale_inv;
    g.scale_b = p.b.scale_inv;
    const te_fl_quant& quant = *call_.d->quant;
    g.out_t = static_cast<uint8_t*>(quant.columnwise_data);
    g.scale = quant.scale;
    g.scale_inv = static_cast<float*>(quant.scale_inv);
    g.scale_inv_t = static_cast<float*>(quant.columnwise_scale_inv);
    g.amax = quant.amax;
  }
  if (call_.bias != nullptr) g.bias = backend::data<const bf16>(*call_.bias);
  if (backward) g.pre = backend::data<const bf16>(*call_.pre_gelu_in);
  if (call_.d_sum != nullptr) g.sums = static_cast<float*>(scratch);
  const void* a = p.fp8 ? p.a.codes : backend::data<const void>(*call_.a);
  const void* b = p.fp8 ? p.b.codes : backend::data<const void>(*call_.b);
  const bool across = form_ == Form::kBackward;
  const te_fl_tensor& pre = backward ? *call_.pre_gelu_in : *call_.pre_gelu_out;
  const CUtensorMap maps[3] = {
      boxes(a, p.fp8, p.m, p.k, fused::kRows),
      across ? boxes(b, false, p.k, p.n, 64) : boxes(b, p.fp8, p.n, p.k, fused::kCols / 2),
      boxes(backend::data<const void>(pre), false, p.m, p.n, fused::kUnitRows)};
  switch (form_) {
    case Form::kForwardMeasured: {
      g.amax = static_cast<float*>(scratch);
      check(cudaMemsetAsync(g.amax, 0, sizeof(float), stream_of(ctx)), "cudaMemsetAsync");
      launch<hopper::E4m3, false, fused::Measured>(ctx, maps, g);
      te_fl_context own = ctx;
      own.workspace = scratch;
      own.workspace_bytes = scratch_bytes();
      te_fl_activation_act_fwd_args args{};
      args.input = call_.pre_gelu_out;
      args.output = call_.d;
      gelu_measured(own, args);
      break;
    }
    case Form::kForwardCodes:
      launch<hopper::E4m3, false, e4m3>(ctx, maps, g);
      break;
    case Form::kForward:
      launch<hopper::Bf16, false, bf16>(ctx, maps, g);
      break;
    default:
      launch<hopper::Bf16AcrossB, true, bf16>(ctx, maps, g);
  }
  if (g.sums != nullptr)
    add_partials(ctx, g.sums, p.m / fused::kUnitRows, p.n, *call_.d_sum, false);
}

}  // namespace te_fl::cuda
