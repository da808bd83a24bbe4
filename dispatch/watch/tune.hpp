#pragma once

#include "te_fl/watch.hpp"

namespace te_fl::dispatch {

// Whether a list for the signature gains more than the noise of timing: its fastest implementation
// serves every call and takes at least 5 % less than what dispatch takes by itself.
bool worth_pinning(const TunedSignature& row);

}  // namespace te_fl::dispatch
