#include "torch/torch_device.hpp"

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "py/interpreter.hpp"
#include "te_fl/device.hpp"
#include "te_fl/log.hpp"
#include "te_fl/tensor.hpp"
#include "torch/callback.hpp"

namespace te_fl::python {
namespace {
namespace made {  // other files have functions of these names

PyObject* g_make = nullptr;  // the argument of set_device_maker(); never freed

// One device. Never freed: te-fl keeps its descriptor until the process ends.
struct TorchDevice {
  PyObject* object = nullptr;  // the te_fl.torch_device.TorchDevice
  PyObject* like = nullptr;    // a tensor on the device
  Device device;
  std::string provider;
  te_fl_device_desc desc;
};

TorchDevice& of(void* self) { return *static_cast<TorchDevice*>(self); }

te_fl_status report(const te_fl_error_sink* sink, const Status& status) {
  if (status.ok()) return TE_FL_OK;
  if (sink != nullptr) sink->write(sink->host, status.message().c_str());
  return status.to_c();
}

// Runs f() under the interpreter's lock. A Python exception becomes a status, with the code `other`
// unless it is te-fl's own. `ended` is the result after the interpreter has ended.
template <class F>
te_fl_status in_python(const te_fl_error_sink* sink, F f, StatusCode other = StatusCode::kInternal,
                       const Status& ended = Status(StatusCode::kFailedPrecondition,
                                                    "the Python interpreter has ended")) {
  const InterpreterLock lock;
  if (!lock.held()) return report(sink, ended);
  const ErrorAside aside;
  try {
    f();
    return TE_FL_OK;
  } catch (const PythonError&) {
    return report(sink, callback_failed(other));
  } catch (const std::bad_alloc&) {
    return report(sink, Status(StatusCode::kOutOfMemory, "no host memory is left"));
  }
}

unsigned long long number(const void* address) {
  return reinterpret_cast<unsigned long long>(address);
}

template <class... Args>
Ref call(void* self, const char* method, const char* format, Args... args) {
  return Ref::take(PyObject_CallMethod(of(self).object, method, format, args...));
}

void* address_of(const Ref& object) {
  void* address = PyLong_AsVoidPtr(object.get());
  if (address == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
  return address;
}

// The bytes at an address as PyTorch's uint8 tensor on this device or, if `host`, on the CPU.
Ref bytes_at(void* self, const void* data, size_t bytes, bool host) {
  const std::array<int64_t, 1> shape{static_cast<int64_t>(bytes)};
  const Device device = host ? Device() : of(self).device;
  return to_framework(
      value_or_throw(Tensor::wrap(const_cast<void*>(data), shape, {}, DType::kU8, device, nullptr)),
      of(self).like);
}

te_fl_status allocate(void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* sink) {
  if (memory->kind != TE_FL_MEMORY_DEVICE) {
    return report(sink, Status(StatusCode::kUnsupported,
                               "a device that PyTorch makes has memory of the kind DEVICE only"));
  }
  return in_python(
      sink,
      [&] {
        *out = address_of(
            call(self, "allocate", "KKK", static_cast<unsigned long long>(memory->bytes),
                 static_cast<unsigned long long>(memory->alignment), number(memory->stream)));
      },
      StatusCode::kOutOfMemory);
}

te_fl_status release(void* self, void* data, uint32_t, void* stream, const te_fl_error_sink* sink) {
  return in_python(
      sink, [&] { call(self, "free", "KK", number(data), number(stream)); }, StatusCode::kInternal,
      Status());
}

te_fl_status copy(void* self, void* dst, const void* src, size_t bytes, uint32_t host_flags,
                  void* stream, const te_fl_error_sink* sink) {
  return in_python(sink, [&] {
    const Ref to = bytes_at(self, dst, bytes, (host_flags & 1) != 0);
    const Ref from = bytes_at(self, src, bytes, (host_flags & 2) != 0);
    call(self, "copy", "OOK", to.get(), from.get(), number(stream));
  });
}

te_fl_status fill(void* self, void* dst, uint8_t value, size_t bytes, void* stream,
                  const te_fl_error_sink* sink) {
  return in_python(sink, [&] {
    call(self, "fill", "OiK", bytes_at(self, dst, bytes, false).get(), int{value}, number(stream));
  });
}

te_fl_status create_stream(void* self, void** stream, const te_fl_error_sink* sink) {
  return in_python(sink, [&] { *stream = address_of(call(self, "create_stream", nullptr)); });
}
te_fl_status destroy_stream(void* self, void* stream, const te_fl_error_sink* sink) {
  return in_python(
      sink, [&] { call(self, "destroy_stream", "K", number(stream)); }, StatusCode::kInternal,
      Status());
}
te_fl_status synchronize(void* self, void* stream, const te_fl_error_sink* sink) {
  return in_python(sink, [&] { call(self, "synchronize", "K", number(stream)); });
}

te_fl_status create_event(void* self, uint32_t flags, void** event, const te_fl_error_sink* sink) {
  return in_python(sink, [&] {
    *event = address_of(call(self, "create_event", "i", (flags & TE_FL_EVENT_TIMED) != 0 ? 1 : 0));
  });
}
te_fl_status destroy_event(void* self, void* event, const te_fl_error_sink* sink) {
  return in_python(
      sink, [&] { call(self, "destroy_event", "K", number(event)); }, StatusCode::kInternal,
      Status());
}
te_fl_status record_event(void* self, void* event, void* stream, const te_fl_error_sink* sink) {
  return in_python(sink, [&] { call(self, "record_event", "KK", number(event), number(stream)); });
}
te_fl_status wait_event(void* self, void* event, void* stream, const te_fl_error_sink* sink) {
  return in_python(sink, [&] { call(self, "wait_event", "KK", number(event), number(stream)); });
}
te_fl_status synchronize_event(void* self, void* event, const te_fl_error_sink* sink) {
  return in_python(sink, [&] { call(self, "synchronize_event", "K", number(event)); });
}
te_fl_status query_event(void* self, void* event, int32_t* done, const te_fl_error_sink* sink) {
  return in_python(sink, [&] {
    *done = call(self, "query_event", "K", number(event)).get() == Py_True ? 1 : 0;
  });
}
te_fl_status elapsed_time(void* self, void* start, void* end, uint64_t* nanoseconds,
                          const te_fl_error_sink* sink) {
  return in_python(sink, [&] {
    const Ref found = call(self, "elapsed_time", "KK", number(start), number(end));
    *nanoseconds = PyLong_AsUnsignedLongLong(found.get());
    if (PyErr_Occurred() != nullptr) throw PythonError();
  });
}

te_fl_status is_capturing(void* self, void* stream, int32_t* capturing,
                          const te_fl_error_sink* sink) {
  return in_python(sink, [&] {
    *capturing = call(self, "is_capturing", "K", number(stream)).get() == Py_True ? 1 : 0;
  });
}

void set_text(char* to, size_t size, const char* text) {
  std::strncpy(to, text, size - 1);
  to[size - 1] = '\0';
}

te_fl_status properties(void* self, te_fl_device_props* props, const te_fl_error_sink* sink) {
  return in_python(sink, [&] {
    const Ref found = call(self, "properties", nullptr);
    unsigned long long total = 0, free = 0;
    unsigned int units = 0, arch = 0;
    const char *name = nullptr, *driver = nullptr;
    if (PyArg_ParseTuple(found.get(), "KKIIss", &total, &free, &units, &arch, &name, &driver) == 0)
      throw PythonError();
    props->total_memory = total, props->free_memory = free;
    props->compute_units = units, props->arch = arch;
    set_text(props->name, sizeof props->name, name);
    set_text(props->driver, sizeof props->driver, driver);
  });
}

const te_fl_device_api& device_api() {
  static const te_fl_device_api api = [] {
    te_fl_device_api a;
    a.allocate = allocate, a.free = release, a.copy = copy, a.fill = fill;
    a.create_stream = create_stream, a.destroy_stream = destroy_stream;
    a.synchronize = synchronize, a.properties = properties;
    a.create_event = create_event, a.destroy_event = destroy_event;
    a.record_event = record_event, a.wait_event = wait_event;
    a.synchronize_event = synchronize_event, a.query_event = query_event;
    a.elapsed_time = elapsed_time, a.is_capturing = is_capturing;
    return a;
  }();
  return api;
}

// Adds the device if PyTorch has it. Another thread may have added it meanwhile.
bool make_in_python(const Device& device) {
  const std::string provider = devices::provider_name(device.provider);
  const Ref object =
      Ref::take(PyObject_CallFunction(g_make, "iis", device.type, device.index, provider.c_str()));
  if (object.get() == Py_None) return false;
  auto made = std::make_unique<TorchDevice>();
  Ref like = Ref::take(PyObject_GetAttrString(object.get(), "like"));
  made->device = device;
  made->provider = provider;
  made->desc.device = device.to_c();
  made->desc.provider = made->provider.empty() ? "torch" : made->provider.c_str();
  made->desc.self = made.get();
  made->desc.api = &device_api();
  made->object = Ref::share(object.get()).release();
  made->like = like.release();
  Result<Device> added = [&] {
    const WithoutLock unlocked;
    return devices::add(&made->desc);
  }();
  if (!added.ok() && added.status().code() != StatusCode::kAlreadyExists)
    throw_status(added.status());
  if (added.ok()) {
    log::info(to_string(device) + " is made by PyTorch, since no plugin of te-fl supports it");
    made.release();
  }
  return true;
}

bool make(const Device& device) noexcept {
  const InterpreterLock lock;
  if (!lock.held()) return false;
  const ErrorAside aside;
  try {
    return make_in_python(device);
  } catch (const PythonError&) {
    const Status status = callback_failed();
    log::warning("te-fl has made no device of PyTorch's " + to_string(device) + ": " +
                 status.message());
  } catch (const std::bad_alloc&) {  // The caller reports that there is no such device.
  }
  return false;
}

}  // namespace made
}  // namespace

PyObject* set_device_maker(PyObject*, PyObject* function) noexcept {
  return guarded([&] {
    Py_INCREF(function);
    Py_XDECREF(std::exchange(made::g_make, function));
    devices::set_maker(made::make);
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
