#pragma once

// Helper for backends that implement te_fl_op_desc.describe (rule R31).

#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/plugin.h"

namespace te_fl::backend {

// Makes a C function for te_fl_op_desc.describe from `std::string F(const te_fl_context&, const
// Args&)`. F reads metadata only and may throw.
template <class Args, auto F>
te_fl_status describe_thunk(void*, const te_fl_context* ctx, const void* raw,
                            const te_fl_error_sink* text) noexcept {
  return guard(ctx->errors, [&] {
    const Widened<Args> args(raw);
    const std::string words = F(*ctx, *args);
    report(text, words.c_str());
  });
}

}  // namespace te_fl::backend
