// Ops that permute tokens by expert, pad groups of rows, and compute offsets from splits.
#include "te_fl/ops/moe.h"

#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "integers.hpp"
#include "quant_store.hpp"
#include "router_kernels.hpp"
#include "te_fl/backend/values_in_memory.hpp"

namespace te_fl::cpu {
namespace {

using backend::invalid;
using backend::wrong_value;

// ---- permutation

struct Range {
  int64_t low, high;  // smallest and largest value; undefined without values
};

Range checked_experts(const te_fl_tensor& indices, int64_t num_experts) {
  const Integers values(indices);
  const int64_t size = backend::numel(indices);
  const int64_t low = num_experts == 0 ? std::numeric_limits<int32_t>::min() : 0;
  const int64_t bound =
      num_experts == 0 ? int64_t{std::numeric_limits<int32_t>::max()} + 1 : num_experts;
  Range range{bound - 1, low};
  for (int64_t i = 0; i < size; ++i) {
    const int64_t v = values[i];
    if (v < low || v >= bound) wrong_value("indices", i, v, low, bound, ", the experts");
    range.low = std::min(range.low, v), range.high = std::max(range.high, v);
  }
  return range;
}

// Returns the (token, expert) pairs sorted by expert, then by position. Uses a counting sort unless
// there are far more experts than pairs.
std::vector<int32_t> sorted_pairs(const te_fl_tensor& indices, const Range& range) {
  const Integers experts(indices);
  const int64_t size = backend::numel(indices);
  std::vector<int32_t> order(static_cast<size_t>(size));
  if (size == 0) return order;
  if (range.high - range.low > 4 * size + 65536) {
    for (int64_t i = 0; i < size; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return experts[a] < experts[b]; });
    return order;
  }
  std::vector<int32_t> next(static_cast<size_t>(range.high - range.low) + 2, 0);
  for (int64_t i = 0; i < size; ++i) ++next[static_cast<size_t>(experts[i] - range.low) + 1];
  for (size_t e = 1; e < next.size(); ++e) next[e] += next[e - 1];
  for (int64_t i = 0; i < size; ++i) {
    int32_t& at = next[static_cast<size_t>(experts[i] - range.low)];
    order[static_cast<size_t>(at++)] = static_cast<int32_t>(i);
  }
  return order;
}

int64_t row_bytes_of(const te_fl_tensor& t) { return t.dl.shape[1] * element_bytes(t); }

void moe_permute_fwd(const te_fl_context&, const te_fl_moe_permute_fwd_args& a) {
  const int64_t tokens = a.indices->dl.shape[0], each = a.indices->dl.shape[1];
  const std::vector<int32_t> order =
      sorted_pairs(*a.indices, checked_experts(*a.indices, a.num_experts));
  const auto pairs = static_cast<int64_t>(order.size());
  const int64_t rows = a.output->dl.shape[0], bytes = row_bytes_of(*a.input);
  const char* input = backend::data<const char>(*a.input);
  char* output = backend::data<char>(*a.output);
  auto* map = backend::data<int32_t>(*a.row_id_map);
  ThreadPool::instance().parallel_for(
      std::max(rows, pairs), grain_of_rows(bytes, 4 * kGrain), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const int64_t pair = r < pairs ? order[static_cast<size_t>(r)] : -1;
          if (pair >= 0) {
            map[pair % each * tokens + pair / each] = r < rows ? static_cast<int32_t>(r) : -1;
          }
          if (r >= rows) continue;
          char* to = output + r * bytes;
          if (pair < 0) {
            std::memset(to, 0, static_cast<size_t>(bytes));
          } else {
            std::memcpy(to, input + pair / each * bytes, static_cast<size_t>(bytes));
          }
        }
      });
}
Refusal refuse_permute_fwd(const te_fl_moe_permute_fwd_args& a) {
  if (!all_dense(a.input, a.indices, a.output, a.row_id_map)) return kNotContiguous;
  return overlaps(*a.output, *a.input) ? kOverlaps : nullptr;
}

