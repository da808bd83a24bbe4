"""Calls of te-fl's layers from PyTorch: one into C++ for a forward and one for its backward, as one node of autograd."""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Dict, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakValueDictionary

import torch
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from te_fl import _native, private_device, torch_node
from te_fl.errors import Unsupported
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.runtime.dtypes import BY_CODE

_queue = torch.autograd.Variable._execution_engine.queue_callback
_task = torch._C._current_graph_task_id
_transforms = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func
_tracing = torch._C._get_tracing_state  # None outside of torch.jit.trace
_dispatch_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY  # None outside of make_fx
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

TRAINING, UNCACHED = 0, 1  # modes of _native.layer_forward(); others are the numbers of scopes (te_fl.pytorch.fp8.weight_cache)

# The order in which te_fl.pytorch gives layer_forward() and layer_backward() their arguments is the order in which te_fl reads them.
assert _native.LAYER_FORWARD_ARGUMENTS == ("layer", "activation", "mode", "is_first_microbatch", "inputs", "parameters", "attention", "random")
assert _native.LAYER_BACKWARD_ARGUMENTS == ("token", "gradient", "parameters", "main_grads", "keep", "input_grad")

_devices = set()  # those whose memory comes from PyTorch


def use_torch_memory(device: torch.device) -> None:
    """From now on te-fl's memory of the device is PyTorch's."""
    key = (device.type, device.index)
    if device.type == "cpu" or key in _devices:
        return
    if device.type != "cuda":
        _native.use_allocator(private_device.native_name(device), *private_device.allocator(device))
        _devices.add(key)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete

    def on_device(size: int, stream: int) -> int:
        if torch.cuda.current_device() == index:
            return allocate(size, stream)
        with torch.cuda.device(index):
            return allocate(size, stream)

    torch.cuda.init()
    if not any(kind == "cuda" for kind, _ in _devices) and hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
        torch._C._cuda_attach_out_of_memory_observer(_native.quiet_out_of_memory)
    _native.use_allocator(f"cuda:{index}", on_device, free, torch.cuda.empty_cache)
    _devices.add(key)


class LayerCall(NamedTuple):
    """The arguments of a layer's forward besides tensors that autograd follows."""

    layer: Any  # of _native.layer()
    inputs: int  # the number of inputs among the tensors
    extras: int  # the number of tensors after them that are in `attention` as well and get a gradient; the parameters follow
    activation: int  # the output's dtype as an index in te_fl.tensors.DTYPES
    first: Any  # is_first_microbatch
    attention: Optional[dict]
    random: Optional[torch.Tensor]
    updates: int  # the thread whose gradients' scales are to be updated when the backward ends; 0: none
    accumulates: bool  # true if gradients of weights go to main_grad
    delays: bool = False  # true if they come by backward_dw() alone


def _ends(token: torch.Tensor, thread: int) -> None:
    """Updates the scales of gradients when the backward that runs now has ended, once for all layers whose forward `thread` ran."""
    key = (_task(), thread)
    if key in _ending:
        return

    def end() -> None:
        _native.end_backward(token)

    _ending[key] = end
    _queue(end)


_ending: WeakValueDictionary = WeakValueDictionary()  # callbacks of PyTorch's engine, which it drops with a backward that raises
_KEPT = {torch.nn.Parameter}


MainGrads = Tuple[Optional[Tuple[torch.Tensor, bool]], ...]  # for each parameter its main_grad, and whether that is overwritten; None: there is none


class _Writes:
    """A weight's: they say whether its next gradient overwrites main_grad."""

    def __init__(self) -> None:
        self.asked = False  # by a forward with is_first_microbatch=True, and no backward has run since
        self.backward = -1  # the number of PyTorch's in which a gradient of the weight was last computed
        self.delayed: Deque[bool] = deque()  # for gradients that are left to backward_dw(), the earliest first


_writes = WeakTensorKeyDictionary()  # _Writes by weight


def _takes_main_grad(p: torch.Tensor) -> bool:
    return p.dim() == 2 and p.requires_grad


