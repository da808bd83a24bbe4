"""Detects installed frameworks without importing them, and holds the oldest versions that te_fl supports."""

from __future__ import annotations

import re
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Optional

NAMES = {"torch": "PyTorch", "jax": "JAX"}
MINIMUM = {"torch": "2.7", "jax": "0.10"}
# FlagGems, the packages that it imports, by the names of their modules, and how to install them. FlagGems requires one version each of NumPy, PyYAML and
# SQLAlchemy, none of which it depends on; pip installs it beside other versions only with --no-deps.
FLAGGEMS = "5.0.2"
FLAGGEMS_NEEDS = {"triton": "triton", "packaging": "packaging", "yaml": "PyYAML", "sqlalchemy": "SQLAlchemy"}
FLAGGEMS_COMMAND = f"pip install 'te-fl[flaggems]' && pip install --no-deps flag_gems=={FLAGGEMS}"


def installed(package: str) -> Optional[str]:
    """The version in a package's metadata; None if it is not installed. Metadata provided by te_fl itself (as_transformer_engine) is ignored."""
    versions = (d.version for d in metadata.distributions(name=package) if not type(d).__module__.startswith("te_fl."))
    return next(versions, None)


def numbers(version: str) -> tuple:
    """The numbers at the beginning of a version: (2, 9, 1) for 2.9.1+cu128."""
    return tuple(int(n) for n in re.match(r"[0-9.]*", version).group().split(".") if n)


def flaggems_missing() -> Optional[str]:
    """The reason why FlagGems cannot be imported, with a remedy, as far as it can be seen without importing it; None if there is none."""
    if find_spec("flag_gems") is None:
        return f"FlagGems is not installed ({FLAGGEMS_COMMAND})"
    missing = [package for module, package in FLAGGEMS_NEEDS.items() if find_spec(module) is None]
    return f"FlagGems is installed without {', '.join(missing)}, which it imports (pip install 'te-fl[flaggems]')" if missing else None


def refusal(package: str, version: Optional[str] = None) -> Optional[str]:
    """The reason why te_fl does not support this version of a framework (default: the installed one), with a remedy. None if it is supported or not
    installed.
    """
    version, least = version or installed(package), MINIMUM[package]
    if version is None or numbers(version) >= numbers(least):
        return None
    return f"{NAMES[package]} {version} is installed; te_fl needs {least} or newer (pip install --upgrade '{package}>={least}')"


def require(package: str) -> None:
    """Imports a framework. Raises ImportError if it is missing or too old, with the version and a remedy."""
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(f"{NAMES[package]} is not installed; te_fl needs {MINIMUM[package]} or newer "
                                  f"(pip install '{package}>={MINIMUM[package]}')", name=package) from None
    wrong = refusal(package, module.__version__)
    if wrong:
        raise ImportError(wrong, name=package)
