// Modules of Python as te-fl's plugins.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// set_module_loader(load): `load` of te_fl._modules, which says what it does, is called from the
// first op on, whichever thread makes it.
PyObject* set_module_loader(PyObject*, PyObject* load) noexcept;

}  // namespace te_fl::python
