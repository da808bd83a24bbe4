// A plugin's create() under a time limit (R14).
#pragma once

#include <chrono>
#include <functional>

#include "te_fl/plugin.h"

namespace te_fl::plugins {

struct LimitedCall {
  te_fl_status status = TE_FL_OK;
  bool timed_out = false;  // the call goes on, on a thread that nobody waits for
};

// Runs `call` on a thread of its own and waits at most `limit`. A call that ends in time leaves
// nothing of the thread behind, its thread-local objects included. One that does not end keeps what
// it owns until it does. `call` must not throw. OUT_OF_MEMORY if no thread can be had.
LimitedCall run_with_limit(std::function<te_fl_status()> call, std::chrono::milliseconds limit);

}  // namespace te_fl::plugins
