// Borrows tensors of other libraries by DLPack for the duration of a call.
#pragma once

#include "py/exchange.hpp"
#include "py/py.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// Borrows the memory of Python objects until destruction. Uses the exchange table of the object's
// type if it has one (PyTorch), and otherwise `__dlpack__`.
class Borrowed {
 public:
  Borrowed() = default;
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  // Describes `object`'s memory. `written`: the memory must be writable. `name` is the argument's
  // name in errors: TypeError for an object without DLPack, BufferError for memory that cannot be
  // exported. Shape and strides live as long as this Borrowed; strides are NULL if the tensor is
  // compact. An element that packs two 4-bit values (PyTorch's float4_e2m1fn_x2) counts as two
  // along the last dimension.
  te_fl_dltensor describe(PyObject* object, bool written, const char* name);

  // The stream for work on `device`: the current stream of the library that owns a borrowed tensor
  // on that device, else the default stream.
  void* stream(const te_fl_device& device) const;

 private:
  struct Lent;
  te_fl_dltensor by_capsule(PyObject* object, bool written, const char* name);
  void count_packed(te_fl_dltensor& t);

  Extents extents_;  // of an older PyTorch's tensors, and of tensors with packed 4-bit elements
  Lent* lent_ = nullptr;  // tensors from DLPack capsules, the newest first
  // Exchange table of the last tensor borrowed by the exchange API.
  const void* exchange_ = nullptr;
};

// Throws te_fl.InvalidArgument unless all parts of a quantised tensor lie on one device. Pinned
// memory is accepted for any part, since host and devices can access it.
void check_part_device(const te_fl_device& part, const te_fl_device& other,
                       const std::string& name);

}  // namespace te_fl::python
