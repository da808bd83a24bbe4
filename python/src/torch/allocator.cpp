#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "py/errors.hpp"
#include "py/interpreter.hpp"
#include "py/mutex.hpp"
#include "te_fl/memory.hpp"
#include "te_fl/op_manager.hpp"
#include "torch/callback.hpp"
#include "torch/layer.hpp"

namespace te_fl::python {
namespace {

// PyTorch's CUDA caching allocator, called through the C functions that libtorch_cuda exports for
// compiled models (torch/csrc/inductor/aoti_torch/c/shim.h). They need no interpreter: a call
// through Python costs several microseconds, and a layer makes dozens of allocations. If the
// library lacks these functions, allocations go through Python.
struct TorchCuda {
  using Guard = void*;
  int (*enter)(void* stream, int32_t device, Guard* out) = nullptr;
  int (*leave)(Guard guard) = nullptr;
  int (*allocate)(uint64_t bytes, void** out) = nullptr;
  int (*release)(void* data) = nullptr;
  bool complete() const { return enter && leave && allocate && release; }
};

TorchCuda find_torch_cuda() {
  TorchCuda found;
  void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return found;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
  };
  find(found.enter, "aoti_torch_create_cuda_stream_guard");
  find(found.leave, "aoti_torch_delete_cuda_stream_guard");
  find(found.allocate, "aoti_torch_cuda_caching_allocator_raw_alloc");
  find(found.release, "aoti_torch_cuda_caching_allocator_raw_delete");
  return found;  // the library is loaded as long as PyTorch, so the handle is never closed
}

// On failure, PyTorch's C functions log a stack trace of forty lines before they return the error.
// The Python function, which is tried next, raises the error anyway. Logging is therefore silenced
// from the moment PyTorch detects that a direct allocation of this thread fails
// (quiet_out_of_memory) until the allocation returns.
constexpr int kFatalOnly = 3;  // a severity of c10
thread_local bool t_direct = false, t_quiet = false;

struct TorchLog {
  Mutex mutex{AtFork::kTaken};
  int* level = nullptr;  // c10's minimum severity for logging; null until a CUDA allocator is used
  int threads = 0;       // number of threads that silence the log
  int before = 0;
};
// Never destroyed: threads may allocate after static destruction.
TorchLog& g_torch_log = *new TorchLog();

void find_log_level() {
  void* library = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return;
  auto* level = static_cast<int*>(dlsym(library, "FLAGS_caffe2_log_level"));
  const std::lock_guard lock(g_torch_log.mutex);
  g_torch_log.level = level;
}

void quieten() {
  TorchLog& log = g_torch_log;
  if (t_quiet) return;
  const std::lock_guard lock(log.mutex);
  if (log.level == nullptr) return;
  if (log.threads++ == 0) log.before = std::exchange(*log.level, kFatalOnly);
  t_quiet = true;
}
void end_quiet() {
  if (!t_quiet) return;
  TorchLog& log = g_torch_log;
  const std::lock_guard lock(log.mutex);
  if (--log.threads == 0) *log.level = log.before;
  t_quiet = false;
}

// Wraps a framework's allocation functions as a te-fl allocator. The Python functions run under the
// interpreter's lock. A caller of an allocator must not hold both the interpreter's lock and a
// te-fl mutex.
struct Allocator {
  Device device;
  TorchCuda direct;
  PyObject* allocate;
  PyObject* release;
  PyObject* trim;
  Mutex mutex{AtFork::kTaken};
  // The allocation stream of each live allocation, by address.
  std::unordered_map<void*, void*> streams;
  std::unordered_map<void*, std::set<void*>> users;
};

te_fl_status refuse(const te_fl_error_sink* sink, const std::string& text, te_fl_status status) {
  sink->write(sink->host, text.c_str());
  return status;
}

// Reports the Python exception that is set to `sink`, and clears it.
te_fl_status report(const te_fl_error_sink* sink, te_fl_status status) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  std::string text = "the framework's allocator failed";
  if (PyObject* words = value != nullptr ? PyObject_Str(value) : nullptr) {
    Py_ssize_t size = 0;
    if (const char* utf8 = PyUnicode_AsUTF8AndSize(words, &size)) {
      text.assign(utf8, static_cast<size_t>(size));
    }
    Py_DECREF(words);
    note_cause(value, text);
  }
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return refuse(sink, text, status);
}

bool allocate_directly(const Allocator& allocator, const te_fl_memory_desc& memory, void** out) {
  const TorchCuda& torch = allocator.direct;
  TorchCuda::Guard guard = nullptr;
  if (!torch.complete() || !interpreter_alive()) return false;
  if (torch.enter(memory.stream, allocator.device.index, &guard) != 0) return false;
  t_direct = true;
  const bool made = torch.allocate(memory.bytes, out) == 0;
  t_direct = false;
  end_quiet();
  torch.leave(guard);
  return made;
}

te_fl_status allocate_in_python(const Allocator& allocator, const te_fl_memory_desc& memory,
                                void** out, const te_fl_error_sink* sink) {
  const InterpreterLock lock;
  if (!lock.held()) return refuse(sink, "the interpreter has ended", TE_FL_OUT_OF_MEMORY);
  const ErrorAside aside;
  PyObject* address =
      PyObject_CallFunction(allocator.allocate, "KK", static_cast<unsigned long long>(memory.bytes),
                            reinterpret_cast<unsigned long long>(memory.stream));
  if (address == nullptr) return report(sink, TE_FL_OUT_OF_MEMORY);
  *out = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  return PyErr_Occurred() != nullptr ? report(sink, TE_FL_INTERNAL) : TE_FL_OK;
}

