"""transformer_engine.plugin.core.discovery: the plugins that are Python modules. te-fl loads them into the registry of the process by itself; these
functions also load them into a registry of the program's own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import Any, Iterable, List, Tuple

from te_fl import _native
from te_fl._modules import GROUP as PLUGIN_GROUP, OWN, find_register, takes_registry
from te_fl.plugin_core.logger_manager import get_logger

__all__ = ["PLUGIN_GROUP", "PLUGIN_MODULES_ENV", "clear_discovered_plugin", "discover_from_entry_points", "discover_from_env_modules", "discover_plugin",
           "get_discovered_plugin"]

PLUGIN_MODULES_ENV = "TE_FL_PLUGIN_MODULES"
_discovered: List[Tuple[str, str, bool]] = []


def _offer(name: str, source: str, load: Any, registry: Any) -> bool:
    """Registers a plugin's functions; logs an error if that fails."""
    try:
        found = load()
        register = found if callable(found) and not isinstance(found, type) else find_register(found)
        if register is not None:
            register(registry) if takes_registry(register) else register()
    except Exception as error:
        get_logger().error(f"plugin {name} failed to load: {type(error).__name__}: {error}")
        register = None
    _discovered.append((name, source, register is not None))
    return register is not None


def _loaded(entries: bool) -> int:
    """Counts the modules that te-fl has loaded, and adds them to the list."""
    known = {name for name, _, _ in _discovered}
    rows = [(p["name"], "entry_point" if p["origin"].startswith("entry point") else "env_module", p["state"] == "active")
            for p in _native.info()["plugins"] if p["origin"] == PLUGIN_MODULES_ENV or p["origin"].startswith("entry point")]
    rows = [row for row in rows if (row[1] == "entry_point") == entries]
    _discovered.extend(row for row in rows if row[0] not in known)
    return sum(active for _, _, active in rows)


def _discover(registry: Any, entries: bool, offers: Iterable[Tuple[str, Any]]) -> int:
    if registry is None:
        return 0
    if getattr(registry, "is_process", bool)():
        return _loaded(entries)
    return sum(_offer(name, "entry_point" if entries else "env_module", load, registry) for name, load in offers)


def discover_from_entry_points(registry: Any) -> int:
    """Loads the plugins of installed packages other than te-fl; returns how many loaded."""
    return _discover(registry, True, [(e.name, e.load) for e in importlib.metadata.entry_points(group=PLUGIN_GROUP) if e.module != OWN])


def discover_from_env_modules(registry: Any) -> int:
    """Loads the modules that TE_FL_PLUGIN_MODULES names; returns how many loaded."""
    names = [name.strip() for name in os.environ.get(PLUGIN_MODULES_ENV, "").split(",") if name.strip()]
    return _discover(registry, False, [(name, lambda name=name: importlib.import_module(name)) for name in names])


def discover_plugin(registry: Any) -> int:
    """Loads all plugins that are Python modules; returns how many loaded."""
    return discover_from_entry_points(registry) + discover_from_env_modules(registry)


discover_op_plugin = discover_plugin


def get_discovered_plugin() -> List[Tuple[str, str, bool]]:
    """(name, "entry_point" or "env_module", whether it loaded) of the plugins found so far."""
    return list(_discovered)


def clear_discovered_plugin() -> None:
    _discovered.clear()
