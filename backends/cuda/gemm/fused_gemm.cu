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

constexpr int64_t kExtent = 256;  // rows and columns of a cluster's tile

template <class Type, bool kBackward, class Out>
void launch(const te_fl_context& ctx, const CUtensorMap (&maps)[3], const FusedGemm& g) {
  constexpr auto kKernel = fused::fused_gemm_kernel<Type, kBackward, Out>;
  const int clusters =
      std::min(max_active_clusters<kKernel>(ctx.device.index, fused::kTileThreads, fused::kShared),
               g.rows / int{kExtent} * (g.cols / int{kExtent}));
  kKernel<<<2 * clusters, fused::kTileThreads, fused::kShared, stream_of(ctx)>>>(maps[0], maps[1],
                                                                                 maps[2], g);
  check_launch("fused_gemm_kernel");
}

}  // namespace

size_t FusedProduct::scratch_bytes() const {
  if (form_ == FusedForm::kForwardMeasured) return gelu_measured_workspace();
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
  const bool across = form_ == FusedForm::kBackward;
  const te_fl_tensor& pre = backward ? *call_.pre_gelu_in : *call_.pre_gelu_out;
  const CUtensorMap maps[3] = {
      boxes(a, p.fp8, p.m, p.k, fused::kRows),
      across ? boxes(b, false, p.k, p.n, 64) : boxes(b, p.fp8, p.n, p.k, fused::kCols / 2),
      boxes(backend::data<const void>(pre), false, p.m, p.n, fused::kUnitRows)};
  switch (form_) {
    case FusedForm::kForwardMeasured: {
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
    case FusedForm::kForwardCodes:
      launch<hopper::E4m3, false, e4m3>(ctx, maps, g);
      break;
    case FusedForm::kForward:
      launch<hopper::Bf16, false, bf16>(ctx, maps, g);
      break;
    default:
      launch<hopper::Bf16AcrossB, true, bf16>(ctx, maps, g);
  }
  if (g.sums != nullptr)
    add_partials(ctx, g.sums, p.m / fused::kUnitRows, p.n, *call_.d_sum, false);
}

}  // namespace te_fl::cuda
