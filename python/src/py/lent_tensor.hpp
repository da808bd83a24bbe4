// Tensors of te-fl, lent to Python for the time of one call (te_fl.LentTensor).
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>

#include "py/py.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// One call of an implementation in Python. It is shared by the tensors that it lends and by what
// was made of them, so that what is kept beyond its end is noticed.
struct Lending {
  std::string op;
  Device device;
  void* stream = nullptr;
  bool enquiry = false;  // supports() and the like see metadata only
  std::atomic<bool> over{false};
  std::atomic<int> exports{0};  // arrays of other libraries on this call's memory
};

// The class; it has no constructor in Python.
PyObject* lent_tensor_class();
// A te_fl.LentTensor. `writable`: it is one of the op's outputs. Throws PythonError.
Ref lend(const std::shared_ptr<Lending>& lending, const te_fl_dltensor& tensor, uint32_t provider,
         bool writable);
// Lends compact memory by its parts.
Ref lend(const std::shared_ptr<Lending>& lending, void* data, te_fl_dtype dtype,
         std::span<const int64_t> shape, bool writable);

}  // namespace te_fl::python
