// te_fl._native: the runtime as Python sees it. The package te_fl gives its functions their names.
#include "errors.hpp"
#include "jax_ffi.hpp"
#include "op_call.hpp"
#include "policy.hpp"
#include "report.hpp"

namespace te_fl::python {
namespace {

PyObject* set_classes(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *errors = nullptr, *quantized = nullptr, *saved = nullptr;
    if (PyArg_ParseTuple(args, "OOO", &errors, &quantized, &saved) == 0) throw PythonError();
    set_error_classes(errors);
    set_argument_classes(quantized, saved);
    return Ref::share(Py_None);
  });
}

Ref capsule_of(xla::Error* (*handler)(xla::Call*) noexcept) {
  return Ref::take(PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr));
}

PyObject* jax_handlers(PyObject*, PyObject*) noexcept {
  return guarded([&] {
    Ref dict = Ref::take(PyDict_New());
    put(dict, "cpu", capsule_of(&jax::handle_on_host));
    put(dict, "CUDA", capsule_of(&jax::handle_on_cuda));
    return dict;
  });
}

PyObject* jax_version(PyObject*, PyObject*) noexcept {
  return guarded([&] { return to_python(int64_t{jax::seen_version()}); });
}

PyMethodDef g_methods[] = {
    {"set_classes", set_classes, METH_VARARGS, "set_classes(errors, Quantized, Saved)"},
    {"op", make_op, METH_O, "op(name) -> a callable of keyword arguments that runs the op"},
    {"schema", schema, METH_O, "schema(op) -> dict"},
    {"resolve", resolve, METH_VARARGS, "resolve(op, arguments) -> dict"},
    {"explain", explain, METH_VARARGS, "explain(op, device, dtypes, scalings) -> dict"},
    {"saved_bytes", saved_bytes, METH_VARARGS, "saved_bytes(op, arguments) -> int"},
    {"op_names", op_names, METH_NOARGS, "op_names() -> list of str"},
    {"usage", usage, METH_NOARGS, "usage() -> list of dict"},
    {"reset_usage", reset_usage, METH_NOARGS, "reset_usage()"},
    {"reload", reload, METH_NOARGS, "reload(): reads the environment again"},
    {"info", info, METH_NOARGS, "info() -> dict"},
    {"load_plugin", load_plugin, METH_O, "load_plugin(path_or_name) -> name"},
    {"verify_counts", verify_counts, METH_NOARGS, "verify_counts() -> dict"},
    {"write_trace", write_trace, METH_NOARGS, "write_trace()"},
    {"policy_scope", policy_scope, METH_O, "policy_scope(settings) -> scope"},
    {"enter_scope", enter_scope, METH_O, "enter_scope(scope)"},
    {"leave_scope", leave_scope, METH_O, "leave_scope(scope)"},
    {"policy_text", policy_text, METH_NOARGS, "policy_text() -> str"},
    {"jax_handlers", jax_handlers, METH_NOARGS, "jax_handlers() -> dict of platform to capsule"},
    {"jax_version", jax_version, METH_NOARGS,
     "jax_version() -> int: the version of XLA's FFI, major * 1000 + minor; -1 before "
     "registration"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT,
                        "_native",
                        "te-fl's runtime",
                        -1,
                        g_methods,
                        nullptr,
                        nullptr,
                        nullptr,
                        nullptr};

}  // namespace
}  // namespace te_fl::python

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&te_fl::python::g_module); }
