#include "ops/op_call.hpp"

#include <algorithm>
#include <map>
#include <span>

#include "ops/arguments.hpp"
#include "ops/communicator.hpp"
#include "ops/function_op.hpp"
#include "ops/manager.hpp"
#include "ops/op_binding.hpp"
#include "ops/policy.hpp"
#include "py/dlpack.hpp"
#include "py/errors.hpp"
#include "py/exchange.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kOpName = "te_fl.op";

const OpBinding& unwrap_binding(PyObject* self) {
  const auto* op = static_cast<const OpBinding*>(PyCapsule_GetPointer(self, kOpName));
  if (op == nullptr) throw PythonError();
  return *op;
}

template <CallForm kForm>
PyObject* run_op(PyObject* self, PyObject* const* args, Py_ssize_t count,
                 PyObject* names) noexcept {
  return guarded([&]() -> Ref {
    const OpBinding& op = unwrap_binding(self);
    Arguments arguments(op, kForm);
    if (kForm != CallForm::kNamed) {
      arguments.set_inputs(args, static_cast<size_t>(count));
    } else if (count != 0) {
      throw_type_error(std::string(op.schema->name) + "() takes keyword arguments only");
    }
    const Py_ssize_t keywords = names != nullptr ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < keywords; ++i) {
      arguments.set(PyTuple_GetItem(names, i), args[count + i]);
    }
    const DeterministicScope deterministic;
    Ref by_name;
    if (arguments.is_python_collective()) {
      by_name = Ref::take(PyDict_New());
      for (Py_ssize_t i = 0; i < keywords; ++i)
        check(PyDict_SetItem(by_name.get(), PyTuple_GetItem(names, i), args[count + i]));
    }
    Ref made = arguments.make_outputs(by_name.get());
    arguments.flatten();
    arguments.run(nullptr, by_name.get());
    return made;
  });
}

template <CallForm kForm>
PyMethodDef method() {
  return {"op", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_op<kForm>)),
          METH_FASTCALL | METH_KEYWORDS, "Runs an op of te-fl."};
}

PyObject* run_function_op(PyObject* self, PyObject* positional, PyObject* keywords) noexcept {
  return guarded([&] {
    const DeterministicScope deterministic;
    return call_function_op(OpManager::instance(), unwrap_binding(self).id, positional, keywords);
  });
}

const PyMethodDef kRunFunction = {
    "op", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_function_op)),
    METH_VARARGS | METH_KEYWORDS, "Runs an op of Python functions."};

// An op's name, signature and docstring for Python. Lives as long as the op's Python callables.
struct MethodOfOp {
  PyMethodDef definition;
  std::string words;
};

MethodOfOp& find_method(const OpBinding& op) {
  static auto* methods = new std::map<const OpBinding*, MethodOfOp>();
  const auto [at, added] = methods->try_emplace(&op);
  if (added) {
    at->second.definition = is_function_op(*op.schema) ? kRunFunction : method<CallForm::kNamed>();
    at->second.definition.ml_name = op.schema->name;
  }
  return at->second;
}

// Parses a Python call (op, dict, manager=None, tuple=()). Calls f(manager, op, arguments, named),
// or g(manager, op, tuple, dict) if the op is a function op.
template <class F, class G>
Ref with_arguments(PyObject* args, F&& f, G&& g) {
  PyObject *name = nullptr, *named = nullptr, *manager = Py_None, *positional = nullptr;
  if (PyArg_ParseTuple(args, "OO!|OO!", &name, &PyDict_Type, &named, &manager, &PyTuple_Type,
                       &positional) == 0)
    throw PythonError();
  const DeterministicScope deterministic;
  const Ref none = Ref::take(PyTuple_New(0));
  if (positional == nullptr) positional = none.get();
  if (const auto id = find_function_op(unwrap_manager(manager), name))
    return g(unwrap_manager(manager), *id, positional, named);
  const OpBinding& op = bind(name);
  if (PyTuple_Size(positional) != 0) {
    throw_type_error(std::string("op '") + op.schema->name +
                     "' is in the catalogue: it takes keyword arguments only, those of te_fl.ops." +
                     op.schema->name);
  }
  Arguments arguments(op);
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(named, &at, &key, &value) != 0;) arguments.set(key, value);
  return f(unwrap_manager(manager), op, arguments, named);
}

template <class T>
std::vector<T> to_numbers(PyObject* list) {
  std::vector<T> numbers;
  const Ref items = Ref::take(PySequence_List(list));
  for (Py_ssize_t i = 0; i < PyList_Size(items.get()); ++i) {
    const long number = PyLong_AsLong(PyList_GetItem(items.get(), i));
    if (PyErr_Occurred() != nullptr) throw PythonError();
    numbers.push_back(static_cast<T>(number));
  }
  return numbers;
}

