#pragma once

#include <string>

#include "comm/file_store.hpp"

namespace te_fl::comm {

// A store at a TCP port. The process of rank 0 runs its server as long as a Store of rank 0 is
// alive. All ranks are clients, rank 0 included. Rank 0: FAILED_PRECONDITION if it cannot listen at
// the port. Other ranks wait for rank 0 for at most `timeout`: TIMEOUT if there is no answer. After
// rank 0 has ended, calls return COMM_FAILED.
Result<std::shared_ptr<Store>> open_tcp_store(const std::string& host, int port,
                                              const StoreRank& rank,
                                              std::chrono::milliseconds timeout);

}  // namespace te_fl::comm
