// The FP8 state of one module of the framework.
#pragma once

#include <memory>

#include "py/mutex.hpp"
#include "py/py.hpp"
#include "te_fl/nn/modules/module.hpp"

namespace te_fl::python {

// Shared by the layers of one module.
struct ModuleStates {
  nn::Fp8States fp8;
  // Taken without the interpreter's lock, which others wait for inside.
  Mutex mutex{AtFork::kFreedInChild};
};

// The states that the capsule of make_fp8_states() holds; a PythonError for another object.
const std::shared_ptr<ModuleStates>& states_of(PyObject* capsule);

}  // namespace te_fl::python
