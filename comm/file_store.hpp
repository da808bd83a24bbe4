#pragma once

#include <sys/types.h>

#include <string>

#include "te_fl/comm.hpp"

namespace te_fl::comm {

// The rank that opens a store; `generation` counts the stores of one address that its process has
// opened one after the other, from 1.
struct StoreRank {
  int rank = 0;
  int size = 1;
  uint32_t generation = 1;
};

// A store in a folder: each key is a file, written beside its place and linked into it, so that
// nobody sees half a value.
//
// A folder of an earlier run is told so: rank 0 refuses a folder that has anything in it, and then
// writes its mark. Every other rank, having seen a mark, writes a token that it has just drawn.
// Rank 0 waits for all tokens and writes the roster of them; a rank goes on only if the roster has
// its own token, which no earlier run could know. A rank 0 that refuses a folder of a store says so
// in it, and those that wait there end with the same error.
//
// Therefore opening it waits for all ranks, at most `timeout`, and TIMEOUT names those that did not
// come. The folder stays behind: whoever named it removes it.
Result<std::shared_ptr<Store>> open_file_store(const std::string& folder, const StoreRank& rank,
                                               std::chrono::milliseconds timeout);

}  // namespace te_fl::comm
