// Forward norms that write FP8 in tiles of 128 x 128 elements, so that no 128-element scaling block
// spans two tiles in either direction.
//
// With block scaling, one launch computes the statistics of rows and quantises tiles. A slab is 128
// rows. There are two kinds of work items: row items compute the statistics of some rows of a slab,
// and tile items quantise one tile of it. Thread blocks take items in order from an atomic counter
// (the ticket). A slab's tile items come some slabs after its row items, so x is read from memory
// once and the second time from the L2 cache. A tile item waits until all row items of its slab are
// done. There is no deadlock, even if few thread blocks run at once: row items have smaller
// tickets, so running blocks have already taken them, and row items never wait. With current
// per-tensor scaling, the statistics are known before the launch and the tiles are independent.
#include "common/tile_block128.cuh"
#include "norm/norm_held.cuh"

namespace te_fl::cuda {
namespace {

constexpr int kAhead = 16;  // slabs whose rows come before the first tiles; measured: 6 is as fast,
                            // 3 is slower

struct Block128Args {
  const void *x, *residual;
  void* sum;
  Source gamma, beta;
  float *mu, *rsigma;
  float4* statistics;       // of every row, as for_tiles() returns them
  unsigned *ticket, *done;  // done: completed row items per slab; both NULL if the statistics are
                            // known
  Quantised q;
  HeldShape shape;
  int rows, slabs, ahead;
  unsigned row_items, tiles, items;  // row_items, tiles: of a slab; items: of all slabs
  float offset;
};

struct Item {
  bool of_rows;
  int slab, index;
};
__device__ inline Item find_item(const Block128Args& a, unsigned i) {
  const unsigned ahead = static_cast<unsigned>(a.ahead), slabs = static_cast<unsigned>(a.slabs);
  if (i < ahead * a.row_items) {
    return {true, static_cast<int>(i / a.row_items), static_cast<int>(i % a.row_items)};
  }
  i -= ahead * a.row_items;
  const unsigned each = a.row_items + a.tiles;
  if (i >= (slabs - ahead) * each) {
    i -= (slabs - ahead) * each;
    return {false, static_cast<int>(slabs - ahead + i / a.tiles), static_cast<int>(i % a.tiles)};
  }
  const unsigned slab = i / each, k = i % each;
  const unsigned before = k * a.row_items / each;
  if ((k + 1) * a.row_items / each > before) {
    return {true, static_cast<int>(slab + ahead), static_cast<int>(before)};
  }
  return {false, static_cast<int>(slab), static_cast<int>(k - before)};
}

struct SlabShared {
  BlockShared tile;
  float4 statistics[kBlockTile];
  __align__(16) float weight[kBlockTile], bias[kBlockTile];
  float4 parts[kBlockWarps];
  unsigned next;
};

template <class T, bool kResidual, bool kFull>
__device__ inline void do_rows(const Block128Args& a, const Item& item, SlabShared& shared) {
  const HeldPlace<kFull> at(a.shape);
  const int row = item.slab * kBlockTile + item.index * (kBlockWarps / a.shape.warps) + at.slot;
  const bool inside = row < a.rows;
  Raw<T> x[kHeldGroups];
  hold_row<kResidual>(at, int64_t{row} * a.shape.cols, inside, a.x, a.residual, a.sum, x);
  const RowStatistics s = held_statistics(at, a.shape, x, shared.parts);
  if (at.part == 0 && at.lane == 0 && inside) {
    if (a.shape.centred) a.mu[row] = s.high + s.rest;
    a.rsigma[row] = s.rsigma;
    __stcg(a.statistics + row, for_tiles(s));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(a.done + item.slab, 1u);
  }
}
__device__ inline void wait_for(const unsigned* done, unsigned items) {
  unsigned seen = 0;
  for (;;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(done) : "memory");
    if (seen >= items) return;
    __nanosleep(50);
  }
}

template <class T, bool kResidual, bool kBlocks>
__device__ inline void do_tile(const Block128Args& a, const Item& item, float scale,
                               SlabShared& shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int right = warp & 1, warp_row = warp / 2;
  const Place<2> at(warp_row * 32 + thread % 32);
  const int row0 = item.slab * kBlockTile, col0 = item.index * kBlockTile;
  const int my_col = right * kTileCols + at.col(0);
  // Indices outside the matrix are clamped to its last row and columns.
  const int last_row = min(a.rows - row0, kBlockTile) - 1;
  const int first_col = min(my_col, a.shape.cols - col0 - kGroup);
  uint4 raw[4];
  const auto load = [&] {
    const T* from = static_cast<const T*>(kResidual ? a.sum : a.x) + col0 + first_col;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + min(at.group * 4 + i, last_row);
      const auto* p = reinterpret_cast<const uint4*>(from + int64_t{row} * a.shape.cols);
      raw[i] = kResidual ? __ldcg(p) : load_once(p);
    }
  };
  if constexpr (!kResidual) load();
  if (thread < kBlockTile) {
    const int col = col0 + min(thread, a.shape.cols - col0 - 1);
    shared.weight[thread] = a.gamma.at(col) + a.offset;
    shared.bias[thread] = a.beta.data != nullptr ? a.beta.at(col) : 0.0f;
  } else if (thread < 2 * kBlockTile) {
    if constexpr (kBlocks) {
      if (thread % 32 == 0) wait_for(a.done + item.slab, a.row_items);
      __syncwarp();
    }
    const int row = thread - kBlockTile;
    shared.statistics[row] = __ldcg(a.statistics + row0 + min(row, last_row));
  }
  __syncthreads();
  if constexpr (kResidual) load();
  float v[4][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 w = *reinterpret_cast<const float4*>(shared.weight + first_col + half * kHalf);
    const float4 b = *reinterpret_cast<const float4*>(shared.bias + first_col + half * kHalf);
    const float weight[kHalf] = {w.x, w.y, w.z, w.w}, bias[kHalf] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 s = shared.statistics[at.group * 4 + i];
      float x[8];
      unpack_piece<2>(raw[i], std::is_same_v<T, fp16>, x);
#pragma unroll
      for (int e = 0; e < kHalf; ++e) {
        v[i][half * kHalf + e] =
            fmaf(fmaf(x[half * kHalf + e] - s.x, s.y, s.z), weight[e], bias[e]);
      }
    }
  }
  uint8_t* const rows_to = static_cast<uint8_t*>(a.q.rows) + int64_t{row0} * a.q.k + col0 + my_col;
  const bool has_cols = a.q.rows != nullptr && col0 + my_col < a.shape.cols;
  uint32_t codes[4][2];
  if constexpr (kBlocks) {
    keep_amaxes<2>(a.q, v, right, warp_row, at, shared.tile);
    find_block_scales(a.q, row0, col0, a.q.k, shared.tile);
    if (has_cols) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = at.group * 4 + i;
        const float s = shared.tile.row_scale[row];
        const uint2 two =
            make_uint2(encode_four(v[i][0] * s, v[i][1] * s, v[i][2] * s, v[i][3] * s, a.q.is_e5m2),
                       encode_four(v[i][4] * s, v[i][5] * s, v[i][6] * s, v[i][7] * s, a.q.is_e5m2));
        if (row <= last_row) store_whole(reinterpret_cast<uint2*>(rows_to + row * a.q.k), two);
      }
    }
    if (a.q.columns == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float s[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) s[e] = shared.tile.column_scale[my_col + 4 * h + e];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[i][h] = encode_four(v[i][4 * h] * s[0], v[i][4 * h + 1] * s[1], v[i][4 * h + 2] * s[2],
                               v[i][4 * h + 3] * s[3], a.q.is_e5m2);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < kHalf; ++e) v[i][4 * h + e] *= scale;
        codes[i][h] =
            encode_four(v[i][4 * h], v[i][4 * h + 1], v[i][4 * h + 2], v[i][4 * h + 3], a.q.is_e5m2);
      }
      const int row = at.group * 4 + i;
      if (has_cols && row <= last_row) {
        store_whole(reinterpret_cast<uint2*>(rows_to + row * a.q.k),
                    make_uint2(codes[i][0], codes[i][1]));
      }
    }
    if (a.q.columns == nullptr) return;
  }
  stage_columns<2>(shared.tile.columns, codes, at, right * kTileCols);
  __syncthreads();
  write_columns<2, kBlockThreads, kBlockTile>(shared.tile.columns,
                                              static_cast<uint8_t*>(a.q.columns) + col0 * a.q.m,
                                              a.q.m, row0, min(a.shape.cols - col0, kBlockTile));
}

