#include "ops/storage.hpp"

#include <forward_list>
#include <optional>
#include <string>

#include "py/errors.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {
namespace {

// Transformer Engine's enum values of the FP8 dtypes.
constexpr long kE4M3 = 7, kE5M2 = 8;
constexpr Py_ssize_t kTargetSize = 6;

std::forward_list<StorageClass>& classes() {
  static auto* all = new std::forward_list<StorageClass>();  // guarded by the interpreter's lock
  return *all;
}

std::string words_of_shape(const te_fl_dltensor& t) {
  std::string text = "[";
  for (int32_t d = 0; d < t.ndim; ++d) text += (d == 0 ? "" : ", ") + std::to_string(t.shape[d]);
  return text + "]";
}

int64_t elements(const te_fl_dltensor& t) {
  int64_t count = 1;
  for (int32_t d = 0; d < t.ndim; ++d) count *= t.shape[d];
  return count;
}

int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Number of scales of the row-wise copy of a matrix [m, k].
int64_t factors(uint32_t scaling, int64_t m, int64_t k) {
  if (scaling == TE_FL_SCALING_TENSOR) return 1;
  if (scaling == TE_FL_SCALING_BLOCK_128X128)
    return (m + 127) / 128 * rounded_up((k + 127) / 128, 4);
  return (k + 127) / 128 * rounded_up(m, 4);
}

// Reads the attributes of one storage object.
class Reader {
 public:
  Reader(PyObject* storage, bool written, const char* name, Borrowed& borrowed,
         std::vector<Ref>& held)
      : storage_(storage), written_(written), name_(name), borrowed_(borrowed), held_(held) {}

  PyObject* attribute(PyObject* name) {
    held_.push_back(Ref::take(PyObject_GetAttr(storage_, name)));
    return held_.back().get();
  }
  bool truth(PyObject* name) {
    const Ref member = Ref::take(PyObject_GetAttr(storage_, name));
    const int value = PyObject_IsTrue(member.get());
    check(value);
    return value != 0;
  }
  // Describes the part in the attribute `name`. Returns false if the attribute is None.
  bool part(PyObject* name, te_fl_dltensor& t) {
    PyObject* value = name != nullptr ? attribute(name) : Py_None;
    if (value == Py_None) return false;
    t = borrowed_.describe(value, written_, name_);
    if (t.strides != nullptr)
      throw_invalid(words(name) + " is not contiguous; give a contiguous tensor");
    if (!device_.has_value()) device_ = t.device;
    check_part_device(t.device, *device_, words(name));
    return true;
  }
  void check_codes(PyObject* name, const te_fl_dltensor& t) const {
    if (dtype_index(t.dtype) != TE_FL_U8)
      throw_invalid(words(name) + " is not uint8; the codes of a quantised tensor are bytes");
  }
  void* scales(PyObject* name, int64_t least) {
    te_fl_dltensor t{};
    if (!part(name, t)) return nullptr;
    if (dtype_index(t.dtype) != TE_FL_F32) throw_invalid(words(name) + " is not FP32; scales are");
    if (elements(t) < least) {
      throw_invalid(words(name) + " has " + std::to_string(elements(t)) +
                    " elements; the scales of these codes are " + std::to_string(least) +
                    " or more");
    }
    return address(t);
  }
  static void* address(const te_fl_dltensor& t) {
    return static_cast<char*>(t.data) + t.byte_offset;
  }
  std::string words(PyObject* attribute) const {
    return "'" + std::string(name_) + "': " + std::string(text_of(attribute, "a name")) +
           " of the " + type_name(storage_);
  }

 private:
  PyObject* storage_;
  bool written_;
  const char* name_;
  Borrowed& borrowed_;
  std::vector<Ref>& held_;
  std::optional<te_fl_device> device_;  // of the first part that was read
};

te_fl_dtype dtype_of_codes(PyObject* code) {
  // An IntEnum is an int; other enumerations may only define __int__.
  const Ref number = PyLong_Check(code) != 0 ? Ref::share(code) : Ref::take(PyNumber_Long(code));
  const long value = PyLong_AsLong(number.get());
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  if (value != kE4M3 && value != kE5M2) {
    throw_invalid("dtype " + std::to_string(value) +
                  " is not an FP8 one: kFloat8E4M3 (7) or kFloat8E5M2 (8)");
  }
  return to_c(value == kE4M3 ? DType::kF8E4M3 : DType::kF8E5M2);
}

// The matrix shape of row-wise codes: all extents but the last are multiplied.
void shape_of_rows(const te_fl_dltensor& t, int64_t (&shape)[2]) {
  shape[1] = t.ndim > 0 ? t.shape[t.ndim - 1] : 1;
  shape[0] = 1;
  for (int32_t d = 0; d + 1 < t.ndim; ++d) shape[0] *= t.shape[d];
}

// The matrix shape of transposed (column-wise) codes.
void shape_of_columns(const te_fl_dltensor& t, int64_t (&shape)[2]) {
  shape[1] = t.ndim > 0 ? t.shape[0] : 1;
  shape[0] = 1;
  for (int32_t d = 1; d < t.ndim; ++d) shape[0] *= t.shape[d];
}

// Returns the address of an FP32 [count] tensor in a target tuple; null for None or an empty
// tensor. A Transformer Engine quantizer that computes no amax passes an empty host tensor,
// whatever the device is.
float* scalar_of(PyObject* value, int64_t count, const te_fl_device& device, bool written,
                 const char* name, const char* what, Borrowed& borrowed) {
  if (value == Py_None) return nullptr;
  const te_fl_dltensor t = borrowed.describe(value, written, name);
  if (elements(t) == 0) return nullptr;
  check_part_device(t.device, device, "'" + std::string(name) + "': the quantizer's " + what);
  if (dtype_index(t.dtype) != TE_FL_F32 || elements(t) != count || t.strides != nullptr) {
    throw_invalid("'" + std::string(name) + "': the quantizer's " + what + " has shape " +
                  words_of_shape(t) + "; it is FP32 [" + std::to_string(count) + "]");
  }
  return static_cast<float*>(Reader::address(t));
}

}  // namespace

