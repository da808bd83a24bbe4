// A plugin's create() under a time limit (R14).
#pragma once

#include <chrono>
#include <functional>

#include "te_fl/plugin.h"

namespace te_fl::plugins {

struct LimitedCall {
  te_fl_status status = TE_FL_OK;
  bool timed_out = false;  // the call continues on a detached thread
};

// Runs `call` on a new thread and waits at most `limit`. If the call ends in time, the thread has
// ended too, thread-local objects included. Otherwise the call keeps what it owns until it ends.
// `call` must not throw. OUT_OF_MEMORY if no thread can be created.
LimitedCall run_with_limit(std::function<te_fl_status()> call, std::chrono::milliseconds limit);

}  // namespace te_fl::plugins
