// The gradients of layernorm and rmsnorm. One kernel reads every row once, writes dx, and
// accumulates each block's partial sums of dgamma and dbeta in registers. A second kernel adds the
// partial sums in a fixed order.
#include "norm/norm.cuh"

namespace te_fl::cuda {
namespace {

// Upper bound of the number of blocks. (There is otherwise one block per multiprocessor.) The
// scratch size depends only on this bound, because it must be computed without a driver query (rule
// R10).
constexpr int kMostGradBlocks = 256;

struct GradArgs {
  const void *dz, *x, *add;
  void* dx;
  Source gamma;
  const float *mu, *rsigma;
  float* partials;  // [blocks, 2 (RMS: 1), cols]: dgamma, dbeta
  int rows;
  int cols, warps;  // warps: number that share a row, a power of two
  int staged;       // floats of shared memory in front of the staged rows
  float inverse_cols, offset;
};

// As in norm_rowwise.cu, `warps` warps share a row and a block processes several rows at once.
// kKept: n and d of a row are kept in registers; otherwise they are computed twice.
template <class T, int kGroups, bool kLayer, bool kKept, int kStages, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) norm_grad_kernel(GradArgs a) {
  constexpr int kWarps = kThreads / 32;
  extern __shared__ float4 dynamic[];
  __shared__ float parts[2][2][kWarps];  // sums of d and of d n
  float* const shared = reinterpret_cast<float*>(dynamic);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int slots = kWarps / a.warps, slot = warp / a.warps, part = warp % a.warps;
  const int groups = a.cols / kGroup;
  const int step = static_cast<int>(gridDim.x) * slots;
  int row = static_cast<int>(blockIdx.x) * slots + slot;

  const auto group_at = [&](int g) { return (g * a.warps + part) * 32 + lane; };
  // The pieces of a stage: x, dz and, if given, add.
  constexpr int kEach = static_cast<int>(sizeof(T) / 2), kAll = kGroups * kEach;
  const Staged staged{reinterpret_cast<uint4*>(shared + a.staged) + threadIdx.x,
                      kAll * (a.add != nullptr ? 3 : 2)};
  float next_mu = 0.0f, next_rs = 0.0f;
  const auto fetch = [&](int stage, int at) {
#pragma unroll
    for (int g = 0; at < a.rows && g < kGroups; ++g) {
      if (group_at(g) >= groups) continue;
      const int64_t from = int64_t{at} * a.cols + group_at(g) * kGroup;
      const T* const from_x = static_cast<const T*>(a.x) + from;
      const T* const from_dz = static_cast<const T*>(a.dz) + from;
      if (a.add == nullptr) {  // with a third operand the cache hint costs more than it gains
        staged.template copy<true>(stage, g * kEach, from_x);
        staged.template copy<true>(stage, kAll + g * kEach, from_dz);
      } else {
        staged.template copy<false>(stage, g * kEach, from_x);
        staged.template copy<false>(stage, kAll + g * kEach, from_dz);
        staged.template copy<false>(stage, 2 * kAll + g * kEach,
                                    static_cast<const T*>(a.add) + from);
      }
    }
    commit_copies();
  };
  const auto fetch_statistics = [&](int at) {
    if (at >= a.rows) return;
    if constexpr (kLayer) next_mu = a.mu[at];
    next_rs = a.rsigma[at];
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) fetch(stage, row + stage * step);
  fetch_statistics(row);
  stage_weights(a.gamma, Source(), a.offset, 0, groups, shared, nullptr);
  __syncthreads();

  float dgamma[kGroups][kGroup] = {}, dbeta[kGroups][kGroup] = {};
  // Every slot of a block runs the same number of iterations, the last one possibly without a row,
  // so that all warps reach the same barriers.
  for (int parity = 0; row - slot < a.rows; row += step, parity ^= 1) {
    const bool has_row = row < a.rows;
    const int stage = kStages == 1 ? 0 : parity;
    wait_copies<kStages - 1>();
    const float mu = next_mu, rs = next_rs;
    fetch_statistics(row + step);
    float sum_d = 0.0f, sum_dn = 0.0f;
    const auto normalise = [&](float(&n)[kHalf]) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) n[i] = kLayer ? (n[i] - mu) * rs : n[i] * rs;
    };
    // Half a group. On entry n holds x and d holds dz; on return they hold n and d.
    const auto sums = [&](int g, int half, float(&n)[kHalf], float(&d)[kHalf]) {
      float gamma[kHalf];
      get_weights(shared, groups, group_at(g), half, gamma);
      normalise(n);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        float& total = dgamma[g][half * kHalf + i];
        total = fmaf(d[i], n[i], total);
        if constexpr (kLayer) dbeta[g][half * kHalf + i] += d[i];
        d[i] *= gamma[i];
        if constexpr (kLayer) sum_d += d[i];
        sum_dn = fmaf(d[i], n[i], sum_dn);
      }
    };
    const auto each = [&](auto f) {
      if (!has_row) return;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (group_at(g) >= groups) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) f(g, half);
      }
    };
    float n[kKept ? kGroups : 1][2][kHalf], d[kKept ? kGroups : 1][2][kHalf];
    each([&](int g, int half) {
      const int kept = kKept ? g : 0;
      unpack(staged.read<T>(stage, g * kEach), half, n[kept][half]);
      unpack(staged.read<T>(stage, kAll + g * kEach), half, d[kept][half]);
      sums(g, half, n[kept][half], d[kept][half]);
    });
    float sum = two_sums(sum_d, sum_dn);
    if (a.warps > 1) {
      const int half_warp = lane / 16, other = lane % 16;
      if (other == 0) parts[parity][half_warp][warp] = sum;
      asm volatile("bar.sync %0, %1;" ::"r"(1 + slot), "r"(32 * a.warps) : "memory");
      sum = other < a.warps ? parts[parity][half_warp][slot * a.warps + other] : 0.0f;
      sum = lanes_sum<16>(sum);
    }
    // dx = rs (d - mean(d) - n mean(d n)) + add
    const float to_n = -rs * (__shfl_sync(0xFFFFFFFFu, sum, 16) * a.inverse_cols);
    const float rest = kLayer ? -rs * (__shfl_sync(0xFFFFFFFFu, sum, 0) * a.inverse_cols) : 0.0f;
    Raw<T> out;
    each([&](int g, int half) {
      const int64_t at = int64_t{row} * a.cols + group_at(g) * kGroup;
      const int kept = kKept ? g : 0;
      if constexpr (!kKept) {
        float gamma[kHalf];
        get_weights(shared, groups, group_at(g), half, gamma);
        unpack(staged.read<T>(stage, g * kEach), half, n[kept][half]);
        unpack(staged.read<T>(stage, kAll + g * kEach), half, d[kept][half]);
        normalise(n[kept][half]);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) d[kept][half][i] *= gamma[i];
      }
      float other[kHalf] = {};
      if (a.add != nullptr) unpack(staged.read<T>(stage, 2 * kAll + g * kEach), half, other);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        other[i] += fmaf(rs, d[kept][half][i], fmaf(n[kept][half][i], to_n, rest));
      }
      pack(other, half, out);
      if (half == 1) store_raw(static_cast<T*>(a.dx) + at, out);
    });
    fetch(stage, row + kStages * step);
  }

  // Adds the sums of the block's slots: each slot stores its sums in the memory of the staged rows,
  // then the slots' sums are added in order.
  const int count = (kLayer ? 2 : 1) * a.cols;
  float* const partials = a.partials + blockIdx.x * int64_t{count};
  const auto put = [&](float* to) {
    // store_group() writes to global memory only, so it cannot be used here.
    const auto put_group = [](float* at, const float* v) {
      reinterpret_cast<float4*>(at)[0] = make_float4(v[0], v[1], v[2], v[3]);
      reinterpret_cast<float4*>(at)[1] = make_float4(v[4], v[5], v[6], v[7]);
    };
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (group_at(g) >= groups) continue;
      put_group(to + group_at(g) * kGroup, dgamma[g]);
      if constexpr (kLayer) put_group(to + a.cols + group_at(g) * kGroup, dbeta[g]);
    }
  };
  if (slots == 1) {
    put(partials);
    return;
  }
  float* const sums = shared + a.staged;
  __syncthreads();
  put(sums + slot * count);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    float sum = sums[i];
    for (int s = 1; s < slots; ++s) sum += sums[s * count + i];
    partials[i] = sum;
  }
}

