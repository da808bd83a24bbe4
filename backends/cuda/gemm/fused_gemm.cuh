// A GEMM with GELU or GELU's gradient as its epilogue, on Hopper. The epilogue of a tile runs while
// the tensor cores compute the next tile, and saves the memory traffic of an elementwise pass.
//
// Two of a block's three warpgroups multiply a tile of 128x256, 64 rows each. In the third
// warpgroup, one warp copies operands in, and three warps ("finishers") apply the epilogue to the
// 16-bit results in shared memory, 32x64 at a time. The two blocks of a cluster compute tiles with
// consecutive rows and share their reads of B.
#pragma once

#include <cuda_bf16.h>

#include "common/element.cuh"
#include "common/hopper_tiles.cuh"
#include "pointwise/activation.cuh"

namespace te_fl::cuda {

struct FusedGemm {
  int rows = 0, cols = 0;  // M and N: multiples of 256
  int lines = 0;           // number of 128-byte lines along K
  float alpha = 1.0f;
  const float* scale_a = nullptr;  // inverse scales of FP8 operands
  const float* scale_b = nullptr;
  const bf16* bias = nullptr;  // [N], used by the forward; may be NULL
  const bf16* pre = nullptr;   // [M, N], input of the backward
  void* out = nullptr;         // [M, N]; may be NULL
  uint8_t* out_t = nullptr;    // FP8 data [N, M]; may be NULL
  const float* scale = nullptr;
  float* scale_inv = nullptr;    // of `out`; may be NULL
  float* scale_inv_t = nullptr;  // of `out_t`; may be NULL
  float* amax = nullptr;         // may be NULL
  float* sums = nullptr;         // column sums [M / 32, N] of the backward; may be NULL
};

namespace fused {

using namespace tiles;  // NOLINT: this kernel uses these tiles

constexpr int kFinishers = 3;
constexpr int kUnitRows = 32;  // rows that a finisher processes at a time, within 64 columns
constexpr int kUnits = kParts * (kRows / kUnitRows);
constexpr int kTurned = kUnitRows * kPart;
constexpr int kExtra = kFinishers * kTurned;
constexpr size_t kShared = shared_bytes(kExtra);

// Registers per thread. Summed over one thread of each of the three warpgroups they may be at most
// 504. Besides the sums, the forward needs registers for a bias, the backward for the inputs of
// GELU's gradient.
template <bool kBackward>
constexpr int kProductRegisters = kBackward ? 184 : 192;
template <bool kBackward>
constexpr int kFinishRegisters = 504 - 2 * kProductRegisters<kBackward>;

template <class Type>
__device__ inline void load(const CUtensorMap& map_a, const CUtensorMap& map_b, const FusedGemm& g,
                            const Layout& at) {
  const int rank = static_cast<int>(hopper::rank_in_cluster());
  Position p;
  for (int index = blockIdx.x / 2; index < Tile::count(g.rows, g.cols); index += gridDim.x / 2) {
    const Tile tile(g.rows, g.cols, index);
    for (int line = 0; line < g.lines; ++line, p.next()) {
      hopper::wait_for(at.empty + p.stage * 8, p.parity ^ 1);
      const uint32_t full = at.full + p.stage * 8, half = at.b(p.stage) + rank * (kB / 2);
      hopper::expect_bytes(full, kStage);
      const int k = line * Operands<Type>::kElements, col = tile.col + rank * (kCols / 2);
      hopper::load_box(map_a, at.a(p.stage), full, k, tile.row + rank * kRows);
      if constexpr (Operands<Type>::kAcrossB) {
        hopper::load_box_to(map_b, half, full, col, k, 3);
        hopper::load_box_to(map_b, half + kB / 4, full, col + 64, k, 3);
      } else {
        hopper::load_box_to(map_b, half, full, k, col, 3);
      }
    }
  }
}

// ---- the epilogue

// Returns an address in a finisher's shared-memory buffer of FP8 results (32 rows of 64 columns)
// for the transposed output. A row consists of four units of 16 bytes, permuted so that the reads
// of turned_store() have no bank conflicts.
__device__ inline uint32_t turned_at(uint32_t turned, int row, int unit) {
  return turned + row * kPart + (unit ^ row >> 3 & 3) * 16;
}
// Writes a finisher's buffered FP8 results to the transposed output. Each thread handles 8 rows of
// 2 columns at a time.
__device__ inline void turned_store(uint32_t turned, uint8_t* out, int64_t pitch) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  // The buffer row whose address this lane passes to ldmatrix. With this order of rows, the values
  // that a thread receives from the four matrices belong to eight consecutive rows.
  const int i = lane % 8, row = 8 * (i / 2) + 2 * (lane / 8) + i % 2;
#pragma unroll
  for (int unit = 0; unit < kPart / 16; ++unit) {
    uint32_t w[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(turned_at(turned, row, unit))
                 : "memory");
    uint8_t* to = out + (16 * unit + 2 * (lane / 4)) * pitch + 8 * q;
    store_whole(reinterpret_cast<uint2*>(to),
                make_uint2(__byte_perm(w[0], w[1], 0x6420), __byte_perm(w[2], w[3], 0x6420)));
    store_whole(reinterpret_cast<uint2*>(to + pitch),
                make_uint2(__byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x7531)));
  }
}

