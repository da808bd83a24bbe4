// The rules for the start positions and sequence lengths of a RoPE call. Plain C++: used by the
// kernel that checks them, and by tests that run without a GPU.
#pragma once

#include <cstdint>

#include "common/value_errors.hpp"

namespace te_fl::cuda {

// Returns the last position that this rank holds of a sequence with `length` tokens on this rank,
// relative to the sequence's start; -1 if the sequence is empty. A rank holds the chunks cp_rank
// and 2 cp_size - 1 - cp_rank of 2 cp_size.
constexpr int64_t last_position(int64_t length, int64_t cp_size, int64_t cp_rank) noexcept {
  if (length == 0 || cp_size == 1) return length - 1;
  const int64_t chunk = length / 2, first = cp_rank * chunk + chunk - 1;
  const int64_t second = (2 * cp_size - 1 - cp_rank) * chunk + chunk - 1;
  return first > second ? first : second;
}

// A call's start positions and sequence lengths, and their limits.
struct PositionRules {
  const int32_t* starts = nullptr;  // start positions by sequence; NULL: 0
  const int32_t* cu = nullptr;      // thd: cumulative global lengths [batch + 1]; else NULL
  int64_t batch = 0;
  int64_t length = 0;  // without `cu`: tokens of each sequence on this rank
  int64_t tokens = 0;  // with `cu`: tokens of the input on this rank
  int64_t cp_size = 1, cp_rank = 0;
  // Names of the angle tables, and their numbers of positions. NULL: there is no second table.
  const char* tables[2] = {nullptr, nullptr};
  int64_t rows[2] = {0, 0};
};

// True if sequence b breaks a rule. Then `error` describes it, without the op.
constexpr bool find_position_error(const PositionRules& r, int64_t b, ValueError& error) noexcept {
  error.at = b;
  const int64_t start = r.starts != nullptr ? r.starts[b] : 0;
  if (start < 0) {
    error.rule = ValueRule::kStart, error.value = start;
    return true;
  }
  int64_t length = r.length;
  if (r.cu != nullptr) {
    const int64_t begin = r.cu[b], end = r.cu[b + 1], whole = r.tokens * r.cp_size;
    error.value = begin, error.more = end;
    if (begin < 0 || end < begin || end > whole) {
      error.rule = ValueRule::kSpan, error.bound = whole;
      return true;
    }
    if (begin % r.cp_size != 0 || end % r.cp_size != 0) {
      error.rule = ValueRule::kSpanMultiple, error.bound = r.cp_size;
      return true;
    }
    length = (end - begin) / r.cp_size;
    if (r.cp_size > 1 && length % 2 != 0) {
      error.rule = ValueRule::kOddLength, error.value = length;
      return true;
    }
  }
  if (length == 0) return false;
  const int64_t last = start + last_position(length, r.cp_size, r.cp_rank);
  for (int i = 0; i < 2 && r.tables[i] != nullptr; ++i) {
    if (last < r.rows[i]) continue;
    error.rule = ValueRule::kPosition, error.argument = r.tables[i];
    error.value = last, error.bound = r.rows[i];
    return true;
  }
  return false;
}

}  // namespace te_fl::cuda