// The default of a scalar argument; None for a required argument.
Ref read_default(const OpBinding& op, const te_fl_arg_desc& arg) {
  const auto read = [&](auto value) {
    std::memcpy(&value, op.defaults.data() + arg.offset, sizeof value);
    return value;
  };
  switch (arg.type) {
    case TE_FL_ARG_BOOL:
      return to_python(read(int32_t{}) != 0);
    case TE_FL_ARG_I32:
    case TE_FL_ARG_ENUM:
      return to_python(int64_t{read(int32_t{})});
    case TE_FL_ARG_I64:
      return to_python(read(int64_t{}));
    case TE_FL_ARG_F32:
      return to_python(double{read(float{})});
    case TE_FL_ARG_F64:
      return to_python(read(double{}));
    default:
      return Ref::share(Py_None);
  }
}

}  // namespace

Ref decision_dict(const Decision& decision) {
  Ref dict = Ref::take(PyDict_New());
  put(dict, "op", to_python(decision.op));
  put(dict, "impl_id", to_python(decision.impl_id));
  put(dict, "policy", to_python(decision.policy));
  put(dict, "runs", to_python(decision.runs));
  put(dict, "silent", to_python(decision.silent));
  put(dict, "candidates", make_list(decision.candidates, [](const Candidate& c) {
        Ref one = Ref::take(PyDict_New());
        put(one, "impl_id", to_python(c.impl_id));
        put(one, "kind", to_python(to_string(c.kind)));
        put(one, "vendor", to_python(c.vendor));
        put(one, "owner", to_python(c.owner));
        put(one, "priority", to_python(int64_t{c.priority}));
        put(one, "accepted", to_python(c.accepted));
        put(one, "chosen", to_python(c.chosen));
        put(one, "staged", to_python(c.staged));
        put(one, "reason", to_python(c.reason));
        return one;
      }));
  return dict;
}

void set_argument_classes(PyObject* quantized, PyObject* saved, PyObject* rows) {
  Py_INCREF(quantized);
  Py_INCREF(saved);
  Py_INCREF(rows);
  g_quantized = quantized;
  g_saved = saved;
  g_rows = rows;
}

PyObject* make_op(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject* name = nullptr;
    const char* words = nullptr;
    if (PyArg_ParseTuple(args, "Os", &name, &words) == 0) throw PythonError();
    const OpBinding& op = bind(name);
    MethodOfOp& method = find_method(op);
    if (method.words.empty()) method.words = words;
    method.definition.ml_doc = method.words.c_str();
    const Ref self = Ref::take(PyCapsule_New(const_cast<OpBinding*>(&op), kOpName, nullptr));
    return Ref::take(PyCFunction_NewEx(&method.definition, self.get(), nullptr));
  });
}

template <CallForm kForm>
PyObject* make_op_of_form(PyObject* name) noexcept {
  return guarded([&] {
    const OpBinding& op = bind(name);
    static auto* methods = new std::map<const OpBinding*, PyMethodDef>();
    const auto [at, added] = methods->try_emplace(&op, method<kForm>());
    if (added) at->second.ml_name = op.schema->name;
    const Ref self = Ref::take(PyCapsule_New(const_cast<OpBinding*>(&op), kOpName, nullptr));
    return Ref::take(PyCFunction_NewEx(&at->second, self.get(), nullptr));
  });
}

PyObject* make_positional_op(PyObject*, PyObject* name) noexcept {
  return make_op_of_form<CallForm::kPositional>(name);
}

PyObject* make_matrix_op(PyObject*, PyObject* name) noexcept {
  return make_op_of_form<CallForm::kMatrices>(name);
}

PyObject* quantized_class() noexcept { return g_quantized; }

PyObject* call_by(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    return with_arguments(
        args,
        [](OpManager& manager, const OpBinding&, const Arguments& a, PyObject* named) {
          a.run(&manager, named);
          return Ref::share(Py_None);
        },
        call_function_op);
  });
}

PyObject* resolve(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    return with_arguments(
        args,
        [](OpManager& manager, const OpBinding& op, const Arguments& a, PyObject*) {
          const CallOptions options = a.options();
          return decision_dict(value_or_throw(
              without_lock([&] { return manager.resolve(op.id, a.raw(), options); })));
        },
        [](OpManager& manager, OpId op, PyObject* positional, PyObject* keywords) {
          return decision_dict(
              value_or_throw(resolve_function_op(manager, op, positional, keywords)));
        });
  });
}

PyObject* saved_bytes(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    return with_arguments(
        args,
        [](OpManager& manager, const OpBinding& op, const Arguments& a, PyObject*) {
          const CallOptions options = a.options();
          return to_python(uint64_t{value_or_throw(
              without_lock([&] { return manager.saved_bytes(op.id, a.raw(), options); }))});
        },
        [](OpManager&, OpId, PyObject*, PyObject*) { return to_python(uint64_t{0}); });
  });
}

