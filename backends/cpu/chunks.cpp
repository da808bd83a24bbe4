// The ops that reorder chunks of rows.
#include <cstring>
#include <vector>

#include "integers.hpp"
#include "quant_store.hpp"
#include "te_fl/backend/values_in_memory.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::cpu {
namespace {

// Returns the input row of each output row; -1 for rows past the last chunk.
std::vector<int32_t> find_sources(const te_fl_moe_sort_chunks_fwd_args& a, int64_t rows) {
  const Integers sizes(*a.split_sizes), order(*a.sorted_index);
  const int64_t count = backend::numel(*a.split_sizes);
  std::vector<int64_t> first(static_cast<size_t>(count) + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    backend::check_chunk(i, sizes[i], first[at], rows);
    first[at + 1] = first[at] + sizes[i];
  }
  std::vector<int32_t> sources(static_cast<size_t>(rows), -1);
  std::vector<bool> taken(static_cast<size_t>(count));
  size_t row = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t chunk = order[i];
    if (chunk < 0 || chunk >= count) {
      backend::wrong_value("sorted_index", i, chunk, 0, count, ", the chunks");
    }
    const auto at = static_cast<size_t>(chunk);
    if (taken[at]) backend::chunk_twice(i, chunk);
    taken[at] = true;
    for (int64_t r = first[at]; r < first[at + 1]; ++r) sources[row++] = static_cast<int32_t>(r);
  }
  return sources;
}

// Copies row sources[r] of the input to row r of the output, or zeros if sources[r] is -1.
void gather_rows(const te_fl_tensor* input, const int32_t* sources, const te_fl_tensor* output) {
  if (input == nullptr || output == nullptr) return;
  const int64_t rows = output->dl.shape[0];
  const int64_t bytes = element_bytes(*output) * (output->dl.ndim == 1 ? 1 : output->dl.shape[1]);
  const char* from = backend::data<const char>(*input);
  char* to = backend::data<char>(*output);
  if (bytes == 0) return;
  ThreadPool::instance().parallel_for(
      rows, grain_of_rows(bytes, 4 * kGrain), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          if (sources[r] < 0) {
            std::memset(to + r * bytes, 0, static_cast<size_t>(bytes));
          } else {
            std::memcpy(to + r * bytes, from + sources[r] * bytes, static_cast<size_t>(bytes));
          }
        }
      });
}

void moe_sort_chunks_fwd(const te_fl_context&, const te_fl_moe_sort_chunks_fwd_args& a) {
  const int64_t rows = a.input->dl.shape[0];
  const std::vector<int32_t> sources = find_sources(a, rows);
  auto* map = backend::data<int32_t>(*a.row_id_map);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t source = sources[static_cast<size_t>(r)];
    map[source < 0 ? r : source] = source < 0 ? -1 : static_cast<int32_t>(r);
  }
  gather_rows(a.input, sources.data(), a.output);
  gather_rows(a.probs, sources.data(), a.permuted_probs);
}
Refusal refuse_chunks_fwd(const te_fl_moe_sort_chunks_fwd_args& a) {
  if (!all_dense(a.input, a.split_sizes, a.sorted_index, a.probs, a.output, a.permuted_probs) ||
      !dense(a.row_id_map)) {
    return kNotContiguous;
  }
  const bool meets = overlaps(*a.output, *a.input) ||
                     (a.probs != nullptr && overlaps(*a.permuted_probs, *a.probs));
  return meets ? kOverlaps : nullptr;
}

void moe_sort_chunks_bwd(const te_fl_context&, const te_fl_moe_sort_chunks_bwd_args& a) {
  const int64_t rows = a.grad_output->dl.shape[0];
  const auto* map = backend::data<const int32_t>(*a.row_id_map);
  for (int64_t i = 0; i < rows; ++i) {
    if (map[i] >= -1 && map[i] < rows) continue;
    backend::wrong_value("row_id_map", i, map[i], -1, rows, ", -1 or a permuted row");
  }
  gather_rows(a.grad_output, map, a.grad_input);
  gather_rows(a.grad_permuted_probs, map, a.grad_probs);
}
Refusal refuse_chunks_bwd(const te_fl_moe_sort_chunks_bwd_args& a) {
  if (!all_dense(a.grad_output, a.row_id_map, a.grad_permuted_probs, a.grad_input, a.grad_probs)) {
    return kNotContiguous;
  }
  const bool meets = overlaps(*a.grad_input, *a.grad_output) ||
                     (a.grad_probs != nullptr && overlaps(*a.grad_probs, *a.grad_permuted_probs));
  return meets ? kOverlaps : nullptr;
}

}  // namespace

void append_chunks(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_moe_sort_chunks_fwd_args, moe_sort_chunks_fwd, refuse_chunks_fwd>(
      "moe_sort_chunks_fwd"));
  ops.push_back(descriptor<te_fl_moe_sort_chunks_bwd_args, moe_sort_chunks_bwd, refuse_chunks_bwd>(
      "moe_sort_chunks_bwd"));
}

}  // namespace te_fl::cpu
