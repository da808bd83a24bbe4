#pragma once

#include "te_fl/status.hpp"

namespace te_fl::comm {

// Starts a thread that checks the communicators of this process several times per second for errors
// and for collectives that hang. The thread ends with the last communicator. OUT_OF_MEMORY if no
// thread can be created.
Status watch();

}  // namespace te_fl::comm
