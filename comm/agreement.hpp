#pragma once

#include <chrono>
#include <string>

#include "comm/namespaced_store.hpp"
#include "te_fl/status.hpp"

namespace te_fl::comm {

// One rank's facts about a communicator, which must equal those of all other ranks, as "key =
// value" lines. `validates`: this rank requests that collectives be compared (TE_FL_VALIDATE);
// other ranks need not request it.
struct Facts {
  std::string table;
  bool validates = false;
};

// Compares the facts of all ranks; every rank must call it. Returns true on every rank if any rank
// requests that collectives be compared. FAILED_PRECONDITION, with the same text on every rank,
// lists the differences from rank 0's facts. TIMEOUT names the ranks that are missing.
Result<bool> agree(NamespacedStore& store, int rank, int size, const Facts& facts,
                   std::chrono::milliseconds timeout);

}  // namespace te_fl::comm