// The type `Out` of a kernel that computes only the amax of the results and stores no result.
struct Measured {};

template <bool kBackward, class Out>
struct Finish {
  static constexpr bool kCodes = std::is_same_v<Out, e4m3>;
  static constexpr bool kMeasured = std::is_same_v<Out, Measured>;
  static constexpr int kPieces = kUnitRows / 4;  // 8-element groups per thread in a unit
  const FusedGemm& g;
  const Layout& at;
  const int lane = threadIdx.x % 32, unit = lane % 8;
  float scale = 1.0f, most = 0.0f;

  __device__ Finish(const FusedGemm& of, const Layout& layout) : g(of), at(layout) {
    if (kCodes) scale = *of.scale;
  }

  // Applies the epilogue to the thread's 8 columns of a row and stores the result.
  __device__ void piece(const uint32_t (&product)[4], const uint4& saved, float (&sums)[8],
                        int64_t index, uint32_t turned) {
    const uint32_t pre[4] = {saved.x, saved.y, saved.z, saved.w};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 v = unpack(product[i]);
      if constexpr (kBackward) {
        const float2 x = unpack(pre[i]);
        v.x *= Gelu::rough_derivative(x.x);
        v.y *= Gelu::rough_derivative(x.y);
        sums[2 * i] += v.x;
        sums[2 * i + 1] += v.y;
      } else {
        v.x = Gelu::value(v.x);
        v.y = Gelu::value(v.y);
      }
      if constexpr (kCodes || kMeasured) most = fmaxf(fmaxf(most, fabsf(v.x)), fabsf(v.y));
      if constexpr (kCodes) {
        out[i] = __nv_cvt_float2_to_fp8x2(make_float2(v.x * scale, v.y * scale), __NV_SATFINITE,
                                          __NV_E4M3);
      } else if constexpr (!kMeasured) {
        out[i] = pack(v.x, v.y);
      }
    }
    if constexpr (kCodes) {
      const uint2 codes =
          make_uint2(__byte_perm(out[0], out[1], 0x5410), __byte_perm(out[2], out[3], 0x5410));
      if (g.out != nullptr) {
        store_whole(reinterpret_cast<uint2*>(static_cast<uint8_t*>(g.out) + index), codes);
      }
      if (g.out_t != nullptr) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(turned), "r"(codes.x), "r"(codes.y)
                     : "memory");
      }
    } else if constexpr (!kMeasured) {
      store_whole(reinterpret_cast<uint4*>(static_cast<bf16*>(g.out) + index),
                  make_uint4(out[0], out[1], out[2], out[3]));
    }
  }

  // Processes a unit of the block's tile: 32 rows from row `first`, and the 64 columns number
  // `part`.
  __device__ void run(int part, int first, int row0, int col0, uint32_t turned) {
    const int64_t cols = g.cols, index = (row0 + first + lane / 8) * cols + col0 + 8 * unit;
    float sums[8] = {};
    uint4 saved[kPieces] = {};
    if constexpr (kBackward) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        saved[n] = __ldcs(reinterpret_cast<const uint4*>(g.pre + index + 4 * n * cols));
      }
    }
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int row = 4 * n + lane / 8;
      uint32_t product[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(product[0]), "=r"(product[1]), "=r"(product[2]), "=r"(product[3])
                   : "r"(at.result(part, first + row, unit))
                   : "memory");
      piece(product, saved[n], sums, index + 4 * n * cols,
            turned_at(turned, row, unit / 2) + unit % 2 * 8);
    }
    if constexpr (kCodes) {
      if (g.out_t != nullptr) {
        __syncwarp();
        turned_store(turned, g.out_t + col0 * int64_t{g.rows} + row0 + first, g.rows);
        __syncwarp();
      }
    }
    if constexpr (kBackward) {
      if (g.sums == nullptr) return;
#pragma unroll
      for (float& s : sums) {
        s += __shfl_xor_sync(~0u, s, 8);
        s += __shfl_xor_sync(~0u, s, 16);
      }
      if (lane < 8) {
        auto* to =
            reinterpret_cast<float4*>(g.sums + (row0 + first) / kUnitRows * cols + col0 + 8 * unit);
        to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
        to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
      }
    }
  }

  __device__ void end() {
    if constexpr (kCodes || kMeasured) {
      if (g.amax != nullptr) {
        most = warp_max(most);
        if (lane == 0) atomic_amax(g.amax, most);
      }
    }
    if constexpr (kCodes) {
      if (blockIdx.x == 0 && threadIdx.x == 32) {
        if (g.scale_inv != nullptr) *g.scale_inv = 1.0f / scale;
        if (g.scale_inv_t != nullptr) *g.scale_inv_t = 1.0f / scale;
      }
    }
  }
};

