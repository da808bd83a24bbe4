// The autograd node of te_fl.pytorch's layers in C++. It computes the same as LayerFunction in
// call.py, without the interpreter's overhead in the forward and in autograd's threads. `python -m
// te_fl build-node` (torch_node.py) compiles it against the installed version of PyTorch; without
// it LayerFunction is used.
#include <ATen/SavedTensorHooks.h>
#include <Python.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plain_forward.hpp"

namespace {

using namespace te_fl::node;
using torch::autograd::SavedVariable;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// The arguments of bind(). Never freed.
PyObject* layer_forward = nullptr;
PyObject* layer_backward = nullptr;
PyObject* python_run = nullptr;            // call.python_run
PyObject* no_second_derivative = nullptr;  // the error message, once.MESSAGE

using Tensors = std::span<PyObject* const>;

class InterpreterLock {
 public:
  InterpreterLock() : state_(PyGILState_Ensure()) {}
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;
  ~InterpreterLock() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

Ref wrapped(const Variable& v) { return checked(THPVariable_Wrap(v)); }

// See call.hooks_may_copy().
bool hooks_may_copy() {
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  if (!hooks.has_value()) return false;
  PyObject* const module =
      PyObject_GetAttrString(hooks->first.ptr(getPyInterpreter()), "__module__");
  const Ref owner(module);
  if (module == nullptr) PyErr_Clear();
  return module == nullptr || !PyUnicode_Check(module) ||
         PyUnicode_CompareWithASCIIString(module, "torch.utils.checkpoint") != 0;
}

// Creates a node with the smart pointer that PyTorch uses for nodes: std::shared_ptr, in newer
// versions c10::intrusive_ptr.
template <class T, class... Args>
auto make_node(Args&&... args) {
  using Pointer = decltype(std::declval<T&>().getptr());
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](auto* n) { deleteNode(n); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

// The autograd node of one forward. Saves what LayerFunction.forward() saves, in the same order:
// the token, the tensors that autograd tracks (inputs, extras, parameters), the tensors of
// `attention`, and the output if the backward reads it.
class LayerNode final : public torch::autograd::Node {
 public:
  LayerNode(torch::autograd::edge_list&& edges, PyObject* call)
      : Node(std::move(edges)), call_(call) {
    Py_INCREF(call);
  }
  ~LayerNode() override {
    if (interpreter_ends()) return;  // leaks the object; the process is ending
    const InterpreterLock lock;
    Py_DECREF(call_);
  }

  std::string name() const override { return "LayerFunctionBackward"; }
  void release_variables() override {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (SavedVariable& s : saved_) s.reset_data();
    token_.reset();
  }
  // Saves the tensors and the output for the backward. Called after this node has become the
  // output's grad_fn.
  void save(const Variable& token, Tensors tensors, const Variable& output) {
    saved_.reserve(tensors.size() + 2);
    saved_.emplace_back(token, false);
    if (hooks_may_copy()) token_ = token;
    for (PyObject* const tensor : tensors) saved_.emplace_back(THPVariable_Unpack(tensor), false);
    PyObject* attention = field(call_, kAttention);
    if (attention == Py_None) return;
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(attention, &at, &key, &value) != 0;) {
      // Inference tensors cannot be saved, and cannot be written outside of inference mode.
      if (THPVariable_Check(value) && !THPVariable_Unpack(value).is_inference()) {
        saved_.emplace_back(THPVariable_Unpack(value), false);
      }
    }
    output_saved_ = PyLong_AsSsize_t(field(call_, kInputs)) == 3;
    if (output_saved_) saved_.emplace_back(output, true);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "te_fl.pytorch's autograd node in C++ is not for compiled autograd, which goes through "
        "LayerFunction: set TE_FL_TORCH_NODE=0 before te_fl.pytorch is imported");
  }

  variable_list apply(variable_list&& gradients) override {
    const InterpreterLock interpreter;
    const std::unique_lock<std::recursive_mutex> lock = locked();
    Variable gradient = std::move(gradients[0]);
    if (!gradient.defined()) gradient = input_metadata(0).zeros_like();
    std::vector<Ref> saved;
    saved.reserve(saved_.size());
    for (size_t i = 0; i < saved_.size(); ++i) {
      const bool own = output_saved_ && i + 1 == saved_.size();
      Variable unpacked = saved_[i].unpack(own ? getptr() : decltype(getptr())());
      saved.push_back(wrapped(i == 0 && token_.defined() ? token_ : unpacked));
    }
    return at::GradMode::is_enabled() ? guarded(saved, gradient) : compute(saved, gradient);
  }

 private:
  // Locks mutex_, and releases the interpreter's lock while waiting for another thread's backward
  // of this node. The mutex is recursive because a saved-tensor hook may run a backward.
  std::unique_lock<std::recursive_mutex> locked() {
    std::unique_lock<std::recursive_mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) return lock;
    PyThreadState* const state = PyEval_SaveThread();
    lock.lock();
    PyEval_RestoreThread(state);
    return lock;
  }

