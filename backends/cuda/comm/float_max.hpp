// Max reduction over ranks that propagates NaN: a NaN on any rank gives NaN. NCCL's own maximum
// drops a NaN, so floats are converted to integers of the same order, in which NaN is the largest.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace te_fl::cuda {

// Returns the bytes of the integers for `n` elements of a float dtype (te_fl_dtype_index): 8 per
// F64 element, else 4.
size_t ordered_bytes(int dtype, int64_t n) noexcept;
// to_ordered() converts `n` elements to integers; from_ordered() converts them back, and turns
// every NaN into the same NaN. Both throw if the kernel launch fails.
void to_ordered(int dtype, const void* from, void* integers, int64_t n, cudaStream_t stream);
void from_ordered(int dtype, const void* integers, void* to, int64_t n, cudaStream_t stream);

}  // namespace te_fl::cuda