constexpr int kSumCols = 32, kSumRows = 32;
// Each thread column sums column blockIdx.x * 32 + threadIdx.x of output blockIdx.y.
__global__ void __launch_bounds__(kSumCols* kSumRows)
    norm_grad_sums_kernel(const float* partials, int parts, int64_t stride, int cols, Target dgamma,
                          Target dbeta) {
  __shared__ float sums[kSumRows][kSumCols];
  const int col = static_cast<int>(blockIdx.x * kSumCols + threadIdx.x);
  float sum = 0.0f;
  if (col < cols) {
    const float* from = partials + blockIdx.y * int64_t{cols} + col;
#pragma unroll 4
    for (int p = static_cast<int>(threadIdx.y); p < parts; p += kSumRows) sum += from[p * stride];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
#pragma unroll
  for (int y = 1; y < kSumRows; ++y) sum += sums[y][threadIdx.x];
  if (blockIdx.y == 0) {
    dgamma.store(col, 1, &sum);
  } else {
    dbeta.store(col, 1, &sum);
  }
}

// Launches the kernel. Returns the number of blocks, each of which writes its partial sums.
template <class T, int kGroups, bool kLayer>
int launch(const te_fl_context& ctx, GradArgs a) {
  constexpr int kWords = kGroups * static_cast<int>(sizeof(T));  // 8-byte words of x per thread
  constexpr bool kKept = kGroups <= 2;
  constexpr int kStages = norm_choice::grad_stages(kGroups, sizeof(T));
  constexpr int kThreads = norm_choice::grad_threads(kGroups, sizeof(T)), kWarps = kThreads / 32;
  const auto kernel = norm_grad_kernel<T, kGroups, kLayer, kKept, kStages, kThreads>;
  const int needed = static_cast<int>(ceil_div(a.cols, kGroups * 32 * kGroup));
  a.warps = 1;
  while (a.warps < needed) a.warps *= 2;
  if (kWarps == 32 && a.warps == 2) a.warps = 4;  // only 15 named barriers are left for slots
  const int slots = kWarps / a.warps;
  const int most = std::min(multiprocessors(ctx.device.index), kMostGradBlocks);
  const int blocks = static_cast<int>(std::min<int64_t>(ceil_div(a.rows, slots), most));
  // Shared memory holds gamma, then the staged rows. At the end, the memory of the staged rows
  // holds the sums of the slots.
  a.staged = a.cols;
  static_assert(kGroups > 1 || kStages == 2,
                "the sums of two rows in FP32 fit where two rows were");
  const int64_t shared = norm_choice::grad_shared(a.cols, kGroups, sizeof(T), a.add != nullptr);
  static SharedMemory granted;
  take_shared(granted, ctx.device.index, kernel, shared, norm_choice::kMostShared);
  kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(shared), stream_of(ctx)>>>(
      a);
  check_launch("norm_grad_kernel");
  return blocks;
}
template <class T, bool kLayer>
int launch_for(const te_fl_context& ctx, const GradArgs& a) {
  const int groups = norm_choice::grad_groups(a.cols, sizeof(T));
  if (groups == 1) return launch<T, 1, kLayer>(ctx, a);
  if constexpr (sizeof(T) == 2) {
    if (groups == 3) return launch<T, 3, kLayer>(ctx, a);
    if (groups == 4) return launch<T, 4, kLayer>(ctx, a);
  }
  return launch<T, 2, kLayer>(ctx, a);
}
template <class T>
int launch_type(const te_fl_context& ctx, const GradArgs& a) {
  return a.mu != nullptr ? launch_for<T, true>(ctx, a) : launch_for<T, false>(ctx, a);
}

}  // namespace

