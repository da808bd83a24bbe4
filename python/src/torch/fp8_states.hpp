// The FP8 state of one PyTorch module.
#pragma once

#include <memory>

#include "py/mutex.hpp"
#include "py/py.hpp"
#include "te_fl/nn/modules/module.hpp"

namespace te_fl::python {

// Shared by the layers of one module.
struct ModuleStates {
  nn::Fp8States fp8;
  // Lock it without the interpreter's lock: its owner may be waiting for that lock.
  Mutex mutex{AtFork::kFreedInChild};
};

// The states in a capsule of make_fp8_states(); throws PythonError for other objects.
const std::shared_ptr<ModuleStates>& unwrap_states(PyObject* capsule);

}  // namespace te_fl::python
