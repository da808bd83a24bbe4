"""transformer_engine.plugin.core: TransformerEngine-FL's names for implementations, policies and plugins, on te-fl (docs/python-plugins.md)."""

import importlib
from typing import Any

from te_fl.plugin_core.discovery import *  # noqa: F401,F403
from te_fl.plugin_core.logger_manager import Logger, LoggerManager  # noqa: F401
from te_fl.plugin_core.manager import *  # noqa: F401,F403
from te_fl.plugin_core.policy import *  # noqa: F401,F403
from te_fl.plugin_core.registry import OpRegistry  # noqa: F401
from te_fl.plugin_core.types import BackendImplKind, OpImpl, match_token  # noqa: F401

_OF_OPS = ("TEFLBackendBase", "TEFLModule", "get_tefl_module", "reset_tefl_module")  # that module imports PyTorch
__all__ = """BackendImplKind OpImpl match_token TEFLBackendBase TEFLModule get_tefl_module reset_tefl_module get_registry get_manager reset_registry
    Logger LoggerManager SelectionPolicy PolicyManager get_policy set_global_policy reset_global_policy policy_context policy_from_env get_policy_epoch
    bump_policy_epoch with_strict_mode with_preference with_allowed_vendors with_denied_vendors PREFER_DEFAULT PREFER_VENDOR PREFER_REFERENCE
    VALID_PREFER_VALUES OpManager get_default_manager reset_default_manager OpRegistry discover_plugin discover_from_entry_points
    discover_from_env_modules get_discovered_plugin clear_discovered_plugin PLUGIN_GROUP PLUGIN_MODULES_ENV""".split()


def __getattr__(name: str) -> Any:
    if name not in _OF_OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("te_fl.plugin_core.ops"), name)
