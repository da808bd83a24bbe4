// te_fl._native, the extension module. The package te_fl exports its functions under public names.
#include "autograd/layer_call.hpp"
#include "jax/jax_ffi.hpp"
#include "jax/lowered_call.hpp"
#include "ops/communicator.hpp"
#include "ops/op_call.hpp"
#include "ops/policy.hpp"
#include "ops/quantised.hpp"
#include "ops/report.hpp"
#include "plugins/modules.hpp"
#include "plugins/registration.hpp"
#include "py/errors.hpp"
#include "py/lent_tensor.hpp"
#include "py/new_tensor.hpp"
#include "py/scope.hpp"
#include "torch/layer.hpp"
#include "torch/lent_parameter.hpp"
#include "torch/process_group.hpp"
#include "torch/quantisers.hpp"
#include "torch/rank_exchange.hpp"
#include "torch/recompute.hpp"
#include "torch/result_tensors.hpp"
#include "torch/scale_functions.hpp"
#include "torch/torch_device.hpp"

namespace te_fl::python {
namespace {

PyObject* set_classes(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *errors = nullptr, *quantized = nullptr, *saved = nullptr, *rows = nullptr;
    if (PyArg_ParseTuple(args, "OOOO", &errors, &quantized, &saved, &rows) == 0)
      throw PythonError();
    set_error_classes(errors);
    set_argument_classes(quantized, saved, rows);
    return Ref::share(Py_None);
  });
}

template <class F>
PyCFunction fast(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

Ref make_capsule(xla::Error* (*handler)(xla::CallFrame*) noexcept) {
  return Ref::take(PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr));
}

PyObject* jax_handlers(PyObject*, PyObject*) noexcept {
  return guarded([&] {
    Ref dict = Ref::take(PyDict_New());
    put(dict, "cpu", make_capsule(&jax::handle_on_host));
    put(dict, "CUDA", make_capsule(&jax::handle_on_cuda));
    return dict;
  });
}

PyObject* jax_version(PyObject*, PyObject*) noexcept {
  return guarded([&] { return to_python(int64_t{jax::seen_version()}); });
}

template <size_t N>
Ref tuple_of_names(const char* const (&names)[N]) {
  Ref tuple = Ref::take(PyTuple_New(N));
  for (size_t i = 0; i < N; ++i) {
    check(PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i),
                          to_python(std::string_view(names[i])).release()));
  }
  return tuple;
}

