// Maxima over ranks in which a NaN of any rank gives NaN. NCCL's own maximum drops a NaN, so floats
// are sent as integers that have the same order, with NaN last.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace te_fl::cuda {

// Bytes of the integers of `n` elements of a float dtype (te_fl_dtype_index): 8 per F64 element,
// else 4.
size_t ordered_bytes(int dtype, int64_t n) noexcept;
// Convert `n` elements to integers and back. Every NaN comes back as the same NaN. Throw launch
// errors.
void to_ordered(int dtype, const void* from, void* integers, int64_t n, cudaStream_t stream);
void from_ordered(int dtype, const void* integers, void* to, int64_t n, cudaStream_t stream);

}  // namespace te_fl::cuda
