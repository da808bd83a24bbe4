// The GEMMs of a group in one kernel, on Hopper. Blocks stay resident and take tiles of all GEMMs
// in turn, so that only the last wave of the whole group leaves multiprocessors idle.
//
// Two of a block's three warpgroups multiply a tile of 128x256. In the third warpgroup, one warp
// copies operands in, and three warps copy 16-bit results out while the next tile is multiplied.
// The two blocks of a cluster compute neighbouring tiles and share their reads of the operand that
// both multiply.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/element.cuh"
#include "common/hopper_tiles.cuh"

namespace te_fl::cuda {

struct GroupedItem {
  void* d = nullptr;  // [rows, cols]
  const bf16* bias = nullptr;
  const float* scale_a = nullptr;  // inverse scales of FP8 operands: one, or one per block
  const float* scale_b = nullptr;
  int rows = 0, cols = 0;
  int lines = 0;             // number of 128-byte lines along K
  int end = 0;               // number of cluster tiles of this GEMM and those before it
  int down = 0, across = 0;  // cluster tiles below one another, and side by side
};

// GEMMs of one launch. Their data is the kernel's argument, of which CUDA allows 32764 bytes.
inline constexpr int kMostItems = 96;

struct GroupedCall {
  CUtensorMap a[kMostItems];
  CUtensorMap b[kMostItems];
  GroupedItem items[kMostItems];
  int tiles = 0;         // cluster tiles of all GEMMs
  int wide = 0;          // the blocks of a cluster are side by side and share reads of A;
                         // otherwise one is below the other, and they share reads of B
  int add_previous = 0;  // D = beta * D + product
  int d_float = 0;       // D is FP32; otherwise it is BF16
  float alpha = 1.0f, beta = 1.0f;
};
static_assert(sizeof(GroupedCall) <= 32764);

namespace grouped {

using namespace tiles;  // NOLINT: this kernel uses these tiles

constexpr int kStorers = 3;    // warps that copy results out
constexpr int kUnitRows = 32;  // rows that such a warp copies at a time, of 64 columns
constexpr int kUnits = kParts * (kRows / kUnitRows);
constexpr size_t kShared = shared_bytes(0);

// The extents of a cluster's tile.
__host__ __device__ constexpr int tile_rows(bool wide) { return wide ? kRows : 2 * kRows; }
__host__ __device__ constexpr int tile_cols(bool wide) { return wide ? 2 * kCols : kCols; }

// The GEMM and the place of each tile that a block computes. The numbers of its tiles rise.
class Tiles {
 public:
  __device__ explicit Tiles(const GroupedCall& call)
      : call_(call), rank_(static_cast<int>(hopper::rank_in_cluster())) {}
  // Sets `group`, the number of the GEMM.
  __device__ void find_group(int index) {
    while (index >= call_.items[group].end) ++group;
  }
  // Sets the tile's place in its GEMM, which find_group() has found.
  __device__ void find_place(int index) {
    const GroupedItem& item = call_.items[group];
    const bool wide = call_.wide != 0;
    uint32_t rest = index - (group > 0 ? call_.items[group - 1].end : 0);
    uint32_t above = 0, height = item.down;
    if (height > kRowGroup) {  // bands of kRowGroup row tiles, one after another
      const uint32_t band = rest / (kRowGroup * item.across);
      rest -= band * kRowGroup * item.across;
      above = band * kRowGroup;
      height = min(uint32_t{kRowGroup}, height - above);
    }
    const uint32_t column = rest / height;
    row = static_cast<int>(above + rest - column * height) * tile_rows(wide);
    col = static_cast<int>(column) * tile_cols(wide);
    own_row = row + (wide ? 0 : rank_ * kRows);
    own_col = col + (wide ? rank_ * kCols : 0);
  }
  int group = 0;
  int row = 0, col = 0;          // the first of the cluster's tile
  int own_row = 0, own_col = 0;  // the first of this block's tile
 private:
  const GroupedCall& call_;
  int rank_;
};

// Copies the operands of the block's tiles in. One thread runs this.
template <class Type>
__device__ inline void load(const GroupedCall& call, const Layout& at) {
  using Of = Operands<Type>;
  const int rank = static_cast<int>(hopper::rank_in_cluster());
  const bool wide = call.wide != 0;
  Tiles tile(call), next(call);
  Position p;
  const auto prefetch = [&](int index) {
    if (index >= call.tiles) return;
    const int before = next.group;
    next.find_group(index);
    if (next.group == before && before != 0) return;
    hopper::prefetch_map(call.a[next.group]);
    hopper::prefetch_map(call.b[next.group]);
  };
  prefetch(blockIdx.x / 2);
  for (int index = blockIdx.x / 2; index < call.tiles; index += gridDim.x / 2) {
    prefetch(index + gridDim.x / 2);
    tile.find_group(index);
    tile.find_place(index);
    const CUtensorMap &map_a = call.a[tile.group], &map_b = call.b[tile.group];
    const int lines = call.items[tile.group].lines;
    for (int line = 0; line < lines; ++line, p.next()) {
      hopper::wait_for(at.empty + p.stage * 8, p.parity ^ 1);
      const uint32_t full = at.full + p.stage * 8, a = at.a(p.stage), b = at.b(p.stage);
      hopper::expect_bytes(full, kStage);
      const int k = line * Of::kElements;
      // A box of A has 64 rows of the tile, or 64 of its columns' K.
      const auto load_a = [&](int half, bool both) {
        const uint32_t to = a + half * (kA / 2);
        const int row = tile.own_row + half * 64;
        const int x = Of::kAcrossA ? row : k, y = Of::kAcrossA ? k : row;
        both ? hopper::load_box_to(map_a, to, full, x, y, 3)
             : hopper::load_box(map_a, to, full, x, y);
      };
      const auto load_b = [&](int half, bool both) {
        const uint32_t to = b + half * (kB / 2);
        const int col = tile.own_col + half * (kCols / 2);
        if constexpr (Of::kAcrossB) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            both ? hopper::load_box_to(map_b, to + n * (kB / 4), full, col + 64 * n, k, 3)
                 : hopper::load_box(map_b, to + n * (kB / 4), full, col + 64 * n, k);
          }
        } else {
          both ? hopper::load_box_to(map_b, to, full, k, col, 3)
               : hopper::load_box(map_b, to, full, k, col);
        }
      };
      if (wide) {
        load_a(rank, true);
        load_b(0, false);
        load_b(1, false);
      } else {
        load_a(0, false);
        load_a(1, false);
        load_b(rank, true);
      }
    }
  }
}

