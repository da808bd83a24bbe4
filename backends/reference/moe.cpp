// Ops that permute tokens by expert, pad groups of rows, and compute offsets from splits.
#include "te_fl/ops/moe.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "element.hpp"
#include "families.hpp"
#include "integers.hpp"
#include "te_fl/backend/values_in_memory.hpp"

namespace te_fl::reference {
namespace {

using backend::invalid;
using backend::wrong_value;

// ---- rows that are copied without conversion

struct Rows {
  char* data;
  int64_t count, cols, row_bytes, col_bytes;
  size_t element;

  explicit Rows(const te_fl_tensor& t)
      : data(backend::data<char>(t)),
        count(t.dl.shape[0]),
        cols(t.dl.shape[1]),
        row_bytes(backend::stride(t, 0) * (t.dl.dtype.bits / 8)),
        col_bytes(backend::stride(t, 1) * (t.dl.dtype.bits / 8)),
        element(t.dl.dtype.bits / 8) {}
  char* at(int64_t row, int64_t col) const { return data + row * row_bytes + col * col_bytes; }
};

void copy_row(const Rows& from, int64_t from_row, const Rows& to, int64_t to_row) {
  for (int64_t c = 0; c < to.cols; ++c) {
    std::memcpy(to.at(to_row, c), from.at(from_row, c), to.element);
  }
}
void zero_row(const Rows& to, int64_t row) {
  for (int64_t c = 0; c < to.cols; ++c) std::memset(to.at(row, c), 0, to.element);
}

// ---- permutation

std::vector<int64_t> checked_experts(const te_fl_tensor& indices, int64_t num_experts) {
  std::vector<int64_t> values = integers(indices);
  const int64_t low = num_experts == 0 ? std::numeric_limits<int32_t>::min() : 0;
  const int64_t bound =
      num_experts == 0 ? int64_t{std::numeric_limits<int32_t>::max()} + 1 : num_experts;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= low && values[i] < bound) continue;
    wrong_value("indices", static_cast<int64_t>(i), values[i], low, bound, ", the experts");
  }
  return values;
}

void moe_permute_fwd(const te_fl_context&, const te_fl_moe_permute_fwd_args& a) {
  const int64_t tokens = a.indices->dl.shape[0], each = a.indices->dl.shape[1];
  const std::vector<int64_t> experts = checked_experts(*a.indices, a.num_experts);
  std::vector<int64_t> order(experts.size()), map(experts.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
    return experts[static_cast<size_t>(x)] < experts[static_cast<size_t>(y)];
  });
  const Rows input(*a.input), output(*a.output);
  for (int64_t r = 0; r < static_cast<int64_t>(order.size()); ++r) {
    const int64_t pair = order[static_cast<size_t>(r)], token = pair / each;
    map[static_cast<size_t>(pair % each * tokens + token)] = r < output.count ? r : -1;
    if (r < output.count) copy_row(input, token, output, r);
  }
  for (auto r = static_cast<int64_t>(order.size()); r < output.count; ++r) zero_row(output, r);
  write_integers(*a.row_id_map, map);
}

// Returns the row of each (expert, token) pair that the mask selects, at index [e, t]; -1 for other
// pairs.
std::vector<int64_t> masked_rows(const te_fl_moe_permute_by_mask_fwd_args& a) {
  const int64_t tokens = a.routing_map->dl.shape[0], experts = a.routing_map->dl.shape[1];
  const int64_t rows = a.output->dl.shape[0];
  const std::vector<int64_t> mask = integers(*a.routing_map);
  const std::vector<int64_t> pads = a.pad_offsets != nullptr
                                        ? integers(*a.pad_offsets)
                                        : std::vector<int64_t>(static_cast<size_t>(experts), 0);
  std::vector<int64_t> map(mask.size(), -1);
  int64_t pairs = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t pad = pads[static_cast<size_t>(e)];
    backend::check_pad_offset(e, pad, e > 0 ? pads[static_cast<size_t>(e - 1)] : 0);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = t * experts + e;
      if (mask[static_cast<size_t>(at)] == 0) continue;
      const int64_t row = backend::first_masked_row(pad, pairs++);
      backend::check_masked_row(at, row, rows);
      map[static_cast<size_t>(e * tokens + t)] = row;
    }
  }
  return map;
}

