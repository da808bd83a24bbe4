#pragma once

namespace te_fl::core {

// Does what may be left undone where no memory is left, behind a change that stands: a line of the
// log, memory that the next change gives back. Nothing that f throws gets out.
template <class F>
void best_effort(F&& f) noexcept {
  try {
    f();
  } catch (...) {  // there is nobody to tell, and nothing depends on it
  }
}

}  // namespace te_fl::core
