// Forward norms that keep rows in registers, so that x is read once.
#include "norm/norm.cuh"

namespace te_fl::cuda {
namespace {

using norm_choice::kRowThreads;
constexpr int kRowWarps = kRowThreads / 32;

struct RowwiseArgs {
  const void *x, *residual;
  void *sum, *z;  // z: dtype of x, or FP8
  Source gamma, beta;
  float *mu, *rest, *rsigma, *amax;
  Quantised q;
  int rows;
  int cols, warps;  // warps: number that share a row, a power of two
  float inverse_cols, epsilon, offset;
  bool centred, find_amax;
  bool weighs;  // computes a result or its amax, not only the statistics
};

// `warps` warps share a row and a block processes several rows. Each block iterates over rows, with
// the next kStages rows in flight.
template <class T, bool kCodes, int kGroups, bool kResidual, int kStages, int kBlocks>
__global__ void __launch_bounds__(kRowThreads, kBlocks) norm_rowwise_kernel(RowwiseArgs a) {
  extern __shared__ float4 dynamic[];
  __shared__ float2 centre_sum[2][kRowWarps];  // of every warp's part of its row
  __shared__ float squares[2][kRowWarps], sizes[kRowWarps];
  float* const g_shared = reinterpret_cast<float*>(dynamic);
  float* const b_shared = g_shared + a.cols;
  constexpr int kEach = static_cast<int>(sizeof(T) / 2);  // number of 16-byte pieces per group
  // This choice was the fastest in measurements.
  constexpr bool kOnce = kGroups <= 2 && (kResidual || !kCodes);
  const Staged staged{
      reinterpret_cast<uint4*>(g_shared + (a.weighs ? 2 * a.cols : 0)) + threadIdx.x,
      kGroups * kEach * (kResidual ? 2 : 1)};
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int slot = warp / a.warps, part = warp % a.warps, groups = a.cols / kGroup;
  const int step = static_cast<int>(gridDim.x) * (kRowWarps / a.warps);
  int row = static_cast<int>(blockIdx.x) * (kRowWarps / a.warps) + slot;

  const auto group_at = [&](int g) { return (g * a.warps + part) * 32 + lane; };
  const auto fetch = [&](int stage, int at) {
#pragma unroll
    for (int g = 0; at < a.rows && g < kGroups; ++g) {
      if (group_at(g) >= groups) continue;
      const int64_t from = int64_t{at} * a.cols + group_at(g) * kGroup;
      staged.template copy<kOnce>(stage, g * kEach, static_cast<const T*>(a.x) + from);
      if constexpr (kResidual) {
        staged.template copy<kOnce>(stage, (kGroups + g) * kEach,
                                    static_cast<const T*>(a.residual) + from);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) fetch(stage, row + stage * step);
  // Returns the number of elements of a row that the k-th of its warps holds.
  const auto size_of = [&](int k) {
    int n = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) n += max(0, min(groups - (g * a.warps + k) * 32, 32));
    return static_cast<float>(n * kGroup);
  };
  const bool stores = a.z != nullptr;
  float scale = 1.0f, most = 0.0f;
  if constexpr (kCodes) {
    scale = a.q.tensor_scale();
    if (blockIdx.x == 0 && threadIdx.x == 0) a.q.write_tensor_scale(scale);
  }
  if (a.weighs) {
    stage_weights(a.gamma, a.beta, a.offset, 0, groups, g_shared, b_shared);
  }
  const float n = size_of(part), inverse_n = n > 0.0f ? 1.0f / n : 0.0f;
  if (threadIdx.x < 16) sizes[threadIdx.x] = size_of(static_cast<int>(threadIdx.x));
  __syncthreads();

  for (int parity = 0; row < a.rows; row += step, parity ^= 1) {
    const int stage = kStages == 1 ? 0 : parity;
    wait_copies<kStages - 1>();
    float v[kGroups][2][kHalf];
    const auto each = [&](auto f) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (group_at(g) >= groups) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) f(v[g][half], g, half);
      }
    };
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (group_at(g) >= groups) continue;
      Raw<T> x = staged.read<T>(stage, g * kEach);
      if constexpr (kResidual) {
        add_raw(x, staged.read<T>(stage, (kGroups + g) * kEach));
        store_raw(static_cast<T*>(a.sum) + int64_t{row} * a.cols + group_at(g) * kGroup, x);
      }
      unpack(x, 0, v[g][0]);
      unpack(x, 1, v[g][1]);
    }
    fetch(stage, row + kStages * step);

