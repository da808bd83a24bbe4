#include "ops/quantised.hpp"

#include <cstring>
#include <forward_list>
#include <optional>
#include <string>
#include <utility>

#include "py/errors.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {
namespace {

// Transformer Engine's enum values of the FP8 dtypes.
constexpr long kE4M3 = 7, kE5M2 = 8;

// The attributes of a class, in the order of te_fl.tensors.QuantizedNames: interned names that are
// never freed; null: the class has no such attribute.
struct Names {
  PyObject* data;
  PyObject* parts[kPartCount];
  PyObject* code;     // E4M3 or E5M2, as kE4M3 or kE5M2; null: `data` has the dtype of the codes
  PyObject* stale;    // true while the column-wise copy is out of date
  PyObject* square;   // true for blocks of 128 x 128, false for 1 x 128
  PyObject* scaling;  // an index in te_fl.tensors.SCALINGS
  PyObject* flags;    // te_fl_quant.flags
  PyObject* amax_epsilon;
  PyObject* shape;  // the logical shape if there is no row-wise copy
};
constexpr size_t kNameCount = sizeof(Names) / sizeof(PyObject*);

struct QuantisedClass {
  PyTypeObject* type;
  Names names;
};

// The fields of te_fl.tensors.QuantizedTarget.
enum Target : Py_ssize_t { kTensor, kCode, kScale, kAmax, kFlags, kAmaxEpsilon, kTargetSize };

PyTypeObject* g_target = nullptr;  // never freed

std::forward_list<QuantisedClass>& classes() {
  static auto* all = new std::forward_list<QuantisedClass>();  // guarded by the interpreter's lock
  return *all;
}

const QuantisedClass* class_of(PyTypeObject* type) noexcept {
  for (const QuantisedClass& known : classes()) {
    if (known.type == type) return &known;
  }
  for (const QuantisedClass& known : classes()) {
    if (PyType_IsSubtype(type, known.type) != 0) return &known;
  }
  return nullptr;
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

void* address(const te_fl_dltensor& t) { return static_cast<char*>(t.data) + t.byte_offset; }

double number(PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (PyErr_Occurred() != nullptr) throw PythonError();
  return number;
}

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

// Reads the attributes of one object into a QuantisedTensor.
class Reader {
 public:
  Reader(PyObject* object, const Names& names, bool written, const char* name, Borrowed& borrowed,
         std::vector<Ref>& held, QuantisedTensor& q)
      : object_(object),
        names_(names),
        written_(written),
        name_(name),
        borrowed_(borrowed),
        held_(held),
        q_(q) {}

  // `code`: the dtype of the codes; null: the object's own.
  void read(PyObject* code) {
    q_.tensor = te_fl_tensor{};
    q_.quant = te_fl_quant{};
    q_.part_bytes = {};
    read_settings();
    te_fl_dltensor rows{}, columns{};
    const bool has_rows = part(names_.data, rows, names_.code == nullptr);
    const bool has_columns = (names_.stale == nullptr || !to_bool(names_.stale)) &&
                             part(names_.parts[kColumnwiseData], columns);
    if (!has_rows && !has_columns) {
      throw_invalid("'" + std::string(name_) + "': a " + type_name(object_) +
                    " has neither its data nor a valid transpose");
    }
    if (has_columns) put(kColumnwiseData, columns);
    q_.tensor.dl = has_rows ? rows : columns;
    if (!has_rows) {
      q_.tensor.dl.data = nullptr;
      q_.tensor.dl.byte_offset = 0;
    }
    if (names_.code != nullptr) {
      see_as_matrix(has_rows ? &rows : nullptr, has_columns ? &columns : nullptr);
      q_.tensor.dl.dtype = dtype_of_codes(code != nullptr ? code : attribute(names_.code));
    } else if (!has_rows) {
      read_shape();
    }
    for (size_t i = kScaleInv; i < kPartCount; ++i) {
      te_fl_dltensor t{};
      if (!part(names_.parts[i], t)) continue;
      if (names_.code != nullptr) check_scales(static_cast<int>(i), t, has_rows, has_columns);
      put(static_cast<int>(i), t);
    }
    q_.tensor.quant = &q_.quant;
  }
  const te_fl_device& device() const { return *device_; }

 private:
  PyObject* attribute(PyObject* name) {
    held_.push_back(Ref::take(PyObject_GetAttr(object_, name)));
    return held_.back().get();
  }
  double number_of(PyObject* name) {
    const Ref member = Ref::take(PyObject_GetAttr(object_, name));
    return number(member.get());
  }
  bool to_bool(PyObject* name) {
    const Ref member = Ref::take(PyObject_GetAttr(object_, name));
    const int value = PyObject_IsTrue(member.get());
    check(value);
    return value != 0;
  }
  void read_settings() {
    q_.quant.scaling = TE_FL_SCALING_TENSOR;
    if (names_.square != nullptr) {
      q_.quant.scaling =
          to_bool(names_.square) ? TE_FL_SCALING_BLOCK_128X128 : TE_FL_SCALING_BLOCK_1X128;
    }
    if (names_.scaling != nullptr)
      q_.quant.scaling = static_cast<uint32_t>(number_of(names_.scaling));
    if (names_.flags != nullptr) q_.quant.flags = static_cast<uint32_t>(number_of(names_.flags));
    if (names_.amax_epsilon != nullptr)
      q_.quant.amax_epsilon = static_cast<float>(number_of(names_.amax_epsilon));
  }
  // Describes the part in the attribute `name`. Returns false if there is none.
  bool part(PyObject* name, te_fl_dltensor& t, bool may_be_strided = false) {
    PyObject* value = name != nullptr ? attribute(name) : Py_None;
    if (value == Py_None) return false;
    t = borrowed_.describe(value, written_, name_);
    if (t.strides != nullptr && !may_be_strided)
      throw_invalid(words(name) + " is not contiguous; give a contiguous tensor");
    if (!device_.has_value()) {
      device_ = t.device;
      q_.object = value;
    }
    check_part_device(t.device, *device_, words(name));
    return true;
  }
  void put(int part, const te_fl_dltensor& t) {
    void* const data = address(t);
    std::memcpy(reinterpret_cast<char*>(&q_.quant) + kParts[part].offset, &data, sizeof data);
    q_.part_bytes[static_cast<size_t>(part)] = elements(t) * t.dtype.bits * t.dtype.lanes / 8;
  }
  void see_as_matrix(const te_fl_dltensor* rows, const te_fl_dltensor* columns) {
    for (const auto& [t, name] :
         {std::pair{rows, names_.data}, std::pair{columns, names_.parts[kColumnwiseData]}}) {
      if (t != nullptr && dtype_index(t->dtype) != TE_FL_U8)
        throw_invalid(words(name) + " is not uint8; the codes of a quantised tensor are bytes");
    }
    const te_fl_dltensor& t = rows != nullptr ? *rows : *columns;
    const int32_t last = rows != nullptr ? t.ndim - 1 : 0;  // transposed codes begin with it
    q_.shape[1] = t.ndim > 0 ? t.shape[last] : 1;
    q_.shape[0] = 1;
    for (int32_t d = 0; d < t.ndim; ++d) q_.shape[0] *= d != last ? t.shape[d] : 1;
    if (rows != nullptr && columns != nullptr && elements(*columns) != elements(*rows)) {
      throw_invalid(words(names_.parts[kColumnwiseData]) + " has shape " +
                    words_of_shape(*columns) + "; the transpose of [" +
                    std::to_string(q_.shape[0]) + ", " + std::to_string(q_.shape[1]) +
                    "] has as many elements as that");
    }
    set_shape(2);
  }
  void set_shape(int32_t rank) {
    q_.tensor.dl.ndim = rank;
    q_.tensor.dl.shape = q_.shape.data();
    q_.tensor.dl.strides = nullptr;
  }
  // Reads the logical shape of a tensor without row-wise data.
  void read_shape() {
    const Ref list = Ref::take(PySequence_List(attribute(names_.shape)));
    const Py_ssize_t rank = PyList_Size(list.get());
    if (rank > kMaxRank) {
      throw_invalid("'" + std::string(name_) + "' has " + std::to_string(rank) +
                    " dimensions; a tensor has at most " + std::to_string(kMaxRank));
    }
    for (Py_ssize_t d = 0; d < rank; ++d) {
      q_.shape[static_cast<size_t>(d)] = PyLong_AsLongLong(PyList_GetItem(list.get(), d));
    }
    if (PyErr_Occurred() != nullptr) throw PythonError();
    set_shape(static_cast<int32_t>(rank));
  }
  // Checks the scales of a matrix of uint8 codes.
  void check_scales(int part, const te_fl_dltensor& t, bool has_rows, bool has_columns) const {
    const std::string attribute = words(names_.parts[part]);
    if (dtype_index(t.dtype) != TE_FL_F32) throw_invalid(attribute + " is not FP32; scales are");
    const bool columnwise = part == kColumnwiseScaleInv;
    // Both copies of a tensor with one scale have the same.
    const bool used = columnwise ? has_columns : has_rows || names_.square == nullptr;
    const auto extents = scale_inv_shape(static_cast<Scaling>(q_.quant.scaling), columnwise,
                                         q_.shape[0], q_.shape[1]);
    const int64_t least = used ? extents[0] * extents[1] : 0;
    if (elements(t) >= least) return;
    throw_invalid(attribute + " has " + std::to_string(elements(t)) +
                  " elements; the scales of these codes are " + std::to_string(least) + " or more");
  }
  std::string words(PyObject* attribute) const {
    return "'" + std::string(name_) + "': " + std::string(to_text(attribute, "a name")) +
           " of the " + type_name(object_);
  }

  PyObject* object_;
  const Names& names_;
  bool written_;
  const char* name_;
  Borrowed& borrowed_;
  std::vector<Ref>& held_;
  QuantisedTensor& q_;
  std::optional<te_fl_device> device_;  // of the first part that was read
};

// Returns the address of an FP32 [count] tensor in a target; null for None or an empty tensor. A
// Transformer Engine quantizer that computes no amax passes an empty host tensor, whatever the
// device is.
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
  return static_cast<float*>(address(t));
}

void read_target(PyObject* target, bool written, const char* name, Borrowed& borrowed,
                 std::vector<Ref>& held, QuantisedTensor& q) {
  const auto field = [&](Target at) { return PyTuple_GetItem(target, at); };
  PyObject* const tensor = field(kTensor);
  const QuantisedClass* kind = class_of(Py_TYPE(tensor));
  if (kind == nullptr) {
    throw_type_error("'" + std::string(name) + "': a te_fl.tensors.QuantizedTarget of a " +
                     type_name(tensor) + ", which is no quantised tensor");
  }
  Reader reader(tensor, kind->names, written, name, borrowed, held, q);
  reader.read(field(kCode));
  const bool both = field(kScale) == field(kAmax) && field(kScale) != Py_None;
  q.quant.scale =
      scalar_of(field(kScale), both ? 2 : 1, reader.device(), written, name, "scale", borrowed);
  q.quant.amax = both
                     ? q.quant.scale + 1
                     : scalar_of(field(kAmax), 1, reader.device(), written, name, "amax", borrowed);
  q.quant.flags = static_cast<uint32_t>(number(field(kFlags)));
  q.quant.amax_epsilon = static_cast<float>(number(field(kAmaxEpsilon)));
}

}  // namespace

