#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "te_fl/watch.hpp"

namespace te_fl::dispatch {

// True if a list for the signature gains more than the noise of timing: its fastest implementation
// serves every call and takes at least 5 %, and 100 ns a call, less than what dispatch takes by
// itself.
bool worth_pinning(const TunedSignature& row);

// A signature's calls whose memory is about as large: within a factor of eight.
struct TunedSize {
  std::map<std::string, double> seconds;  // by implementation, of all the calls that the run made
  double usual_seconds = 0;               // with what dispatch takes by itself
  uint64_t count = 0;
};
using TunedSizes = std::map<int, TunedSize>;  // by the logarithm of the bytes
int size_class_of(size_t bytes);
// True if an implementation is no slower than what dispatch takes by itself, noise aside, for calls
// of any size: a list is for all of them. A reference is taken to be slow for sizes beyond those
// that were timed, unless they reach 1 MiB.
bool holds_for_all_sizes(const std::string& impl_id, bool is_reference, const TunedSizes& sizes);

}  // namespace te_fl::dispatch
