// NCCL as a provider of communicators: the te_fl_comm_desc "nccl".
#pragma once

#include "te_fl/plugin.h"

namespace te_fl::cuda {

// Returns the descriptor of the provider. The NCCL library is opened when the provider is first
// used.
const te_fl_comm_desc& nccl_comm_desc() noexcept;

}  // namespace te_fl::cuda
