// Tests whether tensors share memory. For supports(): reads metadata only.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "te_fl/backend/refusal.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::cuda {

using backend::all_dense;
using backend::dense;
using backend::Extent;
using backend::extent_of;
using backend::overlaps;
using backend::overlaps_askew;

// True if any output shares memory with any input. Long lists are sorted, because comparing all
// pairs would take longer than the call.
inline bool any_overlap(const te_fl_tensor* const* outputs, int64_t output_count,
                        const te_fl_tensor* const* inputs, int64_t input_count) {
  if (output_count * input_count <= 256) {
    for (int64_t i = 0; i < output_count; ++i) {
      for (int64_t j = 0; j < input_count; ++j) {
        if (overlaps(*outputs[i], *inputs[j])) return true;
      }
    }
    return false;
  }
  std::vector<Extent> read;
  read.reserve(static_cast<size_t>(input_count));
  for (int64_t j = 0; j < input_count; ++j) {
    const Extent e = extent_of(backend::data<const void>(*inputs[j]), *inputs[j]);
    if (e.begin < e.end) read.push_back(e);
  }
  std::sort(read.begin(), read.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  // Makes each end the maximum of all ends so far, so that an early extent that reaches far is
  // found too.
  for (size_t j = 1; j < read.size(); ++j) read[j].end = std::max(read[j].end, read[j - 1].end);
  const auto is_read = [&read](const Extent& e) {
    if (e.begin >= e.end) return false;
    const auto after =
        std::lower_bound(read.begin(), read.end(), e.end,
                         [](const Extent& r, const char* end) { return r.begin < end; });
    return after != read.begin() && std::prev(after)->end > e.begin;
  };
  for (int64_t i = 0; i < output_count; ++i) {
    const te_fl_tensor& t = *outputs[i];
    if (is_read(extent_of(backend::data<const void>(t), t))) return true;
    if (t.quant != nullptr && is_read(extent_of(t.quant->columnwise_data, t))) return true;
  }
  return false;
}

inline constexpr const char* kNotContiguous = "reads compact tensors only";
inline constexpr const char* kOverlaps =
    "the output shares memory with an input otherwise than element by element";

}  // namespace te_fl::cuda
