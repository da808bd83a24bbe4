"""Modules by number, which is how a graph of torch.compile names the module that it calls."""

from __future__ import annotations

import itertools
import weakref

import torch

from te_fl.errors import FailedPrecondition

_modules: "weakref.WeakValueDictionary[int, torch.nn.Module]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def enter(module: torch.nn.Module) -> torch.Tensor:
    """A number for the module, int64 [1] on the CPU.

    It is a tensor and no int: a graph takes it as an input, so that modules that differ in nothing else share one graph. The module goes
    when nobody else holds it.
    """
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def module_of(number: torch.Tensor) -> torch.nn.Module:
    """The module that was given this tensor."""
    module = _modules.get(int(number))
    if module is None:
        raise FailedPrecondition(f"FAILED_PRECONDITION: a compiled graph calls module {int(number)} of te_fl.pytorch, which has gone, or is "
                                 "another process's; compile the model where it runs, and keep it while its compiled form is called")
    if module._number.data_ptr() != number.data_ptr():
        raise FailedPrecondition(f"FAILED_PRECONDITION: a compiled graph calls a {type(module).__name__} whose __dict__ was copied from another "
                                 "one's; make a new module and load its state_dict()")
    return module