size_t norm_grad_bytes(int64_t rows, int64_t cols) {
  return sizeof(float) * 2 * static_cast<size_t>(cols * std::min<int64_t>(rows, kMostGradBlocks));
}

void norm_grad(const te_fl_context& ctx, const NormBackward& b, float* partials) {
  const backend::Matrix m = backend::as_matrix(*b.x);
  const int dtype = dtype_of(*b.x);
  GradArgs a{};
  a.dz = backend::data<const void>(*b.dz);
  a.x = backend::data<const void>(*b.x);
  a.add = b.add != nullptr ? backend::data<const void>(*b.add) : nullptr;
  a.dx = backend::data<void>(*b.dx);
  a.gamma = Source(*b.gamma);
  a.mu = b.mu != nullptr ? backend::data<const float>(*b.mu) : nullptr;
  a.rsigma = backend::data<const float>(*b.rsigma);
  a.partials = partials;
  a.rows = static_cast<int>(m.rows);
  a.cols = static_cast<int>(m.cols);
  a.inverse_cols = 1.0f / static_cast<float>(m.cols);
  a.offset = b.zero_centered ? 1.0f : 0.0f;
  const int parts = dtype == TE_FL_BF16  ? launch_type<bf16>(ctx, a)
                    : dtype == TE_FL_F16 ? launch_type<fp16>(ctx, a)
                                         : launch_type<float>(ctx, a);
  const dim3 grid(static_cast<unsigned>(ceil_div(m.cols, kSumCols)), b.dbeta != nullptr ? 2 : 1);
  norm_grad_sums_kernel<<<grid, dim3(kSumCols, kSumRows), 0, stream_of(ctx)>>>(
      partials, parts, m.cols * (b.mu != nullptr ? 2 : 1), a.cols, Target(*b.dgamma),
      b.dbeta != nullptr ? Target(*b.dbeta) : Target());
  check_launch("norm_grad_sums_kernel");
}

}  // namespace te_fl::cuda
