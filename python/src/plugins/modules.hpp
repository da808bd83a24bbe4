// Plugins that are Python modules.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// set_module_loader(load): registers te_fl._modules.load. The first op call of the process runs it,
// on the calling thread.
PyObject* set_module_loader(PyObject*, PyObject* load) noexcept;

}  // namespace te_fl::python
