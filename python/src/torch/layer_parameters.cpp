#include "torch/layer_parameters.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "py/errors.hpp"
#include "torch/arguments.hpp"
#include "torch/layer.hpp"

namespace te_fl::python {

namespace {

// PyTorch's version counter of the tensor; -1 for a tensor without one, such as an inference
// tensor.
long version_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_version");
  PyObject* version = PyObject_GetAttr(tensor, name);
  if (version == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw PythonError();
    PyErr_Clear();
    return -1;
  }
  const Ref owner = Ref::take(version);
  const long number = PyLong_AsLong(version);
  if (number == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return number;
}

PyObject* g_weight_caches = nullptr;  // the argument of set_weight_caches(); never freed

Ref attribute(PyObject* object, const char* name) {
  return Ref::take(PyObject_GetAttrString(object, name));
}

// True if the object is exactly a torch.nn.Parameter, so it is the same object in each call. A
// parametrisation computes a new tensor in each call, possibly at the address of the last one.
bool lasting(PyObject* parameter) {
  static PyObject* const type = [] {
    const Ref module = Ref::take(PyImport_ImportModule("torch.nn"));
    return attribute(module.get(), "Parameter").release();
  }();
  return reinterpret_cast<PyObject*>(Py_TYPE(parameter)) == type;
}

}  // namespace

long long caching_mode(std::span<PyObject* const> parameters) {
  if (g_weight_caches == nullptr) return kUncached;
  static PyObject* const name = PyUnicode_InternFromString("scopes");
  const Ref scopes = Ref::take(PyObject_GetAttr(g_weight_caches, name));
  if (PyList_Size(scopes.get()) <= 0) return kUncached;
  if (!std::ranges::all_of(parameters, lasting)) return kUncached;
  // The number is the handle of the scope's first entry (py/scope.hpp).
  const Ref entered = attribute(PyList_GetItem(scopes.get(), 0), "_entered");
  PyObject* const entry = PyList_GetItem(entered.get(), 0);
  PyObject* const number = entry == nullptr ? nullptr : PyTuple_GetItem(entry, 0);
  if (number == nullptr) throw PythonError();
  return to_integer(number);
}

PyObject* set_weight_caches(PyObject*, PyObject* thread) noexcept {
  return guarded([&] {
    Py_INCREF(thread);
    Py_XDECREF(std::exchange(g_weight_caches, thread));
    return Ref::share(Py_None);
  });
}

std::vector<LentParameter> lend_parameters(const Layer& layer, std::span<PyObject* const> objects,
                                           bool training) {
  if (objects.size() != layer.parameters.size()) {
    throw_type_error("the layer has " + std::to_string(layer.parameters.size()) + " parameters; " +
                     std::to_string(objects.size()) + " were given");
  }
  std::vector<LentParameter> lent;
  lent.reserve(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    lent.push_back(lent_parameter(objects[i], layer.parameters[i].first.c_str(), training));
  }
  return lent;
}

std::vector<bool> find_trained(std::span<PyObject* const> parameters) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  std::vector<bool> trained(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    trained[i] = Ref::take(PyObject_GetAttr(parameters[i], name)).get() == Py_True;
  }
  return trained;
}

Contents number_contents(Layer& layer, std::span<PyObject* const> objects,
                         const std::vector<LentParameter>& lent, long long mode, bool reused) {
  // PyTorch's version counter misses some writes to parameters (through `data`, NumPy views and
  // FSDP2's all-gather), and a new parameter may reuse an old address. So contents count as
  // unchanged only if the caller says so, by is_first_microbatch or by a scope.
  Contents contents{std::vector<uint64_t>(objects.size()), std::vector<long>(objects.size())};
  // In a recomputation, contents_in_segment() replaces these versions by those of the first run,
  // so cached weights stay valid.
  if (repeats_segment()) {
    for (size_t i = 0; i < objects.size(); ++i) contents.versions[i] = version_of(objects[i]);
    return contents;
  }
  const bool caching = mode > kUncached;
  const bool changed = caching ? layer.caching != mode : !reused;
  if (caching) layer.caching = mode;
  for (size_t i = 0; i < objects.size(); ++i) {
    const long now = version_of(objects[i]);
    Seen& seen = layer.seen[i];
    const void* data = lent[i].value.raw_data();
    const bool moved = caching && data != seen.data;
    const bool same = seen.object == objects[i] && seen.version == now && !moved;
    const bool known = !changed && same && seen.life.is(objects[i]);
    if (!known) seen.number = ++layer.numbers;
    if (!same || (!changed && !known)) seen.life.point_at(objects[i]);
    seen.object = objects[i], seen.version = now, seen.data = data;
    contents.numbers[i] = seen.number;
    contents.versions[i] = now;
  }
  return contents;
}

Status lend(Runner& runner, std::vector<LentParameter>& lent, const std::vector<uint64_t>& numbers,
            const std::vector<bool>* trained) {
  const auto& parameters = runner.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    nn::Parameter& p = *parameters[i].parameter;
    if (Status status = p.borrow(std::move(lent[i].value), numbers[i]); !status.ok()) {
      return status.wrap(parameters[i].name);
    }
    if (trained != nullptr && p.requires_grad != (*trained)[i]) {
      p.set_requires_grad((*trained)[i]);
    }
  }
  return {};
}

std::vector<DType> dtypes_of(const std::vector<LentParameter>& parameters) {
  std::vector<DType> dtypes;
  for (const LentParameter& p : parameters) dtypes.push_back(p.dtype);
  return dtypes;
}

}  // namespace te_fl::python
