// The fast path for a module whose forward is one call of its only layer. Computes the same as
// NativeLayer.compute(), without running Python code. Used by plain() in node.cpp.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <Python.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/api.h>

#include <optional>
#include <utility>
#include <vector>

#include "node_objects.hpp"

namespace te_fl::node {

// Arguments of bind() in node.cpp. Never freed.
inline PyObject* parameter_type = nullptr;  // torch.nn.Parameter
// The attribute `scopes` of each is the calling thread's list of scopes.
inline PyObject* fp8_thread = nullptr;          // quantization._state
inline PyObject* checkpoints_thread = nullptr;  // call.reentrant_runs

// Interned attribute names.
struct Names {
  PyObject* layers = PyUnicode_InternFromString("_layers");
  PyObject* last = PyUnicode_InternFromString("last");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* read_names = PyUnicode_InternFromString("_read_names");
  PyObject* recipe = PyUnicode_InternFromString("_recipe");
  PyObject* in_fp8 = PyUnicode_InternFromString("_in_fp8");
  PyObject* scopes = PyUnicode_InternFromString("scopes");
  PyObject* scope_recipe = PyUnicode_InternFromString("recipe");
  PyObject* enabled = PyUnicode_InternFromString("enabled");
  PyObject* reuse_weights = PyUnicode_InternFromString("reuse_weights");
  PyObject* by_module = PyUnicode_InternFromString("by_module");
  PyObject* training = PyUnicode_InternFromString("training");
};
inline const Names& names() {
  static const Names all;
  return all;
}

inline Ref attribute(PyObject* object, PyObject* name) {
  return checked(PyObject_GetAttr(object, name));
}
// The value of a dict's key, borrowed; null if the key is absent.
inline PyObject* item(PyObject* dict, PyObject* key) {
  PyObject* const found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) checked(nullptr);
  return found;
}

inline bool has_scopes(PyObject* thread) {
  return PyList_Size(attribute(thread, names().scopes).get()) != 0;
}

// The index in te_fl.tensors.DTYPES of a dtype that layers compute in; -2 for other dtypes.
inline long dtype_code(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return 1;
    case at::kHalf:
      return 2;
    case at::kBFloat16:
      return 3;
    default:
      return -2;
  }
}

// True if PyTorch is tracing or transforming ops: in torch.func's transforms, torch.jit.trace and
// make_fx.
inline bool follows_ops() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  return keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         keys.has(c10::DispatchKey::Tracer) ||
         (keys.has(c10::DispatchKey::Python) &&
          Modes::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value());
}

// True if a layer can use the tensor unchanged, and no PyTorch transform or profiler is active.
inline bool is_plain(PyObject* x) {
  if (!THPVariable_CheckExact(x) && reinterpret_cast<PyObject*>(Py_TYPE(x)) != parameter_type) {
    return false;
  }
  if (torch::profiler::impl::profilerEnabled() || follows_ops()) return false;
  const at::Tensor& v = THPVariable_Unpack(x);
  return (v.is_cpu() || v.is_cuda()) && v.layout() == at::kStrided &&
         dtype_code(v.scalar_type()) > 0 && v.is_contiguous() && !v.is_neg();
}

// The code of the output's dtype, as in base._run(): autocast's dtype; `activation` outside of
// torch.autocast.
inline long activation_code(const at::Tensor& x, long activation) {
  const auto kind = x.device().type();
  if (!at::autocast::is_autocast_enabled(kind)) return activation;
  return dtype_code(at::autocast::get_autocast_dtype(kind));
}

// True if this forward may be one of a checkpoint's two runs: inside of a backward, or in training
// without gradients. torch_checkpoint.segment() then decides.
inline bool may_be_of_checkpoint(PyObject* module) {
  if (torch::autograd::get_current_graph_task_id() >= 0) return true;
  return !at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         item(module, names().training) == Py_True;
}

