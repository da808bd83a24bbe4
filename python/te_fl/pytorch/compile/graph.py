"""Captures modules' forward and backward as CUDA graphs, with Transformer Engine's names."""

from __future__ import annotations

import contextlib
import gc
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from te_fl.common.recipe import switch
from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.pytorch.compile.graph_state import set_capture_end, set_capture_start
from te_fl.pytorch.fp8.float8_tensor import address_of
from te_fl.pytorch.fp8.quantization import autocast, reusing_weights
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.runtime.refuse import only, refuse

__all__ = ["make_graphed_callables"]

_WHERE = "make_graphed_callables"
_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any):
    """As torch.cuda.graph, with garbage collection off: a collection that destroys another graph would invalidate the capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if collecting:
            gc.enable()


class _Piece:
    """One callable with its CUDA graphs and the static memory that they read and write."""

    def __init__(self, function: Callable, args: Tuple, kwargs: Dict[str, Any], scope: Callable, hooks: Dict[str, Dict], unused: bool,
                 retains: bool, clones: bool):
        self.function, self.scope, self.hooks = function, scope, hooks
        self.unused, self.retains, self.clones = unused, retains, clones
        self.module = isinstance(function, torch.nn.Module)
        self.forward = function.forward if self.module else function
        self.keys = tuple(kwargs)
        inputs, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        for i, leaf in enumerate(inputs):
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cuda":
                supplied = f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
                raise InvalidArgument(f"{_WHERE}: sample argument {i} is {supplied}; a graph reads tensors on cuda alone: "
                                      "bind other arguments beforehand, for instance by functools.partial")
        self.inputs: Tuple[torch.Tensor, ...] = tuple(inputs)
        self.parameters = tuple(function.parameters()) if self.module else ()
        self.training = function.training if self.module else torch.is_grad_enabled()
        self.forward_graph: Optional[torch.cuda.CUDAGraph] = None
        self.backward_graph: Optional[torch.cuda.CUDAGraph] = None
        self.outputs: Tuple[torch.Tensor, ...] = ()
        self.output_gradients: Tuple[Optional[torch.Tensor], ...] = ()  # inputs of the backward graph
        self.gradients: Tuple[Optional[torch.Tensor], ...] = ()  # outputs of the backward graph: gradients of inputs, then of parameters
        self.runs = 0  # number of forwards so far; a backward belongs to the last one
        self.waiting = -1  # number of the forward whose activations are in memory
        self.addresses = [address_of(p) for p in self.parameters]
        self.trained = [p.requires_grad for p in self.parameters]

    # -- before and during the captures

    def hook(self, name: str) -> None:
        for hook in self.hooks.get(name, {}).values():
            if hook(self.function) is not None:
                raise InvalidArgument(f"{_WHERE}: a hook of capture_time_hooks[{name!r}] returned a value; it must return None")

    def compute(self) -> Any:
        args, kwargs = tree_unflatten(list(self.inputs), self.spec)
        # An inference graph updates no scales, so gradients stay off at the scope's end too.
        with torch.set_grad_enabled(self.training), self.scope():
            return self.function(*args, **kwargs)

    def differentiate(self, outputs, grads):
        wanted = [t for t in self.inputs + self.parameters if t.requires_grad]
        return torch.autograd.grad([o for o in outputs if o.requires_grad], wanted, [g for g in grads if g is not None],
                                   only_inputs=True, allow_unused=self.unused, retain_graph=self.retains)

    def learns(self, outputs) -> bool:
        return self.training and any(o.requires_grad for o in outputs)

    def warm_up(self) -> None:
        self.hook("forward_pre_hooks")
        outputs, _ = tree_flatten(self.compute())
        self.hook("forward_hooks")
        if self.learns(outputs):
            self.hook("backward_pre_hooks")
            self.differentiate(outputs, [torch.zeros_like(o) if o.requires_grad else None for o in outputs])
            self.hook("backward_hooks")

    def capture_forward(self, pool: Any) -> None:
        self.forward_graph = torch.cuda.CUDAGraph()
        self.hook("forward_pre_hooks")
        with _capture(self.forward_graph, pool):
            result = self.compute()
        self.hook("forward_hooks")
        outputs, self.result = tree_flatten(result)
        if not all(isinstance(o, torch.Tensor) for o in outputs):
            raise InvalidArgument(f"{_WHERE}: the outputs of {type(self.function).__name__} are not all tensors, and a "
                                  "graph writes tensors alone; return the others beside it")
        self.outputs = tuple(outputs)

    def capture_backward(self, pool: Any) -> None:
        if not self.learns(self.outputs):
            return
        self.output_gradients = tuple(torch.empty_like(o) if o.requires_grad else None for o in self.outputs)
        self.backward_graph = torch.cuda.CUDAGraph()
        self.hook("backward_pre_hooks")
        with _capture(self.backward_graph, pool):
            made = iter(self.differentiate(self.outputs, self.output_gradients))
        self.hook("backward_hooks")
        self.gradients = tuple(next(made) if t.requires_grad else None for t in self.inputs + self.parameters)
        self.outputs = tuple(o.detach() for o in self.outputs)  # the captured autograd graph is no longer needed

    # -- replays

    def check(self, supplied: List[torch.Tensor]) -> None:
        name = type(self.function).__name__
        if self.forward_graph is None:
            raise FailedPrecondition(f"the graphs of {name} were reset; make new ones by {_WHERE}()")
        for i, (own, new) in enumerate(zip(self.inputs, supplied)):
            if not isinstance(new, torch.Tensor) or new.shape != own.shape or new.dtype != own.dtype or new.device != own.device:
                what = f"{new.dtype} {tuple(new.shape)} on {new.device}" if isinstance(new, torch.Tensor) else f"a {type(new).__name__}"
                raise InvalidArgument(f"{name}: argument {i} is {what}; its graph was made for {own.dtype} "
                                      f"{tuple(own.shape)} on {own.device}: make one for each shape, or run the module without a graph")
        for p, address, trained in zip(self.parameters, self.addresses, self.trained):
            if address_of(p) != address:
                raise FailedPrecondition(f"{name}: the memory of a parameter {tuple(p.shape)} was replaced after the "
                                         "capture, and the graph reads that of before; write parameters in place, or make new graphs")
            if p.requires_grad and not trained:
                raise FailedPrecondition(f"{name}: a parameter {tuple(p.shape)} was frozen when the graphs were made, "
                                         "so they compute no gradient of it; make new graphs")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for key in self.keys:
            if key not in kwargs:
                raise TypeError(f"{type(self.function).__name__}: its graph was made with the keyword {key!r}, which this call lacks")
        supplied, spec = tree_flatten((args, {key: kwargs.pop(key) for key in self.keys}))
        if spec != self.spec or kwargs:
            extra = f"; it knows no {', '.join(map(repr, kwargs))}" if kwargs else ""
            raise TypeError(f"{type(self.function).__name__}: its graph was made for other arguments: {self.spec}{extra}")
        self.check(supplied)
        return tree_unflatten(list(_Replay.apply(self, *supplied, *self.parameters)), self.result)

    def reset(self) -> None:
        """Frees the graphs and their memory. Calling the callable raises an error afterwards."""
        for graph in (self.forward_graph, self.backward_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = None
        self.inputs = self.parameters = self.outputs = self.output_gradients = self.gradients = ()
        self.addresses, self.trained = [], []


def _fill(own: torch.Tensor, new: torch.Tensor) -> None:
    if own.data_ptr() != new.data_ptr() or own.stride() != new.stride():
        own.copy_(new)


class _Replay(torch.autograd.Function):
    """The graphs as one autograd node."""

    @staticmethod
    def forward(ctx, piece: _Piece, *tensors: torch.Tensor):
        for own, new in zip(piece.inputs, tensors):
            _fill(own, new)
        piece.forward_graph.replay()
        piece.runs += 1
        piece.waiting = ctx.run = piece.runs
        ctx.piece = piece
        return tuple(o.detach() for o in piece.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        piece = ctx.piece
        if piece.backward_graph is None:
            raise FailedPrecondition("the graph of this forward has no backward: it was reset, or made in eval()")
        if piece.waiting != ctx.run:
            raise FailedPrecondition(f"{type(piece.function).__name__}: the activations of this forward are gone, since "
                                     "its graph ran again or its backward was done; run each backward before the next forward, or make a "
                                     "graph for each that is under way")
        if not piece.retains:
            piece.waiting = -1
        for own, new in zip(piece.output_gradients, grads):
            if own is not None:
                _fill(own, new)
        piece.backward_graph.replay()
        n = len(piece.inputs)
        return (None, *(g if g is None else g.detach().clone() if i >= n and piece.clones else g.detach()
                        for i, g in enumerate(piece.gradients)))


def _saved_states(modules) -> List[Callable[[], None]]:
    """Returns one function for each te-fl module inside of `modules`; it restores the module's current FP8 state."""
    parts = [m for function in modules if isinstance(function, torch.nn.Module) for m in function.modules()]
    return [m._saved() for m in parts if isinstance(m, TransformerEngineBaseModule)]