// The scales of FP8 operands, and how products are summed.
enum class Scales {
  kTensor,       // one per operand; the tensor cores' own sums. BF16 operands have no scales.
  kTensorSplit,  // one per operand; the sums of each line are added in FP32
  kBlocks,       // A by 1x128, B by 128x128; as kTensorSplit
  kVectors,      // A and B by 1x128; as kTensorSplit
};
constexpr bool in_blocks(Scales s) { return s == Scales::kBlocks || s == Scales::kVectors; }

// Reads the scales of a thread's sums of a line, which is as long as a block: 128 elements of K.
// Beyond D it reads the last row's or column's scale, for sums that are not stored.
template <Scales kScales>
class LineScales {
 public:
  __device__ LineScales(const GroupedItem& item, int row, int col)
      : a_(item.scale_a), b_(item.scale_b), row_(row), col_(col) {
    last_row_ = item.rows - 1;
    pitch_a_ = round_up4(item.rows);
    if constexpr (kScales == Scales::kBlocks) {
      b_ += min(col, item.cols - 1) / 128 * round_up4(item.lines);
    } else {
      last_col_ = item.cols - 2;
      pitch_b_ = round_up4(item.cols);
      ahead_ = b_;
    }
  }
  // Reads the next line's scales of A, and with kBlocks that of B.
  __device__ void read() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      next_[i] = __ldg(a_ + min(row_ + i / 2 * 64 + i % 2 * 8, last_row_));
    }
    a_ += pitch_a_;
    if constexpr (kScales == Scales::kBlocks) next_b_ = __ldg(b_++);
    if constexpr (kScales == Scales::kVectors) {  // add() reads B's, which are now on their way
      const float* const ahead = ahead_ + min(col_ / 128 * 128 + threadIdx.x % 4 * 32, last_col_);
      asm volatile("prefetch.global.L1 [%0];" ::"l"(ahead));
      ahead_ += pitch_b_;
    }
  }
  // Makes these scales the current ones. Nothing waits for them before this.
  __device__ void advance() {
#pragma unroll
    for (int i = 0; i < 4; ++i) now_[i] = next_[i] * next_b_;
  }
  // Adds the line's sums of the 64 rows number `half`; the second half ends the line.
  __device__ void add(int half, const float (&part)[64], float (&sum)[64]) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float2 b = make_float2(1, 1);
      if constexpr (kScales == Scales::kVectors) {
        b = __ldg(reinterpret_cast<const float2*>(b_ + min(col_ + 8 * j, last_col_)));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = now_[2 * half + i];
        const int at = 4 * j + 2 * i;
        sum[at] = fmaf(part[at], a * b.x, sum[at]);
        sum[at + 1] = fmaf(part[at + 1], a * b.y, sum[at + 1]);
      }
    }
    if (half == 1) b_ += pitch_b_;
  }

 private:
  __device__ static int round_up4(int n) { return (n + 3) / 4 * 4; }
  const float *a_, *b_, *ahead_ = nullptr;
  int row_, col_, last_row_, last_col_ = 0, pitch_a_, pitch_b_ = 0;
  float now_[4] = {}, next_[4];  // [half][8 rows below]
  float next_b_ = 1;
};

