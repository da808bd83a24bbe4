#include "plugins/modules.hpp"

#include <exception>

#include "py/interpreter.hpp"
#include "te_fl/log.hpp"
#include "te_fl/plugins.hpp"

namespace te_fl::python {
namespace {

using plugins::PluginInfo;

PyObject* g_load = nullptr;  // the function that set_module_loader() took; never freed

std::string text_in(PyObject* row, const char* key) {
  PyObject* found = PyDict_GetItemString(row, key);
  if (found == nullptr) throw_type_error(std::string("a module's report lacks '") + key + "'");
  return std::string(to_text(found, key));
}

PluginInfo read_info(PyObject* row) {
  PluginInfo info;
  info.name = text_in(row, "name"), info.vendor = text_in(row, "vendor");
  info.version = text_in(row, "version"), info.build_id = text_in(row, "build_id");
  info.path = text_in(row, "path"), info.origin = text_in(row, "origin");
  info.abi = "Python", info.reason = text_in(row, "reason");
  const std::string state = text_in(row, "state");
  info.state = state == "active"    ? plugins::State::kActive
               : state == "skipped" ? plugins::State::kSkipped
                                    : plugins::State::kFailed;
  PyObject* ops = PyDict_GetItemString(row, "ops");
  for (Py_ssize_t i = 0; ops != nullptr && i < PyList_Size(ops); ++i)
    info.ops.emplace_back(to_text(PyList_GetItem(ops, i), "ops"));
  return info;
}

Ref list_of_texts(const std::vector<std::string>& texts) {
  return make_list(texts, [](const std::string& t) { return to_python(std::string_view(t)); });
}

std::vector<PluginInfo> load(const std::vector<std::string>& names, bool discover,
                             const std::vector<std::string>& skip) {
  std::vector<PluginInfo> all;
  const InterpreterLock lock;
  if (!lock.held()) return all;
  try {
    const Ref wanted = list_of_texts(names), left_out = list_of_texts(skip);
    const Ref rows = Ref::take(PyObject_CallFunction(
        g_load, "OOO", wanted.get(), discover ? Py_True : Py_False, left_out.get()));
    for (Py_ssize_t i = 0; i < PyList_Size(rows.get()); ++i)
      all.push_back(read_info(PyList_GetItem(rows.get(), i)));
  } catch (const PythonError&) {  // the call continues without the modules that failed
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0) {
      PyErr_Clear();
      // Raises KeyboardInterrupt in the main thread once it is back in Python.
      PyErr_SetInterrupt();
    } else {
      PyErr_WriteUnraisable(g_load);
    }
  } catch (const std::exception& e) {
    log::error(std::string("loading plugin modules was cut short: ") + e.what());
  }
  return all;
}

}  // namespace

PyObject* set_module_loader(PyObject*, PyObject* function) noexcept {
  Py_INCREF(function);
  PyObject* old = std::exchange(g_load, function);
  Py_XDECREF(old);
  plugins::set_module_loader({load});
  Py_INCREF(Py_None);
  return Py_None;
}

}  // namespace te_fl::python
