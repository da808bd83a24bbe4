// te_fl._check_worker: runs a child process of `te-fl check`, the program conformance, or a command
// of the program te-fl inside a Python interpreter, so that they see implementations in Python.
#include <string>
#include <vector>

#include "conformance/check/check.hpp"
#include "conformance/program.hpp"
#include "py/py.hpp"
#include "tools/te-fl/program.hpp"

namespace te_fl::python {
namespace {

PyObject* serve(PyObject*, PyObject* options) noexcept {
  return guarded([&] {
    const std::string text(to_text(options, "the options"));
    return to_python(int64_t{without_lock([&] { return te_fl_tool::check::serve_json(text); })});
  });
}

PyObject* conformance(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject* options = nullptr;
    const char* folder = nullptr;
    if (PyArg_ParseTuple(args, "O!s", &PyList_Type, &options, &folder) == 0) throw PythonError();
    std::vector<std::string> words = {"conformance"};
    for (Py_ssize_t i = 0; i < PyList_Size(options); ++i)
      words.emplace_back(to_text(PyList_GetItem(options, i), "an option"));
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    const std::string cases = folder;
    return to_python(int64_t{without_lock([&] {
      return te_fl::conformance::run_program(static_cast<int>(argv.size()), argv.data(), cases);
    })});
  });
}

PyObject* program(PyObject*, PyObject* options) noexcept {
  return guarded([&] {
    std::vector<std::string> words = {"te-fl"};
    const Py_ssize_t count = PyList_Size(options);
    if (count < 0) throw PythonError();
    for (Py_ssize_t i = 0; i < count; ++i)
      words.emplace_back(to_text(PyList_GetItem(options, i), "an option"));
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    return to_python(int64_t{without_lock(
        [&] { return te_fl_tool::run_program(static_cast<int>(words.size()), argv.data()); })});
  });
}

PyMethodDef g_methods[] = {
    {"serve", serve, METH_O, "serve(options) -> int: serves the orders of te-fl check"},
    {"program", program, METH_O, "program(options) -> int: runs the program te-fl"},
    {"conformance", conformance, METH_VARARGS,
     "conformance(options, folder) -> int: runs the program conformance; folder: that of "
     "expected_unsupported.txt"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef g_module = {PyModuleDef_HEAD_INIT,
                        "_check_worker",
                        "A child of te-fl check",
                        -1,
                        g_methods,
                        nullptr,
                        nullptr,
                        nullptr,
                        nullptr};

}  // namespace
}  // namespace te_fl::python

PyMODINIT_FUNC PyInit__check_worker() { return PyModule_Create(&te_fl::python::g_module); }
