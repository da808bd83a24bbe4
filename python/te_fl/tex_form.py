"""The second form of an op: a Python function with the arguments and results that Transformer Engine's extension module transformer_engine_torch gives
the op (docs/transformer-engine-functions.md).

In a registry the form of op NAME is the op "tex::NAME"; in policies, explain() and usage() NAME governs both forms. te-fl's own functions are the
default of the form, and call the typed op. While no other function is registered, te_fl.transformer_engine_torch has te-fl's functions themselves, so
a call costs nothing more; the first registration replaces the module's function by one that dispatches.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys
import threading
from types import ModuleType
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Optional, Tuple, Union

from te_fl import _native, tex_results
from te_fl.errors import Internal, InvalidArgument, Unsupported
from te_fl.registration import BackendImplKind, OpImpl, OpRegistry, owned_by, watch_registrations

PREFIX = "tex::"
OWN = "default.te_fl"  # the impl_id of te-fl's own functions, which policy/select.cpp knows
_OWN_PRIORITY = 75  # below vendors' functions, above reference ones, if the policy prefers none

# Functions that write to their arguments. After one of them failed in its computation, another implementation would start from half-written values.
_WRITERS = frozenset("""multi_tensor_scale multi_tensor_scale_tensor multi_tensor_adam multi_tensor_adam_param_remainder multi_tensor_adam_fp8
    multi_tensor_adam_capturable multi_tensor_adam_capturable_master multi_tensor_sgd multi_tensor_compute_scale_and_scale_inv
    multi_tensor_compute_scale_inv_e8m0 fused_amax_and_scale_update_after_reduction copy_to_kv_cache thd_out_correction thd_grad_correction
    thd_second_half_lse_correction scaled_softmax_backward scaled_masked_softmax_backward scaled_upper_triang_masked_softmax_backward
    scaled_aligned_causal_masked_softmax_backward""".split())
_ACCUMULATING = {"generic_gemm": 14, "te_general_grouped_gemm": 14}  # the positions of `accumulate`
# Names of functions whose typed op has another name.
TYPED_NAMES = {"te_general_grouped_gemm": "grouped_gemm"}
# Errors of a call that the function could not even begin, such as a function that the vendor's extension lacks.
NOT_BEGUN = (TypeError, AttributeError, ImportError)


@functools.lru_cache(maxsize=None)
def has_form(name: str) -> bool:
    """True if `name` is a function of Transformer Engine's or TransformerEngine-FL's extension module, or an op of the catalogue."""
    return name in _tex_names() or is_typed(name)


@functools.lru_cache(maxsize=None)
def _tex_names() -> FrozenSet[str]:
    return frozenset(_native.tex_names())


def is_typed(name: str) -> bool:
    """True if `name` is an op of the catalogue."""
    if "::" in name:
        return False
    try:
        return bool(_native.schema(name)["args"])
    except LookupError:
        return False


@dataclasses.dataclass(frozen=True)
class TexImpl(OpImpl):
    """An implementation with Transformer Engine's arguments and results: OpImpl of transformer_engine.plugin.core. For a name that Transformer Engine
    does not have, it implements an op of its own.

    If fn raises an exception, the next implementation runs the call, unless the policy is strict; then fn is not tried again for this op until the
    policy changes. NotImplementedError and a `supports` that refuses concern the call only. min_arch: a number such as 80, or its text, "80", "sm_80".
    is_available() is false if `fn._is_available()` raises.
    """

    min_arch: Optional[Union[int, str]] = None  # type: ignore[assignment]
    architecture: int = dataclasses.field(init=False, repr=False, compare=False, default=0)  # min_arch as a number

    def __post_init__(self) -> None:
        super().__post_init__()
        digits = "".join(c for c in str(self.min_arch or "0") if c.isdigit())
        if not digits:
            raise InvalidArgument(f"{self}: min_arch is {self.min_arch!r}; it is an architecture such as 80 or 'sm_80'")
        object.__setattr__(self, "architecture", int(digits))
        object.__setattr__(self, "_runner", _Runner(self))

    @property
    def registered_name(self) -> str:
        return PREFIX + self.op_name if has_form(self.op_name) else self.op_name

    def is_available(self) -> bool:
        try:
            return super().is_available()
        except Exception:
            return False

    def as_function(self) -> Tuple[Callable[..., Any], Optional[Callable[..., Any]]]:
        return self._runner, self._runner.supports  # type: ignore[attr-defined]

    def calls(self) -> "_Runner":
        """Returns the callable of the registry: fn, with its failures remembered and its results checked."""
        return self._runner  # type: ignore[attr-defined,no-any-return]


_RUNNING = "it is running on this thread, and has called the op that it implements"


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.failed: Dict[str, List[Tuple["_Runner", str]]] = {}  # for each op: failures of the call in progress, until another function succeeds
        self.running: List["_Runner"] = []


_thread = _OfThread()


class _Runner:
    """Runs an implementation for a registry."""

    def __init__(self, impl: TexImpl) -> None:
        self.impl = impl
        # for _common() of te_fl.registration, which describes functions by these
        self.__module__, self.__qualname__ = getattr(impl.fn, "__module__", "?"), getattr(impl.fn, "__qualname__", type(impl.fn).__name__)
        self._check = None if impl.impl_id == OWN else tex_results.checker(impl.op_name)
        self._available = not callable(getattr(impl.fn, "_is_available", None))
        self._failure: Optional[Tuple[str, str]] = None  # (what failed, the policy's text)
        self._form: Tuple[Any, str] = None, ""  # te-fl's function that the order of arguments was compared with, and the difference

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            result = self.checked(*arguments, **options)
        except NotImplementedError:
            raise
        except Exception as error:
            self._fail(error, arguments, options)
            raise
        if _thread.failed:
            self._succeed()
        return result

    def checked(self, *arguments: Any, **options: Any) -> Any:
        """Calls the function; raises tex_results.WrongResult if it returns what it may not. A function that calls the op which it implements gets the next
        implementation.
        """
        if self in _thread.running:
            raise Unsupported(_RUNNING)
        _thread.running.append(self)
        try:
            result = self.impl.fn(*arguments, **options)
        finally:
            _thread.running.remove(self)
        if self._check is not None:
            self._check(arguments, options, result)
        return result

    def _fail(self, error: Exception, arguments: tuple, options: dict) -> None:
        """Raises Unsupported, so that the next implementation runs the call. Returns if that must not be."""
        impl, name = self.impl, self.impl.op_name
        if impl.impl_id == OWN or _native.policy_settings()["strict"]:
            return
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, NOT_BEGUN) and _writes(name, arguments, options):
            raise Internal(f"{impl} failed with {text}; it may have written to its arguments already, so no other implementation can run the call. "
                           f"TE_FL_PER_OP={name}=flagos leaves it out") from error
        failed = _thread.failed.setdefault(name, [])
        if any(runner is self for runner, _ in failed):
            failed.clear()  # of an earlier call, which failed in all implementations
        failed.append((self, text))
        raise Unsupported(f"it failed with {text}") from error

    def _succeed(self) -> None:
        """Remembers the implementations that failed before this one in the call."""
        failed = _thread.failed.pop(self.impl.op_name, ())
        if not any(runner is self for runner, _ in failed):  # else they are of an earlier call, which failed in all implementations
            for runner, text in failed:
                runner._failure = text, _native.policy_text()

    def refusal(self) -> str:
        """Returns the reason for which the implementation is not to be tried, whatever the call; empty if it may be."""
        if self in _thread.running:
            return _RUNNING
        if not self._available:
            self._available = self.impl.is_available()
            if not self._available:
                return "its _is_available() says no"
        if self._failure is not None:
            text, policy = self._failure
            if policy == _native.policy_text():
                return f"it failed before, with {text}; another policy, or bump_policy_epoch(), lets it run again"
            self._failure = None
        return self._other_form() if _calls_of_package else ""

    def _other_form(self) -> str:
        """Returns the difference if Transformer Engine's Python package, which passes arguments by position, has another order of them than fn; empty if
        it has not, or if fn does not tell its parameters.
        """
        own = own_function(self.impl.op_name)
        if own is not self._form[0]:
            self._form = own, _difference(_parameters(self.impl.fn), _parameters(own))
        return self._form[1]

    def failed_in_call(self) -> bool:
        """True if this implementation failed in the call in progress on this thread, which te-fl's own function now runs by the typed op."""
        return any(runner is self for runner, _ in _thread.failed.get(self.impl.op_name, ()))

    def supports(self, *arguments: Any, **options: Any) -> Union[bool, str]:
        refusal = self.refusal()
        if refusal:
            return refusal
        least = self.impl.architecture
        if least and (found := _architecture(tex_results.first_tensor(arguments, options))) < least:
            return f"it needs architecture {least} or newer, and the tensors' device has {found}"
        return self.accepts(arguments, options)

    def accepts(self, arguments: tuple, options: dict) -> Union[bool, str]:
        """The answer of supported_dtypes, devices and supports; a `supports` that raises refuses."""
        try:
            return OpImpl.supports_function(self.impl, arguments, options)
        except Exception as error:
            return f"its supports() failed with {type(error).__name__}: {error}"

    def forget(self) -> None:
        self._failure = None


