#include "torch/recompute.hpp"

#include <memory>
#include <string>
#include <utility>

#include "py/errors.hpp"
#include "te_fl/nn/autograd/recompute.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kRecordName = "te_fl.recompute_record";
constexpr const char* kSegmentName = "te_fl.recompute_scope";
constexpr const char* kHooksName = "te_fl.saved_hooks";

struct Recording {
  nn::RecomputeRecord record;
  struct Forward {
    const void* layer;
    Contents contents;
  };
  std::vector<Forward> forwards;  // the forwards of the first run
  Ref scopes;                     // the autocast scopes in force when the first run began, a list
};

// One run of a checkpointed part of the forward, from begin_recompute() to end_recompute(). A
// Segment that was never ended stays in force on its thread, so it must not be freed.
struct Segment {
  std::shared_ptr<Recording> record;
  bool second = false;
  size_t next = 0;  // in a second run, the index of the next forward of the first run
  Segment* outer = nullptr;
  std::unique_ptr<nn::RecomputeScope> scope;
  // In a second run: the thread's list of autocasts, and a copy of the list from before the run.
  Ref scopes, outside;
};

thread_local Segment* t_segment = nullptr;

[[noreturn]] void throw_precondition(const std::string& text) {
  throw_status(Status(StatusCode::kFailedPrecondition, "recomputation: " + text));
}

Ref copy_list(PyObject* list) { return Ref::take(PyList_GetSlice(list, 0, PyList_Size(list))); }

void assign(PyObject* list, PyObject* items) {
  check(PyList_SetSlice(list, 0, PyList_Size(list), items));
}

const std::shared_ptr<Recording>& unwrap_recording(PyObject* capsule) {
  auto* record =
      static_cast<std::shared_ptr<Recording>*>(PyCapsule_GetPointer(capsule, kRecordName));
  if (record == nullptr) throw PythonError();
  return *record;
}

// The innermost second run on this thread; null if there is none.
Segment* second_run() {
  Segment* segment = t_segment;
  while (segment != nullptr && !segment->second) segment = segment->outer;
  return segment;
}

// Disables Python's garbage collection: collecting a PyTorch generator that a failed forward left
// behind would remove saved-tensor hooks.
class NoCollection {
 public:
  ~NoCollection() {
    if (was_enabled_) PyGC_Enable();
  }

 private:
  const bool was_enabled_ = PyGC_Disable() != 0;
};

}  // namespace

bool repeats_segment() { return second_run() != nullptr; }

Contents contents_in_segment(const void* layer, Contents now) {
  Segment* const second = second_run();
  if (second != nullptr) {
    const auto& forwards = second->record->forwards;
    if (second->next == forwards.size() || forwards[second->next].layer != layer) {
      throw_precondition(
          "the second run calls another layer than the first did; a function that is checkpointed "
          "must do the same both times");
    }
    const Contents& then = forwards[second->next++].contents;
    if (then.versions != now.versions) {
      throw_precondition(
          "a parameter was written between the forward and the backward, which runs the forward "
          "again; write parameters after the backward");
    }
    now = then;
  }
  for (Segment* segment = t_segment; segment != second; segment = segment->outer) {
    segment->record->forwards.push_back({layer, now});
  }
  return now;
}

PyObject* hooks_in_force(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *top = nullptr, *pop = nullptr, *push = nullptr;
    if (PyArg_ParseTuple(args, "OOO", &top, &pop, &push) == 0) throw PythonError();
    const NoCollection guard;
    Ref found = Ref::take(PyList_New(0));
    Py_ssize_t taken = 0;
    const auto put_back = [&] {
      while (taken > 0) {
        Ref::take(PyObject_Call(push, PyList_GetItem(found.get(), taken - 1), nullptr));
        --taken;
      }
    };
    try {
      for (;;) {
        const Ref hooks = Ref::take(PyObject_CallFunctionObjArgs(top, Py_False, nullptr));
        if (hooks.get() == Py_None) break;
        check(PyList_Append(found.get(), hooks.get()));
        Ref::take(PyObject_CallNoArgs(pop));
        ++taken;
      }
    } catch (const PythonError&) {
      PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
      PyErr_Fetch(&type, &value, &trace);
      try {
        put_back();
      } catch (const PythonError&) {
        PyErr_Clear();
      }
      PyErr_Restore(type, value, trace);
      throw;
    }
    put_back();
    return found;
  });
}

