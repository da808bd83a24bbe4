// The ops that reorder chunks of rows: kernels compute the source of each row, then copy rows.
#include <algorithm>

#include "common/integers.cuh"
#include "common/overlap.hpp"
#include "common/value_checks.hpp"
#include "common/value_errors.cuh"
#include "moe/kernel_names.hpp"
#include "moe/row_launch.cuh"
#include "plugin/families.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::cuda {
namespace {

constexpr int kTableThreads = 512;

// Prefix sums: offsets[i] = the sum of the first i values, for i from 0 to `size`. The sums must be
// below 2^63. All threads of the block must call it; ends with a barrier.
template <class F>
__device__ void block_offsets(int64_t size, F&& value, int64_t* offsets) {
  constexpr int kWarps = kTableThreads / 32;
  __shared__ int64_t warp_sums[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int64_t carry = 0;
  if (threadIdx.x == 0) offsets[0] = 0;
  for (int64_t base = 0; base < size; base += kTableThreads) {
    const int64_t i = base + threadIdx.x;
    int64_t sum = i < size ? value(i) : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int64_t all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) sum += warp_sums[w];
      all += warp_sums[w];
    }
    if (i < size) offsets[i + 1] = carry + sum;
    carry += all;
    __syncthreads();
  }
  __syncthreads();
}

// The chunks of a call with `rows` rows. `first` [count + 1]: offset of each chunk in the input.
// `start` [count + 1]: offset of the chunk at each output position. `taken` [count] must be zeroed.
struct ChunkTable {
  Integers sizes, order;
  int64_t count, rows;
  int64_t *first, *start;
  int32_t* taken;

  // Returns the number of a chunk's rows that lie inside the tensor. Invalid sizes count as 0.
  __device__ int64_t size(int64_t chunk) const {
    return min(first[chunk + 1], rows) - min(first[chunk], rows);
  }
  __device__ bool is_chunk(int64_t i) const { return i >= 0 && i < count; }
};

// Fills the ChunkTable. Launched as one block. Records invalid values and clamps the offsets, so
// that no row index is out of bounds.
__global__ void __launch_bounds__(kTableThreads)
    chunk_table_kernel(ChunkTable t, ValueErrorSink errors) {
  block_offsets(
      t.count,
      [&](int64_t i) {
        const int64_t size = t.sizes[i];
        return size < 0 ? int64_t{0} : min(size, t.rows + 1);
      },
      t.first);
  for (int64_t i = threadIdx.x; i < t.count; i += kTableThreads) {
    const int64_t size = t.sizes[i], left = t.rows - min(t.first[i], t.rows);
    if (size < 0 || size > left) note(errors, ValueRule::kChunkSize, i, size, t.rows, left);
    const int64_t chunk = t.order[i];
    if (!t.is_chunk(chunk)) {
      note(errors, ValueRule::kChunk, i, chunk, t.count);
    } else if (atomicExch(t.taken + chunk, 1) != 0) {
      note(errors, ValueRule::kChunkTwice, i, chunk, t.count);
    }
  }
  block_offsets(
      t.count,
      [&](int64_t i) {
        const int64_t chunk = t.order[i];
        return t.is_chunk(chunk) ? t.size(chunk) : int64_t{0};
      },
      t.start);
}

// Computes the input row of each output row (-1 past the last chunk), and the inverse map.
__global__ void __launch_bounds__(kThreads)
    chunk_rows_kernel(ChunkTable t, int32_t* sources, int32_t* map) {
  for (int64_t r = blockIdx.x * int64_t{kThreads} + threadIdx.x; r < t.rows;
       r += int64_t{gridDim.x} * kThreads) {
    int64_t low = 0;  // the last position that starts at or before r
    for (int64_t high = t.count + 1; high - low > 1;) {
      const int64_t middle = (low + high) / 2;
      (t.start[middle] <= r ? low : high) = middle;
    }
    int64_t source = -1;
    if (low < t.count) source = t.first[t.order[low]] + r - t.start[low];
    sources[r] = static_cast<int32_t>(source);
    map[source < 0 ? r : source] = source < 0 ? -1 : static_cast<int32_t>(r);
  }
}

__global__ void __launch_bounds__(kThreads)
    check_sources_kernel(const int32_t* sources, int64_t rows, ValueErrorSink errors) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t source = sources[i];
    if (source < -1 || source >= rows) note(errors, ValueRule::kPermutedRow, i, source, rows);
  }
}

// Copies row sources[r] of the input to row r of the output, or zeros if sources[r] is -1.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const Word* input, const int32_t* sources, Word* output, RowPieces p,
                       int64_t rows, ValueErrorSink errors) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kAtOnce} + threadIdx.x;
  Word held[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t i = first + u * kThreads;
    held[u] = Word{};
    if (i >= p.size) continue;
    uint32_t word = 0;
    const int64_t row = p.first + p.words(static_cast<uint32_t>(i), word), source = sources[row];
    if (source >= 0 && source < rows) {
      held[u] = input[source * p.words.divisor + word];
    } else if (source != -1 && word == 0) {
      note(errors, ValueRule::kPermutedRow, row, source, rows);
    }
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t i = first + u * kThreads;
    if (i < p.size) output[p.first * p.words.divisor + i] = held[u];
  }
}

