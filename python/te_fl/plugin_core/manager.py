"""transformer_engine.plugin.core.manager: runs functions with Transformer Engine's arguments by the policy in force."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Callable, List, Optional

from te_fl import _native, registration, tex_form
from te_fl.plugin_core import policy
from te_fl.plugin_core.registry import OpRegistry, load_own
from te_fl.registration import OpImpl

__all__ = ["OpManager", "get_default_manager", "get_manager", "get_registry", "reset_default_manager", "reset_registry"]


class OpManager(registration.OpManager):
    """te_fl.OpManager with TransformerEngine-FL's methods: the name of an op means its form with Transformer Engine's arguments."""

    registry: OpRegistry

    def __init__(self, registry: Optional[registration.OpRegistry] = None) -> None:
        super().__init__(OpRegistry() if registry is None else registry)
        self._known: dict = {}  # the names of ops in the registry, by the names for callers

    @classmethod
    def instance(cls) -> "OpManager":
        return cls(OpRegistry.instance())

    def _find(self, op_name: str) -> str:
        """The name in the registry. te-fl's function is registered there at the first use."""
        found = self._known.get(op_name)
        if found is None:
            found = self._known[op_name] = tex_form.PREFIX + op_name if tex_form.has_form(op_name) else op_name
            if found is not op_name:
                load_own()
                tex_form.ensure_own(self.registry, [op_name])
        return found

    def call(self, op_name: str, /, *positional: Any, **arguments: Any) -> Any:
        """Runs an op with Transformer Engine's arguments; returns the function's result."""
        return _native.call(self._find(op_name), arguments, self._handle, positional)

    def explain(self, op_name: str, /, *positional: Any, **arguments: Any) -> dict:
        return super().explain(self._find(op_name), *positional, **arguments)

    def resolve_candidates(self, op_name: str) -> List[OpImpl]:
        found = {c["impl_id"]: c["accepted"] for c in self.explain(op_name)["candidates"]}
        known = {impl.impl_id: impl for impl in self.registry.get_implementations(op_name)}
        impls = [known[impl_id] for impl_id, accepted in found.items() if accepted and impl_id in known and known[impl_id].is_available()]
        if not impls:
            raise registration.Unsupported(f"op {op_name!r} has no implementation that the policy allows and that is available; registered: "
                                           f"{', '.join(known) or 'none'}")
        return impls

    def call_with_custom_impl(self, op_name: str, current_impl_class: type, call_impl_fn: Callable[[type], Any]) -> Any:
        """Calls call_impl_fn(class) with the class that the first implementation of the op returns; with the next one's if that fails, unless the
        policy is strict.
        """
        failures: List[str] = []
        for impl in self.resolve_candidates(op_name):
            try:
                return call_impl_fn(impl.fn())
            except Exception as error:
                if policy.get_policy().strict:
                    raise
                failures.append(f"{impl.impl_id} ({type(error).__name__}: {error})")
                last = error
        raise registration.Unsupported(f"all implementations of {op_name!r} failed: {'; '.join(failures)}") from last

    def bump_policy_epoch(self) -> None:
        """Reads TE_FL_ variables again, and lets implementations run again that failed."""
        policy.bump_policy_epoch()
        _native.reload()


_manager: Optional[OpManager] = None
_lock = threading.Lock()


def _forget_lock() -> None:
    """Replaces the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def get_default_manager() -> OpManager:
    """The manager of the process. Returns the same object until reset_default_manager()."""
    global _manager
    with _lock:
        if _manager is None:
            _manager = OpManager.instance()
        return _manager


def reset_default_manager() -> None:
    """Restores the initial state: implementations that the program registered in the process's registry are removed, failures are forgotten, and usage
    counts are reset.

    Implementations registered by plugins are kept. Existing manager objects stay valid and use the same registry.
    """
    global _manager
    with _lock:
        _manager = None
    registration.OpRegistry.instance().unregister_owner("python")
    tex_form.forget_failures()
    registration.OpManager.instance().reset_usage()


get_manager = get_default_manager


def get_registry() -> OpRegistry:
    """The registry of the process."""
    return get_default_manager().registry


def reset_registry() -> None:
    """reset_default_manager(); get_tefl_module() makes a new module."""
    reset_default_manager()
    ops = sys.modules.get("te_fl.plugin_core.ops")
    if ops is not None:
        ops.reset_tefl_module()
