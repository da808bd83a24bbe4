"""Numbers for modules: a graph of torch.compile refers to a module by its number."""

from __future__ import annotations

import itertools
import weakref

import torch

from te_fl.errors import FailedPrecondition

_modules: "weakref.WeakValueDictionary[int, torch.nn.Module]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def enter(module: torch.nn.Module) -> torch.Tensor:
    """Assigns a number to the module and returns it as int64 [1] on the CPU.

    The number is a tensor, not an int, so that it is an input of a graph, and modules that differ only in the number share one graph. The registry
    keeps only a weak reference to the module.
    """
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def find_module(number: torch.Tensor) -> torch.nn.Module:
    """The module with this number."""
    module = _modules.get(int(number))
    if module is None:
        raise FailedPrecondition(f"a compiled graph calls module {int(number)} of te_fl.pytorch, which has gone, or is "
                                 "another process's; compile the model where it runs, and keep it while its compiled form is called")
    if module._number.data_ptr() != number.data_ptr():
        raise FailedPrecondition(f"a compiled graph calls a {type(module).__name__} whose __dict__ was copied from another "
                                 "one's; make a new module and load its state_dict()")
    return module