void gather_rows(const te_fl_context& ctx, const te_fl_tensor* input, const int32_t* sources,
                 const te_fl_tensor* output, const ValueErrorSink& errors) {
  if (input == nullptr || output == nullptr) return;
  const int64_t rows = output->dl.shape[0], element = output->dl.dtype.bits / 8;
  const int64_t bytes = output->dl.ndim == 1 ? element : row_bytes_of(*output);
  with_word(word_bytes(bytes, *input, *output), [&]<class Word>(Word) {
    for_pieces(0, rows, bytes / static_cast<int64_t>(sizeof(Word)), [&](const RowPieces& p) {
      gather_rows_kernel<<<block_count(p.size, kThreads * kAtOnce), kThreads, 0, stream_of(ctx)>>>(
          backend::data<const Word>(*input), sources, backend::data<Word>(*output), p, rows,
          errors);
      check_launch("gather_rows_kernel");
    });
  });
}

// ---- calls

// Sizes in bytes of the three arrays in the workspace.
struct ChunkSpace {
  size_t offsets, taken, sources;
  explicit ChunkSpace(const te_fl_moe_sort_chunks_fwd_args& a) {
    const auto count = static_cast<size_t>(backend::numel(*a.split_sizes));
    offsets = (count + 1) * sizeof(int64_t);
    taken = count * sizeof(int32_t);
    sources = static_cast<size_t>(a.input->dl.shape[0]) * sizeof(int32_t);
  }
  size_t total() const { return 2 * offsets + taken + sources; }
};
size_t chunks_workspace(const te_fl_context&, const te_fl_moe_sort_chunks_fwd_args& a) {
  return ChunkSpace(a).total();
}

void moe_sort_chunks_fwd(const te_fl_context& ctx, const te_fl_moe_sort_chunks_fwd_args& a) {
  const int64_t rows = a.input->dl.shape[0];
  const ChunkSpace space(a);
  const cudaStream_t stream = stream_of(ctx);
  char* const memory = static_cast<char*>(ctx.workspace);
  const ChunkTable table{Integers(*a.split_sizes),
                         Integers(*a.sorted_index),
                         backend::numel(*a.split_sizes),
                         rows,
                         reinterpret_cast<int64_t*>(memory),
                         reinterpret_cast<int64_t*>(memory + space.offsets),
                         reinterpret_cast<int32_t*>(memory + 2 * space.offsets)};
  const ValueErrorSink errors = open_value_errors(ctx, "moe_sort_chunks_fwd");
  if (space.taken > 0) {
    check(cudaMemsetAsync(table.taken, 0, space.taken, stream), "cudaMemsetAsync");
  }
  chunk_table_kernel<<<1, kTableThreads, 0, stream>>>(table, errors);
  check_launch("chunk_table_kernel");
  if (validates(ctx)) refuse_noted(ctx);
  if (rows == 0) return;
  auto* const sources = reinterpret_cast<int32_t*>(memory + 2 * space.offsets + space.taken);
  chunk_rows_kernel<<<blocks_for(rows), kThreads, 0, stream>>>(
      table, sources, backend::data<int32_t>(*a.row_id_map));
  check_launch("chunk_rows_kernel");
  gather_rows(ctx, a.input, sources, a.output, errors);
  gather_rows(ctx, a.probs, sources, a.permuted_probs, errors);
}
Refusal refuse_chunks_fwd(const te_fl_moe_sort_chunks_fwd_args& a) {
  if (!all_dense(a.input, a.split_sizes, a.sorted_index, a.probs, a.output, a.permuted_probs,
                 a.row_id_map)) {
    return kNotContiguous;
  }
  const bool meets = overlaps(*a.output, *a.input) ||
                     (a.probs != nullptr && overlaps(*a.permuted_probs, *a.probs));
  return meets ? kOverlaps : refuse_wide(a.input);
}

void moe_sort_chunks_bwd(const te_fl_context& ctx, const te_fl_moe_sort_chunks_bwd_args& a) {
  const int64_t rows = a.grad_output->dl.shape[0];
  const auto* map = backend::data<const int32_t>(*a.row_id_map);
  const ValueErrorSink errors = open_value_errors(ctx, "moe_sort_chunks_bwd");
  if (rows == 0) return;
  if (validates(ctx)) {
    check_sources_kernel<<<blocks_for(rows), kThreads, 0, stream_of(ctx)>>>(map, rows, errors);
    check_launch("check_sources_kernel");
    refuse_noted(ctx);
  }
  gather_rows(ctx, a.grad_output, map, a.grad_input, errors);
  gather_rows(ctx, a.grad_permuted_probs, map, a.grad_probs, errors);
}
Refusal refuse_chunks_bwd(const te_fl_moe_sort_chunks_bwd_args& a) {
  if (!all_dense(a.grad_output, a.row_id_map, a.grad_permuted_probs, a.grad_input, a.grad_probs)) {
    return kNotContiguous;
  }
  const bool meets = overlaps(*a.grad_input, *a.grad_output) ||
                     (a.grad_probs != nullptr && overlaps(*a.grad_probs, *a.grad_permuted_probs));
  return meets ? kOverlaps : refuse_wide(a.grad_output);
}

}  // namespace

void append_chunks(std::vector<te_fl_op_desc>& ops) {
  using Forward = te_fl_moe_sort_chunks_fwd_args;
  using Backward = te_fl_moe_sort_chunks_bwd_args;
  ops.push_back(descriptor<Forward, moe_sort_chunks_fwd, refuse_chunks_fwd>("moe_sort_chunks_fwd"));
  ops.back().describe = describe_by<Forward, "kernels chunk_table, chunk_rows and gather_rows">;
  ops.back().workspace = backend::workspace_thunk<Forward, chunks_workspace>;
  ops.push_back(
      descriptor<Backward, moe_sort_chunks_bwd, refuse_chunks_bwd>("moe_sort_chunks_bwd"));
  ops.back().describe = describe_by<Backward, "kernel gather_rows">;
}

}  // namespace te_fl::cuda
