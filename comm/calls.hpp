#pragma once

#include <memory>

#include "comm/state.hpp"
#include "core/op/collective.hpp"

// Hooks through which dispatch reports calls of collectives to their communicators
// (core/op/collective.hpp).
namespace te_fl::comm {

// Installs the hooks. Called when the first communicator is made; may be called again.
void watch_calls();

// For the watchdog: records an event on the stream, after the work that a call enqueued there. The
// call began at `since`. A device without events records nothing; then only the provider can detect
// a hang.
void mark_enqueued(Comm::State& state, void* stream, const Step& step, Clock::time_point since);

// True if this thread has an open group of the communicator's provider. The collective then begins
// when the group ends, and its event is recorded at that time.
bool wait_for_group(const std::shared_ptr<Comm::State>& state, const core::CollectiveCall& call,
                    const Step& step);

}  // namespace te_fl::comm
