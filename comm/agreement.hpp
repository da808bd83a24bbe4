#pragma once

#include <chrono>
#include <string>

#include "comm/store_face.hpp"
#include "te_fl/status.hpp"

namespace te_fl::comm {

// One rank's facts, which must be those of every other: "key = value" lines.
struct Facts {
  std::string table;
};

// Called by all ranks: OK if all have the same facts. FAILED_PRECONDITION, the same text on every
// rank, lists how the others differ from rank 0. TIMEOUT names the ranks that did not come.
Status agree(StoreFace& store, int rank, int size, const Facts& facts,
             std::chrono::milliseconds timeout);

}  // namespace te_fl::comm