bool is_quantised(PyObject* object) noexcept {
  return Py_TYPE(object) == g_target || class_of(Py_TYPE(object)) != nullptr;
}

bool read_quantised(PyObject* object, bool written, const char* name, Borrowed& borrowed,
                    std::vector<Ref>& held, QuantisedTensor& q) {
  if (Py_TYPE(object) == g_target) {
    read_target(object, written, name, borrowed, held, q);
    return true;
  }
  const QuantisedClass* kind = class_of(Py_TYPE(object));
  if (kind == nullptr) return false;
  Reader(object, kind->names, written, name, borrowed, held, q).read(nullptr);
  return true;
}

PyObject* add_quantized_class(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *type = nullptr, *names = nullptr;
    if (PyArg_ParseTuple(args, "O!O!", &PyType_Type, &type, &PyTuple_Type, &names) == 0)
      throw PythonError();
    if (PyTuple_Size(names) != static_cast<Py_ssize_t>(kNameCount))
      throw_invalid("quantized_class() takes a te_fl.tensors.QuantizedNames");
    PyObject* all[kNameCount] = {};
    for (size_t i = 0; i < kNameCount; ++i) {
      PyObject* const name = PyTuple_GetItem(names, static_cast<Py_ssize_t>(i));
      if (name == Py_None) continue;
      const std::string text(to_text(name, "a name"));
      all[i] = Ref::take(PyUnicode_InternFromString(text.c_str())).release();
    }
    QuantisedClass kind{reinterpret_cast<PyTypeObject*>(type), {}};
    std::memcpy(&kind.names, all, sizeof all);
    const Names& n = kind.names;
    if (n.data == nullptr || n.parts[kColumnwiseData] == nullptr ||
        (n.code == nullptr && n.shape == nullptr)) {
      throw_invalid("a quantised class has names for data, columnwise_data, and code or shape");
    }
    Py_INCREF(type);
    classes().push_front(kind);
    return Ref::share(Py_None);
  });
}

PyObject* set_quantized_target(PyObject*, PyObject* type) noexcept {
  return guarded([&] {
    if (!PyType_Check(type)) throw_type_error("the class of targets must be a type");
    Py_INCREF(type);
    g_target = reinterpret_cast<PyTypeObject*>(type);
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
