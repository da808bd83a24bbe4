// The modules of te_fl::nn as te_fl.pytorch calls them. Parameters, inputs and results are the
// framework's tensors; one call runs one forward or one backward.
#pragma once

#include "py/py.hpp"

namespace te_fl::python {

// fp8_states() -> a new holder of the FP8 state of one module of the framework, for all nn layers
// that the module creates.
PyObject* make_fp8_states(PyObject*, PyObject*) noexcept;
// layer(kind, options, states, delays_wgrad) -> a layer without memory for parameters. states: a
// tuple of (prefix, FP8 states). A site below a prefix uses those states; all other sites use the
// layer's own. delays_wgrad: layer_backward() defers the weights' gradients (without FP8 also the
// biases' gradients) to layer_backward_dw(), and returns None for them. Calls may come from any
// thread; calls of layers that share states are serialised.
PyObject* make_layer(PyObject*, PyObject* args) noexcept;
// layer_parameters(layer) -> list of (name, shape), in the order that the other calls expect.
PyObject* layer_parameters(PyObject*, PyObject* layer) noexcept;
// layer_forward(call, training, *tensors) -> (output, token).
// tensors: the inputs, the extras and the parameters, as call.py's LayerCall counts them.
// call: a LayerCall (te_fl/pytorch/autograd/layer_call.hpp), whose fields `accumulates` and
// `delays` are not read here. activation: the output's dtype as an index in te_fl.tensors.DTYPES;
// -1: the first input's dtype. first: None, a bool, or a F32 tensor [1] as
// ForwardOptions::reuse_weights. attention: a dict of AttentionInputs' fields, or None. random: an
// int64 device tensor [2], seed and offset, or None.
// training: true saves the tensors that the backward reads; the token, an int64 tensor, owns them.
// Otherwise the token is None, and the scopes of set_weight_caches() apply.
PyObject* layer_forward(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept;
// layer_backward(token, gradient, main_grads, keep, input_grad, *parameters) -> the gradients of
// the forward's tensors, with None for absent ones. main_grads: None, or for each parameter None or
// (tensor, overwrite). The gradient is accumulated into the tensor, or overwrites it, and is not
// returned. keep: the token stays valid for another call of layer_backward(). input_grad: false if
// the caller does not use the inputs' gradients; the backward may then skip them and their
// collectives.
PyObject* layer_backward(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept;
// layer_backward_dw(layer, parameters, main_grads, like) -> the gradients that the earliest pending
// backward pass deferred, as tensors of the framework of `like`; None for absent ones. main_grads:
// as for layer_backward().
PyObject* layer_backward_dw(PyObject*, PyObject* args) noexcept;
// set_backward_end(function): te-fl calls function(key, end) in each layer_backward() after which
// FP8 scales of gradients await an update. The framework calls end() when its whole backward pass
// has ended. The key, an integer, identifies the thread of the forward; one end() per backward pass
// and key is enough.
PyObject* set_backward_end(PyObject*, PyObject* function) noexcept;
// set_weight_caches(thread): thread.scopes is the calling thread's list of
// te_fl.pytorch.cache_quantized_weights scopes, outermost first. Forwards inside of one that is not
// training cache quantised weights.
PyObject* set_weight_caches(PyObject*, PyObject* thread) noexcept;
// fp8_state(states, like) -> list of (name, tensor): names as in te_fl::nn; the tensors share
// memory.
PyObject* fp8_state(PyObject*, PyObject* args) noexcept;
// load_fp8_state(states, [(name, tensor)]) -> bool: copies the state in; absent entries are reset.
// Returns false, and loads nothing, if no layer has created FP8 sites yet.
PyObject* load_fp8_state(PyObject*, PyObject* args) noexcept;
// saved_memory(token) -> the memory that the token's forward saved for its backward, as a list of
// uint8 tensors that share this memory and do not overlap. None if the tensor is not a token.
PyObject* saved_memory(PyObject*, PyObject* token) noexcept;
// move_saved_memory(token, ((address, bytes, tensor), ..)): replaces the saved memory at each
// address by the tensor, which must have the same contents, and frees the old memory. Before a
// backward the memory must be back on the device.
PyObject* move_saved_memory(PyObject*, PyObject* args) noexcept;
// empty_bytes(like) -> a uint8 [0] tensor whose storage has a unique address.
PyObject* empty_bytes(PyObject*, PyObject* like) noexcept;
// retire_fp8_states(states): marks the states as replaced; the module uses new ones from now on.
PyObject* retire_fp8_states(PyObject*, PyObject* states) noexcept;

// amax_reduction(reduce, like, ranks) -> a reduction. reduce([tensor], stream) replaces each F32
// [n] tensor of the framework of `like` by its elementwise maximum over all ranks, on the stream of
// that handle. ranks: a tuple of rank numbers in the default group.
PyObject* make_amax_reduction(PyObject*, PyObject* args) noexcept;
// begin_autocast(enabled, calibrating, recipe, find, group) -> scope. recipe: a dict from
// te_fl.common.recipe.native_of() that was not modified since; None if the scope is neither enabled
// nor calibrating. find: None, or a function with find(group) -> a reduction or None.
PyObject* begin_autocast(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept;
// end_autocast(scope): if PyTorch's gradient mode is enabled, updates the scales used in the scope.
PyObject* end_autocast(PyObject*, PyObject* scope) noexcept;
// use_allocator(device, allocate, free, trim): te-fl allocates memory on the device with
// allocate(bytes, stream) -> address and frees it with free(address). trim() releases cached
// memory.
PyObject* use_allocator(PyObject*, PyObject* args) noexcept;
// quiet_out_of_memory(...): PyTorch's out-of-memory observer, called before PyTorch logs the error.
PyObject* quiet_out_of_memory(PyObject*, PyObject* args) noexcept;

}  // namespace te_fl::python
