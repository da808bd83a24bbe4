"""te-fl as a backend of TransformerEngine-FL's own package, which finds it by the entry point te_fl.plugin (docs/inside-transformer-engine.md)."""

from __future__ import annotations

import importlib
from typing import Any

from te_fl.inside import package


def register(registry: Any) -> None:
    """Registers te-fl's functions in the registry of TransformerEngine-FL's package, as implementations "vendor.te_fl" of vendor te_fl."""
    types = importlib.import_module("transformer_engine.plugin.core.types")
    functions = {name: value for name, value in vars(package.extension()).items() if callable(value) and not isinstance(value, type) and not name.startswith("_")}
    registry.register_many([types.OpImpl(op_name=name, impl_id="vendor.te_fl", kind=types.BackendImplKind.VENDOR, fn=function, vendor="te_fl", priority=100)
                            for name, function in functions.items()])
