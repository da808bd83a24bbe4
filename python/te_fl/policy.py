"""Policies set from code, which select the implementations for the ops of a thread."""

from __future__ import annotations

import functools
from typing import Any, Callable, Literal, Mapping, Optional, Sequence, TypeVar, Union, cast

from te_fl import _native
from te_fl.errors import did_you_mean

_Init = TypeVar("_Init", bound=Callable[..., Any])


def _names_the_nearest(init: _Init) -> _Init:
    """Decorates a constructor: raises TypeError for an unknown keyword, naming the nearest known one."""
    @functools.wraps(init)
    def checked(self: Any, *arguments: Any, **settings: Any) -> None:
        for name in settings:
            if name not in init.__kwdefaults__:
                raise TypeError(f"policy() has no setting {name!r}{did_you_mean(name, list(init.__kwdefaults__))}")
        init(self, *arguments, **settings)
    return cast(_Init, checked)


def _listed(value, separator):
    return value if value is None or isinstance(value, str) else separator.join(value)


class policy(_native.Scope):
    """A scope: with te_fl.policy(prefer="vendor", per_op={"gelu": ["reference"]}): ...

    Applies to ops called inside, on this thread; for te_fl.jax, to ops traced inside. Omitted settings keep their outer values. prefer: flagos,
    default, vendor or reference. strict: if the first candidate cannot run, the call is an error. per_op: for each op an exclusive list of tokens
    (kinds, vendor:NAME, impl:ID), or the text of TE_FL_PER_OP. A misspelt op or token raises te_fl.errors.InvalidArgument on construction, naming the
    nearest known one.
    """

    @_names_the_nearest
    def __init__(self, *, prefer: Optional[Literal["flagos", "default", "vendor", "reference"]] = None, strict: Optional[bool] = None, deterministic: Optional[bool] = None,
                 allow_vendors: Union[str, Sequence[str], None] = None, deny_vendors: Union[str, Sequence[str], None] = None,
                 per_op: Union[str, Mapping[str, Union[str, Sequence[str]]], None] = None, max_staged_bytes: Optional[int] = None):
        if per_op is not None and not isinstance(per_op, str):
            per_op = ";".join(f"{op}={_listed(tokens, '|')}" for op, tokens in per_op.items())
        settings = {"prefer": prefer, "strict": strict, "deterministic": deterministic, "allow_vendors": _listed(allow_vendors, ","),
                    "deny_vendors": _listed(deny_vendors, ","), "per_op": per_op, "max_staged_bytes": max_staged_bytes}
        _native.check_policy(settings)  # raises for wrong settings
        self._arguments, self._entered = (settings,), []

    _open, _close, _thread = _native.enter_policy, _native.leave_policy, None


def policy_text() -> str:
    """The policy in force on this thread, as readable text."""
    return _native.policy_text()
