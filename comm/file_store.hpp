#pragma once

#include <sys/types.h>

#include <string>

#include "te_fl/comm.hpp"

namespace te_fl::comm {

// The rank that opens a store. `generation` numbers, from 1, the stores that the process has opened
// at one address one after the other.
struct StoreRank {
  int rank = 0;
  int size = 1;
  uint32_t generation = 1;
};

// A store in a folder. Each key is a file, which is written under a temporary name and then linked
// to its name, so that no rank reads a partial value.
//
// Opening detects a folder of an earlier run. Rank 0 refuses a folder that is not empty, and
// otherwise writes its mark. Each other rank, after reading the mark, writes a new random token.
// Rank 0 waits for all tokens and writes the roster with them. A rank continues only if the roster
// contains its own token, which no earlier run could contain. If rank 0 refuses a folder that was a
// store, it writes a mark there, and the ranks that wait in the folder end with the same error.
//
// Opening therefore waits for all ranks, at most `timeout`; TIMEOUT names the missing ranks. The
// folder is not removed; that is up to the user who named it.
Result<std::shared_ptr<Store>> open_file_store(const std::string& folder, const StoreRank& rank,
                                               std::chrono::milliseconds timeout);

}  // namespace te_fl::comm
