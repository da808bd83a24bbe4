// Quantised tensors of another package (Transformer Engine's storages), read by attribute names, as
// inputs and outputs of ops. No views of parts are created, and nothing is kept between calls.
#pragma once

#include <vector>

#include "py/dlpack.hpp"
#include "py/py.hpp"

namespace te_fl::python {

// The attribute names of one storage class; interned and never freed.
struct StorageClass {
  PyTypeObject* type;
  PyObject *data, *columnwise_data, *scale_inv, *columnwise_scale_inv;  // null: no such part
  PyObject* code;  // the attribute that is E4M3 or E5M2, as kE4M3 or kE5M2
  // The attribute that is true while the column-wise copy is out of date; null: never out of date.
  PyObject* stale;
  // The attribute that is true for blocks of 128 x 128, false for 1 x 128; null: one scale.
  PyObject* square;
};

// The class registered for exactly this type; null if storage_class() has not registered it.
const StorageClass* storage_class_of(PyTypeObject* type) noexcept;

// A storage converted for an op. `tensor` points to the other members.
struct StorageView {
  te_fl_tensor tensor;
  te_fl_quant quant;
  int64_t shape[2];
};

// Describes a storage as a matrix over its last dimension. The storage's codes are uint8 of any
// shape, its column-wise codes are transposed ([last, others...]), and its scales are FP32 as in
// te_fl_quant.
// `code`: the dtype of the codes; null: the storage's own. Adds references to the parts to `held`.
// Throws te_fl.InvalidArgument if a part has the wrong dtype or size.
void read_storage(PyObject* storage, const StorageClass& kind, PyObject* code, bool written,
                  const char* name, Borrowed& borrowed, std::vector<Ref>& held, StorageView& view);

// An output together with its quantizer's settings: a tuple (storage, code, scale, amax, flags,
// amax_epsilon). scale and amax are FP32 [1]; None or an empty tensor means absent. If both are the
// same object, it is FP32 [2] with the scale and the amax.
bool is_storage_target(PyObject* value) noexcept;
void read_storage_target(PyObject* target, bool written, const char* name, Borrowed& borrowed,
                         std::vector<Ref>& held, StorageView& view);

// storage_class(type, data, columnwise_data, scale_inv, columnwise_scale_inv, code, stale, square):
// registers a storage class by the attribute names of its parts; None for a part that it lacks.
PyObject* add_storage_class(PyObject*, PyObject* args) noexcept;

}  // namespace te_fl::python
