#pragma once

// For backends with gated activations: what their descriptions cannot say of the columns that the
// halves take turns of, and where those lie. Throws INVALID_ARGUMENT, clean. Header-only.

#include <cstdint>
#include <string>

#include "te_fl/backend.hpp"

namespace te_fl::backend {

// Throws unless the halves of `half` columns may take turns of `interleave` columns.
inline void check_interleave(int64_t interleave, int64_t half) {
  if (interleave == 0 || half % interleave == 0) return;
  invalid("glu_interleave_size is " + std::to_string(interleave) +
          "; it is 0, or divides the columns of a half, of which there are " +
          std::to_string(half));
}

// Columns of a row [a, b] whose halves have `half` columns each; `interleave` 0: one behind the
// other.
struct HalvesOfRow {
  int64_t half, interleave;

  int64_t place_of_a(int64_t col) const {
    return interleave == 0 ? col : col / interleave * 2 * interleave + col % interleave;
  }
  // From a's place to b's of the same column.
  int64_t distance() const { return interleave == 0 ? half : interleave; }
  // Columns of a, from col on, that lie one behind the other.
  int64_t run(int64_t col) const {
    return interleave == 0 ? half - col : interleave - col % interleave;
  }
};

}  // namespace te_fl::backend
