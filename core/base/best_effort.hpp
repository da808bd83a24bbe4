#pragma once

namespace te_fl::core {

// Does what may be left undone where no memory is left, behind a change that stands: a line of the
// log, memory that the next change gives back. Nothing that f throws gets out.
template <class F>
void best_effort(F&& f) noexcept {
  try {
    f();
  } catch (...) {  // The change stands without it, and a caller could do nothing about it.
  }
}

}  // namespace te_fl::core
