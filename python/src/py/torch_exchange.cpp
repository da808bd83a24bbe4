#include "py/torch_exchange.hpp"

#include <memory>
#include <new>
#include <string>

namespace te_fl::python {
namespace {

constexpr uint8_t kUnsigned = 1;     // DLPack's code of unsigned integers
constexpr uint8_t kFirstFloat8 = 7;  // the first code of DLPack's dtypes of 8 bits and fewer

PyObject* find_attribute(const char* module, const char* name) {
  const Ref from = Ref::take(PyImport_ImportModule(module));
  return Ref::take(PyObject_GetAttrString(from.get(), name)).release();
}

// PyTorch's methods and attributes that describe a tensor. The methods are taken from the base
// class, because a subclass may override them. They are never freed, because static destructors run
// after the interpreter has ended.
struct Members {
  PyObject *data_ptr, *size, *stride;  // methods
  PyObject *dtype, *device;            // names of attributes
  PyObject *dtypes, *devices;          // te_fl.torch_exchange's DTYPES and DEVICES
};

const Members& members() {
  static const Members all = [] {
    const Ref base = Ref::take(find_attribute("torch._C", "TensorBase"));
    const auto method = [&](const char* name) {
      return Ref::take(PyObject_GetAttrString(base.get(), name)).release();
    };
    const auto text = [](const char* name) {
      return Ref::take(PyUnicode_InternFromString(name)).release();
    };
    return Members{method("data_ptr"),
                   method("size"),
                   method("stride"),
                   text("dtype"),
                   text("device"),
                   find_attribute("te_fl.torch_exchange", "DTYPES"),
                   find_attribute("te_fl.torch_exchange", "DEVICES")};
  }();
  return all;
}

Ref call(PyObject* function, PyObject* argument) {
  return Ref::take(PyObject_CallFunctionObjArgs(function, argument, nullptr));
}

int64_t to_number(PyObject* object) {
  const long long number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return number;
}

// The number that a table of te_fl.torch_exchange has for an attribute of the tensor.
int64_t look_up(PyObject* table, PyObject* tensor, PyObject* attribute) {
  const Ref key = Ref::take(PyObject_GetAttr(tensor, attribute));
  return to_number(Ref::take(PyObject_GetItem(table, key.get())).get());
}

void fill_description(PyObject* tensor, Extents& extents, te_fl_dltensor& out) {
  const Members& torch = members();
  const int64_t dtype = look_up(torch.dtypes, tensor, torch.dtype);
  const int64_t device = look_up(torch.devices, tensor, torch.device);
  const Ref shape = call(torch.size, tensor), strides = call(torch.stride, tensor);
  const Py_ssize_t rank = PyTuple_Size(shape.get());
  std::vector<int64_t>& numbers = extents.emplace_front(2 * static_cast<size_t>(rank));
  for (Py_ssize_t i = 0; i < rank; ++i) {
    numbers[static_cast<size_t>(i)] = to_number(PyTuple_GetItem(shape.get(), i));
    numbers[static_cast<size_t>(rank + i)] = to_number(PyTuple_GetItem(strides.get(), i));
  }
  const Ref address = call(torch.data_ptr, tensor);
  out.data = PyLong_AsVoidPtr(address.get());
  if (out.data == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
  out.device = {static_cast<int32_t>(device >> 32), static_cast<int32_t>(device)};
  out.ndim = static_cast<int32_t>(rank);
  out.dtype = {static_cast<uint8_t>(dtype), static_cast<uint8_t>(dtype >> 8),
               static_cast<uint16_t>(dtype >> 16)};
  out.shape = numbers.data();
  out.strides = numbers.data() + rank;
}

// A versioned DLPack tensor as one of DLPack 0.x, which an older PyTorch takes. Its FP8 codes are
// uint8, since that PyTorch refuses FP8 by DLPack.
struct Unversioned {
  Managed managed;
  ManagedVersioned* versioned;  // null: the tensor does not own it
};

void release(Managed* managed) {
  const std::unique_ptr<Unversioned> own(static_cast<Unversioned*>(managed->context));
  if (own->versioned != nullptr) own->versioned->deleter(own->versioned);
}

// If this throws, the caller owns `versioned`, as before.
Ref import_tensor(ManagedVersioned* versioned) {
  static PyObject* const import = find_attribute("torch._C", "_from_dlpack");
  static PyObject* const codes = find_attribute("te_fl.torch_exchange", "CODES");
  auto made = std::make_unique<Unversioned>();
  made->versioned = versioned;
  made->managed = {versioned->tensor, made.get(), release};
  te_fl_dltensor& tensor = made->managed.tensor;
  tensor.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  tensor.byte_offset = 0;  // PyTorch 2.7 does not read the offset
  Ref dtype;
  if (tensor.dtype.code >= kFirstFloat8 && tensor.dtype.bits == 8) {
    const Ref code = to_python(int64_t{tensor.dtype.code});
    dtype = Ref::take(PyObject_GetItem(codes, code.get()));
    tensor.dtype.code = kUnsigned;
  }
  const Ref capsule = Ref::take(PyCapsule_New(&made->managed, "dltensor", nullptr));
  Ref object = call(import, capsule.get());
  Unversioned& owner = *made.release();
  if (!dtype) return object;
  PyObject* const viewed = PyObject_CallMethod(object.get(), "view", "O", dtype.get());
  if (viewed == nullptr) owner.versioned = nullptr;
  return Ref::take(viewed);
}

int to_object(ManagedVersioned* versioned, void** out) noexcept {
  *out = guarded([&] { return import_tensor(versioned); });
  return *out == nullptr ? -1 : 0;
}

int find_stream(int32_t type, int32_t index, void** out) noexcept {
  PyObject* handle = guarded([&] {
    static PyObject* const ask = find_attribute("te_fl.torch_exchange", "current_stream");
    return Ref::take(PyObject_CallFunction(ask, "ii", type, index));
  });
  if (handle == nullptr) return -1;
  *out = PyLong_AsVoidPtr(handle);
  Py_DECREF(handle);
  return PyErr_Occurred() == nullptr ? 0 : -1;
}

const Exchange g_older_torch = {{{1, 0}, nullptr}, nullptr, nullptr,
                                to_object,         nullptr, find_stream};

}  // namespace

const Exchange* find_older_torch(PyTypeObject* type) {
  const Ref name = to_python(std::string_view("torch"));
  PyObject* torch = PyImport_GetModule(name.get());
  if (torch == nullptr) return nullptr;
  const Ref module = Ref::take(torch);
  PyObject* base = PyObject_GetAttrString(module.get(), "Tensor");
  if (base == nullptr) {  // PyTorch is being imported
    PyErr_Clear();
    return nullptr;
  }
  const Ref tensor = Ref::take(base);
  const bool is = PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(tensor.get())) != 0;
  return is ? &g_older_torch : nullptr;
}

bool describe_by_calls(PyObject* tensor, Extents& extents, te_fl_dltensor& out) noexcept {
  PyObject* const done = guarded([&] {
    fill_description(tensor, extents, out);
    return Ref::share(Py_None);
  });
  Py_XDECREF(done);
  return done != nullptr;
}

}  // namespace te_fl::python