template <class T, bool kResidual>
__global__ void __launch_bounds__(kBlockThreads, 2)
    norm_block128_kernel(const __grid_constant__ Block128Args a) {
  __shared__ SlabShared shared;
  if (threadIdx.x == 0) shared.next = atomicAdd(a.ticket, 1u);
  for (;;) {
    __syncthreads();
    const unsigned now = shared.next;
    if (now >= a.items) return;
    unsigned then = 0;  // the next ticket; in flight while this item is processed
    if (threadIdx.x == 0) then = atomicAdd(a.ticket, 1u);
    const Item item = find_item(a, now);
    if (item.of_rows) {
      a.shape.full ? do_rows<T, kResidual, true>(a, item, shared)
                   : do_rows<T, kResidual, false>(a, item, shared);
    } else {
      do_tile<T, kResidual, true>(a, item, 1.0f, shared);
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.next = then;
  }
}
// Each block quantises one tile. Blocks process tiles in reverse order, because the L2 cache may
// still hold the last rows of x.
template <class T>
__global__ void __launch_bounds__(kBlockThreads, 2)
    norm_block128_known_kernel(const __grid_constant__ Block128Args a) {
  __shared__ SlabShared shared;
  const float scale = a.q.tensor_scale();
  if (blockIdx.x == 0 && threadIdx.x == 0) a.q.write_tensor_scale(scale);
  do_tile<T, false, false>(a, find_item(a, a.items - 1 - blockIdx.x), scale, shared);
}

template <class T>
void launch(const te_fl_context& ctx, const Block128Args& a) {
  if (a.ticket == nullptr) {
    norm_block128_known_kernel<T><<<a.items, kBlockThreads, 0, stream_of(ctx)>>>(a);
    return check_launch("norm_block128_known_kernel");
  }
  const unsigned blocks =
      std::min(a.items, 2 * static_cast<unsigned>(multiprocessors(ctx.device.index)));
  const auto kernel =
      a.residual != nullptr ? norm_block128_kernel<T, true> : norm_block128_kernel<T, false>;
  kernel<<<blocks, kBlockThreads, 0, stream_of(ctx)>>>(a);
  check_launch("norm_block128_kernel");
}

int64_t count_slabs(int64_t rows) { return ceil_div(rows, kBlockTile); }

}  // namespace

