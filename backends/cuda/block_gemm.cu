#include "block_gemm.cuh"

#include <algorithm>

#include "block_gemm.hpp"
#include "device.hpp"
#include "hopper_launch.cuh"

namespace te_fl::cuda {
namespace {

constexpr int64_t kExtent = 256;  // of a cluster, both ways

}  // namespace

BlockProduct::BlockProduct(const te_fl_context& ctx, const te_fl_generic_gemm_args& call)
    : call_(call) {
  if (!is_block(*call.a) || !is_block(*call.b) || architecture(ctx.device.index) != 90) return;
  problem_ = describe(call);
  serves_ = serves(ctx);
}

bool BlockProduct::serves(const te_fl_context& ctx) const {
  const te_fl_generic_gemm_args& c = call_;
  const Problem& p = problem_;
  if (!p.block || p.convert != Convert::kNone || p.m % kExtent != 0 || p.n % kExtent != 0 ||
      p.k % 128 != 0 || p.k == 0) {
    return false;
  }
  if (backend::scaling(*c.a) != TE_FL_SCALING_BLOCK_1X128 ||
      backend::scaling(*c.b) != TE_FL_SCALING_BLOCK_1X128) {
    return false;
  }
  if (c.bias != nullptr || c.gelu || c.pre_gelu_in != nullptr || c.pre_gelu_out != nullptr ||
      c.residual != nullptr || c.accumulate || c.bias_grad != nullptr || c.d_sum != nullptr) {
    return false;
  }
  if (c.d->quant != nullptr || dtype_of(*c.d) != TE_FL_BF16 ||
      !aligned16(backend::data<const void>(*c.d)) || !aligned16(p.a.scale_inv) ||
      !aligned16(p.b.scale_inv)) {
    return false;
  }
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ctx.device.index),
        "cudaDeviceGetAttribute");
  return driver().encode_tensor_map != nullptr && p.m / kExtent * (p.n / kExtent) >= sms / 4;
}

void BlockProduct::run(const te_fl_context& ctx) const {
  const Problem& p = problem_;
  BlockGemm g;
  g.rows = static_cast<int>(p.m);
  g.cols = static_cast<int>(p.n);
  g.lines = static_cast<int>(p.k / 128);
  g.alpha = call_.alpha;
  g.scale_a = p.a.scale_inv;
  g.scale_b = p.b.scale_inv;
  g.pitch_a = p.m;  // multiples of 4, so without padding
  g.pitch_b = p.n;
  const CUtensorMap a = boxes(p.a.codes, true, p.m, p.k, blocks::kRows),
                    b = boxes(p.b.codes, true, p.n, p.k, blocks::kCols / 2),
                    d = boxes(backend::data<void>(*call_.d), false, p.m, p.n, blocks::kRows);
  const int clusters = std::min(clusters_of<blocks::block_gemm_kernel>(
                                    ctx.device.index, blocks::kTileThreads, blocks::kShared),
                                blocks::Tile::count(g.rows, g.cols));
  blocks::block_gemm_kernel<<<static_cast<unsigned>(2 * clusters), blocks::kTileThreads,
                              blocks::kShared, stream_of(ctx)>>>(a, b, d, g);
  check_launch("block_gemm_kernel");
}

}  // namespace te_fl::cuda
