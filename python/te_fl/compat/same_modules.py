"""The modules of te_fl.pytorch that have the name of one of Transformer Engine's, such as te_fl.pytorch.attention. Their names come from the modules
in which te-fl defines them, which are imported when a name is first read.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from typing import Any

from te_fl.compat import table


def find(module: str, name: str) -> Any:
    """The object with this name in Transformer Engine's module of the same name as te_fl.pytorch's `module`."""
    theirs = "transformer_engine" + module.removeprefix("te_fl")
    home = None if name.startswith("_") else table.home(theirs, name)
    if home is None:
        raise AttributeError(f"{module} has no {name!r}; {table.way_out(theirs, name)}")
    return getattr(importlib.import_module(home), name)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = find(self.__name__, name)
        return value


def add() -> None:
    """Makes the modules of table.SAME_MODULES importable."""
    for name in table.SAME_MODULES:
        module = _Module(f"te_fl.pytorch.{name}", f"The names of transformer_engine.pytorch.{name} that te-fl supports.")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
        setattr(sys.modules["te_fl.pytorch"], name, module)
