// te_fl._check_worker: runs a child process of `te-fl check` inside a Python interpreter.
#include "conformance/check/check.hpp"

#include "py/py.hpp"

namespace te_fl::python {
namespace {

PyObject* serve(PyObject*, PyObject* options) noexcept {
  return guarded([&] {
    const std::string text(to_text(options, "the options"));
    return to_python(int64_t{without_lock([&] { return te_fl_tool::check::serve_json(text); })});
  });
}

PyMethodDef g_methods[] = {
    {"serve", serve, METH_O, "serve(options) -> int: serves the orders of te-fl check"},
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
