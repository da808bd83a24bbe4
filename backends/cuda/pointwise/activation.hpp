// The ops gelu, dgelu and dbias_dgelu, for ops that end with them.
#pragma once

#include "te_fl/backend.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::cuda {

// Each wants of ctx.workspace what dbias_dgelu_workspace() says of the output's extents.
size_t dbias_dgelu_workspace(int64_t rows, int64_t cols);
void gelu(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args);
void dgelu(const te_fl_context& ctx, const te_fl_activation_act_bwd_args& args);
void dbias_dgelu(const te_fl_context& ctx, const te_fl_activation_dbias_act_args& args);

// gelu() into an output that finds its own scale, with the results' amax in the first float of
// ctx.workspace, which has gelu_measured_workspace() bytes.
size_t gelu_measured_workspace();
void gelu_measured(const te_fl_context& ctx, const te_fl_activation_act_fwd_args& args);

}  // namespace te_fl::cuda