size_t norm_block128_bytes(int64_t rows) {
  return static_cast<size_t>(rows) * sizeof(float4) +
         static_cast<size_t>(count_slabs(rows) + 1) * sizeof(unsigned);
}

void norm_block128(const te_fl_context& ctx, const NormForward& f, const Quantised& out,
                   void* scratch) {
  Block128Args a{};
  a.shape = held_shape(out.k, f.epsilon, f.mu != nullptr);
  a.x = backend::data<const void>(*f.x);
  if (f.sum != nullptr) {
    a.residual = backend::data<const void>(*f.residual);
    a.sum = backend::data<void>(*f.sum);
  }
  a.gamma = Source(*f.gamma);
  if (f.beta != nullptr) a.beta = Source(*f.beta);
  a.mu = f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr;
  a.rsigma = backend::data<float>(*f.rsigma);
  a.offset = f.zero_centered ? 1.0f : 0.0f;
  a.statistics = static_cast<float4*>(scratch);
  a.q = out;
  a.rows = static_cast<int>(out.m);
  a.slabs = static_cast<int>(count_slabs(out.m));
  a.tiles = static_cast<unsigned>(ceil_div(out.k, kBlockTile));
  if (out.scaling != TE_FL_SCALING_TENSOR) {
    a.ahead = std::min(kAhead, a.slabs);
    a.row_items = static_cast<unsigned>(kBlockTile * a.shape.warps / kBlockWarps);
    a.ticket = reinterpret_cast<unsigned*>(a.statistics + out.m);
    a.done = a.ticket + 1;
    check(cudaMemsetAsync(a.ticket, 0, static_cast<size_t>(a.slabs + 1) * sizeof(unsigned),
                          stream_of(ctx)),
          "cudaMemsetAsync");
    clear_amax(ctx, out);
    a.q.running_amax = out.amax;
  }
  a.items = static_cast<unsigned>(a.slabs) * (a.row_items + a.tiles);
  dtype_of(*f.x) == TE_FL_BF16 ? launch<bf16>(ctx, a) : launch<fp16>(ctx, a);
}

}  // namespace te_fl::cuda
