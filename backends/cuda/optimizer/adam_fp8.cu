// Adam that also writes the parameters as FP8, row-wise and column-wise. The FP8 data equals that
// of the op quantize, but the parameters are not read again. Blocks process tiles of 128 rows x 64
// columns like the tile kernels of quantisation (tile.cuh). One launch covers all tensors of a call
// if they fit.
#include <algorithm>

#include "common/overlap.hpp"
#include "common/tile.cuh"
#include "optimizer/adam.cuh"
#include "optimizer/list_choice.hpp"

namespace te_fl::cuda {
namespace {

// One parameter tensor, as part of the kernel parameters.
struct Item {
  const void* grads;
  void* params;
  float *m, *v, *master;    // master may be NULL
  uint8_t *rows, *columns;  // FP8 data; one of them may be NULL
  float *scale_inv, *column_scale_inv, *amax;
  const float* scale;
  int64_t row_count, col_count;
  unsigned first_block;
  int8_t grad_dtype, param_dtype;
  bool is_e5m2;
  bool aligned;  // vectors of four elements and of sixteen FP8 bytes can be used
};
constexpr int kFew = list_choice::kFewCodes, kMany = list_choice::kManyCodes;
template <int kCapacity>
struct Items {
  Item items[kCapacity];
  int count;
};

// A thread's position in a tile. Elements 0..7 of a row are two runs of four.
using At = Place<4>;

// Returns v rounded to `dtype`, as FP32.
__device__ inline float as_stored(float v, int dtype) {
  if (dtype == TE_FL_BF16) return to_f32(from_f32<bf16>(v));
  if (dtype == TE_FL_F16) return to_f32(from_f32<fp16>(v));
  return v;
}

// Updates eight elements of a row with vector accesses. `first`: index of the element in the tile's
// first column. `stored`: receives the parameters' new values; 0 outside the tensor. `keeps`: the
// parameters are not updated.
__device__ inline void update_fours(const Item& t, const Adam& a, bool keeps, int64_t first,
                                    int cols_left, const At& at, float (&stored)[8]) {
  void* weights = t.master != nullptr ? t.master : t.params;
  const int dtype = t.master != nullptr ? TE_FL_F32 : t.param_dtype;
  Four g[2], p[2], m[2], v[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (at.col(4 * h) >= cols_left) continue;
    const int64_t i = first + at.col(4 * h);
    if (keeps) {
      p[h] = load_four(t.params, t.param_dtype, i);
      continue;
    }
    g[h] = load_four(t.grads, t.grad_dtype, i);
    p[h] = load_four(weights, dtype, i);
    m[h] = load_four(t.m, TE_FL_F32, i);
    v[h] = load_four(t.v, TE_FL_F32, i);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float ps[kFour] = {};
    if (at.col(4 * h) < cols_left) {
      const int64_t i = first + at.col(4 * h);
      if (keeps) {
        unpack_four(p[h], t.param_dtype, ps);
      } else {
        float gs[kFour], ms[kFour], vs[kFour];
        unpack_four(g[h], t.grad_dtype, gs);
        unpack_four(p[h], dtype, ps);
        unpack_four(m[h], TE_FL_F32, ms);
        unpack_four(v[h], TE_FL_F32, vs);
#pragma unroll
        for (int j = 0; j < kFour; ++j) a.step(gs[j], ps[j], ms[j], vs[j]);
        Target to;
        to.data = t.m, store_four(to, i, ms);
        to.data = t.v, store_four(to, i, vs);
        if (t.master != nullptr) to.data = t.master, store_four(to, i, ps);
        to.data = t.params, to.dtype = t.param_dtype;
        store_four(to, i, ps);
      }
    }
#pragma unroll
    for (int j = 0; j < kFour; ++j) stored[4 * h + j] = as_stored(ps[j], t.param_dtype);
  }
}
// Like update_fours(), for tensors whose rows are not aligned.
__device__ inline void update_ones(const Item& t, const Adam& a, bool keeps, int64_t first,
                                   int cols_left, const At& at, float (&stored)[8]) {
  Source grads, params;
  grads.data = t.grads, grads.dtype = t.grad_dtype;
  params.data = t.params, params.dtype = t.param_dtype;
  Target out;
  out.data = t.params, out.dtype = t.param_dtype;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    stored[e] = 0.0f;
    if (at.col(e) >= cols_left) continue;
    const int64_t i = first + at.col(e);
    float p = keeps || t.master == nullptr ? params.at(i) : t.master[i];
    if (!keeps) {
      float m = t.m[i], v = t.v[i];
      a.step(grads.at(i), p, m, v);
      t.m[i] = m;
      t.v[i] = v;
      if (t.master != nullptr) t.master[i] = p;
      out.store(i, 1, &p);
    }
    stored[e] = as_stored(p, t.param_dtype);
  }
}

__device__ inline void write_row_ones(uint8_t* row, int cols_left, const At& at,
                                      const uint32_t (&codes)[2]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (at.col(e) < cols_left) row[at.col(e)] = static_cast<uint8_t>(codes[e / 4] >> e % 4 * 8);
  }
}
// Writes the first `count` FP8 columns in shared memory, byte by byte, to a matrix with rows of m
// bytes.
__device__ inline void write_column_ones(const uint32_t (*columns)[32], uint8_t* to, int64_t m,
                                         int64_t row0, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count * kTileRows; i += kThreads) {
    const int col = i / kTileRows, row = i % kTileRows;
    if (row0 + row >= m) continue;
    const uint32_t word = columns[col][code_word(row / 4, writer_index<4>(col))];
    to[col * m + row0 + row] = static_cast<uint8_t>(word >> row % 4 * 8);
  }
}