// Computes a warpgroup's sums of 128 rows and the 128 columns number `group` of FP8 operands. With
// kSplit each line's sums are added to `sum` in FP32, since the tensor cores keep fewer bits;
// without it the sums replace `sum`. Calls `meanwhile` while the last wgmma instructions run.
template <class Type, Scales kScales, class Meanwhile>
__device__ inline void sum_codes(const Layout& at, const GroupedItem& item, const Tiles& tile,
                                 int group, Position& p, float (&sum)[2][64],
                                 const Meanwhile& meanwhile) {
  constexpr bool kSplit = kScales != Scales::kTensor;
  const int lines = item.lines, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  LineScales<kScales> scales(item, tile.own_row + 16 * warp + lane / 4,
                             tile.own_col + 128 * group + 2 * (lane % 4));
  if constexpr (in_blocks(kScales)) {
    if (lines > 0) scales.read();
  }
  int before = -1;
  for (int line = 0; line < lines; ++line, p.next()) {
    hopper::wait_for(at.full + p.stage * 8, p.parity);
    const uint32_t a = at.a(p.stage), b = at.b(p.stage) + group * (kB / 2);
    if constexpr (in_blocks(kScales)) {
      scales.advance();
      if (line + 1 < lines) scales.read();
    }
    if constexpr (kSplit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[64];
        hopper::begin_products();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          hopper::multiply(Type(), part, descriptor_a<Type>(a + half * (kA / 2), step),
                           descriptor_b<Type>(b, step), step != 0);
        }
        hopper::end_products();
        hopper::wait_for_sums(part);
        if (half == 1) at.release(p.stage);
        if constexpr (in_blocks(kScales)) {
          scales.add(half, part, sum[half]);
        } else {
#pragma unroll
          for (int i = 0; i < 64; ++i) sum[half][i] += part[i];
        }
      }
    } else {
      hopper::begin_products();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          hopper::multiply(Type(), sum[half], descriptor_a<Type>(a + half * (kA / 2), step),
                           descriptor_b<Type>(b, step), line != 0 || step != 0);
        }
      }
      hopper::end_products();
      if (before >= 0) {
        hopper::wait_products<1>();
        at.release(before);
      }
      before = p.stage;
    }
  }
  meanwhile();
  if constexpr (!kSplit) {
    hopper::wait_for_sums(sum[0]);
    hopper::wait_for_sums(sum[1]);
    if (before >= 0) at.release(before);
  }
}

// ---- the results