def _parameters(function: Any) -> List[str]:
    """The names of the parameters of a Python function; none if it does not tell them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def _difference(theirs: List[str], own: List[str]) -> str:
    """Compares the places of those parameters whose names two functions share; other names may differ."""
    for place, name in enumerate(theirs):
        if name in own and own.index(name) != place:
            return (f"it has the arguments of another version of Transformer Engine: its argument {place + 1} is {name}, which this version's package passes "
                    f"as {own.index(name) + 1}")
    return ""


_calls_of_package = False


def serve_package() -> None:
    """From now on Transformer Engine's Python package calls the functions, with the arguments that te-fl's function of the name has."""
    global _calls_of_package
    _calls_of_package = True


def _writes(name: str, arguments: tuple, options: dict) -> bool:
    place = _ACCUMULATING.get(name)
    if place is None:
        return name in _WRITERS
    return bool(arguments[place] if len(arguments) > place else options.get("accumulate"))


def _architecture(tensor: Any) -> int:
    """The architecture of a tensor's device, such as 90; 0 on a host."""
    if tensor is None or tensor.device.type != "cuda":
        return 0
    major, minor = sys.modules["torch"].cuda.get_device_capability(tensor.device)
    return 10 * int(major) + int(minor)


# ---- the functions of te_fl.transformer_engine_torch

