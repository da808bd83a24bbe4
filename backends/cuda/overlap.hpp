// Which memory a compact tensor takes; for supports(), metadata only.
#pragma once

#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::cuda {

inline bool dense(const te_fl_tensor* t) noexcept {
  return t == nullptr || backend::is_contiguous(*t);
}
template <class... T>
bool all_dense(const T*... tensors) noexcept {
  return (dense(tensors) && ...);
}

struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool meets(const Extent& other) const noexcept { return begin < other.end && other.begin < end; }
};
inline Extent extent_of(const void* data, const te_fl_tensor& t) noexcept {
  if (data == nullptr) return {};
  const auto* begin = static_cast<const char*>(data);
  return {begin, begin + (backend::numel(t) * t.dl.dtype.bits + 7) / 8};
}
inline bool overlaps(const te_fl_tensor& a, const te_fl_tensor& b) noexcept {
  const Extent a_rows = extent_of(backend::data<const void>(a), a);
  const Extent b_rows = extent_of(backend::data<const void>(b), b);
  if (a_rows.meets(b_rows)) return true;
  if (a.quant == nullptr) return false;
  return extent_of(a.quant->columnwise_data, a).meets(b_rows);
}
// Sharing memory otherwise than element by element.
inline bool overlaps_askew(const te_fl_tensor& a, const te_fl_tensor& b) noexcept {
  const bool same = backend::data<const void>(a) == backend::data<const void>(b) &&
                    a.dl.dtype.bits == b.dl.dtype.bits && backend::numel(a) == backend::numel(b) &&
                    a.quant == nullptr;
  return !same && overlaps(a, b);
}

inline constexpr const char* kNotContiguous = "reads compact tensors only";
inline constexpr const char* kOverlaps =
    "the output shares memory with an input otherwise than element by element";

}  // namespace te_fl::cuda
