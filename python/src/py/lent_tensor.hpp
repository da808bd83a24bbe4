// te_fl.LentTensor: a te-fl tensor that Python code may use during one call.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>

#include "py/py.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// The state of one call of a Python implementation. Shared by the call's LentTensors and by arrays
// made from them, so that use after the call's end is detected.
struct Lending {
  std::string op;
  Device device;
  void* stream = nullptr;
  bool enquiry = false;  // true for supports() and the like, which may read metadata only
  std::atomic<bool> over{false};
  std::atomic<int> exports{0};  // live arrays of other libraries that view this call's memory
};

// The class te_fl.LentTensor; Python cannot construct it.
PyObject* lent_tensor_class();
// Creates a te_fl.LentTensor. `writable`: the tensor is one of the op's outputs. Throws
// PythonError.
Ref lend(const std::shared_ptr<Lending>& lending, const te_fl_dltensor& tensor, uint32_t provider,
         bool writable);
// Creates a LentTensor for compact memory, given by address, dtype and shape.
Ref lend(const std::shared_ptr<Lending>& lending, void* data, te_fl_dtype dtype,
         std::span<const int64_t> shape, bool writable);
// Creates a torch.Tensor on memory that is lent for the call. `tensor`: without byte_offset; its
// own shape and strides are not read. Throws PythonError.
Ref lend_to_torch(const std::shared_ptr<Lending>& lending, const te_fl_dltensor& tensor,
                  std::span<const int64_t> shape, std::span<const int64_t> strides);

}  // namespace te_fl::python