    float centre = 0.0f;
    if (a.centred) {
      float sum = 0.0f;
      each([&](const float(&values)[kHalf], int, int) {
#pragma unroll
        for (int i = 0; i < kHalf; ++i) sum += values[i];
      });
      centre = warp_sum(sum) * inverse_n;
    }
    float sum = 0.0f, square = 0.0f;
    each([&](float(&values)[kHalf], int, int) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        values[i] -= centre;
        sum += values[i];
        square = fmaf(values[i], values[i], square);
      }
    });
    const float mine = two_sums(sum, square);
    RowStatistics s;
    if (a.warps > 1) {
      if (lane == 0) centre_sum[parity][warp] = make_float2(centre, mine);
      if (lane == 16) squares[parity][warp] = mine;
      asm volatile("bar.sync %0, %1;" ::"r"(1 + slot), "r"(32 * a.warps) : "memory");
      // Lanes k and k + 16 read the statistics of the row's k-th warp.
      const int k = lane % 16;
      Moments m{0.0f, 0.0f, 0.0f, 0.0f};
      if (k < a.warps) {
        const float2 two = centre_sum[parity][slot * a.warps + k];
        m = {two.x, two.y, squares[parity][slot * a.warps + k], sizes[k]};
      }
      s = merge<16>(m, a.inverse_cols, a.epsilon, a.centred);
    } else {
      const Moments m{centre, __shfl_sync(0xFFFFFFFFu, mine, 0), __shfl_sync(0xFFFFFFFFu, mine, 16),
                      n};
      s = merge<1>(m, a.inverse_cols, a.epsilon, a.centred);
    }
    if (part == 0 && lane == 0) {
      const float mu = s.high + s.rest;
      if (a.centred) a.mu[row] = mu;
      if (a.centred && a.rest != nullptr) a.rest[row] = (s.high - mu) + s.rest;
      a.rsigma[row] = s.rsigma;
    }
    if (!a.weighs) continue;
    const float shift = (s.high - centre) + s.rest;  // subtracted from the values, which are x -
                                                     // centre
    Raw<T> plain;
    uint32_t codes[2];
    each([&](float(&values)[kHalf], int g, int half) {
      float weight[kHalf], bias[kHalf];
      get_weights(g_shared, groups, group_at(g), half, weight);
      get_weights(b_shared, groups, group_at(g), half, bias);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        values[i] = fmaf((values[i] - shift) * s.rsigma, weight[i], bias[i]);
        if (a.find_amax) most = fmaxf(most, fabsf(values[i]));
        if constexpr (kCodes) values[i] *= scale;
      }
      if (!stores) return;
      const int64_t at = int64_t{row} * a.cols + group_at(g) * kGroup;
      if constexpr (kCodes) {
        codes[half] = encode(values, a.q.is_e5m2);
        if (half == 0) return;
        store_whole(reinterpret_cast<uint2*>(static_cast<uint8_t*>(a.z) + at),
                    make_uint2(codes[0], codes[1]));
      } else {
        pack(values, half, plain);
        if (half == 1) store_raw(static_cast<T*>(a.z) + at, plain);
      }
    });
  }
  if (a.find_amax) {
    most = warp_max(most);
    if (lane == 0) atomic_amax(a.amax, most);
  }
}