// Writes the row of each selected (token, expert) pair to row_id_map. Returns the index of the mask
// element [t, e] of each row; -1 for rows without a pair. Throws before it writes.
std::vector<int64_t> masked_rows(const te_fl_moe_permute_by_mask_fwd_args& a) {
  const int64_t tokens = a.routing_map->dl.shape[0], experts = a.routing_map->dl.shape[1];
  const int64_t rows = a.output->dl.shape[0];
  const auto* mask = backend::data<const uint8_t>(*a.routing_map);
  std::vector<int64_t> next(static_cast<size_t>(experts), 0),
      pair_of(static_cast<size_t>(rows), -1);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      next[static_cast<size_t>(e)] += mask[t * experts + e] != 0 ? 1 : 0;
    }
  }
  int64_t pairs = 0, before = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t pad = a.pad_offsets != nullptr ? Integers(*a.pad_offsets)[e] : 0;
    backend::check_pad_offset(e, pad, before);
    int64_t row = backend::first_masked_row(pad, pairs);
    const int64_t count = std::exchange(next[static_cast<size_t>(e)], row);
    before = pad, pairs += count;
    if (count == 0 || row <= rows - count) continue;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = t * experts + e;
      if (mask[at] == 0) continue;
      backend::check_masked_row(at, row, rows);
      ++row;  // after the check: incrementing the largest number would overflow
    }
  }
  auto* map = backend::data<int32_t>(*a.row_id_map);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t at = t * experts + e, row = mask[at] != 0 ? next[static_cast<size_t>(e)]++ : -1;
      map[e * tokens + t] = static_cast<int32_t>(row);
      if (row >= 0) pair_of[static_cast<size_t>(row)] = at;
    }
  }
  return pair_of;
}

void moe_permute_by_mask_fwd(const te_fl_context&, const te_fl_moe_permute_by_mask_fwd_args& a) {
  const int64_t experts = a.routing_map->dl.shape[1], rows = a.output->dl.shape[0];
  std::vector<int64_t> pair_of = masked_rows(a);
  // Copies row pair_of[r] / each of `from` to row r of `to`, or zeros if row r has no pair.
  const auto gather = [&](const te_fl_tensor& from, const te_fl_tensor& to, int64_t bytes,
                          int64_t each) {
    const char* input = backend::data<const char>(from);
    char* output = backend::data<char>(to);
    ThreadPool::instance().parallel_for(
        rows, grain_of_rows(bytes, 4 * kGrain), [&](int64_t begin, int64_t end) {
          for (int64_t r = begin; r < end; ++r) {
            const int64_t pair = pair_of[static_cast<size_t>(r)];
            if (pair < 0) {
              std::memset(output + r * bytes, 0, static_cast<size_t>(bytes));
            } else {
              std::memcpy(output + r * bytes, input + pair / each * bytes,
                          static_cast<size_t>(bytes));
            }
          }
        });
  };
  if (a.probs != nullptr) {
    gather(*a.probs, *a.permuted_probs, element_bytes(*a.probs), 1);
    const Loader load(*a.permuted_probs);
    Chunk probs;
    for (int64_t first = 0; first < rows;
         first += kChunk) {  // a row whose probability is 0 becomes zeros
      const int64_t n = std::min(kChunk, rows - first);
      load(first, n, probs.data);
      for (int64_t i = 0; i < n; ++i) {
        if (probs.data[i] == 0) pair_of[static_cast<size_t>(first + i)] = -1;
      }
    }
  }
  if (row_bytes_of(*a.input) > 0) gather(*a.input, *a.output, row_bytes_of(*a.input), experts);
}
Refusal refuse_permute_by_mask_fwd(const te_fl_moe_permute_by_mask_fwd_args& a) {
  if (!all_dense(a.input, a.routing_map, a.probs, a.pad_offsets, a.output, a.permuted_probs) ||
      !dense(a.row_id_map)) {
    return kNotContiguous;
  }
  const bool meets = overlaps(*a.output, *a.input) ||
                     (a.probs != nullptr && overlaps(*a.permuted_probs, *a.probs));
  return meets ? kOverlaps : nullptr;
}

