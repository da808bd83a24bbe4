#include "torch/lent_parameter.hpp"

#include <array>
#include <utility>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "te_fl/wrap_quantized.hpp"

namespace te_fl::python {
namespace {

PyTypeObject* g_codes = nullptr;  // the parameter class that holds FP8 codes only

LentParameter lent_codes(PyObject* parameter, const char* name, bool training) {
  const Ref lent =
      Ref::take(PyObject_CallMethod(parameter, "_lent", "O", training ? Py_True : Py_False));
  std::array<PyObject*, 5> parts{};
  int dtype = 0, scaling = 0;
  if (PyArg_ParseTuple(lent.get(), "OOOOOii", &parts[0], &parts[1], &parts[2], &parts[3], &parts[4],
                       &dtype, &scaling) == 0) {
    throw PythonError();
  }
  const auto part = [&](size_t i) {
    return parts[i] != Py_None ? to_tensor(parts[i], name, false) : Tensor();
  };
  auto made = wrap_quantized(static_cast<Scaling>(scaling), {.codes = part(0),
                                                             .columns = part(3),
                                                             .scale_inv = part(1),
                                                             .columnwise_scale_inv = part(4),
                                                             .amax = part(2)});
  if (!made.ok()) throw_status(made.status().wrap(name));
  return {*std::move(made), static_cast<DType>(dtype)};
}

}  // namespace

LentParameter lent_parameter(PyObject* parameter, const char* name, bool training) {
  if (g_codes != nullptr && Py_TYPE(parameter) == g_codes) {
    return lent_codes(parameter, name, training);
  }
  Tensor value = to_tensor(parameter, name, false);
  const DType dtype = value.dtype();
  return {std::move(value), dtype};
}

PyObject* set_codes_class(PyObject*, PyObject* type) noexcept {
  return guarded([&] {
    if (!PyType_Check(type)) throw_type_error("the class of codes must be a type");
    Py_INCREF(type);
    g_codes = reinterpret_cast<PyTypeObject*>(type);
    return Ref::share(Py_None);
  });
}

PyObject* touch(PyObject*, PyObject* dict) noexcept {
  return guarded([&] {
    if (!PyDict_Check(dict)) throw_type_error("touch() takes a dict");
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t at = 0;
    if (PyDict_Next(dict, &at, &key, &value) != 0) {
      const Ref name = Ref::share(key), kept = Ref::share(value);
      PyObject* const other = value == Py_None ? Py_False : Py_None;
      check(PyDict_SetItem(dict, name.get(), other));
      check(PyDict_SetItem(dict, name.get(), kept.get()));
    }
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
