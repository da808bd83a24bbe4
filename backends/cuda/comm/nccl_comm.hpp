// NCCL as a provider of collectives: te_fl_comm_desc "nccl".
#pragma once

#include "te_fl/plugin.h"

namespace te_fl::cuda {

// Opens NCCL when it is first asked for something, not before.
const te_fl_comm_desc& nccl_comm_desc() noexcept;

}  // namespace te_fl::cuda
