// A product whose epilogue is GELU or GELU's gradient, on Hopper: what an elementwise pass would
// read and write again is dealt with while the next products run.
//
// Of the three warp groups of a block two multiply a tile of 128x256, 64 rows each. Of the third,
// one warp copies operands in, and three take the 16-bit results from shared memory through the
// epilogue, 64 columns at a time. The two blocks of a cluster work on rows that follow each other
// and share what they read of B.
#pragma once

#include <cuda_bf16.h>

#include "activation.cuh"
#include "element.cuh"
#include "hopper_tiles.cuh"

namespace te_fl::cuda {

struct FusedGemm {
  int rows = 0, cols = 0;  // M and N: multiples of 256
  int lines = 0;           // K in lines of 128 bytes
  float alpha = 1.0f;
  const float* scale_a = nullptr;  // of codes: inverse scales
  const float* scale_b = nullptr;
  const bf16* bias = nullptr;  // [N], forward, or NULL
  const bf16* pre = nullptr;   // [M, N], read backward
  void* out = nullptr;         // [M, N] or NULL
  uint8_t* out_t = nullptr;    // codes [N, M] or NULL
  const float* scale = nullptr;
  float* scale_inv = nullptr;    // or NULL; of out_t:
  float* scale_inv_t = nullptr;  // or NULL
  float* amax = nullptr;         // or NULL
  float* sums = nullptr;         // [M / 128, N] of column sums, backward, or NULL
};

namespace fused {

using namespace tiles;  // NOLINT: this is their kernel

constexpr int kFinishers = 3;
constexpr int kTurnedLine =
    80;  // 32 rows of two columns of codes, and what spreads lines over the banks
constexpr int kTurned = kPart / 2 * kTurnedLine;
constexpr int kExtra = kFinishers * kTurned;
constexpr size_t kShared = shared_bytes(kExtra);

template <class Type>
struct Operands {  // codes
  static constexpr int kElements = 128;
  static constexpr bool kAcross = false;
};
template <>
struct Operands<hopper::Bf16> {
  static constexpr int kElements = 64;
  static constexpr bool kAcross = false;
};
template <>
struct Operands<hopper::Bf16AcrossB> {
  static constexpr int kElements = 64;
  static constexpr bool kAcross = true;
};

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
      if constexpr (Operands<Type>::kAcross) {
        hopper::load_box_to(map_b, half, full, col, k, 3);
        hopper::load_box_to(map_b, half + kB / 4, full, col + 64, k, 3);
      } else {
        hopper::load_box_to(map_b, half, full, k, col, 3);
      }
    }
  }
}

template <class Type>
__device__ inline uint64_t descriptor_b(uint32_t address, int step) {
  if constexpr (Operands<Type>::kAcross) return hopper::across_k(address + step * 2048, kB / 4);
  return hopper::along_k(address + step * 32);
}

// A warp group's sums of products. kPromote: what a line of codes adds up to is added in FP32
// outside of the tensor cores.
template <class Type, bool kPromote>
__device__ inline void sum_products(const Layout& at, int lines, int group, Position& p,
                                    float (&sum)[128]) {
  int before = -1;
  if constexpr (kPromote) {
#pragma unroll
    for (int i = 0; i < 128; ++i) sum[i] = 0.0f;
  }
  for (int line = 0; line < lines; ++line, p.next()) {
    hopper::wait_for(at.full + p.stage * 8, p.parity);
    const uint32_t a = at.a(p.stage) + group * (kA / 2), b = at.b(p.stage);
    if constexpr (kPromote) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[64];
        hopper::begin_products();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          hopper::multiply(Type(), part, hopper::along_k(a + step * 32),
                           hopper::along_k(b + half * (kB / 2) + step * 32), step != 0);
        }
        hopper::end_products();
        hopper::wait_products<0>();
        if (half == 1) at.release(p.stage);
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[64 * half + i] += part[i];
      }
    } else {
      hopper::begin_products();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        hopper::multiply(Type(), sum, hopper::along_k(a + step * 32), descriptor_b<Type>(b, step),
                         line != 0 || step != 0);
      }
      hopper::end_products();
      if (before >= 0) {
        hopper::wait_products<1>();
        at.release(before);
      }
      before = p.stage;
    }
  }
  if constexpr (!kPromote) {
    hopper::wait_products<0>();
    at.release(before);
  }
}

__device__ inline float2 unpack(uint32_t both) {
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}

// ---- the epilogue

// v[i] of lane q of four and v[q] of lane i change places.
__device__ inline void transpose4(uint32_t (&v)[4], int q) {
  const bool one = q & 1, two = q & 2;
  const auto swap = [](uint32_t& low, uint32_t& high, bool upper, int mask) {
    const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, mask);
    low = upper ? got : low;
    high = upper ? high : got;
  };
  swap(v[0], v[1], one, 1);
  swap(v[2], v[3], one, 1);
  swap(v[0], v[2], two, 2);
  swap(v[1], v[3], two, 2);
}