namespace {

// The hooks that track_hooks() has seen on this thread and that are still in force: a list of
// (pack, unpack), which lives in Python's state of the thread.
PyObject* tracked_hooks() {
  PyObject* state = PyThreadState_GetDict();
  if (state == nullptr) throw PythonError();
  PyObject* list = PyDict_GetItemString(state, kHooksName);
  if (list == nullptr) {
    const Ref made = Ref::take(PyList_New(0));
    check(PyDict_SetItemString(state, kHooksName, made.get()));
    list = made.get();
  }
  return list;
}

PyObject* push_tracked(PyObject* push, PyObject* hooks) noexcept {
  return guarded([&] {
    PyObject* list = tracked_hooks();
    Ref done = Ref::take(PyObject_Call(push, hooks, nullptr));
    check(PyList_Append(list, hooks));
    return done;
  });
}

PyObject* pop_tracked(PyObject* pop, PyObject*) noexcept {
  return guarded([&] {
    PyObject* list = tracked_hooks();
    Ref done = Ref::take(PyObject_CallNoArgs(pop));
    const Py_ssize_t count = PyList_Size(list);
    if (count > 0) check(PyList_SetSlice(list, count - 1, count, nullptr));
    return done;
  });
}

// Called with (push, pop) as `self`. An exception that leaves a backward drops hooks from PyTorch's
// stack without a pop, so this counts those on the stack, and shortens the list to them.
PyObject* top_tracked(PyObject* self, PyObject*) noexcept {
  return guarded([&] {
    PyObject* list = tracked_hooks();
    const Py_ssize_t listed = PyList_Size(list);
    Py_ssize_t count = 0;
    for (; count < listed; ++count) {
      PyObject* done = PyObject_CallNoArgs(PyTuple_GetItem(self, 1));
      if (done == nullptr) break;
      Py_DECREF(done);
    }
    PyErr_Clear();
    for (Py_ssize_t i = 0; i < count; ++i) {
      Ref::take(PyObject_Call(PyTuple_GetItem(self, 0), PyList_GetItem(list, i), nullptr));
    }
    if (count < listed) check(PyList_SetSlice(list, count, listed, nullptr));
    return Ref::share(count > 0 ? PyList_GetItem(list, count - 1) : Py_None);
  });
}

}  // namespace

PyObject* track_hooks(PyObject*, PyObject* args) noexcept {
  static PyMethodDef push_method = {"push", push_tracked, METH_VARARGS, "push(pack, unpack)"};
  static PyMethodDef pop_method = {"pop", pop_tracked, METH_NOARGS, "pop()"};
  static PyMethodDef top_method = {"top", top_tracked, METH_O, "top(ignore_is_tracing)"};
  return guarded([&] {
    PyObject *push = nullptr, *pop = nullptr;
    if (PyArg_ParseTuple(args, "OO", &push, &pop) == 0) throw PythonError();
    const Ref pushes = Ref::take(PyCFunction_New(&push_method, push));
    const Ref pops = Ref::take(PyCFunction_New(&pop_method, pop));
    const Ref tops = Ref::take(PyCFunction_New(&top_method, args));
    return Ref::take(PyTuple_Pack(3, pushes.get(), pops.get(), tops.get()));
  });
}

PyObject* recompute_record(PyObject*, PyObject*) noexcept {
  return guarded([] {
    auto record = std::make_unique<std::shared_ptr<Recording>>(std::make_shared<Recording>());
    Ref capsule = Ref::take(PyCapsule_New(record.get(), kRecordName, [](PyObject* c) {
      delete static_cast<std::shared_ptr<Recording>*>(PyCapsule_GetPointer(c, kRecordName));
    }));
    record.release();
    return capsule;
  });
}

PyObject* begin_recompute(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *capsule = nullptr, *thread = nullptr;
    int second = 0;
    if (PyArg_ParseTuple(args, "OpO", &capsule, &second, &thread) == 0) throw PythonError();
    Ref scopes = Ref::take(PyObject_GetAttrString(thread, "scopes"));
    auto segment = std::make_unique<Segment>();
    segment->record = unwrap_recording(capsule);
    segment->second = second != 0;
    segment->scope = std::make_unique<nn::RecomputeScope>(
        segment->record->record,
        segment->second ? nn::RecomputePhase::kSecond : nn::RecomputePhase::kFirst);
    segment->outer = t_segment;
    Ref scope = Ref::take(PyCapsule_New(segment.get(), kSegmentName, [](PyObject* c) {
      auto* dropped = static_cast<Segment*>(PyCapsule_GetPointer(c, kSegmentName));
      if (dropped->scope == nullptr) delete dropped;
    }));
    if (segment->second) {
      segment->outside = copy_list(scopes.get());
      assign(scopes.get(), segment->record->scopes.get());
      segment->scopes = std::move(scopes);
    } else {
      segment->record->scopes = copy_list(scopes.get());
    }
    t_segment = segment.release();
    return scope;
  });
}

PyObject* end_recompute(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    auto* segment = static_cast<Segment*>(PyCapsule_GetPointer(capsule, kSegmentName));
    if (segment == nullptr) throw PythonError();
    if (segment != t_segment) {
      throw_precondition("its scopes end on the thread that began them, the innermost first");
    }
    t_segment = segment->outer;
    segment->scope.reset();
    if (segment->second) assign(segment->scopes.get(), segment->outside.get());
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