  variable_list compute(const std::vector<Ref>& saved, const Variable& gradient) {
    const auto edges = static_cast<size_t>(num_outputs());
    const auto followed = static_cast<size_t>(PyLong_AsSsize_t(field(call_, kInputs)) +
                                              PyLong_AsSsize_t(field(call_, kExtras)));
    // PyTorch counts an empty expanded tensor as contiguous although its strides are 0, so an empty
    // gradient is replaced by a new tensor.
    const Ref dense =
        wrapped(gradient.numel() != 0 ? gradient.resolve_neg().contiguous()
                                      : at::empty(gradient.sizes(), gradient.options()));
    using Argument = BackwardArgument;
    c10::SmallVector<PyObject*, 24> args(Argument::kParameters, Py_None);
    args[Argument::kToken] = saved[0].get();
    args[Argument::kGradient] = dense.get();
    args[Argument::kKeep] =
        torch::autograd::get_current_graph_task_keep_graph() ? Py_True : Py_False;
    args[Argument::kInputGrad] = Py_False;
    for (size_t i = 0; i < followed; ++i) {
      if (next_edge(i).is_valid()) args[Argument::kInputGrad] = Py_True;
    }
    for (size_t i = followed; i < edges; ++i) args.push_back(saved[1 + i].get());
    const Ref all = checked(PyObject_Vectorcall(layer_backward, args.data(), args.size(), nullptr));
    variable_list results(edges);
    for (size_t i = 0; i < edges; ++i) {
      PyObject* const item = PyTuple_GET_ITEM(all.get(), static_cast<Py_ssize_t>(i));
      if (item != Py_None && next_edge(i).is_valid()) results[i] = THPVariable_Unpack(item);
    }
    return results;
  }

  // The backward under create_graph=True; see once.once_differentiable().
  variable_list guarded(const std::vector<Ref>& saved, const Variable& gradient) {
    variable_list results, refused;
    {
      const at::AutoGradMode no_gradients(false);
      results = compute(saved, gradient);
    }
    for (const Variable& v : results) {
      if (v.defined()) refused.push_back(v.detach().requires_grad_());
    }
    if (gradient.requires_grad()) refused.push_back(gradient);
    for (const Ref& tensor : saved) {
      const Variable& v = THPVariable_Unpack(tensor.get());
      if (v.requires_grad()) refused.push_back(v);
    }
    const auto count = static_cast<int64_t>(refused.size());
    refused =
        make_node<torch::autograd::DelayedError>(PyBytes_AsString(no_second_derivative), count)
            ->apply(std::move(refused));
    size_t next = 0;
    for (Variable& v : results) {
      if (v.defined()) v = refused[next++];
    }
    return results;
  }

  PyObject* call_;
  std::vector<SavedVariable> saved_;
  // The token; defined only if saved-tensor hooks may replace the saved token by a copy, which does
  // not own the forward's record.
  Variable token_;
  bool output_saved_ = false;
  std::recursive_mutex mutex_;  // hides the base class's mutex_
};

// True if a PyTorch transform is active (torch.func, torch.jit.trace) or a tensor has a
// forward-mode tangent. LayerFunction handles these cases or raises an error for them.
bool transformed(Tensors tensors) {
  return follows_ops() || std::ranges::any_of(tensors, [](PyObject* t) {
           return THPVariable_Unpack(t)._fw_grad(0).defined();
         });
}

// Runs the layer's forward. Returns (output, token).
Ref forward(PyObject* call, bool training, Tensors tensors) {
  const at::AutoGradMode no_gradients(false);
  const at::AutoFwGradMode no_tangents(false);
  c10::SmallVector<PyObject*, 24> args(ForwardArgument::kTensors);
  args[ForwardArgument::kCall] = call;
  args[ForwardArgument::kTraining] = training ? Py_True : Py_False;
  args.append(tensors.begin(), tensors.end());
  return checked(PyObject_Vectorcall(layer_forward, args.data(), args.size(), nullptr));
}

