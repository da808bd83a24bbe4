"""Plugins in Python: modules listed in TE_FL_PLUGIN_MODULES, and packages with an entry point `te_fl.plugin` (docs/python-plugins.md).

They are loaded by the first op call or the first query of devices or plugins, on the calling thread.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
from types import ModuleType
from typing import Callable, List, Optional, Sequence

from te_fl import _native, frameworks
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.registration import OpRegistry, owned_by

GROUP = "te_fl.plugin"
_FLAGGEMS = "te_fl.flaggems"
OWN = "te_fl.transformer_engine_fl_backend"  # te-fl's own entry point, for TransformerEngine-FL's package
_turn = threading.RLock()


def load(names: Sequence[str], discover: bool, skip: Sequence[str]) -> List[dict]:
    """Loads the modules with these names, then the plugin modules of installed packages except `skip`. Returns one report per module, for
    plugins::PluginInfo.
    """
    with _turn:
        if discover and _FLAGGEMS not in skip and _policy_names_flagos() and not frameworks.flaggems_missing():
            names = [*names, _FLAGGEMS]
        reports = [_load(name) for name in dict.fromkeys(names)]
        if not discover:
            return reports
        done = {*names, *skip, OWN}
        for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
            if entry.name in done or entry.module in done:
                continue
            done.add(entry.module)
            reports.append(_load(entry.module, entry))
        return reports


def _policy_names_flagos() -> bool:
    """True if the environment's policy has the word flagos, which is the vendor of te_fl.flaggems. Policies of scopes and programs do not count, since an
    implementation, once loaded, is there for all calls.
    """
    texts = []
    try:
        texts += [_native.setting("TE_FL_PREFER") or "", _native.setting("TE_FL_PER_OP") or ""]
        with open(_native.setting("TE_FL_POLICY_FILE") or "", encoding="utf-8") as file:
            texts.append(file.read())
    except (InvalidArgument, OSError, UnicodeDecodeError):
        pass  # a wrong value or file is reported where the policy is read
    return any(re.search(r"\bflagos\b", text, re.IGNORECASE) for text in texts)


def _load(name: str, entry: Optional[importlib.metadata.EntryPoint] = None) -> dict:
    origin = GROUP if entry is None else f"entry point {entry.name} = {entry.value}" + (f" of {entry.dist.name} {entry.dist.version}"
                                                                                           if entry.dist is not None else "")
    report = {"name": name, "vendor": "", "version": entry.dist.version if entry is not None and entry.dist is not None else "", "build_id": "",
              "path": "", "origin": origin, "reason": "", "state": "active", "ops": []}
    registry = OpRegistry.instance()
    try:
        if not _is_there(name):
            return {**report, "state": "skipped", "reason": f"there is no module {name!r}"}
        report["path"] = name  # the package exists, even if loading fails later
        untrusted = name not in sys.modules and _trust_problem(name)
        if untrusted:
            return {**report, "state": "failed", "reason": untrusted}
        module = importlib.import_module(name)
        report.update(path=getattr(module, "__file__", None) or name, build_id=_build_id(module, report["version"]),
                      version=report["version"] or str(getattr(module, "__version__", "")))
        with owned_by(name):
            _bring(name, module, entry.load() if entry is not None and entry.attr else find_register(module), registry)
    except (Exception, SystemExit) as error:
        registry.unregister_owner(name)  # removes registrations of an earlier load
        refused = isinstance(error, NotImplementedError)
        text = str(error).removeprefix(f"{Unsupported.code}: ") if refused else traceback.format_exception_only(type(error), error)[-1].strip()
        return {**report, "state": "skipped" if refused else "failed", "reason": text}
    mine = [row for row in registry.snapshot() if row["owner"] == name]
    report["ops"] = [f"{row['op_name']}: {row['impl_id']}" for row in mine]
    report["vendor"] = ", ".join(sorted({row["vendor"] for row in mine}))
    return report


def find_register(module: ModuleType) -> Optional[Callable]:
    """The module's register(), te_fl_register() as modules for TransformerEngine-FL may have, or register_builtins() of its backends."""
    return next((found for name in ("register", "te_fl_register", "register_builtins") if (found := getattr(module, name, None)) is not None), None)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return False
        raise
    except ValueError:  # the module has no spec, or the name is invalid
        return name in sys.modules


def _trust_problem(name: str) -> str:
    """Returns the reason if another user could exchange the module's file, as for a shared library; else empty."""
    spec = importlib.util.find_spec(name)
    origin = spec.origin if spec is not None else None
    return _native.file_trust_problem(os.path.abspath(origin)) if origin and os.path.exists(origin) else ""


def _bring(name: str, module: ModuleType, register: Optional[Callable], registry: OpRegistry) -> None:
    """Loads the module's shared library, if any, and calls its register function."""
    library = getattr(module, "te_fl_library", None)
    if register is None and library is None:
        unfinished = getattr(getattr(module, "__spec__", None), "_initializing", False)
        raise AttributeError(f"module {name!r} has neither register() nor te_fl_library" +
                             ("; it is being imported still, and calls an op: that belongs into register()" if unfinished else ""))
    if callable(library):
        library = library()
    if library is not None:
        _native.load_plugin(os.path.abspath(os.fspath(library)))
    if register is not None:
        register(registry) if takes_registry(register) else register()


def takes_registry(register: Callable) -> bool:
    try:
        parameters = inspect.signature(register).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) or p.kind is p.VAR_POSITIONAL
               for p in parameters)


def _build_id(module: ModuleType, version: str) -> str:
    """A hash of the module's source. A quarantine of one build therefore does not apply to another."""
    try:
        with open(module.__file__, "rb") as file:
            return (version + "-" if version else "") + hashlib.sha256(file.read()).hexdigest()[:16]
    except (OSError, TypeError):
        return version

