#pragma once

#include <string>

namespace te_fl::conformance {

// Runs the conformance cases with the given arguments (--help lists them; argv[0] is ignored) and
// returns the exit code. `folder` contains expected_unsupported.txt and not_covered.txt, which
// declare the exceptions of te-fl's own backends.
int run_program(int argc, char** argv, const std::string& folder);

}  // namespace te_fl::conformance
