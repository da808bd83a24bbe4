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
  const Exchange* api = exchange_of(Py_TYPE(object));
  if (api == nullptr || api->to_object == nullptr) {
    throw_type_error(std::string(name) + " is a " + type_name(object) +
                     ", which is no tensor with DLPack's C exchange API; PyTorch has it from 2.11 "
                     "on");
  }
  return *api;
}

te_fl_dltensor describe(PyObject* object, const char* name) {
  return python::describe(exchange_for(object, name), object, name);
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
  TE_FL_ASSIGN_OR_RETURN(const Device device, device_of(t.device));
  const auto rank = static_cast<size_t>(t.ndim);
  return Tensor::wrap(static_cast<char*>(t.data) + t.byte_offset, {t.shape, rank},
                      {t.strides, t.strides != nullptr ? rank : 0}, dtype, device,
                      std::move(owner));
}

// The parts of a number_tensor(), in one allocation.
struct Number {
  ManagedVersioned managed{};
  int64_t number = 0;
  // A second copy; a compiled graph may write into a tensor that it reads no more.
  int64_t value = 0;
  int64_t extent = 1;
  int64_t stride = 1;
  void (*gone)(int64_t) = nullptr;
};

Ref to_object(const Exchange& api, ManagedVersioned* managed) {
  void* object = nullptr;
  if (api.to_object(managed, &object) != 0 || object == nullptr) {
    managed->deleter(managed);
    throw PythonError();
  }
  return Ref::take(static_cast<PyObject*>(object));
}

}  // namespace

Tensor tensor_of(PyObject* object, const char* name, bool keep) {
  const te_fl_dltensor t = describe(object, name);
  auto made = wrap(t, keep ? keep_alive(object) : nullptr);
  if (!made.ok()) throw_status(made.status().wrap(name));
  return *std::move(made);
}

Tensor tensor_of(PyObject* object, const char* name, std::vector<Lent>& lent) {
  const te_fl_dltensor t = describe(object, name);
  const std::shared_ptr<void> owner = keep_alive(object);
  auto made = wrap(t, owner);
  if (!made.ok()) throw_status(made.status().wrap(name));
  lent.emplace_back(object, name, t.data, owner);
  return *std::move(made);
}

void* memory_of(PyObject* object, const char* name) {
  const te_fl_dltensor t = describe(object, name);
  return static_cast<char*>(t.data) + t.byte_offset;
}

void Lent::check() const {
  const std::shared_ptr<void> kept = owner_.lock();
  if (kept == nullptr || describe(object_, name_.c_str()).data == data_) return;
  throw_status(Status(
      StatusCode::kFailedPrecondition,
      "the memory of '" + name_ +
          "' has been freed or replaced since the forward, and the backward reads it; leave the "
          "tensor's storage and .data as they are until the backward has run"));
}

Ref to_framework(const Tensor& tensor, PyObject* like) {
  const Exchange& api = exchange_for(like, "the argument");
  auto* managed = static_cast<ManagedVersioned*>(value_of(tensor.to_dlpack(true)));
  return to_object(api, managed);
}

Ref number_tensor(int64_t number, void (*gone)(int64_t), PyObject* like) {
  const Exchange& api = exchange_for(like, "the argument");
  auto owner = std::make_unique<Number>();
  owner->number = owner->value = number;
  owner->gone = gone;
  ManagedVersioned& m = owner->managed;
  m.version = {1, 0};
  m.context = owner.get();
  m.deleter = [](ManagedVersioned* self) {
    const std::unique_ptr<Number> dropped(static_cast<Number*>(self->context));
    dropped->gone(dropped->number);
  };
  m.tensor.data = &owner->value;
  m.tensor.device = {TE_FL_DEVICE_CPU, 0};
  m.tensor.ndim = 1;
  m.tensor.dtype = to_c(DType::kI64);
  m.tensor.shape = &owner->extent;
  m.tensor.strides = &owner->stride;
  return to_object(api, &owner.release()->managed);
}

namespace {

// A device that layers have run on, and who knows its current stream. Guarded by the interpreter's
// lock.
struct Used {
  Device device;
  const Exchange* api;
};
std::vector<Used>& used_devices() {
  static auto* all = new std::vector<Used>();
  return *all;
}

}  // namespace

void* current_stream_of(PyObject* like, const Device& device) {
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
  while (!scopes_.empty()) scopes_.pop_back();  // in reverse order
}

}  // namespace te_fl::python
