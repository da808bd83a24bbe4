#pragma once

// The whole C++ API of the runtime, except nn (te_fl/nn.hpp).
//
// Errors are returned as statuses. te-fl's functions catch exceptions of the code that they call,
// including libraries. One exception may leave a te-fl function that is not noexcept:
// std::bad_alloc, if no host memory is left for te-fl's own data structures. A tensor that is too
// large is OUT_OF_MEMORY.
//
// Process exit: a program may call exit() or return from main() while other threads use te-fl.
// Before the static objects of plugins are destroyed, te-fl waits until no other thread is loading
// or deactivating a plugin (12 s at most) and until no other thread is inside an op or a device
// function (2 s at most). From then on other threads get FAILED_PRECONDITION from ops, plugin loads
// and device functions, and device memory that they free stays allocated. The exiting thread can
// still use te-fl as before. This holds if the main thread exits, or another thread that has used
// te-fl. If a thread that has never used te-fl calls exit(), a plugin that is being loaded at that
// moment may lose its static objects.
#include "te_fl/comm.hpp"
#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/memory.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/op_outputs.hpp"
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
