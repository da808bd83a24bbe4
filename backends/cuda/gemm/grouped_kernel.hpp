// The GEMMs of a group in one kernel of this plugin, for GPUs of compute capability 9.0
// (grouped_kernel.cuh).
#pragma once

#include "gemm/grouped_gemm_choice.hpp"

namespace te_fl::cuda {

// Enqueues the group on the stream of `ctx`. `path`: the result of choose_grouped_gemm() for the
// call, which names a kernel. Needs no workspace.
void run_grouped_kernel(const te_fl_context& ctx, const te_fl_grouped_gemm_args& args,
                        const GroupedPath& path);

}  // namespace te_fl::cuda
