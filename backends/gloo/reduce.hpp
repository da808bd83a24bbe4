// Reductions of elements on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "te_fl/plugin.h"

namespace te_fl::gloo_ranks {

enum class Element { kF64, kF32, kF16, kBF16, kI64, kI32 };
Element to_element(te_fl_dtype dtype);
size_t bytes_of(Element element) noexcept;
// True for F16 and BF16. Their sums over all ranks are computed in F32 and rounded once.
bool is_half(Element element) noexcept;

// Computes out[i] = a[i] + b[i] or max(a[i], b[i]), which is NaN if a[i] or b[i] is NaN. Integer
// sums wrap around. `out` may be a or b.
using Reduce = void (*)(void* out, const void* a, const void* b, size_t n);
Reduce pairwise(Element element, int32_t reduction);  // not for F16 and BF16

// values[i] /= ranks
void divide(Element element, void* values, size_t n, int ranks);

// out[i] = the reduction of parts[r][i] over the ranks r, in rank order, rounded once. `out` may be
// one of the parts.
void reduce_parts(Element element, int32_t reduction, const char* const* parts, int ranks, size_t n,
                  char* out);

}  // namespace te_fl::gloo_ranks
