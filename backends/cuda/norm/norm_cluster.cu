// Forward norms with per-tensor scaling that write row-wise and column-wise FP8 and read x once. A
// cluster of blocks holds some rows in registers, each block a range of their columns, and merges
// the blocks' statistics through distributed shared memory. Row-wise FP8 is written directly,
// column-wise FP8 after a transposition in shared memory.
#include <cooperative_groups.h>
#include <math_constants.h>

#include <array>
#include <bit>

#include "norm/norm.cuh"

namespace te_fl::cuda {
namespace {

constexpr int kTileWarps = 8, kTileThreads = kTileWarps * 32;
constexpr int kWarpRows = 4, kClusterTileRows = kTileWarps * kWarpRows;
using norm_choice::kMostBlocks;
constexpr int kColumnPieces = kClusterTileRows / 16;  // 16-byte vectors of FP8 per tile column

struct ClusterArgs {
  const void *x, *residual;
  void* sum;
  Source gamma, beta;
  float *mu, *rsigma;
  Quantised q;
  int cols, width, blocks;  // width: columns per block; blocks: per cluster
  int step;                 // rows that all clusters process at once
  float inverse_cols, epsilon, offset;
  bool centred;
};

// Sums each v[r] over the warp. Lane l returns the sum of v[l / 8].
__device__ inline float sum_rows(const float (&v)[kWarpRows]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
  float a = upper ? v[2] : v[0], b = upper ? v[3] : v[1];
  a += __shfl_xor_sync(0xFFFFFFFFu, upper ? v[0] : v[2], 16);
  b += __shfl_xor_sync(0xFFFFFFFFu, upper ? v[1] : v[3], 16);
  float sum = odd ? b : a;
  sum += __shfl_xor_sync(0xFFFFFFFFu, odd ? a : b, 8);
  return lanes_sum<8>(sum);
}
__device__ inline float of_row(float v, int row) { return __shfl_sync(0xFFFFFFFFu, v, row * 8); }

// Transposes bytes: byte i of word r becomes byte r of word i.
__device__ inline uint4 turn(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const uint32_t ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);
  return make_uint4(__byte_perm(ab, cd, 0x5410), __byte_perm(ab, cd, 0x7632),
                    __byte_perm(ab2, cd2, 0x5410), __byte_perm(ab2, cd2, 0x7632));
}

// Shared memory layout of a block; offsets in floats.
template <class T, int kGroups, bool kResidual>
struct TileMemory {
  static constexpr int kCols = kGroups * 32 * kGroup;
  static constexpr int kColumnPitch = kCols + 4;  // words of four rows of a column
  static constexpr int kPieces = kWarpRows * kGroups * (kResidual ? 2 : 1);
  static constexpr int kStaged = 0;  // offset of the staged rows
  static constexpr int kWeights = kStaged + kPieces * kTileThreads * 4;
  static constexpr int kTurned = kWeights + 2 * kCols;
  static constexpr int kStatistics = kTurned + kTileWarps * kColumnPitch;
  static constexpr int kParts = kStatistics + kClusterTileRows * 4;
  static size_t bytes(int blocks) {
    return sizeof(float) * (kParts + 2 * static_cast<size_t>(blocks) * kClusterTileRows * 4);
  }
};

template <class T, int kGroups, bool kResidual>
__global__ void __launch_bounds__(kTileThreads, std::max(1, 5 - kGroups - (kResidual ? 1 : 0)))
    norm_cluster_kernel(ClusterArgs a) {
#if __CUDA_ARCH__ >= 900
  namespace cg = cooperative_groups;
  using Memory = TileMemory<T, kGroups, kResidual>;
  extern __shared__ float4 dynamic[];
  float* const memory = reinterpret_cast<float*>(dynamic);
  float4* const statistics = reinterpret_cast<float4*>(memory + Memory::kStatistics);
  float4* const parts = reinterpret_cast<float4*>(memory + Memory::kParts);
  float* const g_shared = memory + Memory::kWeights;
  float* const b_shared = g_shared + Memory::kCols;
  auto cluster = cg::this_cluster();
  cluster.barrier_arrive();  // awaited before the first write to another block
  const int rank = static_cast<int>(blockIdx.x) % a.blocks;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int col0 = rank * a.width, groups = min(a.width, a.cols - col0) / kGroup;
  const int my_row = warp * kWarpRows + lane / 8;  // the row whose statistics this lane has
  const Staged staged{reinterpret_cast<uint4*>(memory + Memory::kStaged) + thread, Memory::kPieces};
  const int rows = static_cast<int>(a.q.m);
  int row0 = static_cast<int>(blockIdx.x) / a.blocks * kClusterTileRows;

  // Index of this thread's elements in row r of the warp, group g.
  const auto at = [&](int r, int g) {
    return int64_t{row0 + warp * kWarpRows + r} * a.cols + col0 + (g * 32 + lane) * kGroup;
  };
  const auto holds = [&](int r, int g) {
    return row0 + warp * kWarpRows + r < rows && g * 32 + lane < groups;
  };
  const auto fetch = [&] {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (!holds(r, g)) continue;
        staged.copy<false>(0, r * kGroups + g, static_cast<const T*>(a.x) + at(r, g));
        if constexpr (kResidual) {
          staged.copy<false>(0, (kWarpRows + r) * kGroups + g,
                             static_cast<const T*>(a.residual) + at(r, g));
        }
      }
    }
    commit_copies();
  };
  fetch();
  stage_weights(a.gamma, a.beta, a.offset, col0, groups, g_shared, b_shared);
  const float scale = a.q.tensor_scale();
  if (blockIdx.x == 0 && thread == 0) a.q.write_tensor_scale(scale);
  float most = 0.0f;
  cluster.barrier_wait();

  for (int parity = 0; row0 < rows; row0 += a.step, parity ^= 1) {
    wait_copies<0>();
    Raw<T> x[kWarpRows][kGroups];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (!holds(r, g)) continue;
        x[r][g] = staged.read<T>(0, r * kGroups + g);
        if constexpr (kResidual) {
          add_raw(x[r][g], staged.read<T>(0, (kWarpRows + r) * kGroups + g));
          store_raw(static_cast<T*>(a.sum) + at(r, g), x[r][g]);
        }
      }
    }
    row0 += a.step;
    fetch();
    row0 -= a.step;

    // Calls f(r, v) for this thread's elements of each row r. In Moments, lane l has the values of
    // row l / 8.
    const auto each = [&](auto f) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (g * 32 + lane >= groups) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float v[kHalf];
            unpack(x[r][g], half, v);
            f(r, v);
          }
        }
      }
    };
    Moments m{0.0f, 0.0f, 0.0f, static_cast<float>(groups * kGroup)};
    float centre[kWarpRows] = {};
    if (a.centred) {
      float sum[kWarpRows] = {};
      each([&](int r, const float(&v)[kHalf]) {
#pragma unroll
        for (int i = 0; i < kHalf; ++i) sum[r] += v[i];
      });
      m.centre = __fdividef(sum_rows(sum), m.n);  // need not be exact, only near the mean
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) centre[r] = of_row(m.centre, r);
    }
    float sum[kWarpRows] = {}, squares[kWarpRows] = {};
    each([&](int r, const float(&v)[kHalf]) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float d = v[i] - centre[r];
        sum[r] += d;
        squares[r] = fmaf(d, d, squares[r]);
      }
    });
    if (a.centred) m.sum = sum_rows(sum);
    m.squares = sum_rows(squares);

    // The Moments of every block of the cluster, in an array [parity, block, row]. Two barriers
    // separate writes with the same parity.
    float4* const mine = parts + parity * a.blocks * kClusterTileRows + my_row;
    for (int to = lane % 8; to < a.blocks; to += 8) {
      *cluster.map_shared_rank(mine + rank * kClusterTileRows, to) =
          make_float4(m.centre, m.sum, m.squares, m.n);
    }
    cluster.sync();
    // Lane l merges the Moments of blocks l % 8 and l % 8 + 8 for its row. Those of blocks that do
    // not exist are empty.
    float4 p = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (lane % 8 < a.blocks) p = mine[lane % 8 * kClusterTileRows];
    m = {p.x, p.y, p.z, p.w};
    if (a.blocks > 8) {
      p = mine[(lane % 8 + 8) * kClusterTileRows];
      const float n = m.n + p.w, c = (m.n * m.centre + p.w * p.x) / n;
      const float d = m.centre - c, e = p.x - c;
      m.squares =
          fmaf(d, fmaf(m.n, d, 2.0f * m.sum), m.squares) + fmaf(e, fmaf(p.w, e, 2.0f * p.y), p.z);
      m.sum = fmaf(m.n, d, m.sum) + fmaf(p.w, e, p.y);
      m.centre = c, m.n = n;
    }
    const RowStatistics s = merge<8>(m, a.inverse_cols, a.epsilon, a.centred);
    // A row past the last becomes NaN, which the amax ignores.
    const bool inside = row0 + warp * kWarpRows + lane / 8 < rows;
    const float shift = inside ? -s.rest * s.rsigma : CUDART_NAN_F;
    if (lane % 8 == 0) statistics[my_row] = make_float4(s.high, s.rsigma, shift, 0.0f);
    if (rank == 0 && lane % 8 == 0 && inside) {
      if (a.centred) a.mu[row0 + my_row] = s.high + s.rest;
      a.rsigma[row0 + my_row] = s.rsigma;
    }
    __syncwarp();