PyObject* explain(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *name = nullptr, *device = nullptr, *dtypes = nullptr, *scalings = nullptr,
             *capsule = Py_None;
    if (PyArg_ParseTuple(args, "OOOO|O", &name, &device, &dtypes, &scalings, &capsule) == 0)
      throw PythonError();
    OpManager& manager = unwrap_manager(capsule);
    const DeterministicScope deterministic;
    const std::string op(to_text(name, "the op's name"));
    const OpId id = value_or_throw(without_lock([&] { return manager.registry().find(op); }));
    CallProfile profile;
    const std::string where(to_text(device, "device"));
    profile.device = value_or_throw(without_lock([&] { return parse_device(where); }));
    profile.dtypes = to_numbers<DType>(dtypes);
    profile.scalings = to_numbers<Scaling>(scalings);
    return decision_dict(
        value_or_throw(without_lock([&] { return manager.explain(id, profile); })));
  });
}

PyObject* output(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *name = nullptr, *tensors = nullptr, *scalars = nullptr, *wanted = nullptr;
    if (PyArg_ParseTuple(args, "OO!O!O", &name, &PyDict_Type, &tensors, &PyDict_Type, &scalars,
                         &wanted) == 0)
      throw PythonError();
    const OpBinding& op = bind(name);
    const int index = op.find(wanted);
    if (index < 0) throw_invalid(std::string(op.schema->name) + " has no such output");
    Arguments arguments(op);
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(tensors, &at, &key, &value) != 0;)
      arguments.set_form(key, value);
    for (Py_ssize_t at = 0; PyDict_Next(scalars, &at, &key, &value) != 0;)
      arguments.set(key, value);
    const OutputForm form = op.rules->form(arguments.raw(), static_cast<uint32_t>(index));
    Ref extents = Ref::share(Py_None);
    if (form.rank >= 0) {
      extents = make_list(std::span(form.extents.data(), static_cast<size_t>(form.rank)),
                          [&](const OutputExtent& e) {
                            PyObject* const of =
                                e.arg < 0 ? Py_None : op.args[static_cast<size_t>(e.arg)].name;
                            return Ref::take(Py_BuildValue(
                                "(OiiLLLL)", of, e.first, e.count, static_cast<long long>(e.less),
                                static_cast<long long>(e.divisor), static_cast<long long>(e.factor),
                                static_cast<long long>(e.more)));
                          });
    }
    const Ref dtype =
        form.dtype ? to_python(static_cast<int64_t>(*form.dtype)) : Ref::share(Py_None);
    return Ref::take(PyTuple_Pack(2, extents.get(), dtype.get()));
  });
}

PyObject* schema(PyObject*, PyObject* name) noexcept {
  return guarded([&] {
    const OpBinding& op = bind(name);
    const auto text = [](const char* t) { return to_python(std::string_view(t ? t : "")); };
    Ref dict = Ref::take(PyDict_New());
    put(dict, "name", text(op.schema->name));
    put(dict, "summary", text(op.schema->summary));
    put(dict, "formula", text(op.schema->formula));
    put(dict, "rules", text(op.schema->rules));
    put(dict, "gradient", text(op.schema->gradient));
    put(dict, "random", to_python((op.schema->flags & TE_FL_SCHEMA_USES_RNG) != 0));
    const std::vector<BoundArg> none;
    put(dict, "args",
        make_list(is_function_op(*op.schema) ? none : op.args, [&](const BoundArg& arg) {
          Ref one = Ref::take(PyDict_New());
          put(one, "name", text(arg.desc->name));
          put(one, "type", to_python(int64_t{arg.desc->type}));
          put(one, "role", to_python(int64_t{arg.desc->role}));
          put(one, "shape", text(arg.desc->shape));
          put(one, "optional", to_python((arg.desc->flags & TE_FL_ARG_OPTIONAL) != 0));
          const auto index = static_cast<uint32_t>(&arg - op.args.data());
          put(one, "allocated", to_python(std::ranges::count(op.outputs, index) != 0));
          put(one, "default", read_default(op, *arg.desc));
          put(one, "later", to_python((arg.desc->flags & TE_FL_ARG_LATER) != 0));
          put(one, "same_as", text(arg.desc->same_as));
          put(one, "inout_if", text(arg.desc->inout_if));
          put(one, "dtypes", to_python(uint64_t{arg.desc->dtypes}));
          put(one, "enum", make_list(arg.enum_names, [](const std::string& n) {
                return to_python(std::string_view(n));
              }));
          return one;
        }));
    return dict;
  });
}

}  // namespace te_fl::python