void check_map(const te_fl_tensor& row_id_map, int64_t rows) {
  const auto* map = backend::data<const int32_t>(row_id_map);
  const int64_t size = backend::numel(row_id_map);
  for (int64_t i = 0; i < size; ++i) {
    if (map[i] >= -1 && map[i] < rows) continue;
    wrong_value("row_id_map", i, map[i], -1, rows, ", -1 or a permuted row");
  }
}

void sum_rows(const te_fl_tensor& input, const te_fl_tensor& row_id_map, const te_fl_tensor* probs,
              const te_fl_tensor& output) {
  const int64_t tokens = output.dl.shape[0], cols = output.dl.shape[1];
  const int64_t each = row_id_map.dl.shape[0], bytes = element_bytes(output);
  check_map(row_id_map, input.dl.shape[0]);
  const auto* map = backend::data<const int32_t>(row_id_map);
  const auto* p = probs != nullptr ? backend::data<const float>(*probs) : nullptr;
  const Loader load(input);
  char* out = backend::data<char>(output);
  const int dtype = dtype_of(output);
  ThreadPool::instance().parallel_for(
      tokens, grain_of_rows(cols * (each + 1)), [&](int64_t begin, int64_t end) {
        Chunk row, sum;
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t col = 0; col < cols; col += kChunk) {
            const int64_t n = std::min(kChunk, cols - col);
            std::fill_n(sum.data, padded(n), 0.0f);
            for (int64_t s = 0; s < each; ++s) {
              const int64_t r = map[s * tokens + t];
              if (r < 0) continue;
              load(r * cols + col, n, row.data);
              add_scaled_f32(row.data, p != nullptr ? p[t * each + s] : 1.0f, n, sum.data);
            }
            store_f32(dtype, sum.data, n, out + (t * cols + col) * bytes);
          }
        }
      });
}

void moe_permute_bwd(const te_fl_context&, const te_fl_moe_permute_bwd_args& a) {
  sum_rows(*a.grad_output, *a.row_id_map, a.probs, *a.grad_input);
}
Refusal refuse_permute_bwd(const te_fl_moe_permute_bwd_args& a) {
  if (!all_dense(a.grad_output, a.row_id_map, a.probs, a.grad_input)) return kNotContiguous;
  return overlaps(*a.grad_input, *a.grad_output) ? kOverlaps : nullptr;
}
void moe_unpermute_fwd(const te_fl_context&, const te_fl_moe_unpermute_fwd_args& a) {
  sum_rows(*a.input, *a.row_id_map, a.probs, *a.output);
}
Refusal refuse_unpermute_fwd(const te_fl_moe_unpermute_fwd_args& a) {
  if (!all_dense(a.input, a.row_id_map, a.probs, a.output)) return kNotContiguous;
  return overlaps(*a.output, *a.input) ? kOverlaps : nullptr;
}

// Returns 1 for each row that has a pair. Throws if two pairs have the same row.
std::vector<uint8_t> rows_with_a_pair(const te_fl_tensor& row_id_map, int64_t rows) {
  check_map(row_id_map, rows);
  const auto* map = backend::data<const int32_t>(row_id_map);
  std::vector<uint8_t> has(static_cast<size_t>(rows), 0);
  for (int64_t i = 0; i < backend::numel(row_id_map); ++i) {
    if (map[i] < 0) continue;
    uint8_t& mine = has[static_cast<size_t>(map[i])];
    if (mine != 0) {
      const int64_t first = std::find(map, map + i, map[i]) - map;
      invalid("row_id_map[" + std::to_string(first) + "] and row_id_map[" + std::to_string(i) +
              "] are both " + std::to_string(map[i]) + "; a row belongs to one pair");
    }
    mine = 1;
  }
  return has;
}

