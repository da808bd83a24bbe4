// The collective provider "threads": ranks that are threads of one process.
#pragma once

#include <sys/types.h>

#include <memory>

#include "meeting.hpp"
#include "te_fl/plugin.h"

namespace te_fl::reference {

const te_fl_comm_desc& thread_ranks();

// One rank of a communicator, as create() returns it.
struct ThreadRank {
  std::shared_ptr<Meeting> meeting;
  int rank = 0;
  pid_t process = 0;  // that created it; a forked child may not use it
};

// Makes the call with the other ranks. Inside a group, records it until group_end().
void call(const ThreadRank& rank, Brought brought);

}  // namespace te_fl::reference