#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      uint32_t codes[kWarpRows][2] = {};
      if (g * 32 + lane < groups) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float weight[kHalf], bias[kHalf];
          get_weights(g_shared, groups, g * 32 + lane, half, weight);
          get_weights(b_shared, groups, g * 32 + lane, half, bias);
#pragma unroll
          for (int r = 0; r < kWarpRows; ++r) {
            const float4 of = statistics[warp * kWarpRows + r];
            float v[kHalf];
            unpack(x[r][g], half, v);
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
              v[i] = fmaf(fmaf(v[i] - of.x, of.y, of.z), weight[i], bias[i]);
              most = fmaxf(most, fabsf(v[i]));
              v[i] *= scale;
            }
            codes[r][half] = encode(v, a.q.is_e5m2);
          }
        }
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
          if (a.q.rows == nullptr || !holds(r, g)) continue;
          store_whole(reinterpret_cast<uint2*>(static_cast<uint8_t*>(a.q.rows) + at(r, g)),
                      make_uint2(codes[r][0], codes[r][1]));
        }
      }
      uint4* to = reinterpret_cast<uint4*>(memory + Memory::kTurned + warp * Memory::kColumnPitch +
                                           (g * 32 + lane) * kGroup);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[half] = turn(codes[0][half], codes[1][half], codes[2][half], codes[3][half]);
      }
    }
    __syncthreads();
    // The barrier in the next iteration separates these reads from later writes.
    const uint32_t* words = reinterpret_cast<const uint32_t*>(memory + Memory::kTurned);
    for (int i = thread; i < groups * kGroup * kColumnPieces; i += kTileThreads) {
      const int c = i / kColumnPieces, piece = i % kColumnPieces;
      if (row0 + piece * 16 >= rows) continue;
      const uint32_t* from = words + piece * 4 * Memory::kColumnPitch + c;
      uint8_t* const to =
          static_cast<uint8_t*>(a.q.columns) + (col0 + c) * a.q.m + row0 + piece * 16;
      store_whole(reinterpret_cast<uint4*>(to),
                  make_uint4(from[0], from[Memory::kColumnPitch], from[2 * Memory::kColumnPitch],
                             from[3 * Memory::kColumnPitch]));
    }
  }
  if (a.q.found != nullptr || a.q.amax == nullptr) return;
  most = warp_max(most);
  if (lane == 0) atomic_amax(a.q.amax, most);
