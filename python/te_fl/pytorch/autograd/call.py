"""Calls of te-fl's layers from PyTorch. One autograd node makes one call into C++ for the forward and one for the backward."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakValueDictionary

import torch
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from te_fl import _native, torch_device, torch_node, torch_tensors
from te_fl.errors import Unsupported
from te_fl.pytorch.autograd import saved_hooks
from te_fl.pytorch.autograd.once import MESSAGE, once_differentiable
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.runtime.refuse import refuse

_queue = torch.autograd.Variable._execution_engine.queue_callback
_task = torch._C._current_graph_task_id
_transforms = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func
_tracing = torch._C._get_tracing_state  # None outside of torch.jit.trace
_dispatch_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY  # None outside of make_fx
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

_devices = set()  # the devices on which te-fl allocates through PyTorch


def use_torch_memory(device: torch.device) -> None:
    """Makes te-fl allocate its memory on the device through PyTorch from now on."""
    key = (device.type, device.index)
    if device.type == "cpu" or key in _devices:
        return
    if device.type != "cuda":
        _native.use_allocator(torch_device.native_name(device), *torch_device.allocator(device))
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
    _native.use_allocator(torch_device.native_name(torch.device("cuda", index)), on_device, free, torch.cuda.empty_cache)  # ROCm's devices are rocm:N
    _devices.add(key)


class LayerCall(NamedTuple):
    """The arguments of a layer's forward, except the tensors that autograd tracks. C++ reads the fields by position (layer_call.hpp)."""

    layer: Any  # a layer from _native.layer()
    inputs: int  # the number of inputs among the tensors
    extras: int  # the number of tensors after the inputs that are in `attention` too and need a gradient; the parameters follow
    activation: int  # the output's dtype as an index in te_fl.tensors.DTYPES
    first: Any  # is_first_microbatch
    attention: Optional[dict]
    random: Optional[torch.Tensor]
    accumulates: bool  # true if weight gradients are accumulated into main_grad
    delays: bool = False  # true if backward_dw() computes the weight gradients


assert LayerCall._fields == _native.LAYER_CALL, f"te_fl._native reads the fields {_native.LAYER_CALL} of LayerCall, which has {LayerCall._fields}"


def _queue_end(key: int, end: Callable[[], None]) -> None:
    """Registers `end`, which updates FP8 scales of gradients, to be called when the current backward ends: once for all layers with this key."""
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
        raise refuse("torch.compile", "compiled_autograd", True, "it does not say when a backward ends, which is when delayed scaling updates "
                     "the gradients' scales; set torch._dynamo.config.compiled_autograd = False, or use another recipe")
    once = (_task(), key)
    if once not in _ending:
        _ending[once] = end
        _queue(end)


_ending: WeakValueDictionary = WeakValueDictionary()  # callbacks of PyTorch's engine; the engine drops them if a backward raises


# For each parameter: main_grad and whether the gradient overwrites it; None: the parameter has no main_grad.
MainGrads = Tuple[Optional[Tuple[torch.Tensor, bool]], ...]


class _Writes:
    """State of one weight that decides whether its next gradient overwrites main_grad or is added to it."""

    def __init__(self) -> None:
        self.asked = False  # a forward with is_first_microbatch=True ran, and no backward has run since
        self.backward = -1  # the graph task id of the PyTorch backward in which a gradient of the weight was last computed
        self.delayed: Deque[bool] = deque()  # for each gradient deferred to backward_dw(), the value that `asked` had; the earliest first


_writes = WeakTensorKeyDictionary()  # _Writes by weight tensor


def is_weight(p: torch.Tensor) -> bool:
    """True for the weight of a product [out, in], and for those of all experts in one parameter [experts, out, in]."""
    return p.dim() >= 2 and not getattr(p, "is_grouped_bias", False)


def _takes_main_grad(p: torch.Tensor) -> bool:
    return is_weight(p) and p.requires_grad


def take_writes(parameters: Dict[str, Optional[torch.Tensor]]) -> Dict[str, _Writes]:
    """Removes the _Writes of each parameter from _writes and returns these states by parameter name. _writes holds weak references to parameters, and
    PyTorch refuses to swap the contents of a tensor that has weak references.
    """
    return {name: _writes.pop(p) for name, p in parameters.items() if p is not None and p in _writes}