void moe_permute_by_mask_fwd(const te_fl_context&, const te_fl_moe_permute_by_mask_fwd_args& a) {
  const int64_t tokens = a.routing_map->dl.shape[0], experts = a.routing_map->dl.shape[1];
  const std::vector<int64_t> map = masked_rows(a);
  const Rows input(*a.input), output(*a.output);
  for (int64_t r = 0; r < output.count; ++r) zero_row(output, r);
  std::vector<float> numbers;
  if (a.probs != nullptr) numbers.assign(static_cast<size_t>(output.count), 0.0f);
  const std::vector<float> probs = a.probs != nullptr ? Reader(*a.probs).all() : numbers;
  for (size_t i = 0; i < map.size(); ++i) {
    if (map[i] < 0) continue;
    const auto at = static_cast<int64_t>(i), t = at % tokens, e = at / tokens;
    const float prob = a.probs != nullptr ? probs[static_cast<size_t>(t * experts + e)] : 1.0f;
    if (prob != 0) copy_row(input, t, output, map[i]);
    if (a.probs != nullptr) numbers[static_cast<size_t>(map[i])] = prob;
  }
  if (a.probs != nullptr) Writer(*a.permuted_probs).write(0, output.count, numbers.data());
  write_integers(*a.row_id_map, map);
}

// Returns the values of row_id_map. Throws unless all are in [-1, rows).
std::vector<int64_t> checked_map(const te_fl_tensor& row_id_map, int64_t rows) {
  std::vector<int64_t> map = integers(row_id_map);
  for (size_t i = 0; i < map.size(); ++i) {
    if (map[i] >= -1 && map[i] < rows) continue;
    wrong_value("row_id_map", static_cast<int64_t>(i), map[i], -1, rows, ", -1 or a permuted row");
  }
  return map;
}

void sum_rows(const te_fl_tensor& input, const te_fl_tensor& row_id_map, const te_fl_tensor* probs,
              const te_fl_tensor& output) {
  const int64_t tokens = output.dl.shape[0], cols = output.dl.shape[1];
  const int64_t each = row_id_map.dl.shape[0];
  const std::vector<int64_t> map = checked_map(row_id_map, input.dl.shape[0]);
  const Reader rows(input);
  const std::vector<float> p = probs != nullptr ? Reader(*probs).all() : std::vector<float>();
  std::vector<double> sums(tokens == 0 ? 0 : static_cast<size_t>(cols));
  std::vector<float> row(sums.size());
  for (int64_t t = 0; t < tokens; ++t) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t s = 0; s < each; ++s) {
      const int64_t r = map[static_cast<size_t>(s * tokens + t)];
      if (r < 0) continue;
      const double factor = p.empty() ? 1.0 : double{p[static_cast<size_t>(t * each + s)]};
      rows.read(r * cols, cols, row.data());
      for (size_t c = 0; c < row.size(); ++c) sums[c] += factor * row[c];
    }
    row.assign(sums.begin(), sums.end());
    Writer(output).write(t * cols, cols, row.data());
  }
}

void moe_permute_bwd(const te_fl_context&, const te_fl_moe_permute_bwd_args& a) {
  sum_rows(*a.grad_output, *a.row_id_map, a.probs, *a.grad_input);
}

void moe_unpermute_fwd(const te_fl_context&, const te_fl_moe_unpermute_fwd_args& a) {
  sum_rows(*a.input, *a.row_id_map, a.probs, *a.output);
}