// The state of the innermost autocast that affects one forward.
struct Fp8 {
  // True if no flag reuses weights, no FP8 forward will be recomputed outside of the autocast, and
  // the module has no quantizers of its own.
  bool plain = false;
  std::optional<Ref> scope;
};
inline Fp8 read_fp8(PyObject* module, PyObject* first) {
  const Names& name = names();
  const Ref scopes = attribute(fp8_thread, name.scopes);
  const Py_ssize_t count = PyList_Size(scopes.get());
  Fp8 found;
  if (count == 0) {
    found.plain =
        item(module, name.in_fp8) == Py_False && torch::autograd::get_current_graph_task_id() < 0;
    return found;
  }
  if (may_be_of_checkpoint(module)) return found;
  PyObject* const scope = PyList_GET_ITEM(scopes.get(), count - 1);
  Py_INCREF(scope);
  found.scope.emplace(scope);
  if (attribute(scope, name.by_module).get() == Py_True) return found;
  if (first == Py_None && attribute(scope, name.reuse_weights).get() != Py_None) return found;
  found.plain = true;
  return found;
}

// The module's parameters; empty if one of them is not exactly of type Parameter.
inline std::vector<Ref> read_parameters(PyObject* module) {
  std::vector<Ref> found;
  PyObject* const all = item(module, names().parameters);
  PyObject* const own = item(module, names().read_names);
  if (all == nullptr || own == nullptr || !PyDict_Check(all) || !PyTuple_Check(own)) return found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); ++i) {
    PyObject* const p = item(all, PyTuple_GET_ITEM(own, i));
    if (p == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(p)) != parameter_type) return {};
    Py_INCREF(p);
    found.emplace_back(p);
  }
  return found;
}

// True if the LayerCall of the layer's last forward (`last` of a NativeLayer) is valid for this
// forward.
inline bool fits(PyObject* call, PyObject* first, long activation) {
  return PyTuple_Check(call) && PyTuple_GET_SIZE(call) == kFields && field(call, kFirst) == first &&
         field(call, kAccumulates) == Py_False && field(call, kDelays) == Py_False &&
         PyLong_AsLong(field(call, kActivation)) == activation;
}

// The arguments that run() in node.cpp takes, for one forward of a module.
struct Plain {
  Ref call;
  std::vector<Ref> parameters;
};

// Returns the arguments of run() for a module, given its __dict__, its key in _layers, and an input
// x; none if the general path NativeLayer.compute() is needed. Records the recipe, as
// quantization.notice() does.
inline std::optional<Plain> plain_forward(PyObject* module, PyObject* key, PyObject* x,
                                          PyObject* first, long activation) {
  PyObject* const layers = item(module, names().layers);
  PyObject* const layer = layers == nullptr ? nullptr : item(layers, key);
  if (layer == nullptr || !is_plain(x)) return std::nullopt;
  Ref call = attribute(layer, names().last);
  const Fp8 fp8 = read_fp8(module, first);
  activation = activation_code(THPVariable_Unpack(x), activation);
  if (!fp8.plain || !fits(call.get(), first, activation)) return std::nullopt;
  if (has_scopes(checkpoints_thread)) return std::nullopt;
  if (at::SavedTensorDefaultHooks::get_hooks().has_value()) return std::nullopt;
  std::vector<Ref> parameters = read_parameters(module);
  if (parameters.empty()) return std::nullopt;
  if (fp8.scope.has_value()) {
    const Ref recipe = attribute(fp8.scope->get(), names().scope_recipe);
    const Ref enabled = attribute(fp8.scope->get(), names().enabled);
    PyObject* const before = item(module, names().recipe);
    if (before != nullptr && before != recipe.get() && item(module, names().in_fp8) == Py_True) {
      const int same = PyObject_RichCompareBool(before, recipe.get(), Py_EQ);
      if (same < 0) checked(nullptr);
      if (same == 0) return std::nullopt;
    }
    if (PyDict_SetItem(module, names().recipe, recipe.get()) != 0 ||
        PyDict_SetItem(module, names().in_fp8, enabled.get()) != 0) {
      checked(nullptr);
    }
  }
  return Plain{std::move(call), std::move(parameters)};
}

}  // namespace te_fl::node
