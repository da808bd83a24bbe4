// Tests whether tensors share memory. For supports(): reads metadata only.
#pragma once

#include "te_fl/backend/refusal.hpp"

namespace te_fl::opencl {

inline constexpr const char* kNotContiguous = "takes compact tensors only";
inline constexpr const char* kOverlaps =
    "the output shares memory with an input otherwise than element by element";

using backend::all_dense;

// An absent input (NULL) never overlaps.
inline bool overlaps(const te_fl_tensor& out, const te_fl_tensor* in) noexcept {
  return in != nullptr && backend::overlaps(out, *in);
}
inline bool overlaps_askew(const te_fl_tensor& out, const te_fl_tensor* in) noexcept {
  return in != nullptr && backend::overlaps_askew(out, *in);
}

}  // namespace te_fl::opencl
