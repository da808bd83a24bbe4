// Maxima over ranks that a NaN of any rank becomes: NCCL's own take the other operand. So floats
// travel as integers that order as they do, NaN last.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace te_fl::cuda {

// Bytes of the integers of `n` elements of a float dtype (te_fl_dtype_index): 8 of F64, else 4.
size_t ordered_bytes(int dtype, int64_t n) noexcept;
// `n` elements to integers and back, NaN coming back as one NaN. Launch errors are thrown.
void to_ordered(int dtype, const void* from, void* integers, int64_t n, cudaStream_t stream);
void from_ordered(int dtype, const void* integers, void* to, int64_t n, cudaStream_t stream);

}  // namespace te_fl::cuda
