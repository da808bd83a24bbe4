// The ops that reorder chunks of rows.
#include <cstring>
#include <limits>

#include "element.hpp"
#include "families.hpp"
#include "integers.hpp"
#include "te_fl/backend/values_in_memory.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::reference {
namespace {

using backend::invalid;
using backend::wrong_value;

// Copies a row between tensors of the same dtype with any strides.
void move_row(const te_fl_tensor& from, int64_t from_row, const te_fl_tensor& to, int64_t to_row) {
  const size_t bytes = static_cast<size_t>(to.dl.dtype.bits / 8);
  const int64_t cols = to.dl.ndim == 1 ? 1 : to.dl.shape[1];
  for (int64_t c = 0; c < cols; ++c) {
    char* const target = backend::data<char>(to) +
                         element_offset(to, to_row * cols + c) * static_cast<int64_t>(bytes);
    if (from_row < 0) {
      std::memset(target, 0, bytes);
      continue;
    }
    std::memcpy(target,
                backend::data<char>(from) +
                    element_offset(from, from_row * cols + c) * static_cast<int64_t>(bytes),
                bytes);
  }
}

void move_rows(const te_fl_tensor* from, const te_fl_tensor* to,
               const std::vector<int64_t>& sources) {
  if (from == nullptr || to == nullptr) return;
  for (size_t r = 0; r < sources.size(); ++r) {
    move_row(*from, sources[r], *to, static_cast<int64_t>(r));
  }
}

// A chunk: the index of its first input row, and its number of rows.
struct Chunk {
  int64_t first, rows;
};
std::vector<Chunk> ordered_chunks(const te_fl_moe_sort_chunks_fwd_args& a) {
  const int64_t rows = a.input->dl.shape[0];
  std::vector<Chunk> chunks;
  int64_t sum = 0;
  for (const int64_t size : integers(*a.split_sizes)) {
    backend::check_chunk(static_cast<int64_t>(chunks.size()), size, sum, rows);
    chunks.push_back({sum, size});
    sum += size;
  }
  std::vector<Chunk> ordered;
  std::vector<bool> taken(chunks.size());
  for (const int64_t i : integers(*a.sorted_index)) {
    const auto at = static_cast<int64_t>(ordered.size()),
               count = static_cast<int64_t>(taken.size());
    if (i < 0 || i >= count) wrong_value("sorted_index", at, i, 0, count, ", the chunks");
    if (taken[static_cast<size_t>(i)]) backend::chunk_twice(at, i);
    taken[static_cast<size_t>(i)] = true;
    ordered.push_back(chunks[static_cast<size_t>(i)]);
  }
  return ordered;
}

void moe_sort_chunks_fwd(const te_fl_context&, const te_fl_moe_sort_chunks_fwd_args& a) {
  const int64_t rows = a.input->dl.shape[0];
  const std::vector<Chunk> chunks = ordered_chunks(a);
  std::vector<int64_t> sources, map(static_cast<size_t>(rows), -1);
  for (const Chunk& c : chunks) {
    for (int64_t i = 0; i < c.rows; ++i) {
      map[static_cast<size_t>(c.first + i)] = static_cast<int64_t>(sources.size());
      sources.push_back(c.first + i);
    }
  }
  sources.resize(static_cast<size_t>(rows), -1);
  move_rows(a.input, a.output, sources);
  move_rows(a.probs, a.permuted_probs, sources);
  write_integers(*a.row_id_map, map);
}

void moe_sort_chunks_bwd(const te_fl_context&, const te_fl_moe_sort_chunks_bwd_args& a) {
  const int64_t rows = a.grad_output->dl.shape[0];
  const std::vector<int64_t> map = integers(*a.row_id_map);
  for (size_t i = 0; i < map.size(); ++i) {
    if (map[i] >= -1 && map[i] < rows) continue;
    wrong_value("row_id_map", static_cast<int64_t>(i), map[i], -1, rows, ", -1 or a permuted row");
  }
  move_rows(a.grad_output, a.grad_input, map);
  move_rows(a.grad_permuted_probs, a.grad_probs, map);
}

}  // namespace

void append_chunks(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(
      descriptor<te_fl_moe_sort_chunks_fwd_args, moe_sort_chunks_fwd>("moe_sort_chunks_fwd"));
  ops.push_back(
      descriptor<te_fl_moe_sort_chunks_bwd_args, moe_sort_chunks_bwd>("moe_sort_chunks_bwd"));
}

}  // namespace te_fl::reference
