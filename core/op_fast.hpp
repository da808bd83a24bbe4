#pragma once

#include "core/compiled_op.hpp"

namespace te_fl::core {

struct FastOp {};

}  // namespace te_fl::core
