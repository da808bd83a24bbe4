// The provider of collectives "threads": ranks that are threads of one process.
#pragma once

#include <sys/types.h>

#include <memory>

#include "meeting.hpp"
#include "te_fl/plugin.h"

namespace te_fl::reference {

const te_fl_comm_desc& thread_ranks();

// One rank of a communicator: what create() gives.
struct ThreadRank {
  std::shared_ptr<Meeting> meeting;
  int rank = 0;
  pid_t process = 0;  // that made it; a child of it may not use it
};

// Does the call with the other ranks, or keeps it until group_end() if the thread is in a group.
void call(const ThreadRank& rank, Brought brought);

}  // namespace te_fl::reference
