// Reports about te-fl: devices, plugins, dispatch counts, settings.
#include "ops/report.hpp"

#include <string>

#include "ops/manager.hpp"
#include "py/errors.hpp"
#include "te_fl/device.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/plugins.hpp"
#include "te_fl/version.hpp"
#include "te_fl/watch.hpp"

namespace te_fl::python {
namespace {

Ref make_name_list(const std::vector<std::string>& names) {
  return make_list(names,
                   [](const std::string& name) { return to_python(std::string_view(name)); });
}

// Parses a function's only argument, an optional manager.
OpManager& manager_argument(PyObject* args) {
  PyObject* manager = Py_None;
  if (PyArg_ParseTuple(args, "|O", &manager) == 0) throw PythonError();
  return unwrap_manager(manager);
}

}  // namespace

PyObject* op_names(PyObject*, PyObject*) noexcept {
  return guarded([] {
    return make_name_list(without_lock([] { return OpManager::instance().registry().op_names(); }));
  });
}

PyObject* usage(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    OpManager& manager = manager_argument(args);
    const auto rows = without_lock([&] { return manager.usage(); });
    return make_list(rows, [](const OpUsage& u) {
      Ref one = Ref::take(PyDict_New());
      put(one, "op", to_python(u.op));
      put(one, "impl_id", to_python(u.impl_id));
      put(one, "calls", to_python(u.calls));
      put(one, "staged_calls", to_python(u.staged_calls));
      put(one, "staged_bytes", to_python(u.staged_bytes));
      return one;
    });
  });
}

PyObject* reset_usage(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    OpManager& manager = manager_argument(args);
    without_lock([&] { manager.reset_usage(); });
    return Ref::share(Py_None);
  });
}

PyObject* reload(PyObject*, PyObject*) noexcept {
  return guarded([] {
    check(without_lock([] { return OpManager::instance().reload(); }));
    return Ref::share(Py_None);
  });
}

PyObject* setting(PyObject*, PyObject* name) noexcept {
  return guarded([&] {
    const std::string text(to_text(name, "the setting's name"));
    const auto v = value_or_throw(without_lock([&] { return environment::variable(text); }));
    if (!v.error.empty()) throw_invalid(v.error);
    if (v.value.empty() && v.origin.starts_with("default")) return Ref::share(Py_None);
    if (v.type == "bool") return to_python(v.value == "1");
    if (v.type == "int") return to_python(int64_t{std::stoll(v.value)});
    return to_python(std::string_view(v.value));
  });
}

PyObject* info(PyObject*, PyObject*) noexcept {
  return guarded([] {
    const auto plugins = without_lock([] {
      (void)OpManager::instance();  // discovers the plugins
      return plugins::list();
    });
    Ref dict = Ref::take(PyDict_New());
    put(dict, "version", to_python(std::string_view(TE_FL_VERSION)));
    put(dict, "devices", make_list(devices::list(), [](const Device& d) {
          return to_python(std::string_view(to_string(d)));
        }));
    put(dict, "plugins", make_list(plugins, [](const plugins::PluginInfo& p) {
          Ref one = Ref::take(PyDict_New());
          put(one, "name", to_python(p.name));
          put(one, "vendor", to_python(p.vendor));
          put(one, "version", to_python(p.version));
          put(one, "path", to_python(p.path));
          put(one, "origin", to_python(p.origin));
          put(one, "state", to_python(plugins::to_string(p.state)));
          put(one, "reason", to_python(p.reason));
          put(one, "devices", make_name_list(p.devices));
          put(one, "ops", make_name_list(p.ops));
          return one;
        }));
    return dict;
  });
}

PyObject* device_name(PyObject*, PyObject* device) noexcept {
  return guarded([&] {
    const std::string text(to_text(device, "the device"));
    const auto properties = without_lock([&]() -> Result<te_fl_device_props> {
      (void)OpManager::instance();  // discovers plugins
      TE_FL_ASSIGN_OR_RETURN(const Device parsed, parse_device(text));
      return devices::properties(parsed);
    });
    return to_python(std::string_view(value_or_throw(Result(properties)).name));
  });
}

PyObject* load_plugin(PyObject*, PyObject* path) noexcept {
  return guarded([&] {
    const std::string text(to_text(path, "the plugin's path or name"));
    auto loaded = without_lock([&] { return plugins::load(text); });
    return to_python(value_or_throw(std::move(loaded)).name);
  });
}

PyObject* file_trust_problem(PyObject*, PyObject* path) noexcept {
  return guarded([&] {
    const std::string text(to_text(path, "the path"));
    return to_python(without_lock([&] { return plugins::trust_problem(text); }));
  });
}

PyObject* verify_counts(PyObject*, PyObject*) noexcept {
  return guarded([] {
    const VerifyCounts counts = te_fl::verify_counts();
    Ref dict = Ref::take(PyDict_New());
    put(dict, "agreed", to_python(counts.agreed));
    put(dict, "differed", to_python(counts.differed));
    put(dict, "saved", to_python(counts.saved));
    put(dict, "captured", to_python(counts.captured));
    put(dict, "skipped", to_python(counts.skipped));
    put(dict, "failed", to_python(counts.failed));
    return dict;
  });
}

PyObject* fingerprint(PyObject*, PyObject*) noexcept {
  return guarded([] {
    return to_python(without_lock([] {
      (void)OpManager::instance();  // discovers plugins
      return te_fl::fingerprint();
    }));
  });
}

PyObject* fingerprint_table(PyObject*, PyObject*) noexcept {
  return guarded([] {
    return to_python(without_lock([] {
      (void)OpManager::instance();  // discovers plugins
      return te_fl::fingerprint_table();
    }));
  });
}

PyObject* fingerprint_difference(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    const char *first = nullptr, *second = nullptr;
    if (PyArg_ParseTuple(args, "ss", &first, &second) == 0) throw PythonError();
    Ref list = Ref::take(PyList_New(0));
    for (const std::string& line : te_fl::fingerprint_difference(first, second)) {
      if (PyList_Append(list.get(), to_python(line).get()) != 0) throw PythonError();
    }
    return list;
  });
}

PyObject* write_trace(PyObject*, PyObject*) noexcept {
  return guarded([] {
    check(without_lock([] { return te_fl::write_trace(); }));
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
