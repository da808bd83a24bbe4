#pragma once

// The whole C++ API of the runtime; nn is in te_fl/nn.hpp.
#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/memory.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/plugins.hpp"
#include "te_fl/policy.hpp"
#include "te_fl/result_memory.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"
#include "te_fl/version.hpp"
#include "te_fl/watch.hpp"
#include "te_fl/wrap_quantized.hpp"
