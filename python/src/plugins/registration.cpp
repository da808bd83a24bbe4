#include "plugins/registration.hpp"

#include <memory>
#include <vector>

#include "ops/function_op.hpp"
#include "ops/manager.hpp"
#include "plugins/implementation.hpp"
#include "py/errors.hpp"
#include "py/interpreter.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kRegistry = "te_fl.registry";
constexpr const char* kManager = "te_fl.manager";

// A registry made by the program lives as long as a capsule of the registry or of a manager on it.
using Registry = std::shared_ptr<OpRegistry>;
struct Manager {
  Registry registry;
  std::unique_ptr<OpManager> own;  // destroyed before the registry; null: the process's manager
};

OpRegistry& unwrap_registry(PyObject* capsule) {
  auto* registry = static_cast<Registry*>(PyCapsule_GetPointer(capsule, kRegistry));
  if (registry == nullptr) throw PythonError();
  return **registry;
}

template <class T>
Ref make_capsule(std::unique_ptr<T> object, const char* name) {
  Ref capsule = Ref::take(PyCapsule_New(object.get(), name, [](PyObject* c) {
    auto* dropped = static_cast<T*>(PyCapsule_GetPointer(c, PyCapsule_GetName(c)));
    {
      const WithoutLock unlocked;  // destroying the manager frees plans and joins threads
      delete dropped;
    }
    drop_dropped();
  }));
  static_cast<void>(object.release());
  return capsule;
}

Ref make_capsule(Registry registry) {
  return make_capsule(std::make_unique<Registry>(std::move(registry)), kRegistry);
}

Ref done(const Status& status) {
  drop_dropped();
  check(status);
  return Ref::share(Py_None);
}

Ref to_dict(const OpImplInfo& info) {
  Ref one = Ref::take(PyDict_New());
  put(one, "op_name", to_python(info.op));
  put(one, "impl_id", to_python(info.impl_id));
  put(one, "kind", to_python(to_string(info.kind)));
  put(one, "vendor", to_python(info.vendor));
  put(one, "priority", to_python(int64_t{info.priority}));
  put(one, "owner", to_python(info.owner));
  return one;
}

}  // namespace

OpManager& unwrap_manager(PyObject* capsule) {
  if (capsule == Py_None) return without_lock([]() -> OpManager& { return OpManager::instance(); });
  auto* manager = static_cast<Manager*>(PyCapsule_GetPointer(capsule, kManager));
  if (manager == nullptr) throw PythonError();
  return manager->own != nullptr ? *manager->own : OpManager::instance();
}

PyObject* set_registration_helpers(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *describe_error = nullptr, *on_stream = nullptr;
    if (PyArg_ParseTuple(args, "OO", &describe_error, &on_stream) == 0) throw PythonError();
    set_helpers(describe_error, on_stream);
    watch_interpreter();
    return Ref::share(Py_None);
  });
}

PyObject* process_registry(PyObject*, PyObject*) noexcept {
  return guarded(
      [] { return make_capsule(Registry(&OpRegistry::instance(), [](OpRegistry*) {})); });
}

PyObject* new_registry(PyObject*, PyObject*) noexcept {
  return guarded([] { return make_capsule(std::make_shared<OpRegistry>()); });
}

PyObject* new_manager(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    auto manager = std::make_unique<Manager>();
    unwrap_registry(capsule);
    manager->registry = *static_cast<Registry*>(PyCapsule_GetPointer(capsule, kRegistry));
    if (manager->registry.get() != &OpRegistry::instance())
      manager->own = std::make_unique<OpManager>(*manager->registry);
    return make_capsule(std::move(manager), kManager);
  });
}

PyObject* declare(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject* capsule = nullptr;
    const char* op = nullptr;
    if (PyArg_ParseTuple(args, "Os", &capsule, &op) == 0) throw PythonError();
    OpRegistry& registry = unwrap_registry(capsule);
    const bool of_functions = value_or_throw(without_lock([&] {
      // Plugins must declare their ops first.
      if (&registry == &OpRegistry::instance()) OpManager::instance();
      return declare_function_op(registry, op);
    }));
    if (of_functions) function_op_names().insert(op);
    return to_python(of_functions);
  });
}

PyObject* register_implementations(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *capsule = nullptr, *list = nullptr;
    const char* owner = nullptr;
    if (PyArg_ParseTuple(args, "OO!s", &capsule, &PyList_Type, &list, &owner) == 0)
      throw PythonError();
    OpRegistry& registry = unwrap_registry(capsule);
    auto made = std::make_shared<std::vector<std::shared_ptr<Implementation>>>();
    std::vector<const te_fl_op_desc*> descs;
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
      made->push_back(Implementation::make(PyList_GetItem(list, i)));
      descs.push_back(&made->back()->desc());
    }
    return done(without_lock([&] { return registry.register_ops(descs, owner, "python", made); }));
  });
}

PyObject* unregister(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject* capsule = nullptr;
    const char *op = nullptr, *impl_id = nullptr;
    if (PyArg_ParseTuple(args, "Oss", &capsule, &op, &impl_id) == 0) throw PythonError();
    OpRegistry& registry = unwrap_registry(capsule);
    return done(without_lock([&] { return registry.unregister_op(op, impl_id); }));
  });
}

PyObject* unregister_owner(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject* capsule = nullptr;
    const char* owner = nullptr;
    if (PyArg_ParseTuple(args, "Os", &capsule, &owner) == 0) throw PythonError();
    OpRegistry& registry = unwrap_registry(capsule);
    return done(without_lock([&] { return registry.unregister_owner(owner); }));
  });
}

PyObject* set_priority(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject* capsule = nullptr;
    const char *op = nullptr, *impl_id = nullptr;
    int priority = 0;
    if (PyArg_ParseTuple(args, "Ossi", &capsule, &op, &impl_id, &priority) == 0)
      throw PythonError();
    OpRegistry& registry = unwrap_registry(capsule);
    return done(without_lock([&] { return registry.set_priority(op, impl_id, priority); }));
  });
}

PyObject* snapshot(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    OpRegistry& registry = unwrap_registry(capsule);
    const auto all = without_lock([&] {
      if (&registry == &OpRegistry::instance()) OpManager::instance();  // discovers plugins
      return registry.snapshot();
    });
    return make_list(all, to_dict);
  });
}

}  // namespace te_fl::python