_MODULE = "te_fl.transformer_engine_torch"
_lock = threading.RLock()  # for the two below
_own: Dict[str, Any] = {}  # te-fl's functions that are replaced in the module at present; None: te-fl has no such name
_adapted: Dict[Tuple[str, str], str] = {}  # the names of vendors' functions, by the (op, impl_id) of the typed implementations by them
_replaced: Dict[str, Any] = {}  # the module's functions in their place
_SCALES = ("multi_tensor_scale", "multi_tensor_scale_tensor")
# Classes of the module whose objects a vendor's function makes.
_MAKERS = {"create_comm_overlap": "CommOverlap", "create_comm_overlap_p2p": "CommOverlapP2P", "create_comm_overlap_helper": "CommOverlapHelper"}


def _forget_lock() -> None:
    """Replaces the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


def _is_own(function: Any) -> bool:
    """False for a placeholder of a name that te-fl does not support, which is a class, and for a module of the package."""
    return callable(function) and not isinstance(function, type)


def own_function(name: str) -> Any:
    """te-fl's function of this name; None if te-fl has none, or if te_fl.transformer_engine_torch is not imported."""
    function = _own[name] if name in _own else getattr(sys.modules.get(_MODULE), name, None)
    return function if _is_own(function) else None


def own_implementation(name: str) -> TexImpl:
    """The implementation of a name by te-fl's function. Looks the function up when it runs, since it depends on the version of the package."""
    def own(*arguments: Any, **options: Any) -> Any:
        if name in _SCALES and "noop_flag" in options:  # TransformerEngine-FL's name of the argument
            options["is_infinite"] = options.pop("noop_flag")
        return own_function(name)(*arguments, **options)

    own.__qualname__, own.__module__ = name, _MODULE
    return TexImpl(name, OWN, BackendImplKind.DEFAULT, own, priority=_OWN_PRIORITY, deterministic=True)


def ensure_own(registry: OpRegistry, names: Iterable[str]) -> None:
    """Registers te-fl's functions of these names, where te-fl has one, unless they are registered."""
    there = {row["op_name"] for row in _native.snapshot(registry._handle) if row["impl_id"] == OWN}
    with owned_by("te_fl"):
        registry.register_many([own_implementation(name) for name in names if own_function(name) is not None and PREFIX + name not in there])