// map_pre: tensor map of the pre-activation, which the forward writes.
template <class Type, bool kBackward, class Out>
__global__ void TE_FL_PAIRS __launch_bounds__(kTileThreads, 1)
    fused_gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                      const __grid_constant__ CUtensorMap map_b,
                      const __grid_constant__ CUtensorMap map_pre,
                      const __grid_constant__ FusedGemm g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout at(hopper::shared_address(memory), kExtra);
  const int team = threadIdx.x / 128, below = static_cast<int>(hopper::rank_in_cluster()) * kRows;
  if (threadIdx.x == 0) at.init(kUnits);
  hopper::sync_cluster();
  const int first = blockIdx.x / 2, step = gridDim.x / 2, tiles = Tile::count(g.rows, g.cols);
  uint32_t parity = 0;
  if (team == 0) {
    hopper::give_registers_back<kFinishRegisters<kBackward>>();
    const int finisher = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    if (finisher < 0) {
      if (lane == 0) load<Type>(map_a, map_b, g, at);
    } else {
      Finish<kBackward, Out> epilogue(g, at);
      int mine = finisher;  // index of the next unit; 0 is the current tile's first unit
      for (int index = first; index < tiles; index += step, parity ^= 1, mine -= kUnits) {
        const Tile tile(g.rows, g.cols, index);
        const int row0 = tile.row + below;
        hopper::wait_for(at.ready, parity);
        for (; mine < kUnits; mine += kFinishers) {
          const int part = mine % kParts, row = mine / kParts * kUnitRows;
          const int col0 = tile.col + part * kPart;
          if (!kBackward && lane == 0) {
            hopper::store_box(map_pre, at.result(part, row, 0), col0, row0 + row);
            hopper::commit_stores();
          }
          epilogue.run(part, row, row0, col0, at.own + finisher * kTurned);
          if (!kBackward && lane == 0) hopper::wait_stores_read();
          __syncwarp();
          if (lane == 0) hopper::arrive(at.taken);
        }
      }
      epilogue.end();
      if (!kBackward && lane == 0) hopper::wait_stores();
    }
  } else {
    hopper::take_registers<kProductRegisters<kBackward>>();
    float factor = g.alpha;
    if (g.scale_a != nullptr) factor *= *g.scale_a * *g.scale_b;
    Position p;
    for (int index = first; index < tiles; index += step, parity ^= 1) {
      const Tile tile(g.rows, g.cols, index);
      float sum[128];
      uint32_t added[32] = {};
      sum_products<Type>(at, g.lines, team - 1, p, sum, [&] {
        if (!kBackward) load_added(g.bias, tile.col, added);
      });
      hopper::wait_for(at.taken, parity ^ 1);
      hand_over(at, 64 * (team - 1), 0, factor, sum, added);
      hopper::fence_for_copies();
      hopper::arrive(at.ready);
    }
  }
  hopper::sync_cluster();  // a block must not end while the other one multicasts to it or signals
                           // its barriers
#endif
}

}  // namespace fused
}  // namespace te_fl::cuda