void moe_unpermute_bwd(const te_fl_context&, const te_fl_moe_unpermute_bwd_args& a) {
  const int64_t rows = a.grad_input->dl.shape[0], cols = a.grad_input->dl.shape[1];
  const int64_t each = a.row_id_map->dl.shape[0], tokens = a.row_id_map->dl.shape[1];
  const std::vector<uint8_t> has_pair = rows_with_a_pair(*a.row_id_map, rows);
  const auto* map = backend::data<const int32_t>(*a.row_id_map);
  const auto* p = a.probs != nullptr ? backend::data<const float>(*a.probs) : nullptr;
  auto* grad_probs = a.grad_probs != nullptr ? backend::data<float>(*a.grad_probs) : nullptr;
  const Loader load_grad(*a.grad_output), load_input(*a.fwd_input);
  const int dtype = dtype_of(*a.grad_input);
  const int64_t bytes = element_bytes(*a.grad_input);
  char* out = backend::data<char>(*a.grad_input);
  ThreadPool::instance().parallel_for(
      tokens, grain_of_rows(cols * (each + 1)), [&](int64_t begin, int64_t end) {
        Chunk grad, other;
        for (int64_t i = begin * each; i < end * each; ++i) {
          const int64_t t = i / each, r = map[i % each * tokens + t];
          double dot = 0.0;
          for (int64_t col = 0; r >= 0 && col < cols; col += kChunk) {
            const int64_t n = std::min(kChunk, cols - col);
            load_grad(t * cols + col, n, grad.data);
            if (grad_probs != nullptr) {
              load_input(r * cols + col, n, other.data);
              dot += dot_f32(grad.data, other.data, n);
            }
            if (p != nullptr) scale_f32(grad.data, n, p[i]);
            store_f32(dtype, grad.data, n, out + (r * cols + col) * bytes);
          }
          if (grad_probs != nullptr) grad_probs[i] = static_cast<float>(dot);
        }
      });
  for (int64_t r = 0; r < rows; ++r) {
    if (has_pair[static_cast<size_t>(r)] != 0) continue;
    std::memset(out + r * cols * bytes, 0, static_cast<size_t>(cols * bytes));
  }
}
Refusal refuse_unpermute_bwd(const te_fl_moe_unpermute_bwd_args& a) {
  if (!all_dense(a.grad_output, a.fwd_input, a.row_id_map, a.probs, a.grad_input, a.grad_probs)) {
    return kNotContiguous;
  }
  return overlaps(*a.grad_input, *a.grad_output) || overlaps(*a.grad_input, *a.fwd_input)
             ? kOverlaps
             : nullptr;
}

// ---- groups

// Row counts of each group before (`plain`) and after padding (`padded`).
struct PaddedGroups {
  const int64_t* plain;
  const int64_t* padded;
  int64_t count;
};

// Copies the rows of each group between the plain and the padded layout. If the padded layout is
// the output, the rest of each padded group becomes 0.
void copy_groups(const PaddedGroups& groups, const char* input, char* output, int64_t bytes,
                 bool pads) {
  int64_t plain = 0, padded = 0;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t rows = groups.plain[g];
    const char* from = input + (pads ? plain : padded) * bytes;
    char* to = output + (pads ? padded : plain) * bytes;
    ThreadPool::instance().parallel_for(rows * bytes, 4 * kGrain, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
    });
    if (pads && groups.padded[g] > rows) {
      std::memset(to + rows * bytes, 0, static_cast<size_t>((groups.padded[g] - rows) * bytes));
    }
    plain += rows, padded += groups.padded[g];
  }
}

