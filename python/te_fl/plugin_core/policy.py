"""TransformerEngine-FL's API of policies and managers, for transformer_engine.plugin.core, implemented by te-fl's policies."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Collection, FrozenSet, Mapping, Optional, Sequence, Tuple

from te_fl import _native
from te_fl.errors import InvalidArgument
from te_fl.policy import policy
from te_fl.registration import OpManager, OpRegistry

__all__ = ["SelectionPolicy", "get_default_manager", "get_manager", "get_policy", "get_registry", "policy_context", "reset_default_manager",
           "reset_global_policy", "set_global_policy", "with_allowed_vendors", "with_denied_vendors", "with_preference", "with_strict_mode"]


@dataclasses.dataclass(frozen=True)
class SelectionPolicy:
    """A complete policy: omitted settings are unset, whatever was in force before, except `deterministic` and max_staged_bytes.

    prefer: flagos, vendor or reference, the kind that is tried first. strict: if the first candidate cannot run, the call is an error. per_op_order:
    (op, tokens) pairs; each is an exclusive list of kinds, vendor:NAME and impl:ID. allow_vendors: None allows all. A misspelt kind raises
    te_fl.errors.InvalidArgument, a ValueError, on construction; a misspelt token or op raises it when the policy is put in force.
    """

    prefer: str = "flagos"
    strict: bool = False
    per_op_order: Tuple[Tuple[str, Tuple[str, ...]], ...] = ()
    deny_vendors: FrozenSet[str] = frozenset()
    allow_vendors: Optional[FrozenSet[str]] = None

    def __post_init__(self) -> None:
        _native.check_policy({"whole": True, "prefer": self.prefer})

    @classmethod
    def from_dict(cls, prefer: str = "flagos", strict: bool = False, per_op_order: Optional[Mapping[str, Sequence[str]]] = None,
                  deny_vendors: Optional[Collection[str]] = None, allow_vendors: Optional[Collection[str]] = None) -> "SelectionPolicy":
        """Creates a policy from lists and sets; per_op_order maps ops to tokens."""
        orders = tuple(sorted((op, tuple(tokens)) for op, tokens in (per_op_order or {}).items()))
        return cls(prefer, strict, orders, frozenset(deny_vendors or ()), None if allow_vendors is None else frozenset(allow_vendors))

    def _settings(self) -> dict:
        if self.allow_vendors is not None and not self.allow_vendors:
            raise InvalidArgument("SelectionPolicy: allow_vendors is empty, which would allow no vendor; prefer or list another kind, or leave it None")
        return {"whole": True, "prefer": self.prefer, "strict": self.strict,
                "allow_vendors": None if self.allow_vendors is None else ",".join(sorted(self.allow_vendors)),
                "deny_vendors": ",".join(sorted(self.deny_vendors)) or None,
                "per_op": ";".join(f"{op}={'|'.join(tokens)}" for op, tokens in self.per_op_order) or None}


def get_policy() -> SelectionPolicy:
    """The policy in force on this thread. A policy without a preferred kind is reported as "flagos", which has the same effect."""
    now = _native.policy_settings()
    return SelectionPolicy.from_dict("flagos" if now["prefer"] in (None, "default") else now["prefer"], now["strict"], now["per_op"],
                                     now["deny_vendors"], now["allow_vendors"] or None)


def set_global_policy(selection: SelectionPolicy) -> SelectionPolicy:
    """Sets the policy of all threads from their next calls on, outside of scopes; returns the previous policy."""
    before = get_policy()
    _native.set_global_policy(selection._settings())
    return before


def reset_global_policy() -> None:
    """Restores the policy of the environment variables."""
    _native.set_global_policy(None)


class policy_context(policy):
    """A scope of this thread: with policy_context(SelectionPolicy(strict=True)): ..."""

    def __init__(self, selection: SelectionPolicy) -> None:
        settings = selection._settings()
        _native.check_policy(settings)
        self._arguments, self._entered = (settings,), []


def with_strict_mode() -> policy:
    return policy(strict=True)


def with_preference(prefer: str) -> policy:
    return policy(prefer=prefer)


def with_allowed_vendors(*vendors: str) -> policy:
    return policy(allow_vendors=vendors)


def with_denied_vendors(*vendors: str) -> policy:
    """A scope that also denies these vendors."""
    return policy(deny_vendors=[*_native.policy_settings()["deny_vendors"], *vendors])


_manager: Optional[OpManager] = None
_lock = threading.Lock()


def _forget_lock() -> None:
    """Replaces the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def get_default_manager() -> OpManager:
    """The process's manager, which te_fl.ops and the layers use. Returns the same object until reset_default_manager()."""
    global _manager
    with _lock:
        if _manager is None:
            _manager = OpManager.instance()
        return _manager


get_manager = get_default_manager


def get_registry() -> OpRegistry:
    """The process's registry."""
    return get_default_manager().registry


def reset_default_manager() -> None:
    """Restores the initial state: implementations that the program registered in the process's registry are removed, and usage counts are reset.

    Implementations registered by plugins are kept. Existing manager objects stay valid and use the same registry.
    """
    global _manager
    with _lock:
        _manager = None
    OpRegistry.instance().unregister_owner("python")
    OpManager.instance().reset_usage()
