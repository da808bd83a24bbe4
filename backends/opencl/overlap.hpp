// Which memory a compact tensor takes; for supports(), metadata only.
#pragma once

#include "te_fl/backend.hpp"

namespace te_fl::opencl {

inline constexpr const char* kNotContiguous = "takes compact tensors only";
inline constexpr const char* kOverlaps =
    "the output shares memory with an input otherwise than element by element";

template <class... T>
bool compact(const T*... tensors) noexcept {
  return ((tensors == nullptr || backend::is_contiguous(*tensors)) && ...);
}

inline bool bytes_meet(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) noexcept {
  const auto *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  return x != nullptr && y != nullptr && x < y + b_bytes && y < x + a_bytes;
}

inline int64_t bytes_of(const te_fl_tensor& t) noexcept {
  return (backend::numel(t) * t.dl.dtype.bits + 7) / 8;
}

// The data of `out`, its column-wise copy too, and those of `in`.
inline bool overlaps(const te_fl_tensor& out, const te_fl_tensor* in) noexcept {
  if (in == nullptr) return false;
  const void* outs[] = {backend::data<const void>(out),
                        out.quant != nullptr ? out.quant->columnwise_data : nullptr};
  const void* ins[] = {backend::data<const void>(*in),
                       in->quant != nullptr ? in->quant->columnwise_data : nullptr};
  for (const void* a : outs) {
    for (const void* b : ins) {
      if (bytes_meet(a, bytes_of(out), b, bytes_of(*in))) return true;
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
