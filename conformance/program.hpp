#pragma once

#include <string>

namespace te_fl::conformance {

// Runs the conformance table as the arguments say (argv[0] is not read; --help lists them) and
// returns the exit code. `folder` has expected_unsupported.txt and not_covered.txt, in which te-fl
// declares the exceptions of its own backends.
int run_program(int argc, char** argv, const std::string& folder);

}  // namespace te_fl::conformance