// The bias of a thread's columns, two elements per word; zeros beyond D's columns or without bias.
template <int kCount>
__device__ inline void load_bias(const GroupedItem& item, int col, uint32_t (&pairs)[kCount]) {
  const int first = col + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const bool has = item.bias != nullptr && first + 8 * j < item.cols;
    pairs[j] = has ? __ldg(reinterpret_cast<const uint32_t*>(item.bias + first + 8 * j)) : 0;
  }
}

__device__ inline float2 load_pair(const float* at) { return *reinterpret_cast<const float2*>(at); }
__device__ inline float2 load_pair(const bf16* at) {
  return unpack(*reinterpret_cast<const uint32_t*>(at));
}
__device__ inline void store_pair(float* at, float2 v) { *reinterpret_cast<float2*>(at) = v; }
__device__ inline void store_pair(bf16* at, float2 v) {
  *reinterpret_cast<uint32_t*>(at) = pack(v.x, v.y);
}

// Writes a warpgroup's sums to D from its registers, eight groups of columns at a time: FP32
// results, and those to which the previous D is added. The first sum is at `row` and `col` of D.
template <class D, int kCount>
__device__ inline void write_directly(const GroupedCall& call, const GroupedItem& item, int row,
                                      int col, float factor, const float (&sum)[kCount],
                                      const uint32_t (&added)[kCount / 4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int left_rows = item.rows - (row + 16 * warp + lane / 4);
  const int left_cols = item.cols - (col + 2 * (lane % 4));
  D* const d = static_cast<D*>(item.d) + (item.rows - left_rows) * int64_t{item.cols} +
               (item.cols - left_cols);
  const bool add = call.add_previous != 0;
#pragma unroll
  for (int block = 0; block < kCount / 4; block += 8) {
    float2 previous[8][2];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool read = add && 8 * i < left_rows && 8 * (block + j) < left_cols;
        previous[j][i] =
            read ? load_pair(d + 8 * i * int64_t{item.cols} + 8 * (block + j)) : make_float2(0, 0);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 more = unpack(added[block + j]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* of = sum + 4 * (block + j) + 2 * i;
        float2 v = make_float2(fmaf(of[0], factor, more.x), fmaf(of[1], factor, more.y));
        if (add) {
          v.x = fmaf(call.beta, previous[j][i].x, v.x);
          v.y = fmaf(call.beta, previous[j][i].y, v.y);
        }
        if (8 * i < left_rows && 8 * (block + j) < left_cols) {
          store_pair(d + 8 * i * int64_t{item.cols} + 8 * (block + j), v);
        }
      }
    }
  }
}

// Copies the block's BF16 results out of shared memory. Three warps run this.
__device__ inline void store(const GroupedCall& call, const Layout& at, int storer) {
  const int lane = threadIdx.x % 32, unit = lane % 8;
  Tiles tile(call);
  uint32_t parity = 0;
  int mine = storer;  // index of the next unit; 0 is the current tile's first unit
  for (int index = blockIdx.x / 2; index < call.tiles;
       index += gridDim.x / 2, parity ^= 1, mine -= kUnits) {
    tile.find_group(index);
    tile.find_place(index);
    const GroupedItem& item = call.items[tile.group];
    const int left_rows = item.rows - tile.own_row - lane / 8;
    const int left_cols = item.cols - tile.own_col - 8 * unit;
    bf16* const d = static_cast<bf16*>(item.d) + (item.rows - left_rows) * int64_t{item.cols} +
                    (item.cols - left_cols);
    hopper::wait_for(at.ready, parity);
    for (; mine < kUnits; mine += kStorers) {
      const int part = mine % kParts, first = mine / kParts * kUnitRows;
      bf16* const to = d + first * int64_t{item.cols} + part * kPart;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 v[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int row = first + 16 * half + 4 * n + lane / 8;
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v[n].x), "=r"(v[n].y), "=r"(v[n].z), "=r"(v[n].w)
                       : "r"(at.result(part, row, unit)));
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int row = 16 * half + 4 * n;
          if (first + row < left_rows && part * kPart < left_cols) {
            *reinterpret_cast<uint4*>(to + row * int64_t{item.cols}) = v[n];
          }
        }
      }
      __syncwarp();
      if (lane == 0) hopper::arrive(at.taken);
    }
  }
}