#endif
}

// The kernel for one element type and width, and the launch configuration for clusters of `blocks`
// blocks.
template <class T, int kGroups, bool kResidual>
struct TilesLaunch {
  using Memory = TileMemory<T, kGroups, kResidual>;
  static constexpr auto kKernel = norm_cluster_kernel<T, kGroups, kResidual>;

  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  explicit TilesLaunch(int blocks) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = static_cast<unsigned>(blocks);
    config.blockDim = kTileThreads;
    config.dynamicSmemBytes = Memory::bytes(blocks);
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  TilesLaunch(const TilesLaunch&) = delete;

  // Number of clusters that the current device runs at once; 0 if it cannot run them.
  int held(int device) const {
    static SharedMemory shared;
    const size_t most = Memory::bytes(kMostBlocks);
    if (!shared.allow(device, kKernel, most, most)) return 0;
    static std::array<PerDevice, 5> clusters;  // indexed by the logarithm of the cluster size
    const auto size = static_cast<size_t>(std::bit_width(attribute.val.clusterDim.x) - 1);
    return clusters[size].get(device, [&] {
      int found = 0;
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (cudaOccupancyMaxActiveClusters(&found, kKernel, &config) != cudaSuccess) found = 0;
      (void)cudaGetLastError();  // a cluster larger than the device allows is not an error
      return found;
    });
  }
};

