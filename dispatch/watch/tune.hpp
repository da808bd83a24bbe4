#pragma once

#include <cstdint>

#include "te_fl/watch.hpp"

namespace te_fl::dispatch {

// True if pinning the row's fastest implementation gains more than measurement noise: the
// implementation can run every call, and is faster than dispatch's usual choice by at least 5 % and
// 100 ns per call.
bool worth_pinning(const TunedSignature& row);

// Limits a list to calls in the size class of `bytes`. A size class is a range of a factor of
// eight. The best choice for small calls may be wrong for large ones or for sizes that were not
// measured.
void set_size_class(SignatureList& list, uint64_t bytes);

}  // namespace te_fl::dispatch
