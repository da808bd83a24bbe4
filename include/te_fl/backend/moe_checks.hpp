#pragma once

// Checks for backends with mixture-of-experts ops. They check extents and scalars of a call, as far
// as op schemas cannot express the rules, and make error messages for values out of range. All
// throw INVALID_ARGUMENT, clean, and read metadata only. Header-only.

#include <cstdint>
#include <limits>
#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::backend {

// Checks that there are fewer than 2^31 pairs of a token and an expert, because row_id_map numbers
// the pairs with 32 bits. `each` is the number of experts per token.
inline void check_pairs(int64_t tokens, int64_t each) {
  if (each == 0 || tokens <= std::numeric_limits<int32_t>::max() / each) return;
  invalid(std::to_string(tokens) + " tokens of " + std::to_string(each) +
          " experts each are 2^31 rows or more, which row_id_map cannot number; split the tokens");
}

[[noreturn]] inline void wrong_value(const char* name, int64_t at, int64_t value, int64_t low,
                                     int64_t bound, const char* more) {
  invalid(std::string(name) + "[" + std::to_string(at) + "] is " + std::to_string(value) +
          "; it must lie in [" + std::to_string(low) + ", " + std::to_string(bound) + ")" + more);
}

// Checks the size of chunk i: at least 0, and with the `before` rows of earlier chunks at most
// `rows`.
inline void check_chunk(int64_t i, int64_t size, int64_t before, int64_t rows) {
  if (size >= 0 && size <= rows - before) return;
  invalid("split_sizes[" + std::to_string(i) + "] is " + std::to_string(size) +
          "; it is 0 or more, and the " + std::to_string(rows) + " rows have " +
          std::to_string(rows - before) + " left for it");
}
[[noreturn]] inline void chunk_twice(int64_t at, int64_t chunk) {
  invalid("sorted_index[" + std::to_string(at) + "] is " + std::to_string(chunk) +
          ", as an earlier element is; each chunk is named once");
}
// Checks that 32 bits suffice for row numbers.
inline void check_chunk_rows(int64_t rows, const char* tensor = "input") {
  if (rows <= std::numeric_limits<int32_t>::max()) return;
  invalid(std::string("the ") + tensor + " has " + std::to_string(rows) +
          " rows, 2^31 or more, which row_id_map cannot number; split the rows");
}

// Checks that pad_offsets do not decrease. `value` is the offset of expert `at`, and `before` is
// the offset of the previous expert, or 0 for expert 0.
inline void check_pad_offset(int64_t at, int64_t value, int64_t before) {
  if (value >= before) return;
  invalid("pad_offsets[" + std::to_string(at) + "] is " + std::to_string(value) + ", expected " +
          std::to_string(before) + " or more: the rows left out before an expert, in all");
}
// Returns the first output row of an expert, after `pairs` pairs of earlier experts and `pad` rows
// of padding. If the sum overflows, returns the largest integer, which is not a valid row.
inline int64_t first_masked_row(int64_t pad, int64_t pairs) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return pad > kMost - pairs ? kMost : pad + pairs;
}
// Checks the output row of a pair. `at` is the index of the pair's element in routing_map.
inline void check_masked_row(int64_t at, int64_t row, int64_t rows) {
  if (row < rows) return;
  invalid("routing_map[" + std::to_string(at) + "] has row " + std::to_string(row) +
          ", but the output has " + std::to_string(rows) +
          " rows; give it one for each pair and for what pad_offsets leaves out");
}