const StorageClass* storage_class_of(PyTypeObject* type) noexcept {
  for (const StorageClass& known : classes()) {
    if (known.type == type) return &known;
  }
  return nullptr;
}

void read_storage(PyObject* storage, const StorageClass& kind, PyObject* code, bool written,
                  const char* name, Borrowed& borrowed, std::vector<Ref>& held, StorageView& view) {
  Reader reader(storage, written, name, borrowed, held);
  view.tensor = te_fl_tensor{};
  view.quant = te_fl_quant{};
  view.quant.scaling = TE_FL_SCALING_TENSOR;
  if (kind.square != nullptr) {
    view.quant.scaling =
        reader.truth(kind.square) ? TE_FL_SCALING_BLOCK_128X128 : TE_FL_SCALING_BLOCK_1X128;
  }
  te_fl_dltensor rows{}, columns{};
  const bool has_rows = reader.part(kind.data, rows);
  const bool has_columns = (kind.stale == nullptr || !reader.truth(kind.stale)) &&
                           reader.part(kind.columnwise_data, columns);
  if (!has_rows && !has_columns) {
    throw_invalid("'" + std::string(name) + "': a " + type_name(storage) +
                  " has neither its data nor a valid transpose");
  }
  if (has_rows) {
    reader.check_codes(kind.data, rows);
    shape_of_rows(rows, view.shape);
  } else {
    shape_of_columns(columns, view.shape);
  }
  if (has_columns) {
    reader.check_codes(kind.columnwise_data, columns);
    if (elements(columns) != view.shape[0] * view.shape[1]) {
      throw_invalid(reader.words(kind.columnwise_data) + " has shape " + words_of_shape(columns) +
                    "; the transpose of [" + std::to_string(view.shape[0]) + ", " +
                    std::to_string(view.shape[1]) + "] has as many elements as that");
    }
    view.quant.columnwise_data = Reader::address(columns);
  }
  const auto [m, k] = view.shape;
  view.quant.scale_inv = reader.scales(
      kind.scale_inv, has_rows || kind.square == nullptr ? factors(view.quant.scaling, m, k) : 0);
  view.quant.columnwise_scale_inv =
      reader.scales(kind.columnwise_scale_inv, has_columns ? factors(view.quant.scaling, k, m) : 0);
  view.tensor.dl = has_rows ? rows : columns;
  if (!has_rows) view.tensor.dl.data = nullptr, view.tensor.dl.byte_offset = 0;
  view.tensor.dl.dtype = dtype_of_codes(code != nullptr ? code : reader.attribute(kind.code));
  view.tensor.dl.ndim = 2;
  view.tensor.dl.shape = view.shape;
  view.tensor.dl.strides = nullptr;
  view.tensor.quant = &view.quant;
}

bool is_storage_target(PyObject* value) noexcept {
  return PyTuple_Check(value) != 0 && PyTuple_Size(value) == kTargetSize &&
         storage_class_of(Py_TYPE(PyTuple_GetItem(value, 0))) != nullptr;
}

void read_storage_target(PyObject* target, bool written, const char* name, Borrowed& borrowed,
                         std::vector<Ref>& held, StorageView& view) {
  PyObject* storage = PyTuple_GetItem(target, 0);
  PyObject* scale = PyTuple_GetItem(target, 2);
  PyObject* amax = PyTuple_GetItem(target, 3);
  read_storage(storage, *storage_class_of(Py_TYPE(storage)), PyTuple_GetItem(target, 1), written,
               name, borrowed, held, view);
  const bool both = scale == amax && scale != Py_None;
  const te_fl_device& device = view.tensor.dl.device;
  view.quant.scale = scalar_of(scale, both ? 2 : 1, device, written, name, "scale", borrowed);
  view.quant.amax =
      both ? view.quant.scale + 1 : scalar_of(amax, 1, device, written, name, "amax", borrowed);
  view.quant.flags = static_cast<uint32_t>(PyLong_AsUnsignedLong(PyTuple_GetItem(target, 4)));
  view.quant.amax_epsilon = static_cast<float>(PyFloat_AsDouble(PyTuple_GetItem(target, 5)));
  if (PyErr_Occurred() != nullptr) throw PythonError();
}

PyObject* add_storage_class(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *type = nullptr, *names[7] = {};
    if (PyArg_ParseTuple(args, "O!OOOOOOO", &PyType_Type, &type, &names[0], &names[1], &names[2],
                         &names[3], &names[4], &names[5], &names[6]) == 0)
      throw PythonError();
    for (PyObject*& name : names) {
      if (name == Py_None) {
        name = nullptr;
        continue;
      }
      name = Ref::take(PyUnicode_InternFromString(std::string(text_of(name, "a name")).c_str()))
                 .release();
    }
    if (names[0] == nullptr || names[1] == nullptr || names[4] == nullptr)
      throw_invalid("a storage class has names for data, columnwise_data and code");
    auto* kind = reinterpret_cast<PyTypeObject*>(type);
    if (storage_class_of(kind) == nullptr) {
      Py_INCREF(type);
      classes().push_front(
          {kind, names[0], names[1], names[2], names[3], names[4], names[5], names[6]});
    }
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
