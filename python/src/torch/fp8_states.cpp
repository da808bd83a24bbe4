#include "torch/fp8_states.hpp"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "torch/layer.hpp"

namespace te_fl::python {

namespace {

constexpr const char* kStatesName = "te_fl.fp8_states";

}  // namespace

const std::shared_ptr<ModuleStates>& unwrap_states(PyObject* capsule) {
  auto* states =
      static_cast<std::shared_ptr<ModuleStates>*>(PyCapsule_GetPointer(capsule, kStatesName));
  if (states == nullptr) throw PythonError();
  return *states;
}

PyObject* make_fp8_states(PyObject*, PyObject*) noexcept {
  return guarded([&] {
    auto states = std::make_unique<std::shared_ptr<ModuleStates>>(std::make_shared<ModuleStates>());
    Ref capsule = Ref::take(PyCapsule_New(states.get(), kStatesName, [](PyObject* c) {
      delete static_cast<std::shared_ptr<ModuleStates>*>(PyCapsule_GetPointer(c, kStatesName));
    }));
    states.release();
    return capsule;
  });
}

PyObject* fp8_state(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *capsule = nullptr, *like = nullptr;
    if (PyArg_ParseTuple(args, "OO", &capsule, &like) == 0) throw PythonError();
    ModuleStates& states = *unwrap_states(capsule);
    std::vector<nn::NamedTensor> state;
    {
      const WithoutLock unlocked;
      const std::lock_guard lock(states.mutex);
      state = states.fp8.state();
    }
    return make_list(state, [&](const nn::NamedTensor& t) {
      const Ref name = to_python(std::string_view(t.name));
      const Ref tensor = to_framework(t.tensor, like);
      return Ref::take(PyTuple_Pack(2, name.get(), tensor.get()));
    });
  });
}

PyObject* load_fp8_state(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *capsule = nullptr, *saved = nullptr;
    if (PyArg_ParseTuple(args, "OO", &capsule, &saved) == 0) throw PythonError();
    ModuleStates& states = *unwrap_states(capsule);
    std::vector<nn::NamedTensor> state;
    const Ref items = Ref::take(PySequence_List(saved));
    for (Py_ssize_t i = 0; i < PyList_Size(items.get()); ++i) {
      PyObject *name = nullptr, *tensor = nullptr;
      if (PyArg_ParseTuple(PyList_GetItem(items.get(), i), "OO", &name, &tensor) == 0) {
        throw PythonError();
      }
      state.push_back({std::string(to_text(name, "a name")), to_tensor(tensor, "state", true)});
    }
    Status status;
    bool sites = false;
    const FrameworkStreams streams;
    {
      const WithoutLock unlocked;
      const std::lock_guard lock(states.mutex);
      sites = !states.fp8.empty();
      if (sites) status = states.fp8.load(state, "FP8 state");
    }
    check(status);
    return Ref::share(sites ? Py_True : Py_False);
  });
}

PyObject* empty_bytes(PyObject*, PyObject* like) noexcept {
  return guarded([&] { return tensor_of_no_bytes(like); });
}

PyObject* retire_fp8_states(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    ModuleStates& states = *unwrap_states(capsule);
    const WithoutLock unlocked;
    const std::lock_guard lock(states.mutex);
    states.fp8.retire();
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
