#pragma once

#include <string>

#include "conformance/run.hpp"

namespace te_fl::conformance {

// Calls a problem's op and compares what it leaves with what is expected. Of a collective it is one
// rank's call, with the problem's communicator.
Result run_one(Problem& p, const Device& device, const std::string& impl_id, const How& how);

// Empty, or which memory of the problem was written that may not be; with `untouched` none may.
std::string check_memory(const Problem& p, bool untouched);

}  // namespace te_fl::conformance
