// Products of FP8 codes of which both operands have a scale for every 128 elements along K, on
// Hopper.
//
// Of the three warp groups of a block two multiply a tile of 128x256, 64 rows each; of the third,
// one thread copies operands and scales in and one copies results out. What 128 elements of K add
// up to in the tensor cores is multiplied by the scales of its row and column and added in FP32.
#pragma once
#include <cuda_bf16.h>
#include "element.cuh"
#include "hopper.cuh"

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

constexpr int kRows = 128, kCols = 256, kLine = 128, kStages = 3, kThreads = 384;
constexpr int kA = kRows * kLine, kB = kCols * kLine, kScales = (kRows + kCols) * 4;
constexpr int kStage = kA + kB, kRing = kStages * kStage;
constexpr int kPart = 64, kPartBytes = kRows * kPart * 2, kParts = kCols / kPart,
              kResults = kParts * kPartBytes;
constexpr size_t kShared =
    kRing + kResults + kStages * kScales + (2 * kStages + 2) * sizeof(uint64_t);
constexpr int kRowGroup = 8;

struct Tile {
  int row, col;
  __device__ Tile(const BlockGemm& g, int index) {
    const int across = g.cols / kCols, group = index / (kRowGroup * across),
              rest = index - group * kRowGroup * across;
    const int height = min(kRowGroup, g.rows / (2 * kRows) - group * kRowGroup);
    row = (group * kRowGroup + rest % height) * 2 * kRows;
    col = rest / height * kCols;
  }
  __host__ __device__ static int count(int rows, int cols) {
    return rows / (2 * kRows) * (cols / kCols);
  }
};
struct Layout {
  uint32_t data, results, scales, full, empty, ready, taken;
  __device__ explicit Layout(uint32_t shared)
      : data(shared),
        results(shared + kRing),
        scales(results + kResults),
        full(scales + kStages * kScales),
        empty(full + kStages * 8),
        ready(empty + kStages * 8),
        taken(ready + 8) {}
  __device__ uint32_t a(int stage) const { return data + stage * kStage; }
  __device__ uint32_t b(int stage) const { return a(stage) + kA; }
  __device__ uint32_t scale_a(int stage) const { return scales + stage * kScales; }
  __device__ uint32_t scale_b(int stage) const { return scale_a(stage) + kRows * 4; }
  __device__ uint32_t result(int part, int row, int unit) const {
    return results + part * kPartBytes + row * 128 + (unit ^ row & 7) * 16;
  }
};
struct Position {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

__device__ inline void load(const CUtensorMap& map_a, const CUtensorMap& map_b, const BlockGemm& g,
                            const Layout& at) {
  const int rank = static_cast<int>(hopper::rank_in_cluster());
  Position p;
  for (int index = blockIdx.x / 2; index < Tile::count(g.rows, g.cols); index += gridDim.x / 2) {
    const Tile tile(g, index);
    const int row = tile.row + rank * kRows;
    for (int line = 0; line < g.lines; ++line, p.next()) {
      hopper::wait_for(at.empty + p.stage * 8, p.parity ^ 1);
      const uint32_t full = at.full + p.stage * 8;
      hopper::expect_bytes(full, kStage + kScales);
      hopper::load_box(map_a, at.a(p.stage), full, line * kLine, row);
      hopper::load_box_to(map_b, at.b(p.stage) + rank * (kB / 2), full, line * kLine,
                          tile.col + rank * (kCols / 2), 3);
      hopper::load_row(g.scale_a + line * g.pitch_a + row, at.scale_a(p.stage), full, kRows * 4);
      hopper::load_row(g.scale_b + line * g.pitch_b + tile.col, at.scale_b(p.stage), full,
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
    const uint32_t rows = at.scale_a(p.stage) + (64 * group + 16 * warp + lane / 4) * 4;
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
      const uint32_t cols = at.scale_b(p.stage) + (128 * half + 2 * (lane % 4)) * 4;
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
        if (lane < 2) hopper::arrive_at(at.empty + p.stage * 8, lane);
      }
    }
  }
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
__device__ inline void hand_over(const Layout& at, float factor, int group,
                                 const float (&sum)[128]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int row = 64 * group + 16 * warp + lane % 16;
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    uint32_t v[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* of = sum + 4 * (j + n) + 2 * i;
        v[2 * n + i] = pack(of[0] * factor, of[1] * factor);
      }
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     at.result(j / 8, row, j % 8 + lane / 16)),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  }
}

static __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    block_gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                      const __grid_constant__ CUtensorMap map_b,
                      const __grid_constant__ CUtensorMap map_d,
                      const __grid_constant__ BlockGemm g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout at(hopper::shared_address(memory));
  const int team = threadIdx.x / 128, below = static_cast<int>(hopper::rank_in_cluster()) * kRows;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      hopper::init_barrier(at.full + s * 8, 1);
      hopper::init_barrier(at.empty + s * 8, 16);
    }
    hopper::init_barrier(at.ready, 256);
    hopper::init_barrier(at.taken, 1);
    hopper::fence_barrier_init();
  }
  hopper::sync_cluster();
  const int first = blockIdx.x / 2, step = gridDim.x / 2, tiles = Tile::count(g.rows, g.cols);
  uint32_t parity = 0;
  if (team == 0) {
    hopper::give_registers_back<40>();
    if (threadIdx.x == 0) load(map_a, map_b, g, at);
    if (threadIdx.x == 32) {
      for (int index = first; index < tiles; index += step, parity ^= 1) {
        const Tile tile(g, index);
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
      hand_over(at, g.alpha, team - 1, sum);
      hopper::fence_for_copies();
      hopper::arrive(at.ready);
    }
  }
  hopper::sync_cluster();
#endif
}

}  // namespace blocks
}  // namespace te_fl::cuda
