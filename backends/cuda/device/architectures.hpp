// The GPU architectures for which this build has kernels. Plain C++, so tests run without a GPU.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

namespace te_fl::cuda {

// True if code for `built`, a list such as "80,90a", runs on the GPU architecture `architecture`
// (10 * major + minor). Code for an architecture runs on GPUs of the same major version and an
// equal or higher minor version. Code with the suffix "a" runs on exactly its architecture.
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

// The architectures that TE_FL_CUDA_ARCHITECTURES may contain (CMakeLists.txt).
inline constexpr std::string_view kKnownArchitectures = "80,89,90a,100a,120";

// Returns the newest entry of kKnownArchitectures whose code runs on this GPU; empty if there is
// none.
constexpr std::string_view architecture_for(int architecture) {
  std::string_view best, rest = kKnownArchitectures;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    if (built_for(one, architecture)) best = one;
    rest.remove_prefix(one.size() < rest.size() ? one.size() + 1 : rest.size());
  }
  return best;
}

// If the plugin's code runs on none of the GPUs, which have these architectures, returns why the
// plugin takes no device. Empty if its code runs on one, or if there is no GPU. On a machine with
// GPUs of several kinds the plugin takes all, and a launch on a GPU without code is an error.
inline std::string refuse_all(std::string_view built, std::span<const int> gpus) {
  const auto served = [&](int gpu) { return built_for(built, gpu); };
  if (gpus.empty() || std::any_of(gpus.begin(), gpus.end(), served)) return "";
  const int first = gpus.front();
  const std::string_view wanted = architecture_for(first);
  return "the CUDA plugin has kernels for the architectures " + std::string(built) +
         ", and this GPU has compute capability " + std::to_string(first / 10) + "." +
         std::to_string(first % 10) +
         (wanted.empty()
              ? "; kernels can be built for " + std::string(kKnownArchitectures) + " only"
              : "; build te-fl with TE_FL_CUDA_ARCHITECTURES=" + std::string(wanted) + " or all") +
         ". Its ops run by PyTorch (reference.torch) or on the host";
}

}  // namespace te_fl::cuda
