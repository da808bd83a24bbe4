// Tests for overlapping memory, exact if the tensors are small enough. Used under TE_FL_VALIDATE
// only.
#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "core/op/op_finder.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::core {
namespace {

constexpr int64_t kMaxEnumerated = 1 << 16;

int64_t width_of(const te_fl_tensor& t) {
  const int dtype = dtype_index(t.dl.dtype);
  return std::max(bits(static_cast<DType>(dtype)) / 8, 1);
}

// The offsets of all elements, in elements. Only for small tensors.
std::vector<int64_t> offsets_of(const te_fl_tensor& t) {
  std::vector<int64_t> offsets{0};
  for (int i = 0; i < t.dl.ndim; ++i) {
    std::vector<int64_t> next;
    next.reserve(offsets.size() * static_cast<size_t>(t.dl.shape[i]));
    for (const int64_t base : offsets) {
      for (int64_t k = 0; k < t.dl.shape[i]; ++k) next.push_back(base + k * t.dl.strides[i]);
    }
    offsets.swap(next);
  }
  return offsets;
}

// True if each stride, in ascending order, is larger than the range that the smaller strides cover.
// The elements then do not overlap.
bool strides_are_nested(const te_fl_tensor& t) {
  int64_t reach = 0, last = 0;
  for (int placed = 0; placed < t.dl.ndim;) {
    int64_t step = INT64_MAX, span = 0;  // the smallest stride not processed yet
    int same = 0;
    for (int i = 0; i < t.dl.ndim; ++i) {
      const int64_t stride = std::abs(t.dl.strides[i]);
      if (t.dl.shape[i] < 2 || stride <= last || stride > step) continue;
      same = stride == step ? same + 1 : 1;
      step = stride;
      span = stride * (t.dl.shape[i] - 1);
    }
    if (same == 0) return true;
    if (same > 1 || step <= reach) return false;
    reach += span;
    last = step;
    placed += same;
  }
  return true;
}

}  // namespace

ByteRange byte_range(const te_fl_tensor& t) noexcept {
  const char* first = first_byte(t);
  const int dtype = dtype_index(t.dl.dtype);
  if (is_compact(t)) return {first, first + bytes_for(static_cast<DType>(dtype), numel_of(t))};
  int64_t low = 0, high = 0;
  for (int i = 0; i < t.dl.ndim; ++i) {
    const int64_t reach = (t.dl.shape[i] - 1) * t.dl.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  return {first + low * width_of(t), first + (high + 1) * width_of(t)};
}

bool overlaps_itself(const te_fl_tensor& t) noexcept {
  if (numel_of(t) < 2 || is_compact(t) || strides_are_nested(t)) return false;
  if (numel_of(t) > kMaxEnumerated) return false;
  try {
    std::vector<int64_t> offsets = offsets_of(t);
    std::sort(offsets.begin(), offsets.end());
    return std::adjacent_find(offsets.begin(), offsets.end()) != offsets.end();
  } catch (...) {  // out of memory: undecided
    return false;
  }
}

bool overlap_partly(const te_fl_tensor& a, const te_fl_tensor& b,
                    bool same_start_allowed) noexcept {
  if (first_byte(a) == nullptr || first_byte(b) == nullptr) return false;
  const bool same_start = first_byte(a) == first_byte(b);
  if (same_start) return !same_start_allowed;
  const ByteRange x = byte_range(a), y = byte_range(b);
  if (x.end <= y.begin || y.end <= x.begin) return false;
  if (is_compact(a) && is_compact(b)) return true;
  // Interleaved views of one buffer (packed QKV) cover the same range without a common element.
  if (width_of(a) != width_of(b) || numel_of(a) + numel_of(b) > kMaxEnumerated) return false;
  try {
    std::vector<std::pair<const char*, int>> elements;
    for (const te_fl_tensor* t : {&a, &b}) {
      te_fl_tensor strided = *t;
      int64_t compact[kMaxRank];
      int64_t step = 1;
      for (int i = t->dl.ndim - 1; i >= 0; --i) compact[i] = step, step *= t->dl.shape[i];
      if (t->dl.strides == nullptr) strided.dl.strides = compact;
      for (const int64_t offset : offsets_of(strided)) {
        elements.emplace_back(first_byte(*t) + offset * width_of(*t), t == &a ? 0 : 1);
      }
    }
    std::sort(elements.begin(), elements.end());
    for (size_t i = 1; i < elements.size(); ++i) {
      const bool touch = elements[i].first - elements[i - 1].first < width_of(a);
      if (touch && elements[i].second != elements[i - 1].second) return true;
    }
    return false;
  } catch (...) {
    return false;
  }
}

}  // namespace te_fl::core