PyMethodDef g_methods[] = {
    {"set_classes", set_classes, METH_VARARGS, "set_classes(errors, Quantized, Saved)"},
    {"op", make_op, METH_VARARGS, "op(name, doc) -> a callable that runs the op"},
    {"positional_op", make_positional_op, METH_O, "positional_op(name) -> a callable"},
    {"matrix_op", make_matrix_op, METH_O, "matrix_op(name) -> a callable on matrices"},
    {"quantized_class", add_quantized_class, METH_VARARGS, "quantized_class(type, names)"},
    {"quantized_target", set_quantized_target, METH_O, "quantized_target(type)"},
    {"schema", schema, METH_O, "schema(op) -> dict"},
    {"call", call_by, METH_VARARGS, "call(op, arguments, manager=None, positional=())"},
    {"resolve", resolve, METH_VARARGS,
     "resolve(op, arguments, manager=None, positional=()) -> dict"},
    {"explain", explain, METH_VARARGS,
     "explain(op, device, dtypes, scalings, manager=None) -> dict"},
    {"communicator", make_communicator, METH_VARARGS,
     "communicator(backend, device, rank, size, graph_safe) -> handle"},
    {"output", output, METH_VARARGS,
     "output(op, tensors, scalars, name) -> (extents or None, dtype or None)"},
    {"saved_bytes", saved_bytes, METH_VARARGS, "saved_bytes(op, arguments) -> int"},
    {"op_names", op_names, METH_NOARGS, "op_names() -> list of str"},
    {"usage", usage, METH_VARARGS, "usage(manager=None) -> list of dict"},
    {"reset_usage", reset_usage, METH_VARARGS, "reset_usage(manager=None)"},
    {"reload", reload, METH_NOARGS, "reload(): reads the environment again"},
    {"setting", setting, METH_O, "setting(name) -> bool, int, str or None"},
    {"info", info, METH_NOARGS, "info() -> dict"},
    {"device_name", device_name, METH_O, "device_name(device) -> str"},
    {"load_plugin", load_plugin, METH_O, "load_plugin(path_or_name) -> name"},
    {"file_trust_problem", file_trust_problem, METH_O, "file_trust_problem(path) -> str"},
    {"verify_counts", verify_counts, METH_NOARGS, "verify_counts() -> dict"},
    {"fingerprint", fingerprint, METH_NOARGS, "fingerprint() -> str"},
    {"fingerprint_table", fingerprint_table, METH_NOARGS, "fingerprint_table() -> str"},
    {"fingerprint_difference", fingerprint_difference, METH_VARARGS,
     "fingerprint_difference(table, table) -> list of str"},
    {"write_trace", write_trace, METH_NOARGS, "write_trace()"},
    {"step_boundary", step_boundary, METH_NOARGS, "step_boundary()"},
    {"set_rank_exchange", set_rank_exchange, METH_O, "set_rank_exchange(function(text) -> texts)"},
    {"ranks_exchange_quarantines", ranks_exchange_quarantines, METH_NOARGS,
     "ranks_exchange_quarantines() -> bool"},
    {"held_quarantines", held_quarantines, METH_NOARGS, "held_quarantines() -> str"},
    {"take_quarantines", take_quarantines, METH_O, "take_quarantines(texts)"},
    {"set_backward_boundary", set_backward_boundary, METH_O, "set_backward_boundary(function())"},
    {"check_policy", check_policy, METH_O, "check_policy(settings)"},
    {"enter_policy", enter_policy, METH_O, "enter_policy(settings) -> scope"},
    {"leave_policy", leave_policy, METH_O, "leave_policy(scope)"},
    {"follow_policy", follow_policy, METH_O, "follow_policy(function) -> str"},
    {"set_registration_helpers", set_registration_helpers, METH_VARARGS,
     "set_registration_helpers(describe_error, on_stream)"},
    {"set_module_loader", set_module_loader, METH_O, "set_module_loader(load)"},
    {"process_registry", process_registry, METH_NOARGS, "process_registry() -> registry"},
    {"new_registry", new_registry, METH_NOARGS, "new_registry() -> registry"},
    {"new_manager", new_manager, METH_O, "new_manager(registry) -> manager"},
    {"declare", declare, METH_VARARGS, "declare(registry, op) -> bool"},
    {"register", register_implementations, METH_VARARGS,
     "register(registry, implementations, owner)"},
    {"unregister", unregister, METH_VARARGS, "unregister(registry, op, impl_id)"},
    {"unregister_owner", unregister_owner, METH_VARARGS, "unregister_owner(registry, owner)"},
    {"set_priority", set_priority, METH_VARARGS, "set_priority(registry, op, impl_id, priority)"},
    {"snapshot", snapshot, METH_O, "snapshot(registry) -> list of dict"},
    {"set_deterministic", set_deterministic, METH_O, "set_deterministic(function() -> bool)"},
    {"policy_settings", policy_settings, METH_NOARGS, "policy_settings() -> dict"},
    {"policy_text", policy_text, METH_NOARGS, "policy_text() -> str"},
    {"tex_names", tex_names, METH_NOARGS, "tex_names() -> list of str"},
    {"set_global_policy", set_global_policy, METH_O, "set_global_policy(settings or None)"},
    {"fp8_states", make_fp8_states, METH_NOARGS, "fp8_states() -> states"},
    {"layer", make_layer, METH_VARARGS, "layer(kind, options, states, delays_wgrad) -> layer"},
    {"layer_parameters", layer_parameters, METH_O,
     "layer_parameters(layer) -> list of (name, shape)"},
    {"layer_forward", fast(layer_forward), METH_FASTCALL,
     "layer_forward(call, training, *tensors) -> (output, token)"},
    {"layer_backward", fast(layer_backward), METH_FASTCALL,
     "layer_backward(token, gradient, main_grads, keep, input_grad, *parameters) -> gradients"},
    {"set_backward_end", set_backward_end, METH_O, "set_backward_end(function(key, end))"},
    {"set_weight_caches", set_weight_caches, METH_O, "set_weight_caches(thread)"},
    {"set_empty", set_empty, METH_O, "set_empty(function(like, shape, dtype) -> tensor)"},
    {"set_tensors", set_tensors, METH_VARARGS, "set_tensors(Tensor, empty_like, dtypes)"},
    {"set_codes_class", set_codes_class, METH_O, "set_codes_class(type)"},
    {"touch", touch, METH_O, "touch(dict)"},
    {"layer_backward_dw", layer_backward_dw, METH_VARARGS,
     "layer_backward_dw(layer, parameters, main_grads, like)"},
    {"fp8_state", fp8_state, METH_VARARGS, "fp8_state(states, like) -> list of (name, tensor)"},
    {"load_fp8_state", load_fp8_state, METH_VARARGS, "load_fp8_state(states, state) -> bool"},
    {"saved_memory", saved_memory, METH_O, "saved_memory(token)"},
    {"move_saved_memory", move_saved_memory, METH_VARARGS, "move_saved_memory(token, moved)"},
    {"empty_bytes", empty_bytes, METH_O, "empty_bytes(like) -> tensor"},
    {"retire_fp8_states", retire_fp8_states, METH_O, "retire_fp8_states(states)"},
    {"amax_reduction", make_amax_reduction, METH_VARARGS,
     "amax_reduction(reduce, like, ranks) -> reduction"},
    {"quantisers", make_quantisers, METH_VARARGS,
     "quantisers(name, all, fc2, backward_override, like) -> recipe"},
    {"scale_functions", make_scale_functions, METH_VARARGS,
     "scale_functions(name, amax, scale, like) -> functions"},
    {"begin_autocast", fast(begin_autocast), METH_FASTCALL,
     "begin_autocast(enabled, calibrating, recipe, find, group) -> scope"},
    {"end_autocast", end_autocast, METH_O, "end_autocast(scope)"},
    {"recompute_record", recompute_record, METH_NOARGS, "recompute_record() -> record"},
    {"begin_recompute", begin_recompute, METH_VARARGS,
     "begin_recompute(record, second, thread) -> scope"},
    {"end_recompute", end_recompute, METH_O, "end_recompute(scope)"},
    {"hooks_in_force", hooks_in_force, METH_VARARGS,
     "hooks_in_force(top, pop, push) -> list of (pack, unpack)"},
    {"track_hooks", track_hooks, METH_VARARGS, "track_hooks(push, pop) -> (push, pop, top)"},
    {"quiet_out_of_memory", quiet_out_of_memory, METH_VARARGS, "quiet_out_of_memory(...)"},
    {"set_device_maker", set_device_maker, METH_O, "set_device_maker(make(type, index, provider))"},
    {"use_allocator", use_allocator, METH_VARARGS, "use_allocator(device, allocate, free, trim)"},
    {"jax_handlers", jax_handlers, METH_NOARGS, "jax_handlers() -> dict of platform to capsule"},
    {"jax_resolve", jax_resolve, METH_VARARGS,
     "jax_resolve(text, device, operands, results) -> dict"},
    {"jax_count", jax_count, METH_VARARGS, "jax_count(op, impl_id)"},
    {"in_jax_call", in_jax_call, METH_NOARGS, "in_jax_call() -> bool"},
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

PyMODINIT_FUNC PyInit__native() {
  using namespace te_fl::python;
  return guarded([] {
    Ref module = Ref::take(PyModule_Create(&g_module));
    check(PyModule_AddObjectRef(module.get(), "LentTensor", lent_tensor_class()));
    check(PyModule_AddObjectRef(module.get(), "Scope", scope_class()));
    const Ref fields = tuple_of_names(te_fl::layer_call::field_names);
    check(PyModule_AddObjectRef(module.get(), "LAYER_CALL", fields.get()));
    return module;
  });
}