def give_writes(parameters: Dict[str, Optional[torch.Tensor]], taken: Dict[str, _Writes]) -> None:
    """Stores the states that take_writes() returned, for the parameters that have the same names now; they may be new tensor objects."""
    for name, writes in taken.items():
        if parameters.get(name) is not None:
            _writes[parameters[name]] = writes


def overwrite_next(module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    """Called in a forward with is_first_microbatch=True: the first backward that runs after it overwrites main_grad. A forward that is recomputed in
    a backward changes nothing, because the first run of the checkpoint, without gradients, has called this already.
    """
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
        if hasattr(p, "__fsdp_param__"):  # Megatron's FSDP creates main_grad on the first access
            p.main_grad = p.get_main_grad()
        found.append((p.main_grad, overwrites(p) and id(p.main_grad) not in written))  # several experts may share one main_grad
        written.add(id(p.main_grad))
    return tuple(found)


def _overwrites(p: torch.Tensor) -> bool:
    writes = _writes.get(p)
    if writes is None:
        return bool(getattr(p, "overwrite_main_grad", False))
    return writes.asked or writes.backward != _task() and bool(getattr(p, "overwrite_main_grad", False))


def find_main_grads(parameters: Sequence[torch.Tensor]) -> MainGrads:
    """The parameters' main_grads in a backward pass. With overwrite_main_grad, the first gradient of each backward pass overwrites main_grad."""
    return _main_grads(parameters, _overwrites)


def count_gradients(parameters: Sequence[torch.Tensor], delays: bool) -> None:
    """Called after a backward that computed the gradients of find_main_grads(), or deferred them to backward_dw()."""
    for p in {id(p): p for p in parameters if _takes_main_grad(p)}.values():
        writes = _writes.setdefault(p, _Writes())
        if delays:
            writes.delayed.append(_overwrites(p))
        writes.asked, writes.backward = False, _task()


def _overwrites_late(p: torch.Tensor) -> bool:
    writes = _writes.get(p)
    return writes is not None and bool(writes.delayed) and writes.delayed[0]


def find_delayed_main_grads(parameters: Sequence[torch.Tensor]) -> MainGrads:
    """find_main_grads() for backward_dw(), with the overwrite decisions of the earliest backward whose gradients are deferred."""
    return _main_grads(parameters, _overwrites_late)


def count_delayed(parameters: Sequence[torch.Tensor]) -> None:
    """Called after backward_dw()."""
    for p in {id(p): p for p in parameters}.values():
        writes = _writes.get(p)
        if writes is not None and writes.delayed:
            writes.delayed.popleft()


def check_main_grads(parameters: Sequence[torch.Tensor]) -> None:
    for p in parameters:
        if not is_weight(p) or not p.requires_grad or hasattr(p, "__fsdp_param__"):
            continue
        if not isinstance(getattr(p, "main_grad", None), torch.Tensor):
            raise AttributeError(f"fuse_wgrad_accumulation adds the gradient of a weight {tuple(p.shape)} to its main_grad, and it has none; "
                                 "set weight.main_grad to a tensor of its shape before the forward")


def placeholder(parameter: torch.Tensor) -> Optional[torch.Tensor]:
    """Returns a dummy gradient for a parameter whose gradient went to main_grad, so that hooks that wait for a gradient run. Its values are undefined
    unless the program asks for zeros.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter) if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)


def hooks_may_copy() -> bool:
    """True if saved-tensor hooks of the program are active and may replace saved tensors by copies in the backward. The hooks of
    torch.utils.checkpoint do not count: they return the tensors that the second run saves.
    """
    hooks = saved_hooks.top(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint"


class _Kept(NamedTuple):
    """Objects that a backward needs in addition to the saved tensors. Saved-tensor hooks may replace saved tensors by copies, but not these."""

    token: Optional[torch.Tensor]  # the memory of this tensor owns the forward's record
    weights: Tuple[torch.Tensor, ...]  # the parameter objects, whose attributes (main_grad) the backward reads


class LayerFunction(torch.autograd.Function):
    """The autograd node of a layer. The forward keeps the state that its backward reads in C++; the memory of a saved tensor, the token, owns that
    state. If saved-tensor hooks may copy the token, the node also keeps the token itself until its backward has run.
    """

    @staticmethod
    def forward(ctx, call: LayerCall, *tensors: torch.Tensor) -> torch.Tensor:
        output, token = _native.layer_forward(call, True, *tensors)
        if call.attention is None:
            ctx.save_for_backward(token, *tensors)
        # Tensors of `attention` (masks, lengths) and an output that the backward reads are saved too, so that PyTorch detects in-place writes.
        # Inference tensors cannot be saved, and cannot be written outside of inference mode, so they are left out.
        else:
            kept = [t for t in call.attention.values() if isinstance(t, torch.Tensor) and not t.is_inference()]
            ctx.save_for_backward(token, *tensors, *kept, *((output,) if call.inputs == 3 else ()))
        ctx.call = call
        copied = hooks_may_copy()
        ctx.kept = _Kept(token if copied else None, tensors[call.inputs + call.extras:]) if copied or call.accumulates else None
        return output

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        # Most backward passes build no autograd graph. They skip the guard against second derivatives, which costs 3 us.
        return _guarded_backward(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


def _backward(ctx, grad: torch.Tensor):
    call = ctx.call
    token, *tensors = ctx.saved_tensors
    n, needed, keep = call.inputs + call.extras, ctx.needs_input_grad[1:], keeps_graph()
    if ctx.kept is not None and ctx.kept.token is not None:
        token = ctx.kept.token
    weights = ctx.kept.weights if call.accumulates else ()
    main_grads = find_main_grads(weights) if call.accumulates else None
    gradients = _native.layer_backward(token, grad.resolve_neg().contiguous() if grad.numel() else grad.new_empty(grad.shape),
                                       None if call.delays else main_grads, keep, any(needed[:n]), *tensors[n:len(needed)])
    if main_grads is not None:
        count_gradients(weights, call.delays)
        gradients = gradients[:n] + tuple(placeholder(p) if m is not None else g for p, m, g in zip(weights, main_grads, gradients[n:]))
    if ctx.kept is not None and not keep:
        ctx.kept = None
    return (None, *gradients)


_guarded_backward = once_differentiable(_backward)


def python_run(call: LayerCall, *tensors: torch.Tensor) -> torch.Tensor:
    """Returns the layer's output."""
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
    return _native.layer_forward(call, False, *tensors)[0]


profiling = torch.autograd._profiler_enabled


def shown(module: torch.nn.Module, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps `compute` (run() or an equivalent) in a profiler range titled by the module's class and its `name`, if any. Use it only while profiling()
    is true.
    """
    name = getattr(module, "name", None)
    title = f"te_fl.pytorch.{type(module).__name__}{f' {name}' if name else ''}"

    def run_shown(*arguments: Any) -> torch.Tensor:
        with torch.autograd.profiler.record_function(title):
            return compute(*arguments)
    return run_shown


class ThreadScopes(threading.local):
    """Has the calling thread's list of scopes, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list = []


reentrant_runs = ThreadScopes()  # the runs of checkpoints with use_reentrant=True, by torch_checkpoint.py

_node = torch_node.load(torch.__version__, _native.layer_forward, _native.layer_backward, python_run, MESSAGE, torch.nn.Parameter,
                        quantization._state, reentrant_runs)
run = python_run if _node is None else _node.run
# plain(module, key, x, first, activation): the fast path for a module with one input, given the module's __dict__ and the layer's key in its _layers.
# Returns the output, using the LayerCall of the layer's last forward; None if the general path is needed. Only the node in C++ has it.
plain = None if _node is None else _node.plain
# warn_only=True counts as deterministic too, as in Transformer Engine: an op without a deterministic form is refused, not warned about.
_native.set_deterministic(torch._C._get_deterministic_algorithms)
_native.set_backward_end(_queue_end)
if _node is not None:
    torch_tensors.use_empty(_node.empty)
