// Calls for which some versions of cuDNN report success with wrong results. Pure functions of
// version and sizes, so tests run without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace te_fl::cuda {

// The FP8 forward of cuDNN 9.14.0 gives wrong results if a tensor spans 2^31 elements or more;
// cuDNN 9.19.0 gives correct results (`conformance_huge --op fused_attn_fwd`). The release notes do
// not say which version fixed it, so the untested versions between are refused too.
constexpr size_t kCudnnLongFp8 = 91900;

// Returns why cuDNN must not run an FP8 forward, or nullptr if it may. `version`: 10000 major + 100
// minor + patch. `longest`: the span of the largest tensor, that is, the number of elements from
// its first to its last.
constexpr const char* refuse_long_fp8_forward(size_t version, int64_t longest) noexcept {
  if (longest <= INT32_MAX || version >= kCudnnLongFp8) return nullptr;
  return "FP8 of 2^31 elements or more, which cuDNN before 9.19.0 computes wrongly: install 9.19.0 "
         "or newer";
}

}  // namespace te_fl::cuda
