#pragma once

#include <memory>

#include "comm/rep.hpp"
#include "core/op/collective.hpp"

// Lets the communicators of this process hear of the calls of collectives (core/op/collective.hpp).
namespace te_fl::comm {

// From the first communicator on. May be called again.
void watch_calls();

// Marks, for the watchdog, what a call that began at `since` has enqueued on a stream of the
// communicator's device. A device without events has no marks, and its provider alone sees what
// hangs.
void mark_enqueued(Comm::Rep& rep, void* stream, const Step& step, Clock::time_point since);

// True if this thread has a group of the communicator's provider open: then the collective begins,
// and is marked, as that ends.
bool wait_for_group(const std::shared_ptr<Comm::Rep>& rep, const core::CollectiveCall& call,
                    const Step& step);

}  // namespace te_fl::comm
