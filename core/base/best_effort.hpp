#pragma once

namespace te_fl::core {

// Runs optional work that follows a completed change, such as a log line or returning memory early.
// Drops every exception of `f`, so the work is skipped if the host has no memory.
template <class F>
void best_effort(F&& f) noexcept {
  try {
    f();
  } catch (...) {  // The change stands without this work, and a caller could not repair it.
  }
}

}  // namespace te_fl::core