// 8 rows of a pair of columns, their codes one after the other: 16 bytes.
__device__ inline uint32_t turned_at(uint32_t turned, int pair, int unit) {
  return turned + pair * kTurnedLine + unit * 16;
}
__device__ inline void turn(uint32_t turned, int unit, const uint32_t (&codes)[4]) {
  const int lane = threadIdx.x % 32, k = lane % 8;
  const int pair = 8 * (lane / 8) + 4 * (k & 1) + (k >> 1);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   turned_at(turned, pair, unit)),
               "r"(codes[0]), "r"(codes[1]), "r"(codes[2]), "r"(codes[3])
               : "memory");
}
__device__ inline void store_turned(uint32_t turned, uint8_t* out, int64_t pitch) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int pair = 8 * n + lane / 4, unit = lane % 4;
    uint32_t w[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(turned_at(turned, pair, unit))
                 : "memory");
    uint8_t* to = out + 2 * pair * pitch + 8 * unit;
    store_whole(reinterpret_cast<uint2*>(to),
                make_uint2(__byte_perm(w[0], w[1], 0x6420), __byte_perm(w[2], w[3], 0x6420)));
    store_whole(reinterpret_cast<uint2*>(to + pitch),
                make_uint2(__byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x7531)));
  }
}

// Lanes that differ in one bit share out 2 kHalf sums.
template <int kHalf, int kMask>
__device__ inline void halve(float (&of)[16]) {
  const bool upper = threadIdx.x & kMask;
#pragma unroll
  for (int x = 0; x < kHalf; ++x) {
    const float got = __shfl_xor_sync(~0u, upper ? of[x] : of[x + kHalf], kMask);
    of[x] = (upper ? of[x + kHalf] : of[x]) + got;
  }
}

template <bool kBackward, class Out>
struct Finish {
  static constexpr bool kCodes = sizeof(Out) == 1, kE5m2 = std::is_same_v<Out, e5m2>;
  const FusedGemm& g;
  const Layout& at;
  const int lane = threadIdx.x % 32, q = lane % 4;
  float scale = 1.0f, most = 0.0f;

  __device__ Finish(const FusedGemm& of, const Layout& layout) : g(of), at(layout) {
    if (kCodes) scale = *of.scale;
  }

  __device__ static void store_halves(bf16* to, uint32_t (&v)[2][4], int q) {
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      transpose4(v[quarter], q);
      store_whole(reinterpret_cast<uint4*>(to + 32 * quarter + 8 * q),
                  make_uint4(v[quarter][0], v[quarter][1], v[quarter][2], v[quarter][3]));
    }
  }

  // 64 columns of the tile's 128 rows. A thread's values are as in hand_over, 8 j.. within the
  // part.
  __device__ void part(int n, int row0, int col0, uint32_t turned) {
    const int64_t cols = g.cols;
    float sums[16];
#pragma unroll
    for (float& s : sums) s = 0.0f;
#pragma unroll 1
    for (int first = 0; first < kRows; first += 32) {
      uint4 saved[2][4];
      if constexpr (kBackward) {
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          saved[m / 4][m % 4] = __ldcs(reinterpret_cast<const uint4*>(
              g.pre + (row0 + first + 8 * (m / 2) + lane / 4) * cols + col0 + 32 * (m % 2) +
              8 * q));
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t product[2][8];  // [i][j]
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(product[0][j]), "=r"(product[1][j]), "=r"(product[0][j + 1]),
                         "=r"(product[1][j + 1])
                       : "r"(at.result(n, first + 16 * h + lane % 16, j + lane / 16))
                       : "memory");
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t line = (row0 + first + 16 * h + 8 * i + lane / 4) * cols + col0;
          uint32_t pre[2][4], codes[4], high[2][4];
          if constexpr (kBackward) {
#pragma unroll
            for (int quarter = 0; quarter < 2; ++quarter) {
              const uint4& got = saved[h][2 * i + quarter];
              pre[quarter][0] = got.x, pre[quarter][1] = got.y, pre[quarter][2] = got.z,
              pre[quarter][3] = got.w;
              transpose4(pre[quarter], q);
            }
          }
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            float2 v = unpack(product[i][j]);
            if constexpr (kBackward) {
              const float2 x = unpack(pre[j / 4][j % 4]);
              v.x *= Gelu::derivative(x.x);
              v.y *= Gelu::derivative(x.y);
              sums[2 * j] += v.x;
              sums[2 * j + 1] += v.y;
            } else {
              v.x = Gelu::value(v.x);
              v.y = Gelu::value(v.y);
            }
            if constexpr (kCodes) {
              most = fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y)));
              const uint32_t both =
                  __nv_cvt_float2_to_fp8x2(make_float2(v.x * scale, v.y * scale), __NV_SATFINITE,
                                           kE5m2 ? __NV_E5M2 : __NV_E4M3);
              codes[j / 2] = j % 2 == 0 ? both : codes[j / 2] | both << 16;
            } else {
              high[j / 4][j % 4] = pack(v.x, v.y);
            }
          }
          if constexpr (kCodes) {
            if (g.out_t != nullptr) turn(turned, 2 * h + i, codes);
            if (g.out != nullptr) {
              transpose4(codes, q);
              store_whole(reinterpret_cast<uint4*>(static_cast<uint8_t*>(g.out) + line + 16 * q),
                          make_uint4(__byte_perm(codes[0], codes[1], 0x5410),
                                     __byte_perm(codes[2], codes[3], 0x5410),
                                     __byte_perm(codes[0], codes[1], 0x7632),
                                     __byte_perm(codes[2], codes[3], 0x7632)));
            }
          } else {
            store_halves(static_cast<bf16*>(g.out) + line, high, q);
          }
        }
      }
      if constexpr (kCodes) {
        if (g.out_t != nullptr) {
          __syncwarp();
          store_turned(turned, g.out_t + col0 * int64_t{g.rows} + row0 + first, g.rows);
          __syncwarp();
        }
      }
    }
    if constexpr (kBackward) {
      halve<8, 16>(sums);
      halve<4, 8>(sums);
      halve<2, 4>(sums);
      const int y = (lane & 16) / 2 + (lane & 8) / 2 + (lane & 4) / 2;
      if (g.sums != nullptr) {
        *reinterpret_cast<float2*>(g.sums + row0 / kRows * cols + col0 + y / 2 * 8 + 2 * q) =
            make_float2(sums[0], sums[1]);
      }
    }
  }

  __device__ void end() {
    if constexpr (kCodes) {
      if (g.amax != nullptr) {
        most = warp_max(most);
        if (lane == 0) atomic_amax(g.amax, most);
      }
      if (blockIdx.x == 0 && threadIdx.x == 32) {
        if (g.scale_inv != nullptr) *g.scale_inv = 1.0f / scale;
        if (g.scale_inv_t != nullptr) *g.scale_inv_t = 1.0f / scale;
      }
    }
  }
};