// Calls f(TilesLaunch) with the kernel for these elements.
template <class T, bool kResidual, class F>
void with_width(int64_t width, int blocks, F&& f) {
  const int64_t groups = ceil_div(width, 32 * kGroup);
  if (groups <= 2) return f(TilesLaunch<T, 2, kResidual>(blocks));
  groups == 3 ? f(TilesLaunch<T, 3, kResidual>(blocks)) : f(TilesLaunch<T, 4, kResidual>(blocks));
}
template <class T, class F>
void with_residual(const NormCluster& c, F&& f) {
  c.residual ? with_width<T, true>(c.width, c.blocks, f)
             : with_width<T, false>(c.width, c.blocks, f);
}
template <class F>
void with_launch(const NormCluster& c, F&& f) {
  c.dtype == TE_FL_BF16 ? with_residual<bf16>(c, f) : with_residual<fp16>(c, f);
}

}  // namespace

bool grants_tiles(int device, const NormCluster& cluster) {
  int held = 0;
  with_launch(cluster, [&](const auto& launch) { held = launch.held(device); });
  return held > 0;
}

void norm_cluster(const te_fl_context& ctx, const NormForward& f, const Quantised& out) {
  const int dtype = dtype_of(*f.x);
  ClusterArgs a{};
  a.x = backend::data<const void>(*f.x);
  if (f.sum != nullptr) {
    a.residual = backend::data<const void>(*f.residual);
    a.sum = backend::data<void>(*f.sum);
  }
  a.gamma = Source(*f.gamma);
  if (f.beta != nullptr) a.beta = Source(*f.beta);
  a.mu = f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr;
  a.rsigma = backend::data<float>(*f.rsigma);
  a.q = out;
  a.cols = static_cast<int>(out.k);
  a.inverse_cols = 1.0f / static_cast<float>(out.k);
  a.blocks = norm_choice::cluster_blocks(out.k);
  a.width = static_cast<int>(norm_choice::cluster_width(out.k));
  a.epsilon = f.epsilon;
  a.offset = f.zero_centered ? 1.0f : 0.0f;
  a.centred = f.mu != nullptr;
  with_launch({dtype, a.blocks, a.width, f.sum != nullptr}, [&](auto&& launch) {
    const auto count = static_cast<int>(
        std::min<int64_t>(ceil_div(a.q.m, kClusterTileRows), launch.held(ctx.device.index)));
    launch.config.gridDim.x = static_cast<unsigned>(a.blocks * count);
    launch.config.stream = stream_of(ctx);
    a.step = count * kClusterTileRows;
    check(cudaLaunchKernelEx(&launch.config, launch.kKernel, a), "norm_cluster_kernel");
  });
}

}  // namespace te_fl::cuda
