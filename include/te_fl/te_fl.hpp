#pragma once

// The whole C++ API of the runtime; nn is in te_fl/nn.hpp.
//
// Errors are statuses. What te-fl calls, its libraries included, may throw, and te-fl's functions
// do not: the one exception that a function which is not noexcept may pass on is std::bad_alloc,
// where no host memory is left for te-fl's own books. A tensor that is too large is OUT_OF_MEMORY.
//
// The end of the process: exit(), or a return from main(), may come whatever other threads do with
// te-fl. Before it destroys the static objects of plugins it waits until no other thread loads or
// deactivates a plugin, 12 s at most, and until no other thread is inside an op or a function of a
// device, 2 s at most. From then on other threads have FAILED_PRECONDITION of ops, loads and
// devices, and what they free of a device stays as it is; the thread that exits goes on as before.
// This holds where the main thread exits, or another one that has used te-fl. Where one does that
// never has, a plugin that is just being loaded may lose the static objects that it has made.
#include "te_fl/comm.hpp"
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
