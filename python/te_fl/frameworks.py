"""The frameworks that are installed, found without importing any, and the oldest versions that te_fl works with."""

from __future__ import annotations

import re
from importlib import import_module, metadata
from typing import Optional

NAMES = {"torch": "PyTorch", "jax": "JAX"}
MINIMUM = {"torch": "2.11", "jax": "0.10"}


def installed(package: str) -> Optional[str]:
    """The version that a package's metadata states; None if it is not installed. That te_fl itself answers to a name is no package."""
    versions = (d.version for d in metadata.distributions(name=package) if not type(d).__module__.startswith("te_fl."))
    return next(versions, None)


def _numbers(version: str) -> tuple:
    return tuple(int(n) for n in re.match(r"[0-9.]*", version).group().split(".") if n)


def refusal(package: str, version: Optional[str] = None) -> Optional[str]:
    """The reason for which te_fl does not work with a framework of this version (of the installed one unless it is given), and
    the way out; None if it does, or if nothing is installed."""
    version, least = version or installed(package), MINIMUM[package]
    if version is None or _numbers(version) >= _numbers(least):
        return None
    return f"{NAMES[package]} {version} is installed; te_fl needs {least} or newer (pip install --upgrade '{package}>={least}')"


def require(package: str) -> None:
    """Imports a framework that te_fl is about to use: ImportError that names what is missing or too old, the version and the way out."""
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
