#pragma once

#include "te_fl/status.hpp"

namespace te_fl::comm {

// Starts the thread that looks, several times a second, whether a communicator of this process met
// an error or a collective that does not end. It ends by itself when the last one has gone.
// OUT_OF_MEMORY if no thread can be had.
Status watch();

}  // namespace te_fl::comm
