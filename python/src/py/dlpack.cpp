#include "py/dlpack.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "py/errors.hpp"
#include "py/exchange.hpp"
#include "py/torch_exchange.hpp"
#include "te_fl/status.hpp"

namespace te_fl::python {
namespace {

// A type and the way in which its tensors are borrowed. The entry keeps the type alive, so its
// address is never reused by another type.
struct KnownType {
  PyTypeObject* type = nullptr;
  const Exchange* exchange = nullptr;  // null: the type supports only __dlpack__
};
std::vector<KnownType>& known_types() {
  static auto* types = new std::vector<KnownType>();  // guarded by the interpreter's lock
  return *types;
}

const Exchange* ask_exchange(PyTypeObject* type) {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return find_older_torch(type);
  }
  const Ref owner = Ref::take(capsule);
  const auto* found =
      static_cast<const ExchangeHeader*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (found == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  while (found != nullptr && found->version.major != 1) found = found->previous;
  const auto* api = reinterpret_cast<const Exchange*>(found);
  return api != nullptr && api->describe != nullptr ? api : nullptr;
}

// Returns true for JAX arrays: they are immutable, but JAX exports them as DLPack 0.x capsules,
// which have no read-only flag.
bool is_immutable(PyObject* object) {
  const Ref type = Ref::take(PyObject_Type(object));
  const Ref module = Ref::take(PyObject_GetAttrString(type.get(), "__module__"));
  return PyUnicode_Check(module.get()) != 0 &&
         to_text(module.get(), "__module__").starts_with("jax");
}

[[noreturn]] void throw_read_only(const char* name) {
  throw_invalid("argument '" + std::string(name) +
                "' is written by this op, and its memory is read-only");
}

// Refuses a PyTorch view with the negative bit: the imaginary part of a conjugate shares memory
// with the original and is negated lazily, which DLPack does not express. Such views are never
// contiguous, so only non-contiguous tensors are checked.
void refuse_negated(PyObject* object, const char* name) {
  PyObject* const found = PyObject_CallMethod(object, "is_neg", nullptr);
  if (found == nullptr) return PyErr_Clear();  // a tensor of another library
  const Ref negated = Ref::take(found);
  if (negated.get() == Py_True) {
    throw_invalid(
        "argument '" + std::string(name) +
        "' has PyTorch's negative bit set (lazy negation), which te-fl does not read; give " +
        "its resolve_neg()");
  }
}

bool is_compact(const te_fl_dltensor& t) {
  if (t.strides == nullptr || std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim) {
    return true;  // PyTorch keeps the strides of an expanded tensor without elements
  }
  int64_t expected = 1;
  for (int32_t d = t.ndim - 1; d >= 0; --d) {
    if (t.shape[d] != 1 && t.strides[d] != expected) return false;
    expected *= t.shape[d];
  }
  return true;
}

// PyTorch's PrivateUse1 device under the name of its vendor. te-fl makes such a device when it is
// looked up, if PyTorch has it and no plugin does.
Device device_of_torch(int32_t index) {
  Device device{TE_FL_DEVICE_EXT, index, 0};
  const Ref name = to_python(std::string_view("torch"));
  PyObject* torch = PyImport_GetModule(name.get());
  if (torch == nullptr) return device;
  const Ref owner = Ref::take(torch);
  const Ref internals = Ref::take(PyObject_GetAttrString(torch, "_C"));
  const Ref vendor =
      Ref::take(PyObject_CallMethod(internals.get(), "_get_privateuse1_backend_name", nullptr));
  device.provider = devices::intern_provider(to_text(vendor.get(), "the backend's name"));
  return device;
}

// The current stream of a PrivateUse1 device, which PyTorch 2.11's exchange API does not report.
// This call also remembers the stream object, so that later work can be enqueued by its handle.
void* stream_of_torch(int32_t index) {
  static PyObject* const ask = [] {
    const Ref module = Ref::take(PyImport_ImportModule("te_fl.torch_streams"));
    return Ref::take(PyObject_GetAttrString(module.get(), "private_stream")).release();
  }();
  const Ref handle = Ref::take(PyObject_CallFunction(ask, "i", index));
  void* stream = PyLong_AsVoidPtr(handle.get());
  if (stream == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
  return stream;
}

// True for a tensor of a PyTorch transform that has no memory of its own: a vmap batch, which
// torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True) use as well.
bool stands_for_others(PyObject* object) {
  const Ref name = to_python(std::string_view("torch"));
  PyObject* found = PyImport_GetModule(name.get());
  for (const char* part : {"_C", "_functorch"}) {
    if (found == nullptr) break;
    const Ref owner = Ref::take(found);
    found = PyObject_GetAttrString(owner.get(), part);
  }
  if (found != nullptr) {
    const Ref functions = Ref::take(found);
    for (const char* kind : {"is_legacy_batchedtensor", "is_functorch_wrapped_tensor"}) {
      PyObject* const answer = PyObject_CallMethod(functions.get(), kind, "O", object);
      const bool stands = answer == Py_True;
      Py_XDECREF(answer);
      PyErr_Clear();
      if (stands) return true;
    }
  }
  PyErr_Clear();
  return false;
}

// Refuses PyTorch's DTensor by name: it has no memory of its own, and the exchange API returns a
// null pointer.
void refuse_ranks_tensor(const te_fl_dltensor& t, PyObject* object, const char* name) {
  if (t.data != nullptr || std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim) return;
  if (type_name(object) != "DTensor") return;
  throw_status(Status(
      StatusCode::kUnsupported,
      std::string("'") + name +
          "' is a DTensor, which several ranks have together, and te-fl takes this rank's tensor: "
          "give its to_local(); where fully_shard divided a module's parameters, call the module "
          "that it was given, which gathers them"));
}

// Replaces the Python exception that is set by one that says that the tensor has no memory.
[[noreturn]] void throw_without_memory(PyObject* object, const char* name) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref kind = Ref::take(type), error = Ref::take(value);
  Py_XDECREF(trace);
  if (stands_for_others(object)) {
    throw_status(Status(
        StatusCode::kUnsupported,
        std::string("'") + name +
            "' stands for several tensors: te-fl computes inside no transform of PyTorch's (vmap, "
            "torch.autograd.grad(is_grads_batched=True), jacobian and hessian with "
            "vectorize=True); take one gradient after the other, or leave vectorize out"));
  }
  const Ref text = Ref::take(PyObject_Str(error.get()));
  const std::string_view reason = to_text(text.get(), "an error's text");
  const std::string message = std::string("'") + name + "' has no memory that te-fl can read: " +
                              std::string(reason.substr(0, reason.find('\n')));
  PyErr_SetString(kind.get(), message.c_str());
  throw PythonError();
}

bool is_torch(const Exchange& api) {
  const Ref name = to_python(std::string_view("torch"));
  PyObject* torch = PyImport_GetModule(name.get());
  if (torch == nullptr) return false;
  const Ref module = Ref::take(torch);
  const Ref type = Ref::take(PyObject_GetAttrString(module.get(), "Tensor"));
  return find_exchange(reinterpret_cast<PyTypeObject*>(type.get())) == &api;
}

}  // namespace

te_fl_dltensor describe(const Exchange& api, PyObject* object, const char* name, Extents& extents) {
  te_fl_dltensor t{};
  const bool described = api.describe != nullptr ? api.describe(object, &t) == 0
                                                 : describe_by_calls(object, extents, t);
  if (!described) throw_without_memory(object, name);
  refuse_ranks_tensor(t, object, name);
  return t;
}

Result<Device> to_device(const te_fl_device& device) {
  if (device.type != TE_FL_DEVICE_EXT) return Device{device.type, device.index, 0};
  std::vector<Device> same = without_lock([] { return devices::list(); });
  std::erase_if(same,
                [&](const Device& d) { return d.type != device.type || d.index != device.index; });
  if (same.size() == 1) return same[0];
  if (same.empty()) {
    const Device made = device_of_torch(device.index);
    if (without_lock([&] { return devices::find(made).ok(); })) return made;
  }
  std::string matches;
  for (const Device& d : same) matches += (matches.empty() ? "" : ", ") + to_string(d);
  const std::string index = std::to_string(device.index);
  return Status(StatusCode::kInvalidArgument,
                matches.empty() ? "no plugin has an extension device of index " + index +
                                      "; install its vendor's, or name it in TE_FL_PLUGIN_MODULES"
                                : "the tensor is on an extension device of index " + index +
                                      ", and DLPack does not say which of " + matches +
                                      " that is; load the plugin of its vendor alone");
}

void* current_stream(const Exchange& api, const te_fl_device& device) {
  if (device.type == TE_FL_DEVICE_CPU) return nullptr;
  if (device.type == TE_FL_DEVICE_EXT && is_torch(api)) return stream_of_torch(device.index);
  void* stream = nullptr;
  if (api.current_stream != nullptr &&
      api.current_stream(device.type, device.index, &stream) != 0) {
    throw PythonError();
  }
  return stream;
}

const Exchange* find_exchange(PyTypeObject* type) {
  for (const KnownType& known : known_types()) {
    if (known.type == type) return known.exchange;
  }
  const Exchange* found = ask_exchange(type);
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  known_types().push_back({type, found});
  return found;
}

struct Borrowed::Lent {
  Lent* next;
  Managed* plain;
  ManagedVersioned* versioned;
};

Borrowed::~Borrowed() {
  while (lent_ != nullptr) {
    Lent* lent = lent_;
    lent_ = lent->next;
    if (lent->plain != nullptr && lent->plain->deleter != nullptr)
      lent->plain->deleter(lent->plain);
    if (lent->versioned != nullptr && lent->versioned->deleter != nullptr) {
      lent->versioned->deleter(lent->versioned);
    }
    delete lent;
  }
}

te_fl_dltensor Borrowed::by_capsule(PyObject* object, bool written, const char* name) {
  static PyObject* const keywords = [] {
    PyObject* dict = PyDict_New();
    PyObject* newest = Py_BuildValue("(ii)", 1, 1);
    if (dict != nullptr && newest != nullptr) PyDict_SetItemString(dict, "max_version", newest);
    Py_XDECREF(newest);
    return dict;
  }();
  PyObject* method = PyObject_GetAttrString(object, "__dlpack__");
  if (method == nullptr) {
    PyErr_Clear();
    throw_type_error(
        "argument '" + std::string(name) + "' is a " + type_name(object) +
        ", which does not support DLPack: give a tensor of PyTorch, NumPy or JAX, or another "
        "object with __dlpack__");
  }
  const Ref bound = Ref::take(method);
  if (written && is_immutable(object)) throw_read_only(name);
  const Ref none = Ref::take(PyTuple_New(0));
  PyObject* raw = PyObject_Call(bound.get(), none.get(), keywords);
  if (raw == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();  // the library's DLPack has no max_version parameter
    raw = PyObject_Call(bound.get(), none.get(), nullptr);
  }
  const Ref capsule = Ref::take(raw);
  auto* lent = new Lent{lent_, nullptr, nullptr};
  lent_ = lent;
  if (PyCapsule_IsValid(capsule.get(), "dltensor_versioned") != 0) {
    lent->versioned =
        static_cast<ManagedVersioned*>(PyCapsule_GetPointer(capsule.get(), "dltensor_versioned"));
    check(PyCapsule_SetName(capsule.get(), "used_dltensor_versioned"));
    if (lent->versioned->version.major != 1) {
      throw_type_error("argument '" + std::string(name) + "' speaks DLPack " +
                       std::to_string(lent->versioned->version.major) + ", te-fl speaks DLPack 1");
    }
    if (written && (lent->versioned->flags & kReadOnly) != 0) throw_read_only(name);
    return lent->versioned->tensor;
  }
  lent->plain = static_cast<Managed*>(PyCapsule_GetPointer(capsule.get(), "dltensor"));
  if (lent->plain == nullptr) throw PythonError();
  check(PyCapsule_SetName(capsule.get(), "used_dltensor"));
  return lent->plain->tensor;
}

te_fl_dltensor Borrowed::describe(PyObject* object, bool written, const char* name) {
  te_fl_dltensor t{};
  if (const Exchange* api = find_exchange(Py_TYPE(object)); api != nullptr) {
    t = python::describe(*api, object, name, extents_);
    exchange_ = api;
  } else {
    t = by_capsule(object, written, name);
  }
  if (is_compact(t)) {
    t.strides = nullptr;
  } else if (exchange_ != nullptr) {
    refuse_negated(object, name);
  }
  if (t.dtype.lanes == 2 && t.dtype.bits == 4) count_packed(t);
  return t;
}

void Borrowed::count_packed(te_fl_dltensor& t) {
  if (t.strides != nullptr || t.ndim < 1) return;  // te-fl's dtype check refuses this tensor
  std::vector<int64_t>& shape = extents_.emplace_front(t.shape, t.shape + t.ndim);
  shape.back() *= 2;
  t.shape = shape.data();
  t.dtype.lanes = 1;
}

void* Borrowed::stream(const te_fl_device& device) const {
  const auto* api = static_cast<const Exchange*>(exchange_);
  return api == nullptr ? nullptr : current_stream(*api, device);
}

void check_part_device(const te_fl_device& part, const te_fl_device& other,
                       const std::string& name) {
  const auto pinned = [](const te_fl_device& d) {
    return d.type == TE_FL_DEVICE_CUDA_HOST || d.type == TE_FL_DEVICE_ROCM_HOST;
  };
  if ((part.type == other.type && part.index == other.index) || pinned(part) || pinned(other))
    return;
  throw_status(Status(StatusCode::kInvalidArgument,
                      name +
                          " lies on another device than the other parts of the quantised tensor; "
                          "move all of them to one"));
}

}  // namespace te_fl::python