void moe_unpermute_bwd(const te_fl_context&, const te_fl_moe_unpermute_bwd_args& a) {
  const int64_t rows = a.grad_input->dl.shape[0], cols = a.grad_input->dl.shape[1];
  const int64_t each = a.row_id_map->dl.shape[0], tokens = a.row_id_map->dl.shape[1];
  const std::vector<int64_t> map = checked_map(*a.row_id_map, rows);
  // The index in the map, [s, t], of each row.
  std::vector<int64_t> pair_of(static_cast<size_t>(rows), -1);
  for (size_t i = 0; i < map.size(); ++i) {
    if (map[i] < 0) continue;
    int64_t& pair = pair_of[static_cast<size_t>(map[i])];
    if (pair >= 0) {
      invalid("row_id_map[" + std::to_string(pair) + "] and row_id_map[" + std::to_string(i) +
              "] are both " + std::to_string(map[i]) + "; a row belongs to one pair");
    }
    pair = static_cast<int64_t>(i);
  }
  const Reader grads(*a.grad_output), inputs(*a.fwd_input);
  const std::vector<float> p = a.probs != nullptr ? Reader(*a.probs).all() : std::vector<float>();
  std::vector<float> grad(rows == 0 ? 0 : static_cast<size_t>(cols)), input(grad.size());
  std::vector<float> grad_probs(map.size(), 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t pair = pair_of[static_cast<size_t>(r)];
    if (pair < 0) {
      std::fill(grad.begin(), grad.end(), 0.0f);
    } else {
      const int64_t s = pair / tokens, t = pair % tokens;
      const auto at = static_cast<size_t>(t * each + s);
      grads.read(t * cols, cols, grad.data());
      inputs.read(r * cols, cols, input.data());
      double dot = 0.0;
      for (size_t c = 0; c < grad.size(); ++c) dot += double{grad[c]} * input[c];
      grad_probs[at] = static_cast<float>(dot);
      if (!p.empty()) {
        for (float& g : grad) g *= p[at];
      }
    }
    Writer(*a.grad_input).write(r * cols, cols, grad.data());
  }
  if (a.grad_probs == nullptr) return;
  Writer(*a.grad_probs).write(0, static_cast<int64_t>(grad_probs.size()), grad_probs.data());
}

// ---- groups

void fused_multi_row_padding(const te_fl_context&, const te_fl_fused_multi_row_padding_args& a) {
  const Rows input(*a.input), output(*a.output);
  int64_t from = 0, to = 0;
  for (int64_t g = 0; g < a.input_rows_count; ++g) {
    for (int64_t i = 0; i < a.padded_rows[g]; ++i, ++to) {
      if (i < a.input_rows[g]) {
        copy_row(input, from++, output, to);
      } else {
        zero_row(output, to);
      }
    }
  }
}

void fused_multi_row_unpadding(const te_fl_context&,
                               const te_fl_fused_multi_row_unpadding_args& a) {
  const Rows input(*a.input), output(*a.output);
  int64_t from = 0, to = 0;
  for (int64_t g = 0; g < a.input_rows_count; ++g) {
    for (int64_t i = 0; i < a.unpadded_rows[g]; ++i) copy_row(input, from + i, output, to++);
    from += a.input_rows[g];
  }
}

void splits_to_offsets(const te_fl_context&, const te_fl_splits_to_offsets_args& a) {
  const std::vector<int64_t> splits = integers(*a.splits);
  std::vector<int64_t> offsets;
  uint64_t sum = 0;  // wraps around on overflow
  if (a.leading_zero != 0) offsets.push_back(0);
  for (size_t i = 0; i < splits.size(); ++i) {
    if (splits[i] < 0) {
      invalid("splits[" + std::to_string(i) + "] is " + std::to_string(splits[i]) +
              ", expected 0 or more");
    }
    sum += static_cast<uint64_t>(splits[i]) * static_cast<uint64_t>(a.stride);
    offsets.push_back(static_cast<int64_t>(sum));
  }
  write_integers(*a.offsets, offsets);
}

}  // namespace

void append_moe(std::vector<te_fl_op_desc>& ops) {
  using Padding = te_fl_fused_multi_row_padding_args;
  using Unpadding = te_fl_fused_multi_row_unpadding_args;
  ops.push_back(descriptor<te_fl_moe_permute_fwd_args, moe_permute_fwd>("moe_permute_fwd"));
  ops.push_back(descriptor<te_fl_moe_permute_by_mask_fwd_args, moe_permute_by_mask_fwd>(
      "moe_permute_by_mask_fwd"));
  ops.push_back(descriptor<te_fl_moe_permute_bwd_args, moe_permute_bwd>("moe_permute_bwd"));
  ops.push_back(descriptor<te_fl_moe_unpermute_fwd_args, moe_unpermute_fwd>("moe_unpermute_fwd"));
  ops.push_back(descriptor<te_fl_moe_unpermute_bwd_args, moe_unpermute_bwd>("moe_unpermute_bwd"));
  ops.push_back(descriptor<Padding, fused_multi_row_padding>("fused_multi_row_padding"));
  ops.push_back(descriptor<Unpadding, fused_multi_row_unpadding>("fused_multi_row_unpadding"));
  ops.push_back(descriptor<te_fl_splits_to_offsets_args, splits_to_offsets>("splits_to_offsets"));
}

}  // namespace te_fl::reference
