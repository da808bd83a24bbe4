// Text descriptions of the plugin ABI, as the golden files contain them.
#pragma once

#include <string>

namespace te_fl::test {

// Describes each struct, "te_fl_quant size 56", and its members, "  struct_size @0"; and each
// catalogue op, "op NAME size SIZE least SIZE", and its arguments, "  ARGUMENT @OFFSET" ("later"
// follows an argument that a later version added).
std::string describe_layout();
// Describes enumerators, flags and constants, one a line: "TE_FL_OK 0".
std::string describe_values();

}  // namespace te_fl::test
