// For which GPUs this build has kernels. Plain C++, so that it can be tested where there is no GPU.
#pragma once

#include <cstdlib>
#include <string_view>

namespace te_fl::cuda {

// `built`: "80,90a". Code of an architecture runs on GPUs of the same major version that are not
// older; with an "a" on that one alone. `architecture` is 10 * major + minor.
constexpr bool built_for(std::string_view built, int architecture) {
  while (!built.empty()) {
    const size_t end = built.find(',');
    const std::string_view one = built.substr(0, end);
    int number = 0;
    for (const char c : one) {
      if (c >= '0' && c <= '9') number = 10 * number + (c - '0');
    }
    const bool exact = !one.empty() && one.back() == 'a';
    if (number == architecture) return true;
    if (!exact && number / 10 == architecture / 10 && number < architecture) return true;
    if (end == std::string_view::npos) break;
    built.remove_prefix(end + 1);
  }
  return false;
}

// The values that TE_FL_CUDA_ARCHITECTURES takes (CMakeLists.txt).
inline constexpr std::string_view kKnownArchitectures = "80,89,90a,100a,120";

// The newest of them whose code runs on a GPU; empty if there is none.
constexpr std::string_view architecture_for(int architecture) {
  std::string_view best, rest = kKnownArchitectures;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    if (built_for(one, architecture)) best = one;
    rest.remove_prefix(one.size() < rest.size() ? one.size() + 1 : rest.size());
  }
  return best;
}

}  // namespace te_fl::cuda
