#include "py/interpreter.hpp"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <new>
#include <thread>

namespace te_fl::python {
namespace {

// The time in milliseconds for which the interpreter's shutdown waits for threads that are inside a
// Python implementation.
constexpr int kEndWaitMs = 10'000;

std::atomic<bool> g_ending{false};
std::atomic<int> g_inside{0};  // threads that hold or await the lock through InterpreterLock
constinit thread_local int t_inside = 0;
std::thread::id g_ender;  // the thread that ends the interpreter; set before g_ending

struct Dropped {
  PyObject* object;
  Dropped* next;
};
std::atomic<Dropped*> g_dropped{nullptr};

// A forked child has only the forking thread.
void forked_child() { g_inside.store(t_inside, std::memory_order_relaxed); }

// The module of torch.compile that sets the frame evaluation hook; null until the program imports
// torch.compile. Call under the interpreter's lock.
PyObject* tracer_module() noexcept {
  static constinit PyObject* name = nullptr;
  if (name == nullptr) name = PyUnicode_InternFromString("torch._dynamo.eval_frame");
  return name;
}

// During shutdown only the thread that ends the interpreter may enter: its atexit handlers may call
// ops.
bool may_enter() noexcept {
  if (Py_IsInitialized() == 0) return false;
  return !g_ending.load() || std::this_thread::get_id() == g_ender;
}

PyObject* end(PyObject*, PyObject*) noexcept {
  g_ender = std::this_thread::get_id();
  g_ending.store(true);
  {
    const WithoutLock unlocked;  // lets threads inside an implementation finish
    const timespec pause{0, 1'000'000};
    for (int i = 0; i < kEndWaitMs && g_inside.load() > t_inside; ++i) nanosleep(&pause, nullptr);
  }
  Py_INCREF(Py_None);
  return Py_None;
}

PyMethodDef g_end = {"end", end, METH_NOARGS, "Notices the interpreter's end."};

}  // namespace

InterpreterLock::InterpreterLock() noexcept {
  // Incremented before g_ending is read. Therefore either the thread that ends the interpreter sees
  // this count, or this thread sees g_ending.
  g_inside.fetch_add(1);
  ++t_inside;
  if (may_enter()) {
    state_ = lock_or_sleep([] { return PyGILState_Ensure(); });
    held_ = true;
    stop_tracing();
  }
}

InterpreterLock::~InterpreterLock() {
  if (held_) {
    trace_again();
    PyGILState_Release(state_);
  }
  --t_inside;
  g_inside.fetch_sub(1);
}

void InterpreterLock::stop_tracing() noexcept {
  PyObject* const name = tracer_module();
  PyObject* const modules = name == nullptr ? nullptr : PyImport_GetModuleDict();
  PyObject* const module = modules == nullptr ? nullptr : PyDict_GetItem(modules, name);
  if (module == nullptr) return;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  // The attribute is absent while the module is being imported.
  set_tracer_ = PyObject_GetAttrString(module, "set_eval_frame");
  if (set_tracer_ != nullptr) tracer_ = PyObject_CallFunctionObjArgs(set_tracer_, Py_None, nullptr);
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

void InterpreterLock::trace_again() noexcept {
  if (set_tracer_ == nullptr) return;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  if (tracer_ != nullptr) {
    PyObject* const stopped = PyObject_CallFunctionObjArgs(set_tracer_, tracer_, nullptr);
    Py_XDECREF(stopped);
    Py_DECREF(tracer_);
  }
  Py_DECREF(set_tracer_);
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

bool interpreter_alive() noexcept { return may_enter(); }

void watch_interpreter() {
  static bool watched = false;  // guarded by the interpreter's lock
  if (watched) return;
  const Ref module = Ref::take(PyImport_ImportModule("atexit"));
  const Ref function = Ref::take(PyCFunction_NewEx(&g_end, nullptr, nullptr));
  Ref::take(PyObject_CallMethod(module.get(), "register", "O", function.get()));
  if (pthread_atfork(nullptr, nullptr, &forked_child) != 0) throw std::bad_alloc();
  watched = true;
}

void drop_later(PyObject* object) noexcept {
  if (object == nullptr) return;
  auto* dropped = new (std::nothrow) Dropped{object, nullptr};
  if (dropped == nullptr) return;  // out of memory: leaks the object
  dropped->next = g_dropped.load(std::memory_order_relaxed);
  while (!g_dropped.compare_exchange_weak(dropped->next, dropped, std::memory_order_release)) {
  }
}

void drop_dropped() noexcept {
  Dropped* dropped = g_dropped.exchange(nullptr, std::memory_order_acquire);
  while (dropped != nullptr) {
    Dropped* next = dropped->next;
    Py_DECREF(dropped->object);
    delete dropped;
    dropped = next;
  }
}

}  // namespace te_fl::python
