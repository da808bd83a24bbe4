#pragma once

// Helpers for backends that refuse calls by their metadata. They make a supports() from a function
// that returns the reason for a refusal, and test the layout and overlap of tensors' memory.
// Header-only. These helpers do not throw and do not read elements.

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "te_fl/backend.hpp"
#include "te_fl/plugin.h"

namespace te_fl::backend {

// The reason why a call is refused, a static string; NULL if the call is supported.
using Refusal = const char*;

// Makes a C function for te_fl_op_desc.supports from `Refusal F(const Args&)` or `Refusal F(const
// te_fl_context&, const Args&)`. F reads metadata only. If F throws an error, it is reported as
// clean.
template <class Args, auto F>
te_fl_status refusal_thunk(void*, const te_fl_context* ctx, const void* raw) noexcept {
  Refusal refusal = nullptr;
  const te_fl_status failed = guard(ctx->errors, [&] {
    const Widened<Args> args(raw);
    if constexpr (std::is_invocable_v<decltype(F), const te_fl_context&, const Args&>) {
      refusal = F(*ctx, *args);
    } else {
      refusal = F(*args);
    }
  });
  if (failed != TE_FL_OK) return failed | TE_FL_CLEAN;
  if (refusal == nullptr) return TE_FL_OK;
  report(ctx->errors, refusal);
  return TE_FL_UNSUPPORTED;
}

// True for a compact tensor, and for an optional tensor that is absent (NULL).
inline bool dense(const te_fl_tensor* t) noexcept { return t == nullptr || is_contiguous(*t); }
template <class... Tensors>
bool all_dense(const Tensors*... tensors) noexcept {
  return (dense(tensors) && ...);
}

// The address range of a compact tensor's bytes. Both NULL: empty.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool meets(const Extent& other) const noexcept { return begin < other.end && other.begin < end; }
  bool operator==(const Extent&) const = default;
};
// The address range of a tensor's row-wise or column-wise data, which begins at `copy`. Empty if
// `copy` is NULL.
inline Extent extent_of(const void* copy, const te_fl_tensor& t) noexcept {
  if (copy == nullptr) return {};
  const auto* begin = static_cast<const char*>(copy);
  return {begin, begin + (numel(t) * t.dl.dtype.bits + 7) / 8};
}
inline Extent rowwise_extent(const te_fl_tensor& t) noexcept {
  return extent_of(data<const void>(t), t);
}
inline Extent columnwise_extent(const te_fl_tensor& t) noexcept {
  return t.quant == nullptr ? Extent() : extent_of(t.quant->columnwise_data, t);
}

// True if row-wise or column-wise data of `out` shares memory with row-wise or column-wise data of
// `in`. Both tensors are compact.
inline bool overlaps(const te_fl_tensor& out, const te_fl_tensor& in) noexcept {
  for (const Extent& written : {rowwise_extent(out), columnwise_extent(out)}) {
    if (written.meets(rowwise_extent(in)) || written.meets(columnwise_extent(in))) return true;
  }
  return false;
}
// True if `out` and `in` share memory, except if they are unquantised tensors of equal size at the
// same address. In that exceptional case a kernel that reads each element right before it writes
// the element can work in place.
inline bool overlaps_askew(const te_fl_tensor& out, const te_fl_tensor& in) noexcept {
  const bool same = data<const void>(out) == data<const void>(in) &&
                    out.dl.dtype.bits == in.dl.dtype.bits && numel(out) == numel(in) &&
                    scaling(out) == TE_FL_SCALING_NONE && scaling(in) == TE_FL_SCALING_NONE;
  return !same && overlaps(out, in);
}

}  // namespace te_fl::backend
