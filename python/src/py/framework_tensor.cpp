#include "py/framework_tensor.hpp"

#include <algorithm>
#include <span>
#include <string>

#include "py/errors.hpp"
#include "py/exchange.hpp"
#include "py/interpreter.hpp"

namespace te_fl::python {
namespace {

const Exchange& exchange_for(PyObject* object, const char* name) {
  const Exchange* api = find_exchange(Py_TYPE(object));
  if (api == nullptr || api->to_object == nullptr) {
    throw_type_error(std::string(name) + " is a " + type_name(object) +
                     ", which is no tensor of PyTorch");
  }
  return *api;
}

te_fl_dltensor describe_object(PyObject* object, const char* name, Extents& extents) {
  return python::describe(exchange_for(object, name), object, name, extents);
}

std::shared_ptr<void> keep_alive(PyObject* object) {
  Py_INCREF(object);
  return std::shared_ptr<void>(object, [](void* kept) {
    const InterpreterLock lock;
    if (lock.held()) Py_DECREF(static_cast<PyObject*>(kept));
  });
}

Result<Tensor> wrap(const te_fl_dltensor& t, std::shared_ptr<void> owner) {
  TE_FL_ASSIGN_OR_RETURN(const DType dtype, dtype_from_c(t.dtype));
  TE_FL_ASSIGN_OR_RETURN(const Device device, to_device(t.device));
  const auto rank = static_cast<size_t>(t.ndim);
  return Tensor::wrap(static_cast<char*>(t.data) + t.byte_offset, {t.shape, rank},
                      {t.strides, t.strides != nullptr ? rank : 0}, dtype, device,
                      std::move(owner));
}

// The number of bytes from a tensor's first element to the end of its last.
int64_t reach_bytes(const te_fl_dltensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    int64_t stride = 1;
    if (t.strides != nullptr) {
      stride = t.strides[i];
    } else {
      for (int j = i + 1; j < t.ndim; ++j) stride *= t.shape[j];
    }
    last += (t.shape[i] - 1) * stride;
  }
  return (last + 1) * t.dtype.bits * t.dtype.lanes / 8;
}

PyObject* torch_attribute(const char* module, const char* name) {
  const Ref from = Ref::take(PyImport_ImportModule(module));
  return Ref::take(PyObject_GetAttrString(from.get(), name)).release();
}

// The storage of a PyTorch tensor, read by the base class even if a subclass overrides it; null for
// other objects.
Ref find_storage(PyObject* tensor) {
  static PyObject* const base = torch_attribute("torch._C", "TensorBase");
  static PyObject* const storage =
      Ref::take(PyObject_GetAttrString(base, "untyped_storage")).release();
  PyObject* found = PyObject_CallFunctionObjArgs(storage, tensor, nullptr);
  if (found == nullptr) PyErr_Clear();
  return found == nullptr ? Ref() : Ref::take(found);
}

long long call_for_number(PyObject* storage, PyObject* method) {
  const Ref number = Ref::take(PyObject_CallMethodObjArgs(storage, method, nullptr));
  const long long value = PyLong_AsLongLong(number.get());
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}

// Returns where the memory of a storage begins.
const char* base_of(PyObject* storage) {
  static PyObject* const pointer = PyUnicode_InternFromString("data_ptr");
  // NOLINTNEXTLINE(performance-no-int-to-ptr): PyTorch gives addresses as integers
  return reinterpret_cast<const char*>(call_for_number(storage, pointer));
}

int64_t bytes_of(PyObject* storage) {
  static PyObject* const bytes = PyUnicode_InternFromString("nbytes");
  return call_for_number(storage, bytes);
}

// Returns the base address of a tensor's storage if the `bytes` at `data` lie in it, else null: a
// tensor subclass may hold its memory elsewhere. Each query of a storage is a Python call, so the
// common case of a tensor at the start of its storage is tested first.
const char* base_around(PyObject* storage, const char* data, int64_t bytes) {
  const char* const base = base_of(storage);
  if (base == nullptr || data < base) return nullptr;
  return data == base || data + bytes <= base + bytes_of(storage) ? base : nullptr;
}

// The address of a tensor's first element; the caller keeps the tensor alive.
const char* data_of(PyObject* tensor) {
  Extents extents;
  const te_fl_dltensor t = describe_object(tensor, "tensor", extents);
  return static_cast<const char*>(t.data) + t.byte_offset;
}

// The parts of a tensor from number_tensor() or tensor_of_no_bytes(), in one allocation.
struct Number {
  ManagedVersioned managed{};
  int64_t number = 0;
  // A copy of `number` for the tensor's element; a compiled graph may write into tensors that it no
  // longer reads.
  int64_t value = 0;
  int64_t extent = 1;
  int64_t stride = 1;
  void (*gone)(int64_t) = nullptr;
};

// A host vector in the Number's memory; `deleter` frees both.
ManagedVersioned* vector_in(std::unique_ptr<Number> number, int64_t extent, DType dtype,
                            void (*deleter)(ManagedVersioned*)) {
  number->extent = extent;
  ManagedVersioned& m = number->managed;
  m.version = {1, 0};
  m.context = number.get();
  m.deleter = deleter;
  m.tensor.data = &number->value;
  m.tensor.device = {TE_FL_DEVICE_CPU, 0};
  m.tensor.ndim = 1;
  m.tensor.dtype = to_c(dtype);
  m.tensor.shape = &number->extent;
  m.tensor.strides = &number->stride;
  return &number.release()->managed;
}

Ref to_object(const Exchange& api, ManagedVersioned* managed) {
  void* object = nullptr;
  if (api.to_object(managed, &object) != 0 || object == nullptr) {
    managed->deleter(managed);
    throw PythonError();
  }
  return Ref::take(static_cast<PyObject*>(object));
}

}  // namespace

