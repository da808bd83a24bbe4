// Asks which memory tensors share; for supports(), metadata only.
#pragma once

#include "te_fl/backend/refusal.hpp"

namespace te_fl::opencl {

inline constexpr const char* kNotContiguous = "takes compact tensors only";
inline constexpr const char* kOverlaps =
    "the output shares memory with an input otherwise than element by element";

using backend::all_dense;

// True if a copy of `out`, row-wise or column-wise, shares memory with one of `in`.
inline bool overlaps(const te_fl_tensor& out, const te_fl_tensor* in) noexcept {
  if (in == nullptr) return false;
  for (const backend::Extent& a : {backend::rowwise_extent(out), backend::columnwise_extent(out)}) {
    if (a.meets(backend::rowwise_extent(*in)) || a.meets(backend::columnwise_extent(*in))) {
      return true;
    }
  }
  return false;
}

// Sharing memory otherwise than element by element.
inline bool overlaps_askew(const te_fl_tensor& out, const te_fl_tensor* in) noexcept {
  if (in == nullptr) return false;
  const bool same = backend::data<const void>(out) == backend::data<const void>(*in) &&
                    out.dl.dtype.bits == in->dl.dtype.bits &&
                    backend::numel(out) == backend::numel(*in) && out.quant == nullptr &&
                    in->quant == nullptr;
  return !same && overlaps(out, in);
}

}  // namespace te_fl::opencl