te_fl_status allocate(void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* sink) {
  auto& allocator = *static_cast<Allocator*>(self);
  // Fall back to Python, which reports the reason of the failure.
  if (!allocate_directly(allocator, *memory, out)) {
    const te_fl_status status = allocate_in_python(allocator, *memory, out, sink);
    if (status != TE_FL_OK) return status;
  }
  const std::lock_guard lock(allocator.mutex);
  allocator.streams[*out] = memory->stream;
  return TE_FL_OK;
}

te_fl_status record_stream(void* self, void* data, void* stream, const te_fl_error_sink*) {
  auto& allocator = *static_cast<Allocator*>(self);
  const std::lock_guard lock(allocator.mutex);
  allocator.users[data].insert(stream);
  return TE_FL_OK;
}

// The framework reuses memory in the order of its allocation stream, so the allocation stream first
// waits for the other streams that used the memory.
Status wait_for_users(const Device& device, void* stream, const std::set<void*>& others) {
  for (void* other : others) {
    if (other == stream) continue;
    TE_FL_ASSIGN_OR_RETURN(void* event, devices::create_event(device));
    Status status = devices::record_event(device, event, other);
    if (status.ok()) status = devices::wait_event(device, stream, event);
    devices::destroy_event(device, event);
    TE_FL_RETURN_IF_ERROR(status);
  }
  return {};
}

te_fl_status release(void* self, void* data, const te_fl_error_sink* sink) {
  auto& allocator = *static_cast<Allocator*>(self);
  std::set<void*> others;
  void* stream = nullptr;
  {
    const std::lock_guard lock(allocator.mutex);
    if (const auto found = allocator.streams.find(data); found != allocator.streams.end()) {
      stream = found->second;
      allocator.streams.erase(found);
    }
    if (const auto found = allocator.users.find(data); found != allocator.users.end()) {
      others = std::move(found->second);
      allocator.users.erase(found);
    }
  }
  if (const Status status = wait_for_users(allocator.device, stream, others); !status.ok()) {
    // The memory stays allocated, since another stream may be using it.
    return refuse(sink, status.to_string(), TE_FL_INTERNAL);
  }
  if (!interpreter_alive()) return TE_FL_OK;  // the process's end frees the memory
  if (allocator.direct.complete() && allocator.direct.release(data) == 0) return TE_FL_OK;
  const InterpreterLock lock;
  if (!lock.held()) return TE_FL_OK;
  const ErrorAside aside;
  PyObject* none =
      PyObject_CallFunction(allocator.release, "K", reinterpret_cast<unsigned long long>(data));
  if (none == nullptr) return report(sink, TE_FL_INTERNAL);
  Py_DECREF(none);
  return TE_FL_OK;
}

te_fl_status call_trim(Allocator& allocator, const te_fl_error_sink* sink) {
  const InterpreterLock lock;
  if (!lock.held()) return TE_FL_OK;  // the process's end frees the memory
  const ErrorAside aside;
  PyObject* none = PyObject_CallNoArgs(allocator.trim);
  if (none == nullptr) return report(sink, TE_FL_INTERNAL);
  Py_DECREF(none);
  return TE_FL_OK;
}
te_fl_status trim(void* self, uint64_t, const te_fl_error_sink* sink) {
  return call_trim(*static_cast<Allocator*>(self), sink);
}
// The framework's cache cannot be trimmed for a single stream, so retiring a stream trims all of
// it.
te_fl_status retire_stream(void* self, void*, const te_fl_error_sink* sink) {
  return call_trim(*static_cast<Allocator*>(self), sink);
}

}  // namespace

PyObject* quiet_out_of_memory(PyObject*, PyObject*) noexcept {
  return guarded([] {
    if (t_direct) quieten();
    return Ref::share(Py_None);
  });
}

PyObject* use_allocator(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *name = nullptr, *allocate_fn = nullptr, *release_fn = nullptr, *trim_fn = nullptr;
    if (PyArg_ParseTuple(args, "OOOO", &name, &allocate_fn, &release_fn, &trim_fn) == 0) {
      throw PythonError();
    }
    // The first use loads plugins, which may be Python modules.
    without_lock([] { OpManager::instance(); });
    auto allocator = std::make_unique<Allocator>();
    allocator->device = value_or_throw(parse_device(to_text(name, "the device")));
    if (allocator->device.type == TE_FL_DEVICE_CUDA) {
      allocator->direct = find_torch_cuda();
      find_log_level();
    }
    Py_INCREF(allocate_fn), Py_INCREF(release_fn), Py_INCREF(trim_fn);
    allocator->allocate = allocate_fn;
    allocator->release = release_fn;
    allocator->trim = trim_fn;
    te_fl_allocator table;
    table.name = "torch";
    table.self = allocator.get();
    table.allocate = allocate;
    table.free = release;
    table.record_stream = record_stream;
    table.trim = trim;
    table.retire_stream = retire_stream;
    Status status;
    {
      const WithoutLock unlocked;
      status = devices::install_allocator(allocator->device, &table);
    }
    check(status);
    allocator.release();  // te-fl owns it from here on, until the process ends
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