def _renamed(old: str, supplied: Any, name: str, value: Any) -> Any:
    if supplied is None:
        return value
    if value is not None:
        raise InvalidArgument(f"{_WHERE}: {old} and {name} are both given, and say the same thing; give {name}")
    warnings.warn(f"{_WHERE}: {old} is the older name of {name}", DeprecationWarning, stacklevel=3)
    return supplied


def _for_each(name: str, value: Any, count: int) -> Tuple:
    values = value if isinstance(value, tuple) else (value,) * count
    if len(values) != count:
        raise InvalidArgument(f"{_WHERE}: {name} has {len(values)} entries for {count} callables")
    return values


def _check(function: Callable, where: str) -> None:
    if not isinstance(function, torch.nn.Module):
        return
    for m in function.modules():
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            raise FailedPrecondition(f"{where}: {type(m).__name__} has hooks, which replays would not run; register them "
                                     "afterwards, or give capture_time_hooks for those that only captures need")
        for name in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
            if getattr(m, name, False):
                raise refuse(where, name, True, f"{type(m).__name__} does that on the host, which replays leave out")
        if getattr(m, "_model_init", None) is not None:
            raise refuse(where, "quantized_model_init", True, f"a graph would go on reading codes of {type(m).__name__} that are made anew when its "
                         "weights are written; keep them in high precision")
    if any(b.requires_grad for b in function.buffers()):
        raise FailedPrecondition(f"{where}: a buffer of {type(function).__name__} requires a gradient; make it a parameter")


