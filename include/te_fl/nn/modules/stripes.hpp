#pragma once

#include <string>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

namespace te_fl::nn {

// Says what this process has of the file TE_FL_STRIPES_FILE, which is read once for each path: "no
// file", or "a file of contents HASH". Ranks of sequence parallelism compute products by rows in as
// many stripes as it says, and have a collective for each, so they must have the same. A
// te_fl::Comm compares it when it is made; SequenceRanks of a framework compare it themselves.
// Errors: the file cannot be read (NOT_FOUND, FAILED_PRECONDITION), or breaks a rule of
// docs/ranks.md (INVALID_ARGUMENT, which names it). Thread-safe.
TE_FL_API Result<std::string> stripes_in_words();

}  // namespace te_fl::nn