def _maker(name: str, place: str, dispatch: Callable[..., Any]) -> type:
    return type(place, (), {"__new__": lambda cls, *arguments, **options: dispatch(*arguments, **options), "__module__": "transformer_engine_torch",
                            "__doc__": f"Makes the object by the op {name}."})


def _put(members: dict, name: str, value: Any) -> None:
    """Replaces a name of the module. _own has what it was; a function that the module has got since counts as its own."""
    if name not in _own or members.get(name) is not _replaced[name]:
        _own[name] = members.get(name)
    members[name] = _replaced[name] = value


def _replace(members: dict, name: str) -> None:
    dispatch = _native.op(PREFIX + name, f"The implementations of {name} that have Transformer Engine's arguments.")
    _put(members, name, dispatch)
    if name in _MAKERS:
        _put(members, _MAKERS[name], _maker(name, _MAKERS[name], dispatch))


def _restore(members: dict, name: str) -> None:
    for place in (name, _MAKERS.get(name)):
        if place is None:
            continue
        function = _own.pop(place)
        del _replaced[place]
        if function is None:
            del members[place]
        else:
            members[place] = function


def _names_of_others(registry: OpRegistry) -> FrozenSet[str]:
    """The names for which others than te-fl have registered functions."""
    return frozenset(row["op_name"][len(PREFIX):] for row in _native.snapshot(registry._handle) if row["op_name"].startswith(PREFIX) and row["impl_id"] != OWN)


def install(module: Optional[ModuleType] = None) -> None:
    """Makes te_fl.transformer_engine_torch dispatch the names that others than te-fl have registered, and only those. Called after each registration,
    and after the module's functions have changed.
    """
    module = module or sys.modules.get(_MODULE)
    if module is None or not getattr(module, "_complete", False):
        return
    registry = OpRegistry.instance()
    members = vars(module)
    with _lock:
        theirs = _names_of_others(registry)
        for name in theirs:
            _replace(members, name)
        for name in [n for n in _replaced if n not in theirs and n not in _MAKERS.values()]:
            _restore(members, name)
    ensure_own(registry, theirs)
    _adapt(registry, module._typed_ops.adapted)


def _adapt(registry: OpRegistry, adapted: Callable[[TexImpl], Optional[OpImpl]]) -> None:
    """Registers vendors' functions as implementations of typed ops, and removes those whose function was removed."""
    owners = {(row["op_name"], row["impl_id"]): row["owner"] for row in _native.snapshot(registry._handle)}
    for op_name, impl_id in [key for key, name in _adapted.items() if (PREFIX + name, key[1]) not in owners]:
        del _adapted[op_name, impl_id]
        if (op_name, impl_id) in owners:
            registry.unregister(op_name, impl_id)
    for impl in list(registry.registered()):
        key = TYPED_NAMES.get(impl.op_name, impl.op_name), impl.impl_id
        if not isinstance(impl, TexImpl) or impl.kind is not BackendImplKind.VENDOR or key in owners:
            continue
        made = adapted(impl)
        if made is not None:
            _adapted[key] = impl.op_name
            with owned_by(owners[impl.registered_name, impl.impl_id]):
                registry.register_impl(made)


def _follow(registry: OpRegistry, names: Iterable[str]) -> None:
    if not registry.is_process() or not any(name.startswith(PREFIX) for name in names):
        return
    if "torch" in sys.modules and _MODULE not in sys.modules:
        importlib.import_module(_MODULE)  # calls install()
    else:
        install()


watch_registrations(_follow)


def forget_failures() -> None:
    """Lets implementations run again that failed."""
    for impl in list(OpRegistry.instance().registered()):
        if isinstance(impl, TexImpl):
            impl.calls().forget()


def explain(op: str, positional: tuple, arguments: dict) -> Optional[dict]:
    """explain() of the form tex::NAME of an op; None if nothing is registered for it."""
    if PREFIX + op not in {row["op_name"] for row in _native.snapshot(OpRegistry.instance()._handle)}:
        return None
    made = _native.resolve(PREFIX + op, arguments, None, positional) if positional or arguments else _native.explain(PREFIX + op, "cpu", [], [])
    return {**made, "op": op, "form": "tex"}
