"""Errors for arguments that te-fl does not support. No argument is ignored silently: each either has an effect, or is checked here against the only
supported value.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from typing import Any, Callable, Iterable, Mapping, Tuple, TypeVar, cast

import torch
import torch.distributed as dist

from te_fl.errors import InvalidArgument, Unsupported, did_you_mean
from te_fl.pytorch.runtime.argument_rules import RULES


_SIZES = ("in_features", "out_features", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_gqa_groups")
_PROBABILITIES = ("attention_dropout", "hidden_dropout", "drop_path_rate")
_EPSILONS = ("eps", "layernorm_epsilon", "qk_norm_eps")
_FUNCTIONS = ("init_method", "output_layer_init_method", "get_rng_state_tracker")

_Init = TypeVar("_Init", bound=Callable[..., Any])


def refuse(where: str, argument: str, value: Any, way_out: str) -> Unsupported:
    return Unsupported(f"{where}: {argument} = {value!r} is not supported; {way_out}")


def checks_keywords(*more: str) -> Callable[[_Init], _Init]:
    """Decorates constructors: raises TypeError for an unknown keyword, naming the nearest known one. more: names that the constructor's **kwargs
    accepts.
    """
    def decorate(init: _Init) -> _Init:
        known = [name for name, p in inspect.signature(init).parameters.items() if p.kind is not p.VAR_KEYWORD][1:] + list(more)

        @functools.wraps(init)
        def checked(self: Any, *arguments: Any, **keywords: Any) -> None:
            for name in keywords:
                if name not in known:
                    raise TypeError(f"{type(self).__name__}() has no argument {name!r}{did_you_mean(name, known)}")
            init(self, *arguments, **keywords)

        return cast(_Init, checked)
    return decorate


def hides_misspelt(function: _Init) -> _Init:
    """Decorates functions whose last parameter, **misspelt, collects unknown keywords; hides that parameter from signature() and help()."""
    shown = inspect.signature(function)
    setattr(function, "__signature__", shown.replace(parameters=list(shown.parameters.values())[:-1]))
    return function


def misspelling(function: Callable, names: Iterable[str]) -> TypeError:
    """The error for unknown keywords of a function decorated with hides_misspelt(); names the nearest known keyword."""
    name = next(iter(names))
    return TypeError(f"{function.__qualname__}() has no argument {name!r}{did_you_mean(name, list(inspect.signature(function).parameters))}")


def only(where: str, *rules: Tuple[str, Any, Any, str]) -> None:
    """Checks rules (argument, value, the only supported value, advice), and refuses the first whose value differs."""
    for argument, value, supported, way_out in rules:
        if value is not supported and value != supported:
            raise refuse(where, argument, value, way_out)


def check_group(where: str, argument: str, group: Any) -> None:
    """Refuses objects that programs mistake for a process group: a DeviceMesh, a DTensor, and a group that does not contain this rank."""
    if group is None:
        return
    if group is getattr(getattr(dist, "GroupMember", None), "NON_GROUP_MEMBER", group):  # missing from a PyTorch without torch.distributed
        raise InvalidArgument(f"{where}: {argument} is a process group of other ranks, as new_group() gave it to this one (NON_GROUP_MEMBER); make the "
                              "call on the group's ranks only, or give a group that has this rank")
    kind, mesh = type(group).__name__, "it"
    if isinstance(group, torch.Tensor):
        mesh = "its device_mesh"
    elif kind != "DeviceMesh":
        return
    raise refuse(where, argument, f"a {kind}", f"it takes a torch.distributed.ProcessGroup; give that of one dimension of {mesh}: get_group(NAME)")


def process_group(where: str, argument: str, group: Any) -> None:
    """Refuses objects that are not process groups. None is accepted."""
    check_group(where, argument, group)
    if group is not None and not isinstance(group, getattr(dist, "ProcessGroup", ())):
        raise refuse(where, argument, group, "give a torch.distributed.ProcessGroup, or leave it out")


_CONTEXT_KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")


def context_parallel(where: str, cp_group: Any, cp_global_ranks: Any, cp_comm_type: Any) -> None:
    """Checks the arguments of context parallelism: one process group, or for 'a2a+p2p' a list of two, of the all-to-all and of the exchange of keys."""
    choice(where, "cp_comm_type", cp_comm_type, _CONTEXT_KINDS)
    groups = cp_group if isinstance(cp_group, (list, tuple)) else (cp_group,)
    for one in groups:
        process_group(where, "cp_group", one)
    if cp_group is None:
        return
    if (cp_comm_type == "a2a+p2p") != isinstance(cp_group, (list, tuple)) or (cp_comm_type == "a2a+p2p" and (len(groups) != 2 or None in groups)):
        shown = f"a list of {len(groups)}" if isinstance(cp_group, (list, tuple)) else "one process group"
        raise InvalidArgument(f"{where}: cp_group is {shown} with cp_comm_type {cp_comm_type!r}; 'a2a+p2p' takes a list of two process groups, [of the "
                              "all-to-all of heads, of the exchange of keys], and the other kinds take one process group")
    ranks = math.prod(one.size() for one in groups)
    if cp_global_ranks is None or ranks == 1:
        return
    named = list(cp_global_ranks)
    own = None if len(groups) > 1 else list(dist.get_process_group_ranks(groups[0]))
    if len(named) != ranks or (own is not None and named != own):
        raise InvalidArgument(f"{where}: cp_global_ranks is {named}, and cp_group has {ranks} ranks{'' if own is None else f', {own}'}; give the global ranks of "
                              "the group in its order, or leave them out")


def tensor_parallel(where: str, tp_group: Any, tp_size: Any) -> None:
    """Checks tp_group and tp_size. As in Transformer Engine, the size of a given group overrides tp_size."""
    process_group(where, "tp_group", tp_group)
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise InvalidArgument(f"{where}: tp_size is {tp_size!r}; it is the number of ranks that divide the module, 1 or more")


def parallel_mode(where: str, mode: Any) -> None:
    if mode not in (None, "column", "row"):
        raise InvalidArgument(f"{where}: parallel_mode is {mode!r}; it is None, 'column' or 'row'")


def symmetric(where: str, value: Any) -> None:
    if value is not None:
        raise refuse(where, "symmetric_ar_type", value, "sums over ranks are the process group's own; leave it out")


def choice(where: str, argument: str, value: Any, supported: Iterable[str]) -> None:
    supported = tuple(supported)
    if value not in supported:
        raise InvalidArgument(f"{where}: {argument} is {value!r}; it is one of {', '.join(map(repr, supported))}")


def integer(where: str, argument: str, value: Any) -> None:
    """Refuses values that are not integers, including floats and strings."""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{where}: {argument} is {value!r}; it is an integer") from None


def size(where: str, argument: str, value: Any, least: int = 1) -> None:
    integer(where, argument, value)
    if value < least:
        raise InvalidArgument(f"{where}: {argument} is {value}; it is {least} or more")


def number(where: str, argument: str, value: Any, rule: str, holds: Callable[[float], bool]) -> None:
    """Refuses values that are not numbers (including strings), and numbers that violate the rule."""
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{where}: {argument} is {value!r}; it is a number")
    if not holds(float(value)):
        raise InvalidArgument(f"{where}: {argument} is {value}; it is {rule}")


def epsilon(where: str, argument: str, value: Any) -> None:
    number(where, argument, value, "finite and 0 or more", lambda v: 0.0 <= v < math.inf)


def values(where: str, arguments: Mapping[str, Any]) -> None:
    """Refuses invalid values of the constructor arguments named above, for any module."""
    named = {name: value for name, value in arguments.items() if value is not None}
    for name in _SIZES:
        if name in named:
            size(where, name, named[name])
    for name in _PROBABILITIES:
        if name in arguments:
            number(where, name, arguments[name], "a probability, 0 or more and less than 1", lambda v: 0.0 <= v < 1.0)
    for name in _EPSILONS:
        if name in arguments:
            epsilon(where, name, arguments[name])
    for name in _FUNCTIONS:
        if name in named and not callable(named[name]):
            raise TypeError(f"{where}: {name} is {named[name]!r}; it is a function, or None")
    if "layer_number" in named:
        integer(where, "layer_number", named["layer_number"])
    if "softmax_scale" in named:
        number(where, "softmax_scale", named["softmax_scale"], "finite", math.isfinite)


def check(where: str, arguments: Mapping[str, Any]) -> None:
    """Refuses unsupported arguments of a module's constructor, by the module's rules in nn/modules.yaml, and invalid values. arguments: by name, as
    in the constructor's locals().
    """
    values(where, arguments)
    for kind, names, *more in RULES[where]:
        named = [arguments[name] for name in names]
        if kind == "choice":
            choice(where, names[0], named[0], more[0])
        elif kind == "off":
            only(where, (names[0], bool(named[0]), False, more[0]))
        else:
            {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel, "parallel_mode": parallel_mode, "symmetric": symmetric}[kind](where, *named)
