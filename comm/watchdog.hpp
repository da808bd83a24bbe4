#pragma once

namespace te_fl::comm {

// Starts the thread that looks, several times a second, whether a communicator of this process met
// an error or a collective that does not end. It ends by itself when the last one has gone.
void watch();

}  // namespace te_fl::comm
