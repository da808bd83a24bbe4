// Tensors of other libraries, borrowed by DLPack for the time of a call.
#pragma once

#include <forward_list>
#include <optional>
#include <vector>

#include "py/py.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// Borrows the memory of Python objects until it is destroyed. It reads an object through
// `__dlpack_c_exchange_api__` where its type has that (PyTorch), which costs a function call, else
// through `__dlpack__`.
class Borrowed {
 public:
  Borrowed() = default;
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  // Describes `object`'s memory. `written`: it must be writable. `name` is the argument's, for
  // errors: TypeError for an object that speaks no DLPack, BufferError for memory that cannot be
  // lent. The descriptor's shape and strides live as long as this object; strides are NULL if the
  // tensor is compact. An element that packs two 4-bit ones (PyTorch's float4_e2m1fn_x2) counts as
  // two along the last dimension.
  te_fl_dltensor describe(PyObject* object, bool written, const char* name);

  // The stream that work on `device` should go to: the current one of the library that lent a
  // tensor there; the default stream where no library says.
  void* stream(const te_fl_device& device) const;

 private:
  struct Lent;
  te_fl_dltensor by_capsule(PyObject* object, bool written, const char* name);
  void count_packed(te_fl_dltensor& t);

  std::forward_list<std::vector<int64_t>> shapes_;  // of packed tensors
  Lent* lent_ = nullptr;                            // capsules' tensors, the newest first
  const void* exchange_ = nullptr;  // of the last tensor that came by the exchange API
};

// Throws te_fl.InvalidArgument unless a part of a quantised tensor lies where another does: an op
// knows one device of it. Pinned memory may be any part, since host and devices reach it.
void check_part_device(const te_fl_device& part, const te_fl_device& other,
                       const std::string& name);

}  // namespace te_fl::python
