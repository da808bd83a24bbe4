// Modules of te_fl::nn as te_fl.pytorch calls them: parameters, inputs and results are the
// framework's tensors, and one call is one forward or one backward.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// fp8_states() -> what holds the FP8 state of one module of the framework, whatever layers the
// module needs.
PyObject* make_fp8_states(PyObject*, PyObject*) noexcept;
// layer(kind, options, states) -> a layer, whose parameters have no memory. states: a tuple of
// (prefix, FP8 states): the sites below the prefix use these, and the others the layer's own. Calls
// may come from any thread; those of layers that share states run one after the other.
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
// layer_backward(token, gradient, parameters, main_grads, keep, input_grad) -> (gradients of the
// inputs and of the attention's bias, gradients of the parameters), None where there is none.
// main_grads: None, or for each parameter None or (a tensor that the gradient is added to in place
// of being returned, whether it overwrites what is there). keep: the token may be given again.
// input_grad = false says that the caller has no use for the inputs' gradients: the backward may
// leave them out, with their collectives.
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
// fp8_state(states, like) -> list of (name, tensor): by te_fl::nn's names, sharing memory.
PyObject* fp8_state(PyObject*, PyObject* args) noexcept;
// load_fp8_state(states, [(name, tensor)]) -> whether a layer has brought sites, without which
// nothing is loaded. Copies; what is not given is reset.
PyObject* load_fp8_state(PyObject*, PyObject* args) noexcept;
// saved_memory(token) -> the memory that the forward of this token keeps for its backward, as a
// list of (uint8 tensor that shares it, the program's storage that it lies in or None); no two
// overlap. None for a tensor that is no token.
PyObject* saved_memory(PyObject*, PyObject* token) noexcept;
// move_saved_memory(token, ((address, bytes, tensor), ..)): has the forward keep its bytes from
// that address on in the tensor, which has the same contents, and lets the old memory go. Before a
// backward they must be back on the device.
PyObject* move_saved_memory(PyObject*, PyObject* args) noexcept;
// empty_bytes(like): uint8 [0], whose storage has an address of its own.
PyObject* empty_bytes(PyObject*, PyObject* like) noexcept;
// retire_fp8_states(states): the module takes others from now on.
PyObject* retire_fp8_states(PyObject*, PyObject* states) noexcept;

// amax_reduction(reduce, like, ranks) -> a reduction: reduce([tensor], stream) writes into each of
// the tensors, F32 [n] of the framework that `like` is of, the largest of what all ranks have
// there, on the stream of that handle. ranks: a tuple of their numbers in the default group.
PyObject* make_amax_reduction(PyObject*, PyObject* args) noexcept;
// begin_autocast(enabled, calibrating, recipe, find, group) -> scope. recipe: a dict that
// te_fl.common.recipe.native_of() made and nobody has written since, or None if the scope neither
// is enabled nor calibrates. find: None, or a function; find(group) -> a reduction or None.
PyObject* begin_autocast(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept;
// end_autocast(scope): updates the scales of what was used in it if PyTorch computes gradients now.
PyObject* end_autocast(PyObject*, PyObject* scope) noexcept;
// use_allocator(device, allocate, free, trim): te-fl's memory of the device comes from
// allocate(bytes, stream) -> address, and free(address) takes it; trim() gives back what is unused.
PyObject* use_allocator(PyObject*, PyObject* args) noexcept;
// quiet_out_of_memory(...): what PyTorch calls when a device has no memory left, before it says so.
PyObject* quiet_out_of_memory(PyObject*, PyObject* args) noexcept;

}  // namespace te_fl::python