def make_graphed_callables(modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False,
                           sample_kwargs: Any = None, fp8_enabled: Any = None, fp8_calibrating: Optional[bool] = None,
                           fp8_recipe: Any = None, fp8_group: Any = None, fp8_weight_caching: Optional[bool] = None, enabled: Any = None,
                           calibrating: Optional[bool] = None, recipe: Any = None, amax_reduction_group: Any = None,
                           cache_quantized_params: Optional[bool] = None, _order: Optional[List[int]] = None,
                           _num_layers_per_chunk: Optional[List[int]] = None, pool: Any = None, retain_graph_in_backward: bool = False,
                           _reuse_graph_input_output_buffers: bool = False, clone_param_grads_on_return: bool = True,
                           pre_warmup_hook: Optional[Callable] = None, post_warmup_hook: Optional[Callable] = None,
                           capture_time_hooks: Optional[List[Optional[Dict[str, Dict]]]] = None):
    """Returns the modules; their forward and backward passes now replay CUDA graphs. For a plain function of tensors, returns a function that
    replays.

    modules: one callable or a tuple. sample_args, sample_kwargs: for each callable its arguments, CUDA tensors with the shapes and requires_grad of
    later calls; they become the graphs' static inputs. Forwards are captured in this order, backwards in reverse. num_warmup_iters: eager runs before
    the capture, whose changes to FP8 state are undone. enabled, calibrating, recipe: the autocast captured with each callable, including its scale
    updates; an autocast around a replay has no effect. cache_quantized_params: calls take is_first_microbatch, and weights are quantised only if it
    is True. allow_unused_input: permits inputs and parameters without a gradient. pool: memory pool shared with other graphs.
    retain_graph_in_backward: a backward may be repeated. clone_param_grads_on_return: False returns the static gradients of parameters, which the
    next replay overwrites. capture_time_hooks: for each callable a dict of 'forward_pre_hooks', 'forward_hooks', 'backward_pre_hooks' and
    'backward_hooks', dicts of functions that run around captures and are not replayed.

    A module whose training mode differs from the capture runs eagerly. The next replay overwrites the outputs. A call raises an error for a backward
    after a later replay, for arguments of other shapes, and for parameters that have moved. The result has reset(), which frees the graphs. Not
    supported: fuse_wgrad_accumulation, delay_wgrad_compute, quantized_model_init, interleaved schedules (_order).
    """
    enabled = _renamed("fp8_enabled", fp8_enabled, "enabled", enabled) or False
    calibrating = _renamed("fp8_calibrating", fp8_calibrating, "calibrating", calibrating) or False
    recipe = _renamed("fp8_recipe", fp8_recipe, "recipe", recipe)
    group = _renamed("fp8_group", fp8_group, "amax_reduction_group", amax_reduction_group)
    caches = _renamed("fp8_weight_caching", fp8_weight_caching, "cache_quantized_params", cache_quantized_params) or False
    only(_WHERE, ("_order", _order, None, "capture the callables in one order"), ("_num_layers_per_chunk", _num_layers_per_chunk, None,
         "it goes with _order"), ("_reuse_graph_input_output_buffers", bool(_reuse_graph_input_output_buffers), False, "it goes with _order"))
    one = not isinstance(modules, tuple)
    if one:
        modules, sample_args, sample_kwargs = (modules,), (sample_args,), (sample_kwargs,)
    count = len(modules)
    for function in modules:
        _check(function, _WHERE)
    if len({f.training for f in modules if isinstance(f, torch.nn.Module)}) > 1:
        raise InvalidArgument(f"{_WHERE}: some modules are in training and some are not; give them in one mode")
    if not torch.cuda.is_available():
        raise refuse(_WHERE, "modules", tuple(type(f).__name__ for f in modules), "graphs are CUDA's, and there is no GPU here; call the "
                     "modules as they are")
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise FailedPrecondition(f"{_WHERE}: torch.autocast keeps casts, which a graph would read for ever; give it "
                                 "cache_enabled=False")
    each_args, each_kwargs = _for_each("sample_args", sample_args, count), _for_each("sample_kwargs", sample_kwargs, count)
    each_enabled = [switch("make_graphed_callables", "enabled", on) for on in _for_each("enabled", enabled, count)]
    hooks = [{}] * count if capture_time_hooks is None else [h or {} for h in _for_each("capture_time_hooks", tuple(capture_time_hooks), count)]
    for supplied in hooks:
        if set(supplied) - set(_HOOKS):
            raise InvalidArgument(f"{_WHERE}: capture_time_hooks has {sorted(set(supplied) - set(_HOOKS))}; it knows {_HOOKS}")
    flag = torch.zeros(1, dtype=torch.float32, device="cuda") if caches else None

    def make_scope(on: bool) -> Callable:
        def scope():
            stack = contextlib.ExitStack()
            stack.enter_context(autocast(enabled=on, calibrating=calibrating, recipe=recipe, amax_reduction_group=group))
            stack.enter_context(reusing_weights(flag))
            return stack
        return scope

    pieces = [_Piece(f, args if isinstance(args, tuple) else (args,), kwargs or {}, make_scope(bool(on)), supplied, allow_unused_input,
                     retain_graph_in_backward, clone_param_grads_on_return)
              for f, args, kwargs, on, supplied in zip(modules, each_args, each_kwargs, each_enabled, hooks)]
    set_capture_start()
    try:
        _capture_all(pieces, num_warmup_iters, pool, pre_warmup_hook, post_warmup_hook)
    finally:
        set_capture_end()
    graphed = tuple(_replaced(piece, flag) for piece in pieces)
    return graphed[0] if one else graphed


