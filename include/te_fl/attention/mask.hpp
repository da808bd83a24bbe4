// MaskRule: the keys that a query sees. te_fl/attention.hpp describes the semantics.
#pragma once

#include <cstdint>

#include "te_fl/ops/attention.h"

namespace te_fl::backend {

// A half-open range of keys or queries.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  constexpr bool empty() const noexcept { return begin >= end; }
};

// The rule that decides which keys of its sequence a query may see, except for the arbitrary mask
// tensor. constexpr, so that device code can use it.
struct MaskRule {
  bool causal = false;
  // aligns the diagonal with the bottom-right corner; otherwise the top-left
  bool bottom_right = false;
  bool padding = false;    // the mask type is one of padding_*
  bool arbitrary = false;  // attn_mask masks elements as well
  int64_t window_left = -1;
  int64_t window_right = -1;

  constexpr int64_t diagonal(int64_t q_len, int64_t kv_len) const noexcept {
    return bottom_right ? kv_len - q_len : 0;
  }
  // The keys that query i sees. Empty for i >= q_len.
  constexpr KeyRange keys(int64_t i, int64_t q_len, int64_t kv_len) const noexcept {
    if (i >= q_len) return {};
    const int64_t centre = i + diagonal(q_len, kv_len);
    KeyRange r{0, kv_len};
    if (window_left >= 0 && centre - window_left > 0) r.begin = centre - window_left;
    if (window_right >= 0 && centre + window_right + 1 < r.end) r.end = centre + window_right + 1;
    if (causal && centre + 1 < r.end) r.end = centre + 1;
    if (r.end < r.begin) r.end = r.begin;
    return r;
  }
  // The queries that see key j: the inverse of keys(). Empty for j >= kv_len.
  constexpr KeyRange queries(int64_t j, int64_t q_len, int64_t kv_len) const noexcept {
    if (j >= kv_len) return {};
    const int64_t centre = j - diagonal(q_len, kv_len);
    KeyRange r{0, q_len};
    if (causal && centre > r.begin) r.begin = centre;
    if (window_right >= 0 && centre - window_right > r.begin) r.begin = centre - window_right;
    if (window_left >= 0 && centre + window_left + 1 < r.end) r.end = centre + window_left + 1;
    if (r.end < 0) r.end = 0;
    if (r.end < r.begin) r.begin = r.end;
    return r;
  }
  constexpr bool masked(int64_t i, int64_t j, int64_t q_len, int64_t kv_len) const noexcept {
    const KeyRange r = keys(i, q_len, kv_len);
    return j < r.begin || j >= r.end;
  }
};

// The mask rule of a call. Windows are limited to 2^61 so that sums do not overflow.
constexpr MaskRule mask_rule(int32_t mask_type, int64_t window_left,
                             int64_t window_right) noexcept {
  constexpr int64_t kFar = int64_t{1} << 61;
  MaskRule r;
  const bool top_left =
      mask_type == TE_FL_MASK_TYPE_CAUSAL || mask_type == TE_FL_MASK_TYPE_PADDING_CAUSAL;
  r.bottom_right = !top_left;
  r.causal = top_left || mask_type == TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT ||
             mask_type == TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
  r.padding = mask_type == TE_FL_MASK_TYPE_PADDING || mask_type == TE_FL_MASK_TYPE_PADDING_CAUSAL ||
              mask_type == TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
  r.arbitrary = mask_type == TE_FL_MASK_TYPE_ARBITRARY;
  r.window_left = window_left > kFar ? kFar : window_left;
  r.window_right = window_right > kFar ? kFar : window_right;
  return r;
}

// ALiBi adds the slope times this number to a score.
constexpr int64_t alibi_distance(int64_t i, int64_t j, int64_t q_len, int64_t kv_len) noexcept {
  return j - i - (kv_len - q_len);
}

}  // namespace te_fl::backend
