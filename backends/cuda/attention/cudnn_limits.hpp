// Calls that versions of cuDNN compute wrongly and report as done. Pure functions of version and
// sizes, so that they can be tested where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace te_fl::cuda {

// The FP8 forward of 9.14.0 writes wrong results where a tensor reaches over more than 2^31
// elements, and that of 9.19.0 right ones (`conformance_huge --op fused_attn_fwd`). The library's
// release notes name no version that mended it, so those between, which nobody has measured, are
// refused too.
constexpr size_t kCudnnLongFp8 = 91900;

// Says why an FP8 forward is not cuDNN's; nullptr if it may be. `version` is 10000 major + 100
// minor + patch; `longest` is the number of elements from the first to the last of its longest
// tensor.
constexpr const char* refuse_long_fp8_forward(size_t version, int64_t longest) noexcept {
  if (longest <= INT32_MAX || version >= kCudnnLongFp8) return nullptr;
  return "FP8 of 2^31 elements or more, which cuDNN before 9.19.0 computes wrongly: install 9.19.0 "
         "or newer";
}

}  // namespace te_fl::cuda