Tensor to_tensor(PyObject* object, const char* name, bool keep) {
  Extents extents;
  const te_fl_dltensor t = describe_object(object, name, extents);
  auto made = wrap(t, keep ? keep_alive(object) : nullptr);
  if (!made.ok()) throw_status(made.status().wrap(name));
  return *std::move(made);
}

Tensor to_tensor(PyObject* object, const char* name, std::vector<Lent>& lent) {
  Extents extents;
  const te_fl_dltensor t = describe_object(object, name, extents);
  const char* const data = static_cast<char*>(t.data) + t.byte_offset;
  const int64_t bytes = reach_bytes(t);
  const Ref storage = find_storage(object);
  const char* const base =
      storage.get() == nullptr ? nullptr : base_around(storage.get(), data, bytes);
  const bool inside = base != nullptr;
  PyObject* const keeper = inside ? storage.get() : object;
  const std::shared_ptr<void> owner = keep_alive(keeper);
  auto made = wrap(t, owner);
  if (!made.ok()) throw_status(made.status().wrap(name));
  lent.emplace_back(keeper, inside, name, inside ? base : data, data, bytes, owner);
  return *std::move(made);
}

std::shared_ptr<void> lend_result(PyObject* object, const std::weak_ptr<void>& owner,
                                  std::vector<Lent>& lent) {
  Extents extents;
  const te_fl_dltensor t = describe_object(object, "output", extents);
  const char* const data = static_cast<char*>(t.data) + t.byte_offset;
  const int64_t bytes = reach_bytes(t);
  const Ref storage = find_storage(object);
  const char* const base =
      storage.get() == nullptr ? nullptr : base_around(storage.get(), data, bytes);
  if (base == nullptr) return nullptr;
  lent.emplace_back(storage.get(), true, "output", base, data, bytes, owner);
  return keep_alive(storage.get());
}

void* data_address(PyObject* object, const char* name) {
  Extents extents;
  const te_fl_dltensor t = describe_object(object, name, extents);
  return static_cast<char*>(t.data) + t.byte_offset;
}

