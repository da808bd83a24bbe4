#pragma once

#include <string>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

namespace te_fl::nn {

// Identifies the contents of the file TE_FL_STRIPES_FILE, which is read once for each path: "no
// file" or "a file of contents HASH". The file defines into how many stripes of rows the ranks of
// sequence parallelism divide a product; each stripe has its own collective, so all ranks need the
// same file. A te_fl::Comm compares this text between ranks when it is made; implementations of
// SequenceRanks must compare it themselves. Errors: the file cannot be read (NOT_FOUND,
// FAILED_PRECONDITION), or breaks a rule of docs/ranks.md (INVALID_ARGUMENT, which names the rule).
// Thread-safe.
TE_FL_API Result<std::string> stripes_in_words();

}  // namespace te_fl::nn
