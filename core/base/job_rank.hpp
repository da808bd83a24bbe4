#pragma once

#include <optional>

namespace te_fl::core {

// The rank of this process in its job, from the variables of te-fl's and the usual launchers:
// TE_FL_RANK, RANK, OMPI_COMM_WORLD_RANK or PMI_RANK. Empty if none of them is a number.
std::optional<int> job_rank();

}  // namespace te_fl::core
