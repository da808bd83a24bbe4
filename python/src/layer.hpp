// Modules of te_fl::nn as te_fl.pytorch calls them: parameters, inputs and results are the
// framework's tensors, and one call is one forward or one backward.
#pragma once

#include "py.hpp"

namespace te_fl::python {

// layer(kind, options) -> a layer, whose parameters have no memory. Its calls may come from any
// thread; they run one after the other.
PyObject* make_layer(PyObject*, PyObject* args) noexcept;
// layer_parameters(layer) -> list of (name, shape), in the order that the calls take them.
PyObject* layer_parameters(PyObject*, PyObject* layer) noexcept;
// layer_forward(layer, activation, mode, is_first_microbatch, inputs, parameters, attention,
// random)
// -> (output, token). activation: the output's dtype as an index in te_fl.tensors.DTYPES, -1: the
// first input's. mode: 0 keeps what a backward needs, which the token holds, an int64 tensor whose
// memory owns it; others keep nothing, token is None: 1, or the number of a scope inside which the
// caller leaves parameters as they are, so that quantised copies are kept. is_first_microbatch:
// None, a bool, or a F32 tensor [1] as ForwardOptions::reuse_weights. attention: a dict of
// AttentionInputs' fields, or None. random: an int64 tensor [2] on the device, seed and offset, or
// None.
PyObject* layer_forward(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept;
// layer_backward(token, gradient, parameters, main_grads, keep) -> (gradients of the inputs and of
// the attention's bias, gradients of the parameters), None where there is none. main_grads: None,
// or for each parameter None or (a tensor that the gradient is added to in place of being returned,
// whether it overwrites what is there); with is_first_microbatch = True in the forward it always
// overwrites. keep: the token may be given again.
PyObject* layer_backward(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept;
// delay_layer_wgrad(layer): from now on backwards leave the gradients of weights (without FP8 also
// of biases) to layer_backward_dw(), and return None for them.
PyObject* delay_layer_wgrad(PyObject*, PyObject* layer) noexcept;
// layer_backward_dw(layer, parameters, main_grads, like) -> the gradients that the earliest of
// these backwards left, None where there is none, as tensors of the framework that `like` is of.
// main_grads: as for layer_backward().
PyObject* layer_backward_dw(PyObject*, PyObject* args) noexcept;
// end_backward(token): updates the gradients' scales of the thread that ran the token's forward.
PyObject* end_backward(PyObject*, PyObject* token) noexcept;
// layer_state(layer, like) -> list of (name, tensor): FP8 state by te_fl::nn's names, sharing
// memory.
PyObject* layer_state(PyObject*, PyObject* args) noexcept;
// set_layer_state(layer, [(name, tensor)]): copies.
PyObject* set_layer_state(PyObject*, PyObject* args) noexcept;

// begin_autocast(enabled, calibrating, recipe) -> scope. recipe: a dict that
// te_fl.common.recipe.native_of() made and nobody has written since, or None if the scope neither
// is enabled nor calibrates.
PyObject* begin_autocast(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept;
// end_autocast(scope): updates the scales of what was used in it.
PyObject* end_autocast(PyObject*, PyObject* scope) noexcept;
// use_allocator(device, allocate, free, trim): te-fl's memory of the device comes from
// allocate(bytes, stream) -> address, and free(address) takes it; trim() gives back what is unused.
PyObject* use_allocator(PyObject*, PyObject* args) noexcept;

}  // namespace te_fl::python