// Multiplies the block's tiles. Two warpgroups run this.
template <class Type, Scales kScales>
__device__ inline void multiply_tiles(const GroupedCall& call, const Layout& at, int group) {
  constexpr bool kCodes = Operands<Type>::kElements == 128;
  constexpr bool kSplit = kScales != Scales::kTensor;
  const bool direct = call.d_float != 0 || call.add_previous != 0;
  Tiles tile(call);
  Position p;
  uint32_t parity = 0;
  for (int index = blockIdx.x / 2; index < call.tiles; index += gridDim.x / 2, parity ^= 1) {
    tile.find_group(index);
    const GroupedItem& item = call.items[tile.group];
    constexpr int kCount = kCodes ? 64 : 128;  // sums of 64 rows
    uint32_t added[kCount / 4];
    float factor = call.alpha;
    // Finds the data that the results need while the tensor cores work.
    const auto meanwhile = [&] {
      if constexpr (!in_blocks(kScales)) {
        tile.find_place(index);
        if (item.scale_a != nullptr) factor *= *item.scale_a * *item.scale_b;
      }
      load_bias(item, tile.own_col + (kCodes ? 128 * group : 0), added);
    };
    // Gives sums of the 64 rows number `half` on. The FP8 kernels' warpgroups have 128 columns
    // each.
    const auto give = [&](int half, const auto& sum) {
      const int row = 64 * half, part = kCodes ? 2 * group : 0;
      const int d_row = tile.own_row + row, d_col = tile.own_col + kPart * part;
      if (call.d_float != 0) {
        write_directly<float>(call, item, d_row, d_col, factor, sum, added);
      } else if (direct) {
        write_directly<bf16>(call, item, d_row, d_col, factor, sum, added);
      } else {
        hand_over(at, row, part, factor, sum, added);
      }
    };
    float sum[kCodes ? 2 : 1][kCount];
    if ((kCodes && kSplit) || item.lines == 0) {
#pragma unroll
      for (auto& part : sum) {
#pragma unroll
        for (float& s : part) s = 0;
      }
    }
    if constexpr (kCodes) {
      if constexpr (in_blocks(kScales)) tile.find_place(index);
      sum_codes<Type, kScales>(at, item, tile, group, p, sum, meanwhile);
    } else if (item.lines > 0) {
      sum_products<Type>(at, item.lines, group, p, sum[0], meanwhile);
    } else {
      meanwhile();
    }
    if (!direct) hopper::wait_for(at.taken, parity ^ 1);
    if constexpr (kCodes) {
      give(0, sum[0]);
      give(1, sum[1]);
    } else {
      give(group, sum[0]);
    }
    if (!direct) hopper::arrive(at.ready);
  }
}

// Registers per thread. Summed over one thread of each of the three warpgroups they may be at most
// 504.
template <bool kSplit>
constexpr int kProductRegisters = kSplit ? 232 : 224;
template <bool kSplit>
constexpr int kOtherRegisters = 504 - 2 * kProductRegisters<kSplit>;

template <class Type, Scales kScales>
__global__ void TE_FL_PAIRS __launch_bounds__(kTileThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ GroupedCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kSplit = kScales != Scales::kTensor;
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout at(hopper::shared_address(memory), 0);
  const int team = threadIdx.x / 128;
  if (threadIdx.x == 0) at.init(kUnits);
  hopper::sync_cluster();
  if (team == 0) {
    hopper::give_registers_back<kOtherRegisters<kSplit>>();
    const int warp = threadIdx.x / 32;
    if (warp > 0) {
      if (call.d_float == 0 && call.add_previous == 0) store(call, at, warp - 1);
    } else if (threadIdx.x == 0) {
      load<Type>(call, at);
    }
  } else {
    hopper::take_registers<kProductRegisters<kSplit>>();
    multiply_tiles<Type, kScales>(call, at, team - 1);
  }
  hopper::sync_cluster();  // a block must not end while the other one multicasts to it or signals
                           // its barriers
#endif
}

}  // namespace grouped
}  // namespace te_fl::cuda
