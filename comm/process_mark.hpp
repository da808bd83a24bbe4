#pragma once

#include <string>

namespace te_fl::comm {

// Names this process among all that the machine has run: the boot, the PID namespace, the number
// and when it was started. Empty where /proc does not say.
std::string process_mark();

// The number of the process that `mark` names, if that was one of this machine, whose end can be
// seen here, and has ended; 0 if it goes on or is not known.
int ended_process(const std::string& mark);

}  // namespace te_fl::comm
