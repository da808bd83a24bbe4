#pragma once

// Checks of values in memory, which te-fl does not read before it calls a backend, and their error
// messages. All throw INVALID_ARGUMENT, clean. Header-only.

#include <cstdint>
#include <limits>
#include <string>

#include "te_fl/backend.hpp"

namespace te_fl::backend {

// Throws the error for element `at` of tensor `name`, which must lie in [low, bound). `more` ends
// the message.
[[noreturn]] inline void wrong_value(const char* name, int64_t at, int64_t value, int64_t low,
                                     int64_t bound, const char* more) {
  invalid(std::string(name) + "[" + std::to_string(at) + "] is " + std::to_string(value) +
          "; it must lie in [" + std::to_string(low) + ", " + std::to_string(bound) + ")" + more);
}

// ---- moe_sort_chunks_fwd

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

// ---- moe_permute_by_mask_fwd

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

// ---- rotary embeddings

// Checks that a context-parallel rank's part of a sequence of cu_seqlens, of `length` positions,
// can be split into two chunks of equal length, as cp_size > 1 requires. `sequence` begins the
// message: "sequence 3 of cu_seqlens".
inline void check_chunks(int64_t length, int64_t cp_size, const std::string& sequence) {
  if (cp_size == 1 || length % 2 == 0) return;
  invalid(sequence + " has " + std::to_string(length) +
          " tokens on this rank, expected an even number: with cp_size > 1 a rank holds two chunks "
          "of equal length");
}

// Checks that `positions` rows of angles include the largest position that start_positions and
// cu_seqlens need (-1: they need none).
inline void check_angle_rows(const char* name, int64_t positions, int64_t largest) {
  if (largest < positions) return;
  invalid(std::string(name) + " has " + std::to_string(positions) + " positions, but position " +
          std::to_string(largest) + " is needed");
}

}  // namespace te_fl::backend
