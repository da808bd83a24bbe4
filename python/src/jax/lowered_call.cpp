#include "jax/lowered_call.hpp"

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "jax/jax_call.hpp"
#include "jax/jax_ffi.hpp"
#include "ops/op_call.hpp"
#include "py/errors.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {
namespace {

// Arrays that have shapes, but no memory.
struct Arrays {
  std::deque<std::vector<int64_t>> extents;
  std::vector<jax::Array> list;
};

Arrays read_arrays(PyObject* described) {
  Arrays made;
  for (Py_ssize_t i = 0; i < PyList_Size(described); ++i) {
    int dtype = 0;
    PyObject* shape = nullptr;
    if (PyArg_ParseTuple(PyList_GetItem(described, i), "iO!", &dtype, &PyTuple_Type, &shape) == 0)
      throw PythonError();
    std::vector<int64_t>& extents = made.extents.emplace_back();
    for (Py_ssize_t d = 0; d < PyTuple_Size(shape); ++d) {
      extents.push_back(PyLong_AsLongLong(PyTuple_GetItem(shape, d)));
      if (PyErr_Occurred() != nullptr) throw PythonError();
    }
    made.list.push_back({to_c(static_cast<DType>(dtype)), nullptr,
                         static_cast<int32_t>(extents.size()), extents.data()});
  }
  return made;
}

}  // namespace

PyObject* jax_resolve(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    const char *text = nullptr, *where = nullptr;
    PyObject *operands = nullptr, *results = nullptr;
    if (PyArg_ParseTuple(args, "ssO!O!", &text, &where, &PyList_Type, &operands, &PyList_Type,
                         &results) == 0)
      throw PythonError();
    Arrays read = read_arrays(operands), written = read_arrays(results);
    return decision_dict(value_or_throw(without_lock([&]() -> Result<Decision> {
      TE_FL_ASSIGN_OR_RETURN(const std::unique_ptr<jax::OpCall> call, jax::OpCall::parse(text));
      TE_FL_ASSIGN_OR_RETURN(const Device device, parse_device(where));
      return call->resolve(read.list, written.list, device);
    })));
  });
}

PyObject* jax_count(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    const char *op = nullptr, *impl_id = nullptr;
    if (PyArg_ParseTuple(args, "ss", &op, &impl_id) == 0) throw PythonError();
    check(without_lock([&]() -> Status {
      OpManager& manager = OpManager::instance();
      TE_FL_ASSIGN_OR_RETURN(const OpId id, manager.registry().find(op));
      return manager.count(id, impl_id);
    }));
    return Ref::share(Py_None);
  });
}

PyObject* in_jax_call(PyObject*, PyObject*) noexcept {
  return guarded([] { return to_python(jax::in_handler()); });
}

}  // namespace te_fl::python
