// What every implementation of layernorm_fwd and rmsnorm_fwd checks alike.
// Header-only; sees backend.hpp alone, so that any backend can use it.
#pragma once

#include "te_fl/backend.hpp"

namespace te_fl::norm {

// Throws invalid() unless residual and sum are both given or both NULL.
inline void check_residual(const te_fl_tensor* residual, const te_fl_tensor* sum) {
  if ((residual == nullptr) == (sum == nullptr)) return;
  const bool has_sum = sum != nullptr;
  backend::invalid(std::string(has_sum ? "sum" : "residual") + " is given and " +
                   (has_sum ? "residual" : "sum") +
                   " is missing (NULL); give both, or neither to normalise x itself");
}

}  // namespace te_fl::norm
