#pragma once

#include <string>

#include "conformance/run.hpp"

namespace te_fl::conformance {

// Calls the op of a problem and compares the outputs with the expectations. For a collective, makes
// one rank's call with the problem's communicator.
Result run_one(Problem& p, const Device& device, const std::string& impl_id, const How& how);

// Returns the name of memory that was written although it must not be; empty if there is none. With
// `untouched` no memory may be written.
std::string check_memory(const Problem& p, bool untouched);

}  // namespace te_fl::conformance
