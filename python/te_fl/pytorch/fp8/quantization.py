"""FP8 scopes: autocast and quantized_model_init, with Transformer Engine's names."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from typing import Any, Iterator, NamedTuple, NoReturn, Optional

import torch

from te_fl import _native
from te_fl.common.recipe import DelayedScaling, Recipe, attends, describe_natively, native_of, switch
from te_fl.errors import FailedPrecondition
from te_fl.pytorch.distributed import amax_reduction, collectives
from te_fl.pytorch.fp8 import roles
from te_fl.pytorch.fp8.availability import get_default_recipe
from te_fl.pytorch.runtime import traced
from te_fl.pytorch.runtime.refuse import hides_misspelt, misspelling, refuse


class ModelInit(NamedTuple):
    """The quantized_model_init() settings for modules constructed inside of it."""

    recipe: Recipe
    native_recipe: dict
    preserve_high_precision_init_val: bool


class _State(threading.local):
    def __init__(self):
        self.scopes = []
        self.last: Optional[_Scope] = None  # the scope that autocast() made last, for reuse: programs mostly enter equal scopes
        self.model_init: Optional[ModelInit] = None


_state = _State()


def notice(module: Any, may_enter: bool = False) -> Optional[_Scope]:
    """Called when a module's forward begins. Records the recipe for the module's FP8 state.

    PyTorch's checkpoint reruns a forward inside of a backward, outside of the autocast of the first run. The rerun would compute in high precision,
    and its gradients would belong to another function. Such a rerun is refused; or, if the caller may enter a scope and only one recipe is possible,
    an autocast equal to the first run's is returned, in which the caller begins the forward again.
    """
    scopes = _state.scopes
    if scopes:
        scope, own = scopes[-1], module.__dict__  # reads __dict__ directly, which is faster than nn.Module's attribute access
        if own["_in_fp8"] and own["_recipe"] is not scope.recipe and own["_recipe"] != scope.recipe:
            own["_several_recipes"] = True
        own["_recipe"], own["_in_fp8"] = scope.recipe, scope.enabled
        for part in module._recipe_parts:
            part.__dict__["_recipe"] = scope.recipe
    elif module._in_fp8:
        if torch._C._current_graph_task_id() >= 0 and _quantises(module):
            ambiguity = _ambiguity(module)
            if may_enter and not ambiguity:
                return autocast(recipe=module._recipe)
            raise FailedPrecondition(
                f"{type(module).__name__}: the backward runs this forward again outside of its autocast, so in another "
                f"precision{ambiguity}; use te_fl.pytorch.checkpoint(), or give torch.utils.checkpoint.checkpoint() use_reentrant=False and "
                "context_fn=te_fl.pytorch.recompute_contexts (Transformers: model.gradient_checkpointing_enable({\"use_reentrant\": False, "
                "\"context_fn\": te_fl.pytorch.recompute_contexts}))")
        module.__dict__["_in_fp8"] = False
    return None


def _quantises(module: Any) -> bool:
    """True if the module's last forward in an autocast had something to quantise: norms never do, and attention does with few recipes."""
    return bool(getattr(module, "_sites", True)) and (not getattr(module, "_attends", False) or attends(module._recipe))


def _ambiguity(module: Any) -> str:
    """The reason why a rerun cannot use the first run's autocast; empty if it can."""
    if "_several_recipes" in module.__dict__:
        return ", and it ran by several recipes, of which any may have been that forward's"
    if isinstance(module._recipe, DelayedScaling):
        return ", and by delayed scaling with other scales, which the end of the autocast has updated"
    return ""


def module_scope(module: Any) -> Optional[_Scope]:
    """The scope in which a forward of the module runs: by the quantizers that a CustomRecipe's factory makes for it. None: the innermost one."""
    scopes = _state.scopes
    if not scopes or not scopes[-1].by_module or not module._sites or getattr(module, "_attends", False):
        return None
    outer = scopes[-1]
    scope = _Scope(True, False, outer.recipe, roles.native_of(module, outer.recipe), outer.group)
    scope.reuse_weights = outer.reuse_weights
    return scope


class reusing_weights:
    """A scope inside of an autocast. Modules called without is_first_microbatch read `flag`, F32 [1], on the device when the work runs: if it is
    nonzero, quantised weights are reused. None: no effect.
    """

    def __init__(self, flag: Optional[torch.Tensor]):
        self._flag = flag

    def __enter__(self) -> None:
        if self._flag is not None:
            _state.scopes[-1].reuse_weights = self._flag

    def __exit__(self, *error: Any) -> None:
        if self._flag is not None:
            _state.scopes[-1].reuse_weights = None