template <bool kAligned>
__device__ inline void update_tile(const Item& t, const Adam& a, bool keeps, unsigned block,
                                   uint32_t (*columns)[32], float* warp_amax) {
  const auto col_tiles =
      static_cast<unsigned>(max(int64_t{1}, (t.col_count + kTileCols - 1) / kTileCols));
  const unsigned step = block / col_tiles;
  const int64_t row0 = int64_t{step} * kTileRows;
  const int64_t col0 = int64_t{block - step * col_tiles} * kTileCols;
  const int cols_left =
      static_cast<int>(t.col_count - col0 < kTileCols ? t.col_count - col0 : kTileCols);
  const At at(static_cast<int>(threadIdx.x));
  const float scale = *t.scale;
  if (block == 0 && threadIdx.x == 0) {
    if (t.scale_inv != nullptr) *t.scale_inv = 1.0f / scale;
    if (t.column_scale_inv != nullptr) *t.column_scale_inv = 1.0f / scale;
  }
  float most = 0.0f;
  uint32_t codes[4][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = row0 + at.group * 4 + i;
    float p[8] = {};
    if (row < t.row_count) {
      const int64_t first = row * t.col_count + col0;
      if constexpr (kAligned) {
        update_fours(t, a, keeps, first, cols_left, at, p);
      } else {
        update_ones(t, a, keeps, first, cols_left, at, p);
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) most = fold_amax(most, p[e]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      codes[i][h] = encode_four(p[4 * h] * scale, p[4 * h + 1] * scale, p[4 * h + 2] * scale,
                             p[4 * h + 3] * scale, t.is_e5m2);
    }
    if (t.rows == nullptr || row >= t.row_count) continue;
    uint8_t* to = t.rows + row * t.col_count + col0;
    if constexpr (kAligned) {
      write_row<4>(to, cols_left, at, codes[i]);
    } else {
      write_row_ones(to, cols_left, at, codes[i]);
    }
  }
  if (t.amax != nullptr) {
    most = block_amax(most, warp_amax);
    if (threadIdx.x == 0) atomic_amax(t.amax, most);
  }
  if (t.columns == nullptr) return;
  stage_columns<4>(columns, codes, at, 0);
  __syncthreads();
  uint8_t* to = t.columns + col0 * t.row_count;
  if constexpr (kAligned) {
    write_columns<4, kThreads, kTileCols>(columns, to, t.row_count, row0, cols_left);
  } else {
    write_column_ones(columns, to, t.row_count, row0, cols_left);
  }
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, 3)
    adam_fp8_kernel(const __grid_constant__ Items<kCapacity> list, Adam a, const int32_t* noop) {
  __shared__ __align__(16) uint32_t columns[kTileCols][32];
  __shared__ float warp_amax[kWarps];
  const bool keeps = noop != nullptr && *noop != 0;
  if (!keeps) a.read_tensors();
  int which = 0;
  for (int below = list.count - 1; which < below;) {
    const int middle = (which + below + 1) / 2;
    if (list.items[middle].first_block <= blockIdx.x) {
      which = middle;
    } else {
      below = middle - 1;
    }
  }
  const Item& t = list.items[which];
  const unsigned block = blockIdx.x - t.first_block;
  if (t.aligned) {
    update_tile<true>(t, a, keeps, block, columns, warp_amax);
  } else {
    update_tile<false>(t, a, keeps, block, columns, warp_amax);
  }
}

Item make_item(const te_fl_multi_tensor_adam_args& a, int64_t i) {
  const Quantised q = quantised(*a.fp8_params[i], nullptr, FLT_MAX);
  Item t{};
  t.grads = backend::data<const void>(*a.grads[i]);
  t.params = backend::data<void>(*a.params[i]);
  t.m = backend::data<float>(*a.exp_avgs[i]);
  t.v = backend::data<float>(*a.exp_avg_sqs[i]);
  t.master = a.master_params_count != 0 ? backend::data<float>(*a.master_params[i]) : nullptr;
  t.rows = static_cast<uint8_t*>(q.rows);
  t.columns = static_cast<uint8_t*>(q.columns);
  t.scale_inv = q.scale_inv;
  t.column_scale_inv = q.column_scale_inv;
  t.amax = q.amax;
  t.scale = q.scale;
  t.row_count = q.m;
  t.col_count = q.k;
  t.grad_dtype = static_cast<int8_t>(dtype_of(*a.grads[i]));
  t.param_dtype = static_cast<int8_t>(dtype_of(*a.params[i]));
  t.is_e5m2 = q.is_e5m2;
  uintptr_t all = 0;
  for (const void* p : {t.grads, static_cast<const void*>(t.params), static_cast<const void*>(t.m),
                        static_cast<const void*>(t.v), static_cast<const void*>(t.master),
                        static_cast<const void*>(t.rows), static_cast<const void*>(t.columns)}) {
    all |= reinterpret_cast<uintptr_t>(p);
  }
  t.aligned = all % 16 == 0 && q.k % 16 == 0 && (q.columns == nullptr || q.m % 16 == 0);
  return t;
}
// Number of blocks of a parameter. An empty parameter has one block, which writes its scale_inv.
int64_t block_count(const Item& t) {
  return std::max<int64_t>(1, ceil_div(t.row_count, kTileRows)) *
         std::max<int64_t>(1, ceil_div(t.col_count, kTileCols));
}

template <int kCapacity>
void run(const te_fl_context& ctx, const te_fl_multi_tensor_adam_args& a, const Adam& constants,
         const int32_t* noop) {
  Items<kCapacity> list{};
  int64_t blocks = 0;
  const auto launch = [&] {
    if (list.count == 0) return;
    adam_fp8_kernel<kCapacity>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(ctx)>>>(list, constants, noop);
    check_launch("adam_fp8_kernel");
    list.count = 0;
    blocks = 0;
  };
  for (int64_t i = 0; i < a.grads_count; ++i) {
    Item t = make_item(a, i);
    const int64_t own = block_count(t);
    if (list.count == kCapacity || blocks + own > INT32_MAX) launch();
    t.first_block = static_cast<unsigned>(blocks);
    list.items[list.count++] = t;
    blocks += own;
  }
  launch();
}

}  // namespace

void adam_with_fp8(const te_fl_context& ctx, const te_fl_multi_tensor_adam_args& a,
                   const Adam& constants, const int32_t* noop) {
  if (choose_list(a).capacity == kFew) return run<kFew>(ctx, a, constants, noop);
  run<kMany>(ctx, a, constants, noop);
}

Refusal refuse_fp8_params(const te_fl_multi_tensor_adam_args& a) {
  for (int64_t i = 0; i < a.fp8_params_count; ++i) {
    const te_fl_tensor& t = *a.fp8_params[i];
    if (const Refusal why = refuse_output(t)) return why;
    if ((t.quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0) {
      return "writes fp8_params with a given scale only: one that is computed needs the amax of "
             "all "
             "updated values first";
    }
  }
  return any_overlap(a.fp8_params, a.fp8_params_count, a.params, a.params_count)
             ? "fp8_params share memory with params"
             : nullptr;
}

}  // namespace te_fl::cuda
