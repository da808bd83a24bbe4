// te-fl devices that are made from PyTorch's, where no plugin serves a tensor's device.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// set_device_maker(make): make(dlpack_type, index, provider) -> a te_fl.torch_device.TorchDevice,
// or None if PyTorch has no such device. provider: the name in ext:PROVIDER:INDEX, else "". Called
// when a device is looked up that no plugin has; the object's methods then are the device's
// functions. One te-fl device is made for each device of PyTorch, and lives as long as the process.
PyObject* set_device_maker(PyObject*, PyObject* make) noexcept;

}  // namespace te_fl::python