def reused_weights() -> Optional[torch.Tensor]:
    return _state.scopes[-1].reuse_weights if _state.scopes else None


class Captures:
    """State of CUDA graph captures that a framework makes itself. Process-wide, since only one graph is captured at a time.

    started: True from graph_state.set_capture_start() to set_capture_end(). flag: F32 [1] that the framework writes between replays; nonzero means
    that captured layers reuse their quantised weights. None: no flag.
    """

    started = False
    flag: Optional[torch.Tensor] = None


captures = Captures()


def graph_capturing() -> bool:
    """True while a framework makes a CUDA graph, including warm-up runs, and while the current stream is being captured."""
    return captures.started or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def captured_first(first: Any) -> Any:
    """is_first_microbatch of a forward when captures.flag is set. In FP8 during a capture this is the flag, whatever the program passes, since a
    replay would repeat the captured value.
    """
    return captures.flag if not isinstance(first, torch.Tensor) and enabled() and graph_capturing() else first


def enabled() -> bool:
    return bool(_state.scopes) and _state.scopes[-1].enabled


def delays() -> bool:
    """True inside of an autocast that computes or calibrates with delayed scaling."""
    return bool(_state.scopes) and _state.scopes[-1].delayed


def by_module() -> bool:
    """True inside of an autocast with a CustomRecipe, whose quantizers each module has of its own."""
    return _state.scopes[-1].by_module if _state.scopes else False  # torch.compile does not trace bool() of a list


def calibrating() -> bool:
    return bool(_state.scopes) and _state.scopes[-1].calibrating


def group() -> Optional[Any]:
    """The amax_reduction_group of the innermost autocast."""
    return _state.scopes[-1].group if _state.scopes else None


def active_recipe() -> Optional[Recipe]:
    """The recipe object of the innermost autocast."""
    recipe = _state.scopes[-1].recipe if _state.scopes else None
    return get_default_recipe() if recipe is _default_recipe else recipe


class _Scope(_native.Scope):
    """The result of autocast(). Entered and exited by C functions, so that KeyboardInterrupt cannot leave a scope half open."""

    reuse_weights: Optional[torch.Tensor] = None  # see reusing_weights
    by_module = False  # true for a CustomRecipe, whose quantizers each module has of its own; see module_scope()
    _open, _close, _thread = _native.begin_autocast, _native.end_autocast, _state

    def __init__(self, enabled: bool, calibrating: bool, recipe: Recipe, native: Optional[dict], group: Optional[Any] = None):
        self.enabled, self.calibrating, self.recipe, self.native, self.group = enabled, calibrating, recipe, native, group
        self.delayed = native is not None and native["kind"] == "delayed"
        self.by_module = enabled and native is not None and native["kind"] == "factory"
        reduces = self.delayed and enabled and native["reduce_amax"]
        self._arguments, self._entered = (enabled, calibrating, native, amax_reduction.find_reduction if reduces else None, group), []

    def __call__(self, function):
        """Decorates a function: each call runs in a scope of its own."""
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return wrapped


class _GraphScope:
    """An autocast in a function compiled by torch.compile; Dynamo traces its methods."""

    def __init__(self, *settings: Any):
        self._given, self._entered = settings, []

    def __enter__(self) -> "_GraphScope":
        if torch.compiler.is_compiling():
            enabled, calibrating, _, native, group = self._given
            if group is not None and enabled and native.get("reduce_amax") and collectives.available() and collectives.size_of(group) > 1:
                raise refuse("autocast", "amax_reduction_group", group, "graphs of torch.compile reduce over the default group; leave it out, or "
                             "leave fullgraph=True out")
            self._entered.append(traced.graph.begin_autocast(enabled, calibrating, native))
        else:
            self._entered.append(_Scope(*self._given).__enter__())
        return self

    def __exit__(self, *error: Any) -> None:
        entered = self._entered.pop()
        if isinstance(entered, torch.Tensor):
            traced.graph.end_autocast(entered)
        else:
            entered.__exit__(*error)


