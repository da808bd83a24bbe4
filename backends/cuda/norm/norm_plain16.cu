// Forward norms of 16-bit rows. Each block processes as many rows as its warps hold (with kAmax,
// only as many blocks as run at once are launched, and they loop over rows). x and weights are
// loaded directly into registers; while some blocks compute, the loads of others are in flight.
#include "norm/norm_held.cuh"

namespace te_fl::cuda {
namespace {

constexpr int kMostThreads = 512;

struct Plain16Args {
  const void *x, *gamma, *beta;
  void* z;  // has the dtype of x
  float *mu, *rsigma, *amax;
  float4* tiles;
  HeldShape shape;
  int rows, step, rows_each;  // rows that all blocks, and that one block, process at once
  float offset;
};

// kAmax: computes the amax of the result instead of the result.
template <class T, bool kAmax, bool kFull>
__global__ void __launch_bounds__(kMostThreads, 2)
    norm_plain16_kernel(const __grid_constant__ Plain16Args a) {
  __shared__ float4 parts[2][kMostThreads / 32];
  const HeldPlace<kFull> at(a.shape);
  const T* const gamma = static_cast<const T*>(a.gamma);
  const T* const beta = static_cast<const T*>(a.beta);
  float most = 0.0f;
  int parity = 0;
  for (int row0 = static_cast<int>(blockIdx.x) * a.rows_each; row0 < a.rows;
       row0 += a.step, parity ^= 1) {
    const int row = row0 + at.slot;
    const bool inside = row < a.rows;
    const int64_t first = int64_t{row} * a.shape.cols;
    Raw<T> x[kHeldGroups];
    hold_row<false>(at, first, inside, a.x, nullptr, nullptr, x);
    const RowStatistics s = held_statistics(at, a.shape, x, parts[kAmax ? parity : 0]);
    if (!inside) {
      if (kAmax) continue;
      return;
    }
    if (at.part == 0 && at.lane == 0) {
      if (a.shape.centred) a.mu[row] = s.high + s.rest;
      if (a.tiles != nullptr) a.tiles[row] = for_tiles(s);
      a.rsigma[row] = s.rsigma;
    }
    const float shift = -s.rest * s.rsigma;
#pragma unroll
    for (int g = 0; g < kHeldGroups; ++g) {
      if (!at.holds(g)) continue;
      const int col = at.group(g) * kGroup;
      const Raw<T> weights = load_weights(gamma + col);
      Raw<T> biases, result;
      if (beta != nullptr) biases = load_weights(beta + col);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[kHalf], weight[kHalf], bias[kHalf];
        unpack(x[g], half, v);
        unpack(weights, half, weight);
        unpack(biases, half, bias);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          v[i] = fmaf(fmaf(v[i] - s.high, s.rsigma, shift), weight[i] + a.offset, bias[i]);
          if constexpr (kAmax) most = fmaxf(most, fabsf(v[i]));
        }
        if constexpr (!kAmax) pack(v, half, result);
      }
      if constexpr (!kAmax) store_raw(static_cast<T*>(a.z) + first + col, result);
    }
    if (!kAmax) return;  // without kAmax, a launch has blocks for all rows
  }
  if constexpr (kAmax) {
    most = warp_max(most);
    if (at.lane == 0) atomic_amax(a.amax, most);
  }
}

template <class T, bool kAmax, bool kFull>
void launch(const te_fl_context& ctx, Plain16Args a) {
  const int threads = std::max(128, 32 * a.shape.warps);
  a.rows_each = threads / 32 / a.shape.warps;
  int64_t blocks = ceil_div(a.rows, a.rows_each);
  // With kAmax every warp ends with an atomic maximum, so only as many blocks as run at once are
  // launched.
  if (kAmax) {
    blocks = std::min<int64_t>(
        blocks, int64_t{2 * kMostThreads / threads} * multiprocessors(ctx.device.index));
  }
  a.step = static_cast<int>(blocks) * a.rows_each;
  norm_plain16_kernel<T, kAmax, kFull>
      <<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream_of(ctx)>>>(a);
  check_launch("norm_plain16_kernel");
}
template <class T>
void launch_for(const te_fl_context& ctx, const Plain16Args& a) {
  if (a.amax != nullptr) {
    return a.shape.full ? launch<T, true, true>(ctx, a) : launch<T, true, false>(ctx, a);
  }
  a.shape.full ? launch<T, false, true>(ctx, a) : launch<T, false, false>(ctx, a);
}

}  // namespace

void norm_plain16(const te_fl_context& ctx, const NormForward& f, float4* tiles, float* amax) {
  const backend::Matrix m = backend::as_matrix(*f.x);
  Plain16Args a{};
  a.shape = held_shape(m.cols, f.epsilon, f.mu != nullptr);
  a.x = backend::data<const void>(*f.x);
  a.gamma = backend::data<const void>(*f.gamma);
  if (f.beta != nullptr) a.beta = backend::data<const void>(*f.beta);
  if (amax == nullptr) a.z = backend::data<void>(*f.z);
  a.mu = f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr;
  a.rsigma = backend::data<float>(*f.rsigma);
  a.amax = amax;
  a.tiles = tiles;
  a.rows = static_cast<int>(m.rows);
  a.offset = f.zero_centered ? 1.0f : 0.0f;
  dtype_of(*f.x) == TE_FL_BF16 ? launch_for<bf16>(ctx, a) : launch_for<fp16>(ctx, a);
}

}  // namespace te_fl::cuda
