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

// Makes the collective call together with the other ranks and waits for it. Inside a group, records
// the call, which group_end() then makes.
void call(const ThreadRank& rank, Brought brought);

}  // namespace te_fl::reference
