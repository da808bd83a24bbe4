// Quantised tensors of another package, read by the names of their parts: as operands of ops, and
// as outputs. No view of a part is made, and nothing is kept between calls.
#pragma once

#include <vector>

#include "py/dlpack.hpp"
#include "py/py.hpp"

namespace te_fl::python {

// A class of storage; its names are interned and kept for ever.
struct StorageClass {
  PyTypeObject* type;
  PyObject *data, *columnwise_data, *scale_inv, *columnwise_scale_inv;  // null: it has no such part
  PyObject* code;    // an FP8 dtype as the package numbers them, kE4M3 or kE5M2
  PyObject* stale;   // true: the column-wise copy is not to be read; null: it always is
  PyObject* square;  // true: blocks of 128 x 128, else of 1 x 128; null: one scale
};

// The class of that very type; null: it is none that storage_class() was told of.
const StorageClass* storage_class_of(PyTypeObject* type) noexcept;

// A storage as an op reads it. `tensor` holds addresses of the other members.
struct StorageView {
  te_fl_tensor tensor;
  te_fl_quant quant;
  int64_t shape[2];
};

// Describes a storage as the matrix over its last dimension: uint8 codes of any shape, of which the
// column-wise copy is transposed ([last, others...]), and FP32 scales as te_fl_quant has them.
// `code`: the dtype of the codes; null: the storage's own. The parts are added to `held`. Throws
// te_fl.InvalidArgument for a part whose dtype or size is another.
void read_storage(PyObject* storage, const StorageClass& kind, PyObject* code, bool written,
                  const char* name, Borrowed& borrowed, std::vector<Ref>& held, StorageView& view);

// An output with its quantizer's settings is a tuple (storage, code, scale, amax, flags,
// amax_epsilon). scale and amax: FP32 [1], or for none None or a tensor without elements; the same
// object twice is FP32 [2] with both.
bool is_storage_target(PyObject* value) noexcept;
void read_storage_target(PyObject* target, bool written, const char* name, Borrowed& borrowed,
                         std::vector<Ref>& held, StorageView& view);

// storage_class(type, data, columnwise_data, scale_inv, columnwise_scale_inv, code, stale, square):
// the names of its parts, or None.
PyObject* add_storage_class(PyObject*, PyObject* args) noexcept;

}  // namespace te_fl::python