void fused_multi_row_padding(const te_fl_context&, const te_fl_fused_multi_row_padding_args& a) {
  copy_groups({a.input_rows, a.padded_rows, a.input_rows_count},
              backend::data<const char>(*a.input), backend::data<char>(*a.output),
              row_bytes_of(*a.input), true);
}
void fused_multi_row_unpadding(const te_fl_context&,
                               const te_fl_fused_multi_row_unpadding_args& a) {
  copy_groups({a.unpadded_rows, a.input_rows, a.input_rows_count},
              backend::data<const char>(*a.input), backend::data<char>(*a.output),
              row_bytes_of(*a.input), false);
}
template <class Args>
Refusal refuse_groups(const Args& a) {
  if (!all_dense(a.input, a.output)) return kNotContiguous;
  return overlaps(*a.output, *a.input) ? kOverlaps : nullptr;
}

void splits_to_offsets(const te_fl_context&, const te_fl_splits_to_offsets_args& a) {
  const Integers splits(*a.splits);
  const int64_t size = backend::numel(*a.splits);
  for (int64_t i = 0; i < size; ++i) {
    if (splits[i] >= 0) continue;
    invalid("splits[" + std::to_string(i) + "] is " + std::to_string(splits[i]) +
            ", expected 0 or more");
  }
  const bool wide = dtype_of(*a.offsets) == TE_FL_I64;
  void* out = backend::data<void>(*a.offsets);
  uint64_t sum = 0;  // wraps around on overflow
  int64_t at = 0;
  const auto put = [&] {
    if (wide) {
      static_cast<int64_t*>(out)[at++] = static_cast<int64_t>(sum);
    } else {
      static_cast<int32_t*>(out)[at++] = static_cast<int32_t>(sum);
    }
  };
  if (a.leading_zero != 0) put();
  for (int64_t i = 0; i < size; ++i) {
    sum += static_cast<uint64_t>(splits[i]) * static_cast<uint64_t>(a.stride);
    put();
  }
}
Refusal refuse_offsets(const te_fl_splits_to_offsets_args& a) {
  if (!all_dense(a.splits, a.offsets)) return kNotContiguous;
  return overlaps(*a.offsets, *a.splits) ? kOverlaps : nullptr;
}

}  // namespace

void append_moe(std::vector<te_fl_op_desc>& ops) {
  using Padding = te_fl_fused_multi_row_padding_args;
  using Unpadding = te_fl_fused_multi_row_unpadding_args;
  ops.push_back(descriptor<te_fl_moe_permute_fwd_args, moe_permute_fwd, refuse_permute_fwd>(
      "moe_permute_fwd"));
  ops.push_back(descriptor<te_fl_moe_permute_by_mask_fwd_args, moe_permute_by_mask_fwd,
                           refuse_permute_by_mask_fwd>("moe_permute_by_mask_fwd"));
  ops.push_back(descriptor<te_fl_moe_permute_bwd_args, moe_permute_bwd, refuse_permute_bwd>(
      "moe_permute_bwd"));
  ops.push_back(descriptor<te_fl_moe_unpermute_fwd_args, moe_unpermute_fwd, refuse_unpermute_fwd>(
      "moe_unpermute_fwd"));
  ops.push_back(descriptor<te_fl_moe_unpermute_bwd_args, moe_unpermute_bwd, refuse_unpermute_bwd>(
      "moe_unpermute_bwd"));
  ops.push_back(descriptor<Padding, fused_multi_row_padding, refuse_groups<Padding>>(
      "fused_multi_row_padding"));
  ops.push_back(descriptor<Unpadding, fused_multi_row_unpadding, refuse_groups<Unpadding>>(
      "fused_multi_row_unpadding"));
  ops.push_back(descriptor<te_fl_splits_to_offsets_args, splits_to_offsets, refuse_offsets>(
      "splits_to_offsets"));
}

}  // namespace te_fl::cpu
