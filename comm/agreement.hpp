#pragma once

#include <chrono>
#include <string>

#include "comm/store_face.hpp"
#include "te_fl/status.hpp"

namespace te_fl::comm {

// One rank's facts, which must be those of every other: "key = value" lines. `validates`: it asks
// that collectives be compared, which a rank may do alone.
struct Facts {
  std::string table;
  bool validates = false;
};

// Called by all ranks. True, on every rank, if one of them asks that collectives be compared.
// FAILED_PRECONDITION, the same text on every rank, lists how the facts of the others differ from
// rank 0's. TIMEOUT names the ranks that did not come.
Result<bool> agree(StoreFace& store, int rank, int size, const Facts& facts,
                   std::chrono::milliseconds timeout);

}  // namespace te_fl::comm