def take_writes(parameters: Dict[str, Optional[torch.Tensor]]) -> Dict[str, _Writes]:
    """Takes the record of each parameter's next gradient out of the table and returns the records by name. The table refers to parameters weakly, and
    PyTorch swaps the contents of no tensor that is referred to so."""
    return {name: _writes.pop(p) for name, p in parameters.items() if p is not None and p in _writes}


def give_writes(parameters: Dict[str, Optional[torch.Tensor]], taken: Dict[str, _Writes]) -> None:
    """Gives the parameters of these names, which may be others, what take_writes() returned."""
    for name, writes in taken.items():
        if parameters.get(name) is not None:
            _writes[parameters[name]] = writes


def overwrite_next(module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    """In a forward with is_first_microbatch=True: of all gradients that follow, the one whose backward runs first overwrites main_grad. A
    forward that a backward runs again asks for nothing; its first run did, in a checkpoint without gradients."""
    if _task() >= 0 or torch.is_inference_mode_enabled() or not (torch.is_grad_enabled() or module.training):
        return
    for p in filter(_takes_main_grad, parameters):
        _writes.setdefault(p, _Writes()).asked = True


def _main_grads(parameters: Sequence[torch.Tensor], overwrites: Callable[[torch.Tensor], bool]) -> MainGrads:
    found, written = [], set()
    for p in parameters:
        if not _takes_main_grad(p):
            found.append(None)
            continue
        if hasattr(p, "__fsdp_param__"):  # Megatron's FSDP makes it when it is asked for
            p.main_grad = p.get_main_grad()
        found.append((p.main_grad, overwrites(p) and id(p.main_grad) not in written))  # experts may share one
        written.add(id(p.main_grad))
    return tuple(found)


def _overwrites(p: torch.Tensor) -> bool:
    writes = _writes.get(p)
    if writes is None:
        return bool(getattr(p, "overwrite_main_grad", False))
    return writes.asked or writes.backward != _task() and bool(getattr(p, "overwrite_main_grad", False))


def main_grads_of(parameters: Sequence[torch.Tensor]) -> MainGrads:
    """In a backward. With overwrite_main_grad the first gradient of each backward overwrites."""
    return _main_grads(parameters, _overwrites)


def count_gradients(parameters: Sequence[torch.Tensor], delays: bool) -> None:
    """After a backward that computed the gradients of main_grads_of(), or left them to backward_dw()."""
    for p in {id(p): p for p in parameters if _takes_main_grad(p)}.values():
        writes = _writes.setdefault(p, _Writes())
        if delays:
            writes.delayed.append(_overwrites(p))
        writes.asked, writes.backward = False, _task()


def _overwrites_late(p: torch.Tensor) -> bool:
    writes = _writes.get(p)
    return writes is not None and bool(writes.delayed) and writes.delayed[0]


def delayed_main_grads_of(parameters: Sequence[torch.Tensor]) -> MainGrads:
    """main_grads_of() in backward_dw(), as the earliest backward had them whose gradients are left."""
    return _main_grads(parameters, _overwrites_late)


def count_delayed(parameters: Sequence[torch.Tensor]) -> None:
    """After a backward_dw()."""
    for p in {id(p): p for p in parameters}.values():
        writes = _writes.get(p)
        if writes is not None and writes.delayed:
            writes.delayed.popleft()


def check_main_grads(parameters: Sequence[torch.Tensor]) -> None:
    for p in parameters:
        if p.dim() != 2 or not p.requires_grad or hasattr(p, "__fsdp_param__"):
            continue
        if not isinstance(getattr(p, "main_grad", None), torch.Tensor):
            raise AttributeError(f"fuse_wgrad_accumulation adds the gradient of a weight {tuple(p.shape)} to its main_grad, and it has none; "
                                 "set weight.main_grad to a tensor of its shape before the forward")


def placeholder(parameter: torch.Tensor) -> Optional[torch.Tensor]:
    """The gradient of a parameter whose main_grad took it, so that hooks that wait for one run. Its values mean nothing, unless the program
    asks for zeros."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter) if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)


_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def hooks_may_copy() -> bool:
    """True if hooks of the program get the tensors that are saved now, and may give a backward copies of them. Those of
    torch.utils.checkpoint give it what the second run saves."""
    hooks = _hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint"


class _Kept(NamedTuple):
    """The objects that a backward needs besides saved tensors, which hooks may replace by copies."""

    token: Optional[torch.Tensor]  # in memory that owns the forward's record
    weights: Tuple[torch.Tensor, ...]  # the parameters themselves, with the attributes of gradients that go to main_grad


class LayerFunction(torch.autograd.Function):
    """A forward that keeps what its backward reads in C++, owned by the memory of a saved tensor, the token. Where hooks may copy the token,
    the node keeps it as well, until its backward has run."""

    @staticmethod
    def forward(ctx, call: LayerCall, *tensors: torch.Tensor) -> torch.Tensor:
        n = call.inputs
        output, token = _native.layer_forward(call.layer, call.activation, TRAINING, call.first, tensors[:n], tensors[n + call.extras:],
                                              call.attention, call.random)
        if call.attention is None:
            ctx.save_for_backward(token, *tensors)
        else:  # saved as well, so that PyTorch notices what is written before the backward: masks, lengths, and an output that is read again
            # (what was made in inference mode can be neither saved nor, outside of that mode, written)
            kept = [t for t in call.attention.values() if isinstance(t, torch.Tensor) and not t.is_inference()]
            ctx.save_for_backward(token, *tensors, *kept, *((output,) if n == 3 else ()))
        ctx.call = call
        copied = hooks_may_copy()
        ctx.kept = _Kept(token if copied else None, tensors[n + call.extras:]) if copied or call.accumulates else None
        return output

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        # Most backwards build no graph of their own and need no guard against a second derivative, which costs 3 us.
        return _guarded_backward(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


def _backward(ctx, grad: torch.Tensor):
    call = ctx.call
    token, *tensors = ctx.saved_tensors
    n = call.inputs + call.extras
    parameters, keep = tuple(tensors[n:len(ctx.needs_input_grad) - 1]), _keeps_graph()
    if ctx.kept is not None and ctx.kept.token is not None:
        token = ctx.kept.token
    weights = ctx.kept.weights if call.accumulates else ()
    main_grads = main_grads_of(weights) if call.accumulates else None
    needed = ctx.needs_input_grad
    inputs, own = _native.layer_backward(token, grad.resolve_neg().contiguous() if grad.numel() else grad.new_empty(grad.shape), parameters,
                                         None if call.delays else main_grads, keep, any(needed[1:n + 1]))
    if call.updates:
        _ends(token, call.updates)
    if main_grads is not None:
        count_gradients(weights, call.delays)
        own = tuple(placeholder(p) if m is not None else g for p, m, g in zip(weights, main_grads, own))
    if ctx.kept is not None and not keep:
        ctx.kept = None
    if n == 1:
        return (None, inputs[0] if needed[1] else None, *own)
    return (None, *(g if needed[i + 1] else None for i, g in enumerate(inputs[:n])), *own)


_guarded_backward = once_differentiable(_backward)


class _Saved(NamedTuple):
    """The part of LayerFunction's ctx that _backward() reads."""

    call: LayerCall
    saved_tensors: Tuple[torch.Tensor, ...]
    needs_input_grad: Tuple[bool, ...]
    kept: None = None  # the node in C++ keeps the token itself, and leaves main_grad to LayerFunction


def _backward_of(call: LayerCall, saved: Tuple[torch.Tensor, ...], needed: Tuple[bool, ...], grad: torch.Tensor):
    """LayerFunction's backward that builds a graph, for the node in C++."""
    return _guarded_backward(_Saved(call, saved, needed), grad)


def lasting(parameters: Sequence[torch.Tensor]) -> bool:
    """True if each parameter may stay as it is over several calls. What is computed for each call, as by parametrisations, is a
    new tensor each time, perhaps where the last one was."""
    return {*map(type, parameters)} <= _KEPT


def python_run(call: LayerCall, caching: int, *tensors: torch.Tensor) -> torch.Tensor:
    """The layer's output. caching: te_fl.pytorch.fp8.weight_cache.number()."""
    if _transforms() is not None:
        raise Unsupported("te_fl.pytorch's layers do not run inside torch.func's transforms (grad, vmap, jvp and their like); take gradients with "
                          "torch.autograd.grad, and give batches as dimensions of the input")
    if _dispatch_mode(_PROXY) is not None:
        raise Unsupported("make_fx records PyTorch's own ops alone, of a layer of te-fl its empty result; use torch.compile")
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                if call.accumulates:
                    check_main_grads(tensors[call.inputs + call.extras:])
                return LayerFunction.apply(call, *tensors)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise Unsupported("te_fl.pytorch's layers have no forward-mode derivative (jvp), and would drop the tangent; take gradients with torch.autograd.grad")
    if _tracing() is not None:
        raise Unsupported("torch.jit.trace records PyTorch's own ops alone, of a layer of te-fl its empty result; use torch.compile, or trace with "
                          "gradients, for which a layer is one function of autograd's")
    n = call.inputs
    parameters = tensors[n + call.extras:]
    return _native.layer_forward(call.layer, call.activation, UNCACHED if caching == UNCACHED or not lasting(parameters) else caching, call.first,
                                 tensors[:n], parameters, call.attention, call.random)[0]


def python_plain(module: dict, key: tuple, x: torch.Tensor, first: Any) -> Optional[torch.Tensor]:
    """The output of the module with these attributes and this key in its _layers, for one input and the LayerCall of its last forward; None: the
    module finds out itself what to call. The node in C++ has the function that does more."""
    return None


_empty = torch.empty


def python_empty(like: torch.Tensor, shape: Tuple[int, ...], dtype: int) -> torch.Tensor:
    """Memory for a result of a layer. dtype: an index in te_fl.tensors.DTYPES."""
    return _empty(shape, dtype=BY_CODE[dtype], device=like.device)


profiling = torch.autograd._profiler_enabled


def shown(module: torch.nn.Module, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`compute`, which is run() or does the same, in a range that a profiler shows under the module's class, and its `name` if it has one. For
    use while profiling() is true."""
    name = getattr(module, "name", None)
    title = f"te_fl.pytorch.{type(module).__name__}{f' {name}' if name else ''}"

    def run_shown(*arguments: Any) -> torch.Tensor:
        with torch.autograd.profiler.record_function(title):
            return compute(*arguments)
    return run_shown


_node = torch_node.load(torch.__version__, _native.layer_forward, _native.layer_backward, _ends, python_run, _backward_of, torch.nn.Parameter)
assert _node is None or _node.CALL_FIELDS == LayerCall._fields, f"node.cpp reads the fields {_node.CALL_FIELDS} of LayerCall, which has {LayerCall._fields}"
assert _node is None or _node.FORWARD_ARGUMENTS == _native.LAYER_FORWARD_ARGUMENTS, f"node.cpp gives layer_forward() {_node.FORWARD_ARGUMENTS}"
assert _node is None or _node.BACKWARD_ARGUMENTS == _native.LAYER_BACKWARD_ARGUMENTS, f"node.cpp gives layer_backward() {_node.BACKWARD_ARGUMENTS}"
run, plain = (python_run, python_plain) if _node is None else (_node.run, _node.plain)


def watch(fp8: Any, weights: Any, checkpoints: Any) -> None:
    """The objects whose `scopes` are the calling thread's autocasts, its cache_quantized_weights() and its reentrant checkpoints, which plain()
    looks at."""
    if _node is not None:
        _node.watch(fp8, weights, checkpoints)


# With warn_only=True too, as in Transformer Engine: what has no deterministic form is refused.
_native.set_deterministic(torch._C._get_deterministic_algorithms)
_native.set_empty(python_empty if _node is None else _node.empty)
