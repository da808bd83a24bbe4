#include "plugins/implementation.hpp"

#include <utility>

#include "ops/function_op.hpp"
#include "py/errors.hpp"
#include "py/interpreter.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::python {
namespace {

PyObject* g_describe_error = nullptr;  // the helpers that set_helpers() took; never freed
PyObject* g_on_stream = nullptr;

te_fl_status find_code(std::string_view name) {
  for (int32_t code = TE_FL_INVALID_ARGUMENT; code <= TE_FL_COMM_FAILED; ++code) {
    if (to_string(static_cast<StatusCode>(code)) == name) return code;
  }
  return TE_FL_INTERNAL;
}

// Converts the Python exception that is set to a status, and keeps the exception as the cause of
// the error that the caller gets.
te_fl_status status_of_exception(const te_fl_error_sink* sink) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value != nullptr && trace != nullptr) PyException_SetTraceback(value, trace);
  const Ref exception = Ref::take(value);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  PyObject* describe_error =
      PyObject_CallFunctionObjArgs(g_describe_error, exception.get(), nullptr);
  if (describe_error == nullptr) {
    PyErr_Clear();
    backend::report(sink, "an exception in Python that cannot be put into words");
    return TE_FL_INTERNAL;
  }
  const Ref owner = Ref::take(describe_error);
  const char *name = nullptr, *text = nullptr;
  if (PyArg_ParseTuple(describe_error, "ss", &name, &text) == 0) {
    PyErr_Clear();
    return TE_FL_INTERNAL;
  }
  backend::report(sink, text);
  note_cause(exception.get(), text);
  return find_code(name);
}

// Runs f, which returns a status, with the interpreter's lock held.
template <class F>
te_fl_status entered(const te_fl_error_sink* sink, F&& f) noexcept {
  const InterpreterLock lock;
  if (!lock.held()) {
    backend::report(sink, "it is written in Python, whose interpreter is ending");
    return TE_FL_FAILED_PRECONDITION;
  }
  try {
    drop_dropped();
    return f();
  } catch (const PythonError&) {
    return status_of_exception(sink);
  } catch (const backend::Error& e) {
    backend::report(sink, e.what());
    return e.status();
  } catch (const std::exception& e) {
    backend::report(sink, e.what());
    return TE_FL_INTERNAL;
  }
}

std::shared_ptr<Lending> make_lending(const OpBinding& op, const te_fl_context& ctx, bool enquiry) {
  auto lending = std::make_shared<Lending>();
  lending->op = op.schema->name;
  lending->device = {ctx.device.type, ctx.device.index, ctx.provider};
  lending->stream = ctx.stream;
  lending->enquiry = enquiry;
  return lending;
}

// Ends a lending when the scope is left, on every path.
struct Ends {
  Lending& lending;
  ~Ends() { lending.over.store(true); }
};

// Fails the call if arrays still view its memory: that memory is reused after the call.
te_fl_status check_returned(const Lending& lending, const te_fl_error_sink* sink) {
  if (lending.exports.load() == 0) return TE_FL_OK;
  // The remaining references may be garbage in a cycle.
  const Ref gc = Ref::take(PyImport_ImportModule("gc"));
  Ref::take(PyObject_CallMethod(gc.get(), "collect", nullptr));
  const int kept = lending.exports.load();
  if (kept == 0) return TE_FL_OK;
  backend::report(sink, ("it keeps " + std::to_string(kept) +
                         " arrays on the memory of its arguments beyond the call; it must copy "
                         "what it keeps")
                            .c_str());
  return TE_FL_INTERNAL;
}

te_fl_status check_result(PyObject* result, const te_fl_error_sink* sink) {
  if (result == Py_None) return TE_FL_OK;
  if (result == Py_NotImplemented) {
    backend::report(sink, "it returned NotImplemented");
    return TE_FL_UNSUPPORTED;
  }
  backend::report(sink, ("it returned a " + type_name(result) +
                         "; an implementation writes its outputs in place and returns None")
                            .c_str());
  return TE_FL_INTERNAL;
}

te_fl_status check_answer(PyObject* answer, const te_fl_error_sink* sink) {
  if (answer == Py_True) return TE_FL_OK;
  if (answer == Py_False || PyUnicode_Check(answer) != 0) {
    const std::string why(answer == Py_False ? "its supports() says no"
                                             : to_text(answer, "supports"));
    backend::report(sink, why.c_str());
    return TE_FL_UNSUPPORTED;
  }
  backend::report(sink, ("supports() returned a " + type_name(answer) +
                         "; it returns True, or False, or the reason as a str")
                            .c_str());
  return TE_FL_INTERNAL;
}