void Lent::refuse() const {
  throw_status(Status(
      StatusCode::kFailedPrecondition,
      "the memory of '" + std::string(name_) +
          "' has been freed or replaced since the forward, and the backward reads it; leave the "
          "tensor's storage as it is, or give it its contents back before the backward runs"));
}

std::optional<nn::MovedMemory> Lent::moved() const {
  const std::shared_ptr<void> kept = owner_.lock();
  check_followed();
  if (kept == nullptr) return std::nullopt;
  const char* const base = is_storage_ ? base_of(object_) : data_of(object_);
  if (base == base_ && (bytes_ == 0 || base != nullptr)) return std::nullopt;
  const auto offset = static_cast<const char*>(data_) - static_cast<const char*>(base_);
  if (!is_storage_ || base == nullptr || offset + bytes_ > bytes_of(object_)) refuse();
  return nn::MovedMemory{.from = data_,
                         .bytes = bytes_,
                         .to = const_cast<char*>(base) + offset,
                         .owner = keep_alive(object_),
                         .old_owner = owner_};
}

PyObject* Lent::storage_in(const void* begin, int64_t bytes) const {
  if (!is_storage_ || owner_.expired()) return nullptr;
  const auto offset = static_cast<const char*>(begin) - static_cast<const char*>(base_);
  return offset >= 0 && offset + bytes <= bytes_of(object_) ? object_ : nullptr;
}

void Lent::follow(const nn::MovedMemory& place) {
  const auto offset = static_cast<const char*>(data_) - static_cast<const char*>(base_);
  lost_ = !owner_.expired();
  data_ = place.to;
  base_ = static_cast<const char*>(place.to) - offset;
  owner_ = place.owner;
}

void Lent::check() const {
  if (moved().has_value()) refuse();
}

void Lent::check_followed() const {
  if (lost_) refuse();
}

Ref to_framework(const Tensor& tensor, PyObject* like) {
  const Exchange& api = exchange_for(like, "the argument");
  auto* managed = static_cast<ManagedVersioned*>(value_or_throw(tensor.to_dlpack(true)));
  return to_object(api, managed);
}

Ref number_tensor(int64_t number, void (*gone)(int64_t), PyObject* like) {
  const Exchange& api = exchange_for(like, "the argument");
  auto owner = std::make_unique<Number>();
  owner->number = owner->value = number;
  owner->gone = gone;
  return to_object(api, vector_in(std::move(owner), 1, DType::kI64, [](ManagedVersioned* self) {
                     const std::unique_ptr<Number> dropped(static_cast<Number*>(self->context));
                     dropped->gone(dropped->number);
                   }));
}

Ref tensor_of_no_bytes(PyObject* like) {
  const Exchange& api = exchange_for(like, "the argument");
  return to_object(
      api, vector_in(std::make_unique<Number>(), 0, DType::kU8,
                     [](ManagedVersioned* self) { delete static_cast<Number*>(self->context); }));
}

namespace {

// A device that layers have run on, and the exchange table that gives its current stream. Guarded
// by the interpreter's lock.
struct Used {
  Device device;
  const Exchange* api;
};
std::vector<Used>& used_devices() {
  static auto* all = new std::vector<Used>();
  return *all;
}

}  // namespace

void* find_current_stream(PyObject* like, const Device& device) {
  if (device.is_host()) return nullptr;
  const Exchange& api = exchange_for(like, "the argument");
  auto& used = used_devices();
  if (std::none_of(used.begin(), used.end(), [&](const Used& u) { return u.device == device; })) {
    used.push_back({device, &api});
  }
  return current_stream(api, device.to_c());
}

FrameworkStreams::FrameworkStreams() {
  for (const Used& used : used_devices()) {
    void* const stream = current_stream(*used.api, used.device.to_c());
    scopes_.push_back(std::make_unique<StreamScope>(used.device, stream));
  }
}

FrameworkStreams::~FrameworkStreams() {
  // Destroys the scopes in reverse order of construction.
  while (!scopes_.empty()) scopes_.pop_back();
}

}  // namespace te_fl::python
