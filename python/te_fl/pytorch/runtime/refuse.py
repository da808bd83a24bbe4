"""Errors of arguments that te-fl does not honour. None is ignored: what has no effect with the value that is accepted is said here."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Iterable, Mapping, Tuple, TypeVar, cast

import torch.distributed as dist

from te_fl.errors import Unsupported, did_you_mean
from te_fl.pytorch.runtime.argument_rules import RULES

_ONE_RANK = "te_fl.pytorch runs on one rank so far; leave it out"

_Init = TypeVar("_Init", bound=Callable[..., Any])


def refuse(where: str, argument: str, value: Any, way_out: str) -> Unsupported:
    return Unsupported(f"{where}: {argument} = {value!r} is not served; {way_out}")


def checks_keywords(*more: str) -> Callable[[_Init], _Init]:
    """A decorator of constructors: TypeError for a keyword that it has not, naming the nearest. more: names that its **kwargs take."""
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
    """A decorator of functions whose last parameter, **misspelt, takes the keywords that they have not: signature() and help() leave it out."""
    shown = inspect.signature(function)
    setattr(function, "__signature__", shown.replace(parameters=list(shown.parameters.values())[:-1]))
    return function


def misspelling(function: Callable, names: Iterable[str]) -> TypeError:
    """For a function that hides_misspelt() decorates: the error of keywords that it has not, which names the nearest that it has."""
    name = next(iter(names))
    return TypeError(f"{function.__name__}() has no argument {name!r}{did_you_mean(name, list(inspect.signature(function).parameters))}")


def only(where: str, *rules: Tuple[str, Any, Any, str]) -> None:
    """Refuses the first of (argument, value, the only value served, way out) that does not hold."""
    for argument, value, served, way_out in rules:
        if value is not served and value != served:
            raise refuse(where, argument, value, way_out)


def group_of_one(where: str, argument: str, group: Any) -> None:
    """Refuses a process group, or a list of them, of several ranks. None is no group."""
    if group is None:
        return
    kind = getattr(dist, "ProcessGroup", ())  # missing from a build of PyTorch without torch.distributed
    for one in group if isinstance(group, (list, tuple)) else (group,):
        if not isinstance(one, kind):
            raise refuse(where, argument, group, "give a torch.distributed.ProcessGroup of one rank, or leave it out")
        if one.size() != 1:
            raise refuse(where, argument, group, f"it has {one.size()} ranks, and {_ONE_RANK}")


def one_rank(where: str, tp_group: Any, tp_size: int) -> None:
    """As Transformer Engine does, this takes the size of a given group for tp_size. sequence_parallel has no effect on one rank."""
    group_of_one(where, "tp_group", tp_group)
    if tp_group is None and tp_size != 1:
        raise refuse(where, "tp_size", tp_size, _ONE_RANK)


def parallel_mode(where: str, mode: Any) -> None:
    """With one rank a column- or row-parallel layer is the whole layer."""
    if mode not in (None, "column", "row"):
        raise ValueError(f"{where}: parallel_mode is {mode!r}; it is None, 'column' or 'row'")


def symmetric(where: str, value: Any) -> None:
    if value is not None:
        raise refuse(where, "symmetric_ar_type", value, _ONE_RANK)


def choice(where: str, argument: str, value: Any, served: Iterable[str]) -> None:
    served = tuple(served)
    if value not in served:
        raise ValueError(f"{where}: {argument} is {value!r}; it is one of {', '.join(map(repr, served))}")


def check(where: str, arguments: Mapping[str, Any]) -> None:
    """Refuses the arguments of a module's constructor that are not honoured, by the module's rules in nn/modules.yaml. arguments: by name,
    as the constructor's locals() has them."""
    for kind, names, *more in RULES[where]:
        values = [arguments[name] for name in names]
        if kind == "choice":
            choice(where, names[0], values[0], more[0])
        elif kind == "off":
            only(where, (names[0], bool(values[0]), False, more[0]))
        elif kind == "group_of_one":
            group_of_one(where, names[0], values[0])
        else:
            {"one_rank": one_rank, "parallel_mode": parallel_mode, "symmetric": symmetric}[kind](where, *values)
