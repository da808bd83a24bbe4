// The index of a tensor's dtype, and the element size of the dtypes that kernels read and write.
#pragma once

#include <cstdint>

#include "te_fl/dtype.hpp"
#include "te_fl/plugin.h"

namespace te_fl::cuda {

inline int dtype_of(const te_fl_tensor& t) noexcept { return dtype_index(t.dl.dtype); }
constexpr bool is_fp8(int dtype) noexcept { return dtype == TE_FL_F8E4M3 || dtype == TE_FL_F8E5M2; }
// Bytes per element of F32, F16, BF16 or FP8.
constexpr int64_t bytes_of(int dtype) noexcept {
  return dtype == TE_FL_F32 ? 4 : is_fp8(dtype) ? 1 : 2;
}

}  // namespace te_fl::cuda