// Calls fn on the call's device with its stream as PyTorch's current one. `keywords` may be null.
Ref on_stream(PyObject* fn, PyObject* positional, PyObject* keywords, const te_fl_context& ctx) {
  return Ref::take(PyObject_CallFunction(g_on_stream, "OOOiiN", fn, positional,
                                         keywords != nullptr ? keywords : Py_None, ctx.device.type,
                                         ctx.device.index, PyLong_FromVoidPtr(ctx.stream)));
}

PyObject* member(PyObject* dict, const char* key) {
  PyObject* found = PyDict_GetItemString(dict, key);
  if (found == nullptr) throw_type_error(std::string("an implementation lacks '") + key + "'");
  return found;
}
uint64_t number(PyObject* dict, const char* key) {
  const uint64_t value = PyLong_AsUnsignedLongLong(member(dict, key));
  if (PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}
// Copies the entry's text to `text` and returns text.c_str(); returns null if the entry is None.
const char* optional_text(PyObject* dict, const char* key, std::string& text) {
  PyObject* value = member(dict, key);
  if (value == Py_None) return nullptr;
  text = to_text(value, key);
  return text.c_str();
}
PyObject* optional_object(PyObject* dict, const char* key) {
  PyObject* value = member(dict, key);
  if (value == Py_None) return nullptr;
  Py_INCREF(value);
  return value;
}

}  // namespace

void set_helpers(PyObject* describe_error, PyObject* on_stream) {
  Py_INCREF(describe_error);
  Py_INCREF(on_stream);
  g_describe_error = describe_error, g_on_stream = on_stream;
}

Implementation::~Implementation() {
  drop_later(fn_);
  drop_later(supports_);
  drop_later(convert_);
  drop_later(supports_convert_);
  drop_later(repeat_);
}

std::shared_ptr<Implementation> Implementation::make(PyObject* options) {
  std::shared_ptr<Implementation> made(new Implementation());
  const bool typed = PyDict_GetItemString(options, "arguments") != nullptr;
  if (typed) made->op_ = &bind(member(options, "op_name"));
  made->fn_ = optional_object(options, "fn");
  made->supports_ = optional_object(options, "supports");
  made->convert_ = optional_object(options, "convert");
  if (typed) made->supports_convert_ = optional_object(options, "supports_convert");
  made->repeat_ = optional_object(options, "repeat");
  if (typed) {
    made->arguments_ = find_wanted(*made->op_, member(options, "arguments"));
    made->supports_arguments_ = find_wanted(*made->op_, member(options, "supports_arguments"));
  }
  te_fl_op_desc& desc = made->desc_;
  desc.op_name = optional_text(options, "op_name", made->op_name_);
  desc.impl_id = optional_text(options, "impl_id", made->impl_id_);
  desc.vendor = optional_text(options, "vendor", made->vendor_);
  desc.provider = optional_text(options, "provider", made->provider_);
  desc.later_args = optional_text(options, "later_args", made->later_);
  optional_text(options, "words", made->words_);
  desc.kind = static_cast<uint32_t>(number(options, "kind"));
  const long priority = PyLong_AsLong(member(options, "priority"));
  if (PyErr_Occurred() != nullptr) throw PythonError();
  if (priority != static_cast<int32_t>(priority))
    throw_invalid("priority " + std::to_string(priority) + " does not fit in 32 bits");
  desc.priority = static_cast<int32_t>(priority);
  desc.flags = static_cast<uint32_t>(number(options, "flags"));
  desc.min_arch = static_cast<uint32_t>(number(options, "min_arch"));
  desc.max_arch = static_cast<uint32_t>(number(options, "max_arch"));
  desc.dtypes = number(options, "dtypes");
  desc.scalings = static_cast<uint32_t>(number(options, "scalings"));
  desc.device_types = number(options, "device_types");
  desc.self = made.get();
  desc.run = typed ? run : run_function;
  if (made->supports_ != nullptr) desc.supports = typed ? supports : supports_function;
  desc.describe = describe;
  return made;
}

