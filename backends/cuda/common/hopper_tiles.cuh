// Tiled matrix multiplication on Hopper (hopper.cuh). Two warpgroups, with 64 rows each, compute a
// tile of 128x256; a third warpgroup copies operands in and results out. The two blocks of a
// cluster compute vertically adjacent tiles and share their reads of B.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "common/element.cuh"
#include "common/hopper.cuh"

namespace te_fl::cuda::tiles {

constexpr int kRows = 128, kCols = 256, kLine = 128, kStages = 3, kTileThreads = 384;
constexpr int kA = kRows * kLine, kB = kCols * kLine, kStage = kA + kB, kRing = kStages * kStage;
constexpr int kPart = 64;  // tile columns whose 16-bit results fill a 128-byte row
constexpr int kPartBytes = kRows * kPart * 2, kParts = kCols / kPart;
constexpr int kResults = kParts * kPartBytes;
constexpr int kBarriers = 2 * kStages + 2;
constexpr int kRowGroup = 8;  // pairs of row tiles that are processed before the next column tile

struct Tile {
  int row, col;  // first row and column of the cluster's tiles
  __device__ Tile(int rows, int cols, int index) {
    const int across = cols / kCols, group = index / (kRowGroup * across),
              rest = index - group * kRowGroup * across;
    const int height = min(kRowGroup, rows / (2 * kRows) - group * kRowGroup);
    row = (group * kRowGroup + rest % height) * 2 * kRows;
    col = rest / height * kCols;
  }
  __host__ __device__ static int count(int rows, int cols) {
    return rows / (2 * kRows) * (cols / kCols);
  }
};

// A stage of the pipeline's ring buffer, and the mbarrier parity of the current pass over the ring.
struct Position {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Addresses in shared memory. `extra`: bytes of kernel-specific data between the results and the
// barriers, a multiple of 16.
struct Layout {
  uint32_t data, results, own, full, empty, ready, taken;
  __device__ Layout(uint32_t shared, int extra)
      : data(shared),
        results(shared + kRing),
        own(results + kResults),
        full(own + extra),
        empty(full + kStages * 8),
        ready(empty + kStages * 8),
        taken(ready + 8) {}
  __device__ uint32_t a(int stage) const { return data + stage * kStage; }
  __device__ uint32_t b(int stage) const { return a(stage) + kA; }
  // Returns the address of 16 bytes of the results: those of a 64-column slice `part`, a row, and a
  // 16-byte unit of that row, in the swizzle that bulk copies expect.
  __device__ uint32_t result(int part, int row, int unit) const {
    return results + part * kPartBytes + row * 128 + (unit ^ row & 7) * 16;
  }
  // Called by one thread. `takers`: number of arrivals after which the results buffer is empty.
  __device__ void init(int takers) const {
    for (int s = 0; s < kStages; ++s) {
      hopper::init_barrier(full + s * 8, 1);
      hopper::init_barrier(empty + s * 8, 16);  // the warps in both blocks that read the stage's B
    }
    hopper::init_barrier(ready, 256);
    hopper::init_barrier(taken, static_cast<uint32_t>(takers));
    hopper::fence_barrier_init();
  }
  // Called by each warp that has read the stage.
  __device__ void release(int stage) const {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < 2) hopper::arrive_at(empty + stage * 8, lane);
  }
};
constexpr size_t shared_bytes(int extra) {
  return kRing + kResults + static_cast<size_t>(extra) + kBarriers * sizeof(uint64_t);
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

__device__ inline float2 unpack(uint32_t both) {
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}

// Loads the bias of a thread's columns, two elements per word; zeros if `bias` is NULL.
__device__ inline void load_added(const bf16* bias, int col, uint32_t (&pairs)[32]) {
  const auto* from = reinterpret_cast<const uint32_t*>(bias + col + 2 * (threadIdx.x % 4));
#pragma unroll
  for (int j = 0; j < 32; ++j) pairs[j] = bias != nullptr ? __ldg(from + 4 * j) : 0;
}

template <class Type>
struct Operands {  // describes a line of 128 bytes
  static constexpr int kElements = 64;
  static constexpr bool kAcrossA = std::is_same_v<Type, hopper::Bf16Across>;
  static constexpr bool kAcrossB = kAcrossA || std::is_same_v<Type, hopper::Bf16AcrossB>;
};
struct CodeOperands {
  static constexpr int kElements = 128;
  static constexpr bool kAcrossA = false, kAcrossB = false;
};
template <>
struct Operands<hopper::E4m3> : CodeOperands {};
template <>
struct Operands<hopper::E5m2E4m3> : CodeOperands {};

// Descriptors of the operands of instruction number `step` of a line.
template <class Type>
__device__ inline uint64_t descriptor_a(uint32_t address, int step) {
  if constexpr (Operands<Type>::kAcrossA) return hopper::across_k(address + step * 2048, kA / 2);
  return hopper::along_k(address + step * 32);
}
template <class Type>
__device__ inline uint64_t descriptor_b(uint32_t address, int step) {
  if constexpr (Operands<Type>::kAcrossB) return hopper::across_k(address + step * 2048, kB / 4);
  return hopper::along_k(address + step * 32);
}

// Computes a warpgroup's sums of 64 rows and 256 columns over `lines` > 0 lines. Calls `meanwhile`
// while the last wgmma instructions run.
template <class Type, class Meanwhile>
__device__ inline void sum_products(const Layout& at, int lines, int group, Position& p,
                                    float (&sum)[128], const Meanwhile& meanwhile) {
  int before = -1;
  for (int line = 0; line < lines; ++line, p.next()) {
    hopper::wait_for(at.full + p.stage * 8, p.parity);
    const uint32_t a = at.a(p.stage) + group * (kA / 2), b = at.b(p.stage);
    hopper::begin_products();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      hopper::multiply(Type(), sum, descriptor_a<Type>(a, step), descriptor_b<Type>(b, step),
                       line != 0 || step != 0);
    }
    hopper::end_products();
    if (before >= 0) {
      hopper::wait_products<1>();
      at.release(before);
    }
    before = p.stage;
  }
  meanwhile();
  hopper::wait_for_sums(sum);
  at.release(before);
}

// Writes a warpgroup's sums to the results buffer as BF16: sum * factor + added. The first one is
// at row `row` of column slice `part`. sum[4 j + 2 i + e] of a thread is at row
// row + 16 warp + 8 i + lane / 4, column 64 part + 8 j + 2 (lane % 4) + e.
template <int kCount>
__device__ inline void hand_over(const Layout& at, int row, int part, float factor,
                                 const float (&sum)[kCount], const uint32_t (&added)[kCount / 4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  // The address that this lane passes to stmatrix for j = 0. Addresses for other j differ by an
  // XOR.
  const uint32_t first = at.result(part, row + 16 * warp + lane % 16, lane / 16);
#pragma unroll
  for (int j = 0; j < kCount / 4; j += 2) {
    uint32_t v[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 more = unpack(added[j + n]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* of = sum + 4 * (j + n) + 2 * i;
        v[2 * n + i] = pack(fmaf(of[0], factor, more.x), fmaf(of[1], factor, more.y));
      }
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     (first ^ j % 8 * 16) + j / 8 * kPartBytes),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  }
}

}  // namespace te_fl::cuda::tiles
