// The ops gelu, dgelu and dbias_dgelu, for other ops that use them as their last step.
#pragma once

#include "te_fl/backend.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::cuda {

// These functions need dbias_dgelu_workspace(rows and columns of the output) bytes of
// ctx.workspace.
size_t dbias_dgelu_workspace(int64_t rows, int64_t cols);
void gelu(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args);
void dgelu(const te_fl_context& ctx, const te_fl_activation_act_bwd_args& args);
void dbias_dgelu(const te_fl_context& ctx, const te_fl_activation_dbias_act_args& args);

// Computes gelu() into an output whose scale is computed. The first float of ctx.workspace must
// hold the amax of the results; ctx.workspace must have gelu_measured_workspace() bytes.
size_t gelu_measured_workspace();
void gelu_measured(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args);

}  // namespace te_fl::cuda