// map_pre: where the results before GELU go, forward.
template <class Type, bool kPromote, bool kBackward, class Out>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kTileThreads, 1)
    fused_gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                      const __grid_constant__ CUtensorMap map_b,
                      const __grid_constant__ CUtensorMap map_pre,
                      const __grid_constant__ FusedGemm g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout at(hopper::shared_address(memory), kExtra);
  const int team = threadIdx.x / 128, below = static_cast<int>(hopper::rank_in_cluster()) * kRows;
  if (threadIdx.x == 0) at.init(kParts);
  hopper::sync_cluster();
  const int first = blockIdx.x / 2, step = gridDim.x / 2, tiles = Tile::count(g.rows, g.cols);
  uint32_t parity = 0;
  if (team == 0) {
    if constexpr (kPromote) {
      hopper::give_registers_back<104>();
    } else {
      hopper::give_registers_back<136>();
    }
    const int finisher = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    if (finisher < 0) {
      if (lane == 0) load<Type>(map_a, map_b, g, at);
    } else {
      Finish<kBackward, Out> finish(g, at);
      int mine = finisher;  // of the parts of all tiles, one after the other
      for (int index = first; index < tiles; index += step, parity ^= 1, mine -= kParts) {
        const Tile tile(g.rows, g.cols, index);
        const int row0 = tile.row + below;
        if (mine < kParts) hopper::wait_for(at.ready, parity);
        for (; mine < kParts; mine += kFinishers) {
          const int col0 = tile.col + mine * kPart;
          if (!kBackward && lane == 0) {
            hopper::store_box(map_pre, at.results + mine * kPartBytes, col0, row0);
            hopper::commit_stores();
          }
          finish.part(mine, row0, col0, at.own + finisher * kTurned);
          if (!kBackward && lane == 0) hopper::wait_stores_read();
          __syncwarp();
          if (lane == 0) hopper::arrive(at.taken);
        }
      }
      finish.end();
      if (!kBackward && lane == 0) hopper::wait_stores();
    }
  } else {
    if constexpr (kPromote) {
      hopper::take_registers<200>();
    } else {
      hopper::take_registers<184>();
    }
    float factor = g.alpha;
    if (g.scale_a != nullptr) factor *= *g.scale_a * *g.scale_b;
    Position p;
    for (int index = first; index < tiles; index += step, parity ^= 1) {
      const Tile tile(g.rows, g.cols, index);
      float sum[128];
      sum_products<Type, kPromote>(at, g.lines, team - 1, p, sum);
      hopper::wait_for(at.taken, parity ^ 1);
      hand_over(at, team - 1, factor, sum, [&](int chunk) {
        if (g.bias == nullptr) return make_float2(0.0f, 0.0f);
        const bf16* of = g.bias + tile.col + 8 * chunk + 2 * (threadIdx.x % 4);
        return unpack(__ldg(reinterpret_cast<const uint32_t*>(of)));
      });
      hopper::fence_for_copies();
      hopper::arrive(at.ready);
    }
  }
  hopper::sync_cluster();  // no block ends while the other still sends it data or uses its barriers
#endif
}

}  // namespace fused
}  // namespace te_fl::cuda
