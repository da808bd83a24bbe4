// The op dequantize, for ops that dequantise an operand into scratch.
#pragma once

#include "te_fl/ops/quantize.h"

namespace te_fl::cuda {

// Enqueues the op on the stream of `ctx`. It uses the first kStoreWorkspace bytes of the workspace.
void dequantize(const te_fl_context& ctx, const te_fl_dequantize_args& args);

}  // namespace te_fl::cuda
