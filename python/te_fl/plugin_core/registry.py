"""transformer_engine.plugin.core.registry: a registry by the names of Transformer Engine's functions."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Dict, Iterable, List, Optional

from te_fl import _native, registration, tex_form
from te_fl.registration import OpImpl

__all__ = ["OpRegistry", "OpRegistrySnapshot"]


@dataclasses.dataclass
class OpRegistrySnapshot:
    """The implementations by op."""

    impls_by_op: Dict[str, List[OpImpl]]


def load_own() -> None:
    """Imports te-fl's functions, if PyTorch is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("te_fl.transformer_engine_torch")


def _name(row: dict) -> str:
    return row["op_name"].removeprefix(tex_form.PREFIX)


class OpRegistry(registration.OpRegistry):
    """te_fl.OpRegistry with TransformerEngine-FL's methods: the name of an op means its form with Transformer Engine's arguments. The registry of the
    process also has te-fl's functions of that form.
    """

    @classmethod
    def instance(cls) -> "OpRegistry":
        made = cls.__new__(cls)
        process = registration.OpRegistry.instance()
        made._handle, made._mine = process._handle, process._mine
        return made

    def _own_names(self, only: Optional[str]) -> Iterable[str]:
        if not self.is_process():
            return []
        load_own()
        names = (*_native.tex_names(), *_native.op_names()) if only is None else (only,)
        return [name for name in dict.fromkeys(names) if tex_form.own_function(name) is not None]

    def _implementations(self, only: Optional[str] = None) -> Dict[str, List[OpImpl]]:
        """The implementations that are Python functions, by the name of the op; of one op only, if given."""
        found: Dict[str, List[OpImpl]] = {}
        for row in _native.snapshot(self._handle):
            if only is not None and _name(row) != only:
                continue
            if row["op_name"].startswith(tex_form.PREFIX) or not tex_form.has_form(row["op_name"]):
                found.setdefault(_name(row), []).append(self._implementation(row))
        for name in self._own_names(only):
            if all(impl.impl_id != tex_form.OWN for impl in found.setdefault(name, [])):
                found[name].append(tex_form.own_implementation(name))
        return found

    def get_implementations(self, op_name: str) -> List[OpImpl]:
        return self._implementations(op_name).get(op_name, [])

    def list_operators(self) -> List[str]:
        return list(self._implementations())

    def snapshot(self) -> OpRegistrySnapshot:  # type: ignore[override]
        return OpRegistrySnapshot(self._implementations())

    def unregister(self, op_name: str, impl_id: str) -> None:
        super().unregister(tex_form.PREFIX + op_name if tex_form.has_form(op_name) else op_name, impl_id)

    def clear(self) -> None:
        for op_name, impl_id in list(self._mine):
            super().unregister(op_name, impl_id)
