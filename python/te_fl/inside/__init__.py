"""Runs NVIDIA's unmodified Python package transformer_engine on te-fl's ops (docs/inside-transformer-engine.md)."""

from __future__ import annotations

import os
import sys
from typing import Optional

from te_fl import _native
from te_fl.compat import finder
from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.inside import package

__all__ = ["start", "started"]

VARIABLE = "TE_FL_INSIDE_TRANSFORMER_ENGINE"
_started: Optional[str] = None  # the `device` argument of start(), "" for None; None: not started


def started() -> bool:
    return _started is not None


def start(device: Optional[str] = None) -> None:
    """Makes `import transformer_engine` load the installed package with te-fl in place of its C++ extension module.

    device: None; "cpu" to emulate CUDA on the host in this process; or the type of PyTorch's accelerator, such as "musa", to let it take CUDA's place.
    torch.cuda.is_available() is then true. Raises te_fl.errors.FailedPrecondition in these cases: transformer_engine was imported before; the name
    stands for te-fl (te_fl.as_transformer_engine); NVTE_PLUGIN loads te-fl through the package's own plugin mechanism; start() was called before with
    another device; PyTorch's accelerator is not that device (if torch is not imported yet, raised by its import).
    """
    global _started
    if device is not None and (device == "cuda" or not device.isidentifier()):
        raise InvalidArgument(f"te_fl.inside_transformer_engine: device is {device!r}; it is 'cpu', the type of another vendor's device, such as 'musa', without "
                              "an index, or left out for the devices that PyTorch calls cuda")
    wanted = device or ""
    if _started is not None:
        if _started != wanted:
            raise FailedPrecondition(f"te_fl.inside_transformer_engine: it was called with device={_started or None!r} before; a process has one")
        return
    if finder.status()["active"]:
        raise FailedPrecondition("te_fl.inside_transformer_engine: transformer_engine stands for te-fl in this process "
                                 "(te_fl.as_transformer_engine, TE_FL_AS_TRANSFORMER_ENGINE); use one of the two ways")
    if os.environ.get("NVTE_PLUGIN", "").startswith("te_fl"):
        raise FailedPrecondition("te_fl.inside_transformer_engine: NVTE_PLUGIN brings te-fl in by the package's own way; unset it, or leave this out")
    if "transformer_engine" in sys.modules:
        raise FailedPrecondition("te_fl.inside_transformer_engine: transformer_engine was imported before; call this first, or set "
                                 f"{VARIABLE}=1")
    package.install(device)
    _started = wanted


def start_by_variable() -> None:
    """Calls start() as TE_FL_INSIDE_TRANSFORMER_ENGINE (1, cpu or another type of devices) requests, when the interpreter starts."""
    value = (_native.setting(VARIABLE) or "").strip().lower()
    if value in ("", "0", "false", "off", "no"):
        return
    if value in ("1", "true", "on", "yes"):
        start()
    elif value == "cuda" or not value.isidentifier():
        raise InvalidArgument(f"{VARIABLE} is {value!r}; it is 1, cpu, the type of another vendor's device, such as musa, or 0")
    else:
        start(value)