@hides_misspelt
def autocast(enabled: bool = True, calibrating: bool = False, recipe: Optional[Recipe] = None, amax_reduction_group: Optional[Any] = None,
             _graph: bool = False, **misspelt: NoReturn):
    """A scope in which modules' forwards on this thread compute in FP8 by `recipe`: with te.autocast(recipe=DelayedScaling()): ...

    enabled: False computes in high precision. calibrating: with enabled=False and delayed scaling, records amaxes and sets scales. recipe: of
    te_fl.common.recipe; None: get_default_recipe(). A recipe that te-fl does not support raises te_fl.errors.Unsupported here, naming the field.
    amax_reduction_group: with delayed scaling and reduce_amax, the process group whose ranks share scales, computed from the ranks' largest amaxes;
    None: torch.distributed's default group, if initialised. Its ranks reduce at the end of the outermost autocast and of each backward, so all ranks
    must reach these points; see docs/pytorch.md. The backward needs no scope. The result is a context manager and a decorator. It is reusable, also
    by several threads at a time.
    """
    if misspelt:
        raise misspelling(autocast, misspelt)
    enabled, calibrating = switch("autocast", "enabled", enabled), switch("autocast", "calibrating", calibrating)
    if torch.compiler.is_compiling():
        chosen = get_default_recipe() if recipe is None else recipe
        native = describe_natively(chosen if enabled or calibrating else DelayedScaling())
        if native["kind"] == "factory":
            raise refuse("autocast", "recipe", chosen, "graphs of torch.compile hold no quantizers; leave fullgraph=True out, or use another recipe")
        if native.pop("functions", None) is not None:
            raise refuse("autocast", "recipe", chosen, "graphs of torch.compile hold no functions for amaxes and scales; give "
                         "amax_compute_algo='max' or 'most_recent' and no scaling_factor_compute_algo, or leave fullgraph=True out")
        return _GraphScope(enabled, calibrating, chosen, native, amax_reduction_group)
    chosen = _default_recipe if recipe is None else recipe
    native = native_of(chosen) if enabled or calibrating else None  # a changed field of the recipe gives another object
    last = _state.last
    if (last is not None and last.native is native and last.recipe is chosen and last.enabled is enabled and last.calibrating is calibrating
            and amax_reduction_group is None and last.reuse_weights is None):
        return last
    made = _Scope(enabled, calibrating, chosen, native, amax_reduction_group)
    if amax_reduction_group is None:
        _state.last = made
    return made


_default_recipe = get_default_recipe()


_warned = False


@hides_misspelt
def fp8_autocast(enabled: bool = True, calibrating: bool = False, fp8_recipe: Optional[Recipe] = None, fp8_group: Optional[Any] = None,
                 _graph: bool = False, **misspelt: NoReturn):
    """An older name of autocast()."""
    if misspelt:
        raise misspelling(fp8_autocast, misspelt)
    global _warned
    if not _warned:
        _warned = True
        warnings.warn("fp8_autocast is the older name of autocast, which takes recipe and amax_reduction_group", DeprecationWarning,
                      stacklevel=2)
    enabled, calibrating = (switch("fp8_autocast", name, value, "fp8_recipe") for name, value in (("enabled", enabled), ("calibrating", calibrating)))
    return autocast(enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group, _graph=_graph)


def model_init() -> Optional[ModelInit]:
    """The settings of the innermost quantized_model_init() on this thread; None: modules keep high-precision weights."""
    return _state.model_init


@contextlib.contextmanager
def _making_codes(settings: Optional[ModelInit]) -> Iterator[None]:
    outer = _state.model_init
    _state.model_init = settings
    try:
        yield
    finally:
        _state.model_init = outer


@hides_misspelt
def quantized_model_init(enabled: bool = True, recipe: Optional[Recipe] = None, preserve_high_precision_init_val: bool = False,
                         **misspelt: NoReturn) -> contextlib.AbstractContextManager:
    """Modules constructed inside store the weights of their products as FP8 codes only (te_fl.pytorch.fp8.float8_tensor.Float8Tensor).

    enabled: False constructs modules as outside of all such scopes. recipe: determines the scaling of the codes; None: get_default_recipe(). A recipe
    that te-fl does not support raises te_fl.errors.Unsupported. preserve_high_precision_init_val: a weight's get_high_precision_init_val() returns
    the values that its codes were made from, on the host, until its clear_high_precision_init_val().
    """
    if misspelt:
        raise misspelling(quantized_model_init, misspelt)
    enabled = switch("quantized_model_init", "enabled", enabled)
    preserves = switch("quantized_model_init", "preserve_high_precision_init_val", preserve_high_precision_init_val)
    recipe = get_default_recipe() if recipe is None else recipe
    return _making_codes(ModelInit(recipe, native_of(recipe), preserves) if enabled else None)


@hides_misspelt
def fp8_model_init(enabled: bool = True, recipe: Optional[Recipe] = None, preserve_high_precision_init_val: bool = False,
                   **misspelt: NoReturn):
    """An older name of quantized_model_init()."""
    if misspelt:
        raise misspelling(fp8_model_init, misspelt)
    warnings.warn("fp8_model_init is the older name of quantized_model_init, which takes the same arguments", DeprecationWarning, stacklevel=2)
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
