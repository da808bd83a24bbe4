#pragma once

// Lets the communicators of this process hear of the calls of collectives (core/op/collective.hpp).
namespace te_fl::comm {

// From the first communicator on. May be called again.
void watch_calls();

}  // namespace te_fl::comm