// Row counts of each group before (`plain`) and after padding (`padded`).
struct PaddedGroups {
  const int64_t* plain;
  const int64_t* padded;
  int64_t count;
};
inline void check_groups(const PaddedGroups& groups, int64_t plain_rows, int64_t padded_rows) {
  int64_t plain = 0, padded = 0;
  for (int64_t i = 0; i < groups.count; ++i) {
    if (groups.plain[i] > groups.padded[i]) {
      invalid("group " + std::to_string(i) + " has " + std::to_string(groups.plain[i]) +
              " rows and " + std::to_string(groups.padded[i]) +
              " with padding, expected no fewer with padding");
    }
    plain += groups.plain[i], padded += groups.padded[i];
    if (padded > padded_rows) break;  // checked in the loop, before the sums can overflow
  }
  if (plain == plain_rows && padded == padded_rows) return;
  invalid("the groups have " + std::to_string(plain) + " rows and " + std::to_string(padded) +
          " with padding, but the tensors have " + std::to_string(plain_rows) + " and " +
          std::to_string(padded_rows));
}
inline PaddedGroups groups_of(const te_fl_fused_multi_row_padding_args& a) {
  if (a.input_rows_count != a.padded_rows_count) {
    invalid("input_rows has " + std::to_string(a.input_rows_count) + " groups, padded_rows " +
            std::to_string(a.padded_rows_count) + "; expected as many");
  }
  return {a.input_rows, a.padded_rows, a.input_rows_count};
}
inline PaddedGroups groups_of(const te_fl_fused_multi_row_unpadding_args& a) {
  if (a.input_rows_count != a.unpadded_rows_count) {
    invalid("input_rows has " + std::to_string(a.input_rows_count) + " groups, unpadded_rows " +
            std::to_string(a.unpadded_rows_count) + "; expected as many");
  }
  return {a.unpadded_rows, a.input_rows, a.input_rows_count};
}

// Checks the last extent of an optional tensor.
inline void check_last(const char* name, const te_fl_tensor* t, int64_t want, const char* rule) {
  if (t == nullptr || t->dl.shape[t->dl.ndim - 1] == want) return;
  invalid(std::string(name) + " has shape " + shape_text(*t) + ", expected " +
          std::to_string(want) + " in the last dimension: " + rule);
}

inline void check_topk(int64_t topk, int64_t experts) {
  if (topk <= experts) return;
  invalid("topk is " + std::to_string(topk) + ", but there are " + std::to_string(experts) +
          " experts");
}

inline void check_router(const te_fl_fused_topk_with_score_function_fwd_args& a, int64_t experts) {
  check_topk(a.topk, experts);
  check_last("routing_bits", a.routing_bits, (experts + 7) / 8, "a bit for each expert");
  check_last("topk_indices", a.topk_indices, a.topk, "topk");
  constexpr int64_t kMostOf16Bits = int64_t{std::numeric_limits<int16_t>::max()} + 1;
  if (a.topk_indices != nullptr && a.topk_indices->dl.dtype.bits == 16 && experts > kMostOf16Bits) {
    invalid("topk_indices is i16, which numbers " + std::to_string(kMostOf16Bits) +
            " experts, and there are " + std::to_string(experts) + "; give i32 or i64");
  }
  if (a.num_groups == 0) return;
  if (experts % a.num_groups != 0) {
    invalid("num_groups is " + std::to_string(a.num_groups) + ", which does not divide the " +
            std::to_string(experts) + " experts");
  }
  if (a.topk > a.group_topk * (experts / a.num_groups)) {
    invalid("topk is " + std::to_string(a.topk) + ", but the " + std::to_string(a.group_topk) +
            " chosen groups have " + std::to_string(a.group_topk * (experts / a.num_groups)) +
            " experts");
  }
}

inline void check_router(const te_fl_fused_topk_with_score_function_bwd_args& a, int64_t experts) {
  if (a.routing_map == nullptr && a.routing_bits == nullptr && a.topk_indices == nullptr) {
    invalid(
        "no argument says which experts were chosen; give routing_map, routing_bits or "
        "topk_indices");
  }
  check_topk(a.topk, experts);
  check_last("routing_bits", a.routing_bits, (experts + 7) / 8, "a bit for each expert");
  check_last("topk_indices", a.topk_indices, a.topk, "topk");
}

inline void check_router(const te_fl_fused_score_for_moe_aux_loss_fwd_args& a, int64_t experts) {
  check_topk(a.topk, experts);
  check_last("routing_bits", a.routing_bits, (experts + 7) / 8, "a bit for each expert");
}

inline void check_one_element(const char* name, const te_fl_tensor* t) {
  if (t == nullptr || numel(*t) == 1) return;
  invalid(std::string(name) + " has shape " + shape_text(*t) + ", expected one element");
}

inline void check_aux_loss(const te_fl_fused_moe_aux_loss_fwd_args& a) {
  check_one_element("aux_loss", a.aux_loss);
  check_one_element("total_num_tokens_tensor", a.total_num_tokens_tensor);
  if (a.total_num_tokens_tensor == nullptr && a.total_num_tokens == 0) {
    invalid("total_num_tokens is 0, expected at least 1, or total_num_tokens_tensor");
  }
}

}  // namespace te_fl::backend