template <class T, bool kCodes, int kGroups, bool kResidual>
void launch(const te_fl_context& ctx, RowwiseArgs a) {
  // The number of 8-byte words per thread.
  constexpr int kWords = kGroups * static_cast<int>(sizeof(T));
  constexpr int kStages = norm_choice::row_stages(kGroups, sizeof(T));
  constexpr int kBlocks = kWords <= (kResidual ? 4 : 6) ? 2 : 1;
  const auto kernel = norm_rowwise_kernel<T, kCodes, kGroups, kResidual, kStages, kBlocks>;
  const int warps_needed = static_cast<int>(ceil_div(a.cols, kGroups * 32 * kGroup));
  a.warps = 1;
  while (a.warps < warps_needed) a.warps *= 2;
  const int64_t shared = norm_choice::row_shared(a.cols, kGroups, sizeof(T), a.weighs, kResidual);
  static SharedMemory granted;
  take_shared(granted, ctx.device.index, kernel, shared, norm_choice::kMostShared);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      ceil_div(a.rows, kRowWarps / a.warps), int64_t{kBlocks} * multiprocessors(ctx.device.index)));
  kernel<<<blocks, kRowThreads, static_cast<size_t>(shared), stream_of(ctx)>>>(a);
  check_launch("norm_rowwise_kernel");
}
template <class T, bool kCodes, bool kResidual>
void launch_for(const te_fl_context& ctx, const RowwiseArgs& a) {
  constexpr int kFew = norm_choice::row_groups(1, sizeof(T));
  const int groups = norm_choice::row_groups(a.cols, sizeof(T));
  if (groups == kFew) return launch<T, kCodes, kFew, kResidual>(ctx, a);
  if (groups == 3) return launch<T, kCodes, 3, kResidual>(ctx, a);
  return launch<T, kCodes, 4, kResidual>(ctx, a);
}
template <class T>
void launch_codes(const te_fl_context& ctx, const RowwiseArgs& a, bool codes) {
  if (a.residual != nullptr) {
    return codes ? launch_for<T, true, true>(ctx, a) : launch_for<T, false, true>(ctx, a);
  }
  return codes ? launch_for<T, true, false>(ctx, a) : launch_for<T, false, false>(ctx, a);
}

}  // namespace

void norm_rowwise(const te_fl_context& ctx, const NormForward& f, RowTask task, float* rest,
                  float* amax, const Quantised* out) {
  const backend::Matrix m = backend::as_matrix(*f.x);
  const int dtype = dtype_of(*f.x);
  RowwiseArgs a{};
  a.x = backend::data<const void>(*f.x);
  if (f.sum != nullptr) {
    a.residual = backend::data<const void>(*f.residual);
    a.sum = backend::data<void>(*f.sum);
  }
  a.gamma = Source(*f.gamma);
  if (f.beta != nullptr) a.beta = Source(*f.beta);
  a.mu = f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr;
  a.rest = rest;
  a.rsigma = backend::data<float>(*f.rsigma);
  a.rows = static_cast<int>(m.rows);
  a.cols = static_cast<int>(m.cols);
  a.inverse_cols = 1.0f / static_cast<float>(m.cols);
  a.epsilon = f.epsilon;
  a.offset = f.zero_centered ? 1.0f : 0.0f;
  a.centred = f.mu != nullptr;
  a.amax = amax;
  const bool codes = task == RowTask::kStore && out != nullptr;
  if (codes) {
    a.q = *out;
    a.z = out->rows;
    a.amax = out->found == nullptr ? out->amax : nullptr;
  } else if (task == RowTask::kStore) {
    a.z = backend::data<void>(*f.z);
  }
  a.find_amax = a.amax != nullptr;
  a.weighs = a.z != nullptr || a.find_amax;
  return dtype == TE_FL_BF16  ? launch_codes<bf16>(ctx, a, codes)
         : dtype == TE_FL_F16 ? launch_codes<fp16>(ctx, a, codes)
                              : launch_codes<float>(ctx, a, codes);
}

}  // namespace te_fl::cuda