def _capture_all(pieces: List[_Piece], warmups: int, pool: Any, before: Optional[Callable], after: Optional[Callable]) -> None:
    restores = _saved_states([p.function for p in pieces])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        if before is not None:
            before()
        for piece in pieces:
            for _ in range(warmups):
                piece.warm_up()
        if after is not None:
            after()
    torch.cuda.synchronize()
    for restore in restores:
        restore()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    for piece in pieces:
        piece.capture_forward(pool)
    for piece in reversed(pieces):
        piece.capture_backward(pool)


def _replaced(piece: _Piece, flag: Optional[torch.Tensor]) -> Callable:
    """Replaces the callable: returns a function, or the module itself with a new forward."""

    def graphed(*args: Any, **kwargs: Any) -> Any:
        if flag is not None:
            first = kwargs.pop("is_first_microbatch", None)
            if not isinstance(first, bool):
                raise InvalidArgument(f"{type(piece.function).__name__}: is_first_microbatch is {first!r}; with "
                                      "cache_quantized_params each call says True or False")
            flag.fill_(0.0 if first else 1.0)
        return piece(*args, **kwargs)

    if not piece.module:
        graphed.reset = piece.reset
        return graphed
    module, plain, training = piece.function, piece.forward, piece.training

    def forward(*args: Any, **kwargs: Any) -> Any:
        return graphed(*args, **kwargs) if module.training == training else plain(*args, **kwargs)

    module.forward = forward
    module.reset = piece.reset
    return module