Ref Implementation::repeat(PyObject* function, const FlatCall& call, const te_fl_context& ctx,
                           const std::shared_ptr<Lending>& lending) const {
  const Ref kept = Ref::share(function);  // a nested call may drop the entry
  const Ref tensors = call.tensors(lending);
  if (lending->device.is_host())
    return Ref::take(PyObject_CallFunctionObjArgs(function, tensors.get(), nullptr));
  const Ref positional = Ref::take(PyTuple_Pack(1, tensors.get()));
  return on_stream(function, positional.get(), nullptr, ctx);
}

te_fl_status Implementation::run(void* self, const te_fl_context* ctx, const void* args) noexcept {
  const auto& impl = *static_cast<const Implementation*>(self);
  return entered(ctx->errors, [&]() -> te_fl_status {
    const auto lending = make_lending(*impl.op_, *ctx, false);
    const Ends ends{*lending};
    FlatCall flat;
    PyObject* fn = impl.fn_;
    if (impl.repeat_ != nullptr && flat.set(*impl.op_, impl.arguments_, *ctx, args)) {
      RepeatedCalls::Entry& known = impl.repeated_.at(flat.signature());
      if (known.ran && !known.tried) fn = impl.repeat_;
      known.ran = true;
      if (known.function != nullptr) {
        const Ref result = impl.repeat(known.function, flat, *ctx, lending);
        if (result.get() != Py_NotImplemented) return check_returned(*lending, ctx->errors);
      }
    }
    te_fl_status status = TE_FL_OK;
    {
      const Ref arguments =
          call_arguments(*impl.op_, impl.arguments_, *ctx, args, lending, impl.convert_);
      const Ref none = Ref::take(PyTuple_New(0));
      const Ref result = lending->device.is_host()
                             ? Ref::take(PyObject_Call(fn, none.get(), arguments.get()))
                             : on_stream(fn, none.get(), arguments.get(), *ctx);
      if (fn == impl.repeat_) impl.repeated_.keep(flat.signature(), result.get());
      if (fn != impl.repeat_ || result.get() == Py_NotImplemented)
        status = check_result(result.get(), ctx->errors);
    }
    return status != TE_FL_OK ? status : check_returned(*lending, ctx->errors);
  });
}

te_fl_status Implementation::supports(void* self, const te_fl_context* ctx,
                                      const void* args) noexcept {
  const auto& impl = *static_cast<const Implementation*>(self);
  return entered(ctx->errors, [&]() -> te_fl_status {
    FlatCall flat;
    const bool keeps = impl.repeat_ != nullptr && flat.set(*impl.op_, impl.arguments_, *ctx, args);
    if (keeps && impl.repeated_.at(flat.signature()).accepted) return TE_FL_OK;
    const auto lending = make_lending(*impl.op_, *ctx, true);
    const Ends ends{*lending};
    const Ref arguments = call_arguments(*impl.op_, impl.supports_arguments_, *ctx, args, lending,
                                         impl.supports_convert_);
    const Ref none = Ref::take(PyTuple_New(0));
    const Ref answer = Ref::take(PyObject_Call(impl.supports_, none.get(), arguments.get()));
    const te_fl_status status = check_answer(answer.get(), ctx->errors);
    if (keeps && status == TE_FL_OK) impl.repeated_.at(flat.signature()).accepted = true;
    return status;
  });
}

te_fl_status Implementation::run_function(void* self, const te_fl_context* ctx,
                                          const void*) noexcept {
  const auto& impl = *static_cast<const Implementation*>(self);
  return entered(ctx->errors, [&]() -> te_fl_status {
    FunctionCall& call = current_function_call();
    Ref result = Ref::take(PyObject_Call(impl.fn_, call.positional, call.keywords));
    if (result.get() == Py_NotImplemented) return check_result(result.get(), ctx->errors);
    call.result = std::move(result);
    return TE_FL_OK;
  });
}

te_fl_status Implementation::supports_function(void* self, const te_fl_context* ctx,
                                               const void*) noexcept {
  const auto& impl = *static_cast<const Implementation*>(self);
  return entered(ctx->errors, [&]() -> te_fl_status {
    const FunctionCall& call = current_function_call();
    const Ref answer = Ref::take(PyObject_Call(impl.supports_, call.positional, call.keywords));
    return check_answer(answer.get(), ctx->errors);
  });
}

te_fl_status Implementation::describe(void* self, const te_fl_context*, const void*,
                                      const te_fl_error_sink* text) noexcept {
  backend::report(text, static_cast<const Implementation*>(self)->words_.c_str());
  return TE_FL_OK;
}

}  // namespace te_fl::python
