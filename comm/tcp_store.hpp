#pragma once

#include <string>

#include "comm/file_store.hpp"

namespace te_fl::comm {

// A store that rank 0's process serves at a port while a Store of it is alive; every rank, rank 0
// too, is a client. Rank 0: FAILED_PRECONDITION if it cannot listen there. The others wait for rank
// 0 at most `timeout`: TIMEOUT if nobody answers. After rank 0 has ended, calls are COMM_FAILED.
Result<std::shared_ptr<Store>> open_tcp_store(const std::string& host, int port,
                                              const StoreRank& rank,
                                              std::chrono::milliseconds timeout);

}  // namespace te_fl::comm
