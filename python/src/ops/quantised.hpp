// Reads quantised tensors in Python, as inputs and outputs of ops: te_fl.Quantized and the classes
// of other packages (Transformer Engine's storages), by the names of their attributes. Creates no
// views, and keeps nothing between calls.
#pragma once

#include <array>
#include <vector>

#include "ops/quant_parts.hpp"
#include "py/dlpack.hpp"
#include "py/py.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

// A quantised tensor converted for an op. `tensor` points to the other members, so do not copy.
struct QuantisedTensor {
  te_fl_tensor tensor;
  te_fl_quant quant;
  PyObject* object = nullptr;  // the first part, a tensor; borrowed from the references in `held`
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kPartCount> part_bytes{};  // size in bytes of each part's memory
};

// Converts `object` if it is a quantised tensor: an instance of a class that quantized_class() has
// registered, or a te_fl.tensors.QuantizedTarget. Returns false for any other object. Adds
// references to the parts to `held`. A class with a separate dtype of its codes holds a matrix over
// its last dimension: uint8 codes of any shape, column-wise codes that are transposed ([last,
// others...]), and FP32 scales as in te_fl_quant. Throws te_fl.InvalidArgument, naming `name`, the
// attribute and the class, if a part has the wrong dtype, size, device or strides.
bool read_quantised(PyObject* object, bool written, const char* name, Borrowed& borrowed,
                    std::vector<Ref>& held, QuantisedTensor& q);

// True if read_quantised() converts the object.
bool is_quantised(PyObject* object) noexcept;

// quantized_class(type, names): registers a class of quantised tensors and its subclasses. names: a
// te_fl.tensors.QuantizedNames.
PyObject* add_quantized_class(PyObject*, PyObject* args) noexcept;
// quantized_target(type): registers te_fl.tensors.QuantizedTarget.
PyObject* set_quantized_target(PyObject*, PyObject* type) noexcept;

}  // namespace te_fl::python
