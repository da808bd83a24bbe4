"""Has the pure Python package transformer_engine load te-fl's module in place of its compiled extension.

A finder first on sys.meta_path lets the installed transformer_engine.common be found as ever, and changes two things about it: it skips its
shared libraries while it is imported, as it does while it is built itself (NVTE_PROJECT_BUILDING), and its load_framework_extension("torch")
puts te_fl.transformer_engine_torch where it would have put the extension. The same finder has the host answer for CUDA once torch is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from types import ModuleType
from typing import Any, Callable, Optional

from te_fl.errors import Unsupported

_COMMON, _EXTENSION = "transformer_engine.common", "transformer_engine_torch"
OLDEST = (2, 14)
_BUILDING = "NVTE_PROJECT_BUILDING"


def version_of(text: str) -> tuple:
    """The leading numbers of a version."""
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_version() -> None:
    found = importlib.metadata.version("transformer_engine")
    if version_of(found) < OLDEST:
        raise Unsupported(f"transformer_engine {found} is older than {'.'.join(map(str, OLDEST))}, the oldest whose extension module te-fl knows; "
                          "install a newer one")


def load_framework_extension(framework: str) -> None:
    if framework != "torch":
        # The package's top level goes on without a framework that cannot be imported.
        raise ImportError(f"te-fl serves the PyTorch side of transformer_engine only; for {framework} use te_fl.{framework}")
    check_version()
    from te_fl import transformer_engine_torch
    sys.modules[_EXTENSION] = transformer_engine_torch


class _Loader(importlib.abc.Loader):
    """Another loader, with something done around the module's execution."""

    def __init__(self, loader: Any, execute: Callable[[Any, ModuleType], None]):
        self._loader, self._execute = loader, execute

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._execute(self._loader, module)

    def __getattr__(self, name: str) -> Any:  # get_data, get_source and what else tools ask a loader for
        return getattr(self._loader, name)


def _execute_common(loader: Any, module: ModuleType) -> None:
    before = {name: os.environ.get(name) for name in (_BUILDING, "NVTE_RELEASE_BUILD")}
    os.environ[_BUILDING] = "1"
    os.environ.pop("NVTE_RELEASE_BUILD", None)
    try:
        loader.exec_module(module)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    module.load_framework_extension = load_framework_extension


def _answer_for_cuda() -> None:
    from te_fl.inside import host_device
    host_device.install()


def _execute_torch(loader: Any, module: ModuleType) -> None:
    loader.exec_module(module)
    _answer_for_cuda()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, executions: dict):
        self._executions = executions

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        execute = self._executions.get(fullname)
        if execute is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, execute)
        return spec


def install(host: bool) -> None:
    """host: the host answers for CUDA, from the import of torch on."""
    executions: dict = {_COMMON: _execute_common}
    if host and "torch" in sys.modules:
        _answer_for_cuda()
    elif host:
        executions["torch"] = _execute_torch
    sys.meta_path.insert(0, _Finder(executions))
