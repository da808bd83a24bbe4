// Products of FP8 codes of which both operands have a scale for every 128 elements along K, on
// Hopper.
//
// Of the three warp groups of a block two multiply a tile of 128x256, 64 rows each; of the third,
// one thread copies operands and scales in and one copies results out. What 128 elements of K add
// up to in the tensor cores is multiplied by the scales of its row and column and added in FP32.
#pragma once
#include <cuda_bf16.h>
#include "element.cuh"
#include "hopper_tiles.cuh"

namespace te_fl::cuda {

struct BlockGemm {
  int rows = 0, cols = 0;  // M and N: multiples of 256
  int lines = 0;           // K in blocks of 128
  float alpha = 1.0f;
  const float* scale_a = nullptr;  // [lines, pitch_a]: of a row
  const float* scale_b = nullptr;
  int64_t pitch_a = 0, pitch_b = 0;
};

namespace blocks {

using namespace tiles;  // NOLINT: this is their kernel

constexpr int kScales = (kRows + kCols) * sizeof(float);  // of a stage
constexpr int kExtra = kStages * kScales;
constexpr size_t kShared = shared_bytes(kExtra);

__device__ inline uint32_t scale_a(const Layout& at, int stage) { return at.own + stage * kScales; }
__device__ inline uint32_t scale_b(const Layout& at, int stage) {
  return scale_a(at, stage) + kRows * sizeof(float);
}

__device__ inline void load(const CUtensorMap& map_a, const CUtensorMap& map_b, const BlockGemm& g,
                            const Layout& at) {
  const int rank = static_cast<int>(hopper::rank_in_cluster());
  Position p;
  for (int index = blockIdx.x / 2; index < Tile::count(g.rows, g.cols); index += gridDim.x / 2) {
    const Tile tile(g.rows, g.cols, index);
    const int row = tile.row + rank * kRows;
    for (int line = 0; line < g.lines; ++line, p.next()) {
      hopper::wait_for(at.empty + p.stage * 8, p.parity ^ 1);
      const uint32_t full = at.full + p.stage * 8;
      hopper::expect_bytes(full, kStage + kScales);
      hopper::load_box(map_a, at.a(p.stage), full, line * kLine, row);
      hopper::load_box_to(map_b, at.b(p.stage) + rank * (kB / 2), full, line * kLine,
                          tile.col + rank * (kCols / 2), 3);
      hopper::load_row(g.scale_a + line * g.pitch_a + row, scale_a(at, p.stage), full, kRows * 4);
      hopper::load_row(g.scale_b + line * g.pitch_b + tile.col, scale_b(at, p.stage), full,
                       kCols * 4);
    }
  }
}

__device__ inline float2 shared_pair(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
  return v;
}
__device__ inline float shared_one(uint32_t at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
  return v;
}

__device__ inline void sum_products(const Layout& at, int lines, int group, Position& p,
                                    float (&sum)[128]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum[i] = 0.0f;
  for (int line = 0; line < lines; ++line, p.next()) {
    hopper::wait_for(at.full + p.stage * 8, p.parity);
    const uint32_t a = at.a(p.stage) + group * (kA / 2), b = at.b(p.stage);
    const uint32_t rows = scale_a(at, p.stage) + (64 * group + 16 * warp + lane / 4) * 4;
    float low = 0, high = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[64];
      hopper::begin_products();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        hopper::multiply(hopper::E4m3(), part, hopper::along_k(a + step * 32),
                         hopper::along_k(b + half * (kB / 2) + step * 32), step != 0);
      }
      hopper::end_products();
      if (half == 0) low = shared_one(rows), high = shared_one(rows + 32);
      const uint32_t cols = scale_b(at, p.stage) + (128 * half + 2 * (lane % 4)) * 4;
      hopper::wait_products<0>();
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 s = shared_pair(cols + 32 * j);
        float* to = sum + 64 * half + 4 * j;
        to[0] = fmaf(part[4 * j], low * s.x, to[0]);
        to[1] = fmaf(part[4 * j + 1], low * s.y, to[1]);
        to[2] = fmaf(part[4 * j + 2], high * s.x, to[2]);
        to[3] = fmaf(part[4 * j + 3], high * s.y, to[3]);
      }
      if (half == 1) {
        __syncwarp();
        at.release(p.stage);
      }
    }
  }
}

static __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kTileThreads, 1)
    block_gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                      const __grid_constant__ CUtensorMap map_b,
                      const __grid_constant__ CUtensorMap map_d,
                      const __grid_constant__ BlockGemm g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout at(hopper::shared_address(memory), kExtra);
  const int team = threadIdx.x / 128, below = static_cast<int>(hopper::rank_in_cluster()) * kRows;
  if (threadIdx.x == 0) at.init(1);
  hopper::sync_cluster();
  const int first = blockIdx.x / 2, step = gridDim.x / 2, tiles = Tile::count(g.rows, g.cols);
  uint32_t parity = 0;
  if (team == 0) {
    hopper::give_registers_back<40>();
    if (threadIdx.x == 0) load(map_a, map_b, g, at);
    if (threadIdx.x == 32) {
      for (int index = first; index < tiles; index += step, parity ^= 1) {
        const Tile tile(g.rows, g.cols, index);
        hopper::wait_for(at.ready, parity);
        for (int n = 0; n < kParts; ++n) {
          hopper::store_box(map_d, at.results + n * kPartBytes, tile.col + n * kPart,
                            tile.row + below);
        }
        hopper::commit_stores();
        hopper::wait_stores_read();
        hopper::arrive(at.taken);
      }
      hopper::wait_stores();
    }
  } else {
    hopper::take_registers<232>();
    Position p;
    for (int index = first; index < tiles; index += step, parity ^= 1) {
      float sum[128];
      sum_products(at, g.lines, team - 1, p, sum);
      hopper::wait_for(at.taken, parity ^ 1);
      hand_over(at, team - 1, g.alpha, sum, [](int) { return make_float2(0.0f, 0.0f); });
      hopper::fence_for_copies();
      hopper::arrive(at.ready);
    }
  }
  hopper::sync_cluster();
#endif
}

}  // namespace blocks
}  // namespace te_fl::cuda
