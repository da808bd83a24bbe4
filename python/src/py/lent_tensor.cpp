#include "py/lent_tensor.hpp"

#include <algorithm>
#include <exception>
#include <numeric>
#include <vector>

#include "py/exchange.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::python {
namespace {

struct LentTensor {
  std::shared_ptr<Lending> lending;
  te_fl_dltensor dl{};
  uint32_t provider = 0;
  bool writable = false;
  std::vector<int64_t> shape, strides;                   // in elements
  std::vector<Py_ssize_t> buffer_shape, buffer_strides;  // in bytes, computed on the first request
  std::string format;
  Device device() const { return {dl.device.type, dl.device.index, provider}; }
  void* data() const { return static_cast<char*>(dl.data) + dl.byte_offset; }
};

struct Object {
  PyObject_HEAD LentTensor* tensor;
};

// The buffer protocol. Python's stable ABI has it from 3.11 on; Python 3.10 has the same layout and
// the same numbers.
struct Buffer {
  void* buf;
  PyObject* obj;
  Py_ssize_t len, itemsize;
  int readonly, ndim;
  char* format;
  Py_ssize_t *shape, *strides, *suboffsets;
  void* internal;
};
constexpr int kGetBuffer = 1, kReleaseBuffer = 2;  // slots of a type
constexpr int kWritable = 0x1, kFormat = 0x4, kStrides = 0x10 | 0x8;

LentTensor& of(PyObject* self) { return *reinterpret_cast<Object*>(self)->tensor; }

[[noreturn]] void throw_buffer_error(const std::string& text) {
  PyErr_SetString(PyExc_BufferError, text.c_str());
  throw PythonError();
}

// Throws if the call that lent the tensor has ended.
void check_alive(const LentTensor& t) {
  if (t.lending->over.load()) {
    throw_buffer_error("this tensor was lent for a call of '" + t.lending->op +
                       "' that has ended; copy what is to be kept while the call runs");
  }
  if (t.lending->enquiry) {
    throw_buffer_error("supports() of '" + t.lending->op +
                       "' may look at shape, strides, dtype and device of its tensors, not at "
                       "their memory (rule R10)");
  }
}

Ref to_tuple(const std::vector<int64_t>& numbers) {
  Ref list = make_list(numbers, [](int64_t n) { return to_python(n); });
  return Ref::take(PyList_AsTuple(list.get()));
}

bool is_compact(const LentTensor& t) {
  if (std::find(t.shape.begin(), t.shape.end(), 0) != t.shape.end()) return true;
  int64_t expected = 1;
  for (size_t d = t.shape.size(); d-- > 0;) {
    if (t.shape[d] != 1 && t.strides[d] != expected) return false;
    expected *= t.shape[d];
  }
  return true;
}

PyObject* get_shape(PyObject* self, void*) noexcept {
  return guarded([&] { return to_tuple(of(self).shape); });
}
PyObject* get_strides(PyObject* self, void*) noexcept {
  return guarded([&] { return to_tuple(of(self).strides); });
}
PyObject* get_ndim(PyObject* self, void*) noexcept {
  return guarded([&] { return to_python(int64_t{of(self).dl.ndim}); });
}
PyObject* get_dtype(PyObject* self, void*) noexcept {
  return guarded([&] {
    const Result<DType> dtype = dtype_from_c(of(self).dl.dtype);
    return to_python(dtype.ok() ? name(*dtype) : std::string_view("unknown"));
  });
}
PyObject* get_device(PyObject* self, void*) noexcept {
  return guarded([&] { return to_python(std::string_view(to_string(of(self).device()))); });
}
PyObject* get_address(PyObject* self, void*) noexcept {
  return guarded([&] { return Ref::take(PyLong_FromVoidPtr(of(self).data())); });
}
PyObject* get_writable(PyObject* self, void*) noexcept {
  return guarded([&] { return to_python(of(self).writable); });
}
PyObject* get_contiguous(PyObject* self, void*) noexcept {
  return guarded([&] { return to_python(is_compact(of(self))); });
}

PyObject* represent(PyObject* self) noexcept {
  return guarded([&] {
    const Ref shape = to_tuple(of(self).shape);
    const Ref text = Ref::take(PyObject_Repr(shape.get()));
    const Result<DType> dtype = dtype_from_c(of(self).dl.dtype);
    return to_python(
        std::string_view("te_fl.LentTensor(shape=" + std::string(to_text(text.get(), "shape")) +
                         ", dtype=" + std::string(dtype.ok() ? name(*dtype) : "unknown") +
                         ", device=" + to_string(of(self).device()) + ")"));
  });
}

// ---- DLPack

// The object that a DLPack consumer owns, allocated together with its extents. Freed on any thread,
// with or without the interpreter's lock.
template <class T>
struct Export {
  T managed{};
  std::shared_ptr<Lending> lending;
  std::vector<int64_t> shape, strides;
};

template <class T>
T* exported(const std::shared_ptr<Lending>& lending, const te_fl_dltensor& tensor,
            std::span<const int64_t> shape, std::span<const int64_t> strides) {
  auto* made = new Export<T>();
  made->lending = lending;
  made->shape.assign(shape.begin(), shape.end());
  made->strides.assign(strides.begin(), strides.end());
  made->managed.tensor = tensor;
  made->managed.tensor.shape = made->shape.data();
  made->managed.tensor.strides = made->strides.data();
  made->managed.context = made;
  made->managed.deleter = [](T* m) {
    auto* mine = static_cast<Export<T>*>(m->context);
    mine->lending->exports.fetch_sub(1);
    delete mine;
  };
  lending->exports.fetch_add(1);
  return &made->managed;
}
template <class T>
T* exported(const LentTensor& t) {
  return exported<T>(t.lending, t.dl, t.shape, t.strides);
}

template <class T>
Ref make_capsule(T* managed, const char* capsule_name) {
  PyObject* capsule = PyCapsule_New(managed, capsule_name, [](PyObject* c) {
    const char* now = PyCapsule_GetName(c);
    if (now == nullptr || std::string_view(now).starts_with("used_")) return;
    auto* left = static_cast<T*>(PyCapsule_GetPointer(c, now));
    if (left != nullptr) left->deleter(left);
  });
  if (capsule == nullptr) managed->deleter(managed);
  return Ref::take(capsule);
}

// Accepts the call's stream, or -1, which means that the consumer orders its work itself.
void check_stream(const LentTensor& t, PyObject* stream) {
  if (stream == nullptr || stream == Py_None || t.device().is_host()) return;
  const long long handle = PyLong_AsLongLong(stream);
  if (PyErr_Occurred() != nullptr) throw PythonError();
  const auto own = reinterpret_cast<intptr_t>(t.lending->stream);
  const bool both_default = own == 0 && (handle == 0 || handle == 1);
  if (handle == -1 || handle == own || both_default) return;
  throw_buffer_error("this tensor belongs to work on stream " + std::to_string(own) +
                     ", and stream " + std::to_string(handle) +
                     " asks for it; take the implementation's `stream`");
}

PyObject* dlpack(PyObject* self, PyObject* args, PyObject* keywords) noexcept {
  return guarded([&] {
    static const char* const names[] = {"stream", "max_version", "dl_device", "copy", nullptr};
    PyObject *stream = nullptr, *version = nullptr, *device = nullptr, *copy = nullptr;
    if (PyArg_ParseTupleAndKeywords(args, keywords, "|$OOOO", const_cast<char**>(names), &stream,
                                    &version, &device, &copy) == 0) {
      throw PythonError();
    }
    const LentTensor& t = of(self);
    check_alive(t);
    check_stream(t, stream);
    if (copy == Py_True) throw_buffer_error("a lent tensor is not copied; copy what is made of it");
    if (device != nullptr && device != Py_None) {
      long type = 0, index = 0;
      if (PyArg_ParseTuple(device, "ll", &type, &index) == 0) throw PythonError();
      if (type != t.dl.device.type || index != t.dl.device.index)
        throw_buffer_error("this tensor is on " + to_string(t.device()) + " and is not copied");
    }
    long major = 0;
    if (version != nullptr && version != Py_None) {
      long minor = 0;
      if (PyArg_ParseTuple(version, "ll", &major, &minor) == 0) throw PythonError();
    }
    if (major < 1) return make_capsule(exported<Managed>(t), "dltensor");
    auto* managed = exported<ManagedVersioned>(t);
    managed->version = {1, 1};
    managed->flags = t.writable ? 0 : kReadOnly;
    return make_capsule(managed, "dltensor_versioned");
  });
}

PyObject* dlpack_device(PyObject* self, PyObject*) noexcept {
  return guarded([&] {
    return Ref::take(Py_BuildValue("(ii)", of(self).dl.device.type, of(self).dl.device.index));
  });
}

bool is_fp4(const LentTensor& t) {
  const Result<DType> dtype = dtype_from_c(t.dl.dtype);
  return dtype.ok() && *dtype == DType::kF4E2M1;
}

// Describes a tensor of FP4 as PyTorch does, whose elements have two codes.
void pair_fp4(te_fl_dltensor& dl) {
  dl.dtype.lanes = 2;
  dl.shape[dl.ndim - 1] /= 2;
  for (int32_t d = 0; d + 1 < dl.ndim; ++d) dl.strides[d] /= 2;
}

// PyTorch's module; imports it at the first call.
PyObject* torch_module() {
  static PyObject* const torch = PyImport_ImportModule("torch");
  if (torch == nullptr) Ref::take(PyImport_ImportModule("torch"));  // raises the import error
  return torch;
}

// The exchange table of PyTorch's tensors; null if PyTorch has none.
const Exchange* torch_exchange() {
  static PyObject* const type = PyObject_GetAttrString(torch_module(), "Tensor");
  if (type == nullptr) throw PythonError();
  const Exchange* api = find_exchange(reinterpret_cast<PyTypeObject*>(type));
  return api == nullptr || api->to_object == nullptr ? nullptr : api;
}

Ref imported(const Exchange& api, ManagedVersioned* managed) {
  managed->version = {1, 1};  // the read-only flag stays unset: PyTorch has no read-only tensors
  void* made = nullptr;
  if (api.to_object(managed, &made) != 0) {
    managed->deleter(managed);
    throw PythonError();
  }
  return Ref::take(static_cast<PyObject*>(made));
}

PyObject* to_torch(PyObject* self, PyObject*) noexcept {
  return guarded([&] {
    const LentTensor& t = of(self);
    check_alive(t);
    const bool fp4 = is_fp4(t);
    if (fp4 && (t.shape.empty() || t.shape.back() % 2 != 0 || !is_compact(t)))
      throw_buffer_error("its FP4 elements have two codes, and rows of this tensor are not whole");
    const Exchange* api = torch_exchange();
    if (api == nullptr)
      return Ref::take(PyObject_CallMethod(torch_module(), "from_dlpack", "O", self));
    auto* managed = exported<ManagedVersioned>(t);
    if (fp4) pair_fp4(managed->tensor);
    return imported(*api, managed);
  });
}

// ---- NumPy, through the buffer protocol: unlike DLPack, it gives writable arrays in every version

// The format character of the Python module `struct`; null if there is none for the dtype.
const char* format_of(te_fl_dtype dtype) {
  const Result<DType> known = dtype_from_c(dtype);
  if (!known.ok()) return nullptr;
  switch (*known) {
    case DType::kF64:
      return "d";
    case DType::kF32:
      return "f";
    case DType::kF16:
      return "e";
    case DType::kI8:
      return "b";
    case DType::kI16:
      return "h";
    case DType::kI32:
      return "i";
    case DType::kI64:
      return "q";
    case DType::kU8:
      return "B";
    case DType::kU16:
      return "H";
    case DType::kU32:
      return "I";
    case DType::kU64:
      return "Q";
    case DType::kBool:
      return "?";
    default:
      return nullptr;
  }
}

void fill_buffer(PyObject* self, Buffer* view, int flags) {
  LentTensor& t = of(self);
  check_alive(t);
  const char* format = format_of(t.dl.dtype);
  if (!t.device().is_host() || format == nullptr) {
    const Result<DType> dtype = dtype_from_c(t.dl.dtype);
    throw_buffer_error("NumPy has no tensors of " +
                       std::string(dtype.ok() ? name(*dtype) : "this dtype") + " on " +
                       to_string(t.device()));
  }
  if ((flags & kWritable) != 0 && !t.writable)
    throw_buffer_error("this tensor is an input of '" + t.lending->op + "', which is not written");
  if ((flags & kStrides) != kStrides && !is_compact(t))
    throw_buffer_error("this tensor's elements are not contiguous");
  const Py_ssize_t size = t.dl.dtype.bits / 8;
  t.buffer_shape.assign(t.shape.begin(), t.shape.end());
  t.buffer_strides.assign(t.strides.begin(), t.strides.end());
  for (Py_ssize_t& stride : t.buffer_strides) stride *= size;
  static char empty[8];
  // A valid address for a tensor without elements.
  view->buf = t.dl.data != nullptr ? t.data() : empty;
  view->itemsize = size;
  view->len = std::accumulate(t.buffer_shape.begin(), t.buffer_shape.end(), size,
                              [](Py_ssize_t a, Py_ssize_t b) { return a * b; });
  view->readonly = t.writable ? 0 : 1;
  view->ndim = t.dl.ndim;
  view->format = (flags & kFormat) != 0 ? const_cast<char*>(format) : nullptr;
  view->shape = t.dl.ndim > 0 ? t.buffer_shape.data() : nullptr;
  view->strides = t.dl.ndim > 0 ? t.buffer_strides.data() : nullptr;
  view->suboffsets = nullptr;
  view->internal = nullptr;
  t.lending->exports.fetch_add(1);
  Py_INCREF(self);
  view->obj = self;
}

int get_buffer(PyObject* self, Buffer* view, int flags) noexcept {
  try {
    fill_buffer(self, view, flags);
    return 0;
  } catch (const PythonError&) {
  } catch (const std::exception&) {
    PyErr_NoMemory();
  }
  view->obj = nullptr;
  return -1;
}
void release_buffer(PyObject* self, Buffer*) noexcept { of(self).lending->exports.fetch_sub(1); }

PyObject* to_numpy(PyObject* self, PyObject*) noexcept {
  return guarded([&] {
    const Ref view = Ref::take(PyMemoryView_FromObject(self));
    const Ref numpy = Ref::take(PyImport_ImportModule("numpy"));
    return Ref::take(PyObject_CallMethod(numpy.get(), "asarray", "O", view.get()));
  });
}

// ---- the type

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->tensor;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyGetSetDef g_members[] = {
    {"shape", get_shape, nullptr, "Extents, a tuple of int.", nullptr},
    {"strides", get_strides, nullptr, "Strides in elements, a tuple of int.", nullptr},
    {"ndim", get_ndim, nullptr, "Rank.", nullptr},
    {"dtype", get_dtype, nullptr, "Name of the dtype: 'f32', 'bf16', 'f8e4m3'.", nullptr},
    {"device", get_device, nullptr, "'cpu', 'cuda:0'.", nullptr},
    {"address", get_address, nullptr, "Of the first element.", nullptr},
    {"writable", get_writable, nullptr, "Whether the op writes it.", nullptr},
    {"contiguous", get_contiguous, nullptr, "Whether it is compact and row-major.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef g_methods[] = {
    {"__dlpack__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(dlpack)),
     METH_VARARGS | METH_KEYWORDS, "Lends the memory by DLPack, while the call runs."},
    {"__dlpack_device__", dlpack_device, METH_NOARGS, "(device type, index) of DLPack."},
    {"torch", to_torch, METH_NOARGS, "A torch.Tensor on this memory, while the call runs."},
    {"numpy", to_numpy, METH_NOARGS, "A numpy.ndarray on this memory, while the call runs."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot g_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_repr, reinterpret_cast<void*>(represent)},
    {Py_tp_getset, g_members},
    {Py_tp_methods, g_methods},
    {kGetBuffer, reinterpret_cast<void*>(get_buffer)},
    {kReleaseBuffer, reinterpret_cast<void*>(release_buffer)},
    {Py_tp_doc, const_cast<char*>("A tensor of a call, lent to an implementation while it runs.")},
    {0, nullptr},
};

PyType_Spec g_spec = {"te_fl.LentTensor", sizeof(Object), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, g_slots};

Ref make_object(LentTensor&& tensor) {
  auto* type = reinterpret_cast<PyTypeObject*>(lent_tensor_class());
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  Ref object = Ref::take(allocate(type, 0));
  reinterpret_cast<Object*>(object.get())->tensor = new LentTensor(std::move(tensor));
  return object;
}

void fill_strides(LentTensor& t) {
  t.strides.resize(t.shape.size());
  int64_t next = 1;
  for (size_t d = t.shape.size(); d-- > 0;) {
    t.strides[d] = next;
    next *= t.shape[d];
  }
}

}  // namespace

PyObject* lent_tensor_class() {
  static PyObject* const type = PyType_FromSpec(&g_spec);
  if (type == nullptr) throw PythonError();
  return type;
}

Ref lend(const std::shared_ptr<Lending>& lending, const te_fl_dltensor& tensor, uint32_t provider,
         bool writable) {
  LentTensor t;
  t.lending = lending, t.dl = tensor, t.provider = provider, t.writable = writable;
  t.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  if (tensor.strides != nullptr) {
    t.strides.assign(tensor.strides, tensor.strides + tensor.ndim);
  } else {
    fill_strides(t);
  }
  return make_object(std::move(t));
}

Ref lend_to_torch(const std::shared_ptr<Lending>& lending, const te_fl_dltensor& tensor,
                  std::span<const int64_t> shape, std::span<const int64_t> strides) {
  const Exchange* api = torch_exchange();
  if (api != nullptr)
    return imported(*api, exported<ManagedVersioned>(lending, tensor, shape, strides));
  LentTensor t;
  t.lending = lending, t.dl = tensor, t.provider = lending->device.provider, t.writable = true;
  t.shape.assign(shape.begin(), shape.end());
  t.strides.assign(strides.begin(), strides.end());
  const Ref lent = make_object(std::move(t));
  return Ref::take(PyObject_CallMethod(torch_module(), "from_dlpack", "O", lent.get()));
}

Ref lend(const std::shared_ptr<Lending>& lending, void* data, te_fl_dtype dtype,
         std::span<const int64_t> shape, bool writable) {
  LentTensor t;
  t.lending = lending, t.provider = lending->device.provider, t.writable = writable;
  t.dl.data = data, t.dl.dtype = dtype, t.dl.device = lending->device.to_c();
  t.dl.ndim = static_cast<int32_t>(shape.size());
  t.shape.assign(shape.begin(), shape.end());
  fill_strides(t);
  return make_object(std::move(t));
}

}  // namespace te_fl::python
