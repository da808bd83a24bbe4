#pragma once

#include <string>

namespace te_fl::comm {

// Identifies this process among all processes that ran on the machine: boot, PID namespace, PID and
// start time. Empty if /proc does not provide these.
std::string process_mark();

// The PID of the process that `mark` identifies, if it was on this machine and has ended. 0 if it
// is running or cannot be checked.
int ended_process(const std::string& mark);

}  // namespace te_fl::comm
