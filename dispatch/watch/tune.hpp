#pragma once

#include <cstdint>

#include "te_fl/watch.hpp"

namespace te_fl::dispatch {

// True if a list for the row gains more than the noise of timing: its fastest implementation serves
// every call and takes at least 5 %, and 100 ns a call, less than what dispatch takes by itself.
bool worth_pinning(const TunedSignature& row);

// Sets the sizes that a list is for to the class of `bytes`, within a factor of eight: a choice for
// small calls is none for large ones, nor for sizes that were never timed.
void set_size_class(SignatureList& list, uint64_t bytes);

}  // namespace te_fl::dispatch
