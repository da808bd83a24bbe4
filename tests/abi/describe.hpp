// The plugin ABI in words: what the golden files hold.
#pragma once

#include <string>

namespace te_fl::test {

// "te_fl_quant size 56", then "  struct_size @0" for each member; the catalogue's ops likewise,
// with "op NAME size SIZE least SIZE" and "  ARGUMENT @OFFSET" ("later" behind a later one).
std::string describe_layout();
// "TE_FL_OK 0": enumerators, flags and constants.
std::string describe_values();

}  // namespace te_fl::test