// run(call, *tensors) -> the layer's output; see call.python_run().
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(layer_forward != nullptr && count >= 2 && PyTuple_Check(args[0]) &&
                       PyTuple_GET_SIZE(args[0]) == kFields,
                   "run() takes a LayerCall and tensors, after bind()");
  PyObject* const call = args[0];
  const Tensors tensors(args + 1, args + count);
  bool follows = false;
  for (PyObject* const t : tensors) {
    // Names the type by a C string, not a stream: some compilers link their own libstdc++ streams
    // into this library, which are incompatible with those of PyTorch's libraries.
    TORCH_CHECK_TYPE(THPVariable_Check(t),
                     std::string("run(): a ") + Py_TYPE(t)->tp_name + " is no tensor");
    follows = follows || THPVariable_Unpack(t).requires_grad();
  }
  follows = follows && at::GradMode::is_enabled();
  const int accumulates = follows ? PyObject_IsTrue(field(call, kAccumulates)) : 0;
  if (accumulates < 0) return nullptr;
  if (accumulates != 0 || transformed(tensors)) {
    return PyObject_Vectorcall(python_run, args, static_cast<size_t>(count), nullptr);
  }
  torch::autograd::edge_list edges;
  if (follows) {
    edges.reserve(tensors.size());
    for (PyObject* const t : tensors) {
      const Variable& v = THPVariable_Unpack(t);
      edges.push_back(v.requires_grad() ? torch::autograd::impl::gradient_edge(v)
                                        : torch::autograd::Edge());
    }
  }
  const Ref both = forward(call, follows, tensors);
  PyObject* const output = PyTuple_GET_ITEM(both.get(), 0);
  if (follows) {
    const auto node = make_node<LayerNode>(std::move(edges), call);
    const Variable y = THPVariable_Unpack(output);
    torch::autograd::set_history(y, node);
    node->save(THPVariable_Unpack(PyTuple_GET_ITEM(both.get(), 1)), tensors, y);
  }
  Py_INCREF(output);
  return output;
  END_HANDLE_TH_ERRORS
}

// plain(module, key, x, first, activation) -> the output that base._run() would compute. module:
// the module's __dict__; key: the key in its _layers. None if plain_forward() cannot handle the
// call.
PyObject* plain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      fp8_thread != nullptr && count == 5 && PyDict_Check(args[0]),
      "plain() takes a dict, a key, a tensor, is_first_microbatch and a dtype, after bind()");
  const long activation = PyLong_AsLong(args[4]);
  if (activation == -1 && PyErr_Occurred() != nullptr) return nullptr;
  const auto found = plain_forward(args[0], args[1], args[2], args[3], activation);
  if (!found.has_value()) Py_RETURN_NONE;
  c10::SmallVector<PyObject*, 8> all = {found->call.get(), args[2]};
  for (const Ref& p : found->parameters) all.push_back(p.get());
  return run(nullptr, all.data(), static_cast<Py_ssize_t>(all.size()));
  END_HANDLE_TH_ERRORS
}

// empty(like, shape, dtype) -> a new tensor on like's device; see te_fl.torch_tensors.empty().
PyObject* empty(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  using enum at::ScalarType;
  // In the order of te_fl.tensors.DTYPES. No result has the packed dtype of 4-bit codes.
  static constexpr at::ScalarType dtypes[] = {
      Double,    Float,          Half,   BFloat16, Float8_e4m3fn, Float8_e5m2,
      Undefined, Float8_e8m0fnu, Char,   Short,    Int,           Long,
      Byte,      UInt16,         UInt32, UInt64,   Bool};
  TORCH_CHECK_TYPE(count == 3 && THPVariable_Check(args[0]) && PyTuple_Check(args[1]),
                   "empty() takes a tensor, a tuple and the number of a dtype");
  c10::SmallVector<int64_t, 5> sizes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(args[1], i)));
  }
  const size_t code = PyLong_AsSize_t(args[2]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  TORCH_CHECK_VALUE(code < std::size(dtypes), "empty(): there is no dtype " + std::to_string(code));
  const auto options = at::TensorOptions(THPVariable_Unpack(args[0]).device()).dtype(dtypes[code]);
  return THPVariable_Wrap(at::empty(sizes, options));
  END_HANDLE_TH_ERRORS
}

// bind(layer_forward, layer_backward, run, message, Parameter, fp8, checkpoints): sets the objects
// that the other functions and LayerNode use.
PyObject* bind(PyObject*, PyObject* args) {
  PyObject** const places[] = {&layer_forward,        &layer_backward, &python_run,
                               &no_second_derivative, &parameter_type, &fp8_thread,
                               &checkpoints_thread};
  PyObject* objects[std::size(places)] = {};
  if (PyArg_ParseTuple(args, "OOOOOOO", &objects[0], &objects[1], &objects[2], &objects[3],
                       &objects[4], &objects[5], &objects[6]) == 0) {
    return nullptr;
  }
  for (size_t i = 0; i < std::size(places); ++i) {
    Py_INCREF(objects[i]);
    Py_XDECREF(std::exchange(*places[i], objects[i]));
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL,
     "run(call, *tensors) -> output"},
    {"empty", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(empty)), METH_FASTCALL,
     "empty(like, shape, dtype) -> tensor"},
    {"plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(plain)), METH_FASTCALL,
     "plain(module, key, x, first, activation) -> output, or None"},
    {"bind", bind, METH_VARARGS,
     "bind(layer_forward, layer_backward, run, message, Parameter, fp8, checkpoints)"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_node",
                          "te_fl.pytorch's node of autograd.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__node() { return PyModule_Create(&definition); }
