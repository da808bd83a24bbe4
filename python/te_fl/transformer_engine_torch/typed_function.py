"""A vendor's function with Transformer Engine's arguments, as adapters to typed ops call it, and the table of adapters."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Dict, FrozenSet, Optional, Sequence, Tuple

import torch

from te_fl.errors import Unsupported
from te_fl.tex_form import TexImpl
from te_fl.tex_results import WrongResult
from te_fl.transformer_engine_torch.enums import DType

__all__ = ["ADAPTERS", "CHUNK", "LIMITS", "VendorFunction", "WORKSPACE", "adapter", "dtype_of", "needs", "results", "workspaces", "write", "zero"]

CHUNK = 65536  # elements that a block of a multi-tensor kernel takes, as Transformer Engine's optimizers pass it
WORKSPACE = 32 << 20  # bytes
_STREAMS = 4  # on which a grouped product of Transformer Engine's runs, each with a workspace
_DTYPES = {torch.float32: DType.kFloat32, torch.float16: DType.kFloat16, torch.bfloat16: DType.kBFloat16}
_LOGICAL = (torch.bool, torch.uint8)  # equal in memory


def _names(function: Callable[..., Any]) -> Optional[Tuple[FrozenSet[str], FrozenSet[str]]]:
    """(the names of the parameters, those without a default); None if they cannot be read, as of a function in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        return None
    return frozenset(p.name for p in parameters), frozenset(p.name for p in parameters if p.default is p.empty)


class VendorFunction:
    """Calls a vendor's function. Raises WrongResult if it returns what Transformer Engine's function does not."""

    def __init__(self, impl: TexImpl):
        self._runner, self._names = impl.calls(), _names(impl.fn)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        verdict = self._runner.accepts(arguments, options)
        if verdict is not True:
            raise Unsupported(verdict or "its supports() says no")
        return self._runner.checked(*arguments, **options)

    def takes(self, name: str) -> bool:
        return self._names is not None and name in self._names[0]

    def lacks(self, known: FrozenSet[str]) -> str:
        """The reason for which by_name() cannot call the function with arguments of these names; empty if it can."""
        if self._names is None:
            return "the names of its parameters cannot be read, and their order differs between versions of Transformer Engine"
        unknown = sorted(self._names[1] - known)
        return f"it takes {unknown[0]!r}, which te-fl does not know" if unknown else ""

    def by_name(self, values: dict) -> Any:
        """Calls the function with those of the values for which it has parameters: versions of Transformer Engine have them in different orders."""
        assert self._names is not None
        return self(**{name: value for name, value in values.items() if name in self._names[0]})


# The adapters: from a vendor's function to a function with the typed op's arguments.
ADAPTERS: Dict[str, Callable[[VendorFunction], Callable[..., None]]] = {}
# Functions from a vendor's function to the `supports` of the implementation. Without one every call on plain tensors is supported.
LIMITS: Dict[str, Callable[[VendorFunction], Callable[..., Any]]] = {}


def adapter(*names: str, limits: Optional[Callable[[VendorFunction], Callable[..., Any]]] = None) -> Callable:
    """Registers an adapter for the functions of these names."""
    def add(make: Callable[[VendorFunction], Callable[..., None]]) -> Callable:
        ADAPTERS.update(dict.fromkeys(names, make))
        if limits is not None:
            LIMITS.update(dict.fromkeys(names, limits))
        return make
    return add


def needs(known: Sequence[str]) -> Callable[[VendorFunction], Callable[..., Any]]:
    """The limits of an adapter that calls the function by_name() with values of these names."""
    names = frozenset(known)

    def limits(function: VendorFunction) -> Callable[..., Any]:
        lacking = function.lacks(names)
        return lambda: lacking or True
    return limits


def write(output: Optional[torch.Tensor], made: Any) -> None:
    """Copies a result to the op's output, unless the call has none or the function has written there."""
    if output is None:
        return
    if not isinstance(made, torch.Tensor):
        raise WrongResult(f"it returned {type(made).__name__} for an output that the call has")
    if made.numel() != output.numel() or made.device != output.device:
        raise WrongResult(f"it returned a tensor {tuple(made.shape)} on {made.device}; the output is {tuple(output.shape)} on {output.device}")
    if made.dtype != output.dtype and not (made.dtype in _LOGICAL and output.dtype in _LOGICAL):
        raise WrongResult(f"it returned {made.dtype}; the output is {output.dtype}")
    if made is not output and made.data_ptr() != output.data_ptr():
        output.copy_(made.reshape(output.shape))


def results(made: Any, least: int) -> Sequence[Any]:
    """The results of a function that returns at least so many."""
    if not isinstance(made, (list, tuple)) or len(made) < least:
        raise WrongResult(f"it returned {len(made) if isinstance(made, (list, tuple)) else 'one'} results; the op needs {least}")
    return made


def zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def dtype_of(tensor: torch.Tensor) -> DType:
    found = _DTYPES.get(tensor.dtype)
    if found is None:
        raise Unsupported(f"a vendor's function is called with F32, F16 and BF16, not {tensor.dtype}")
    return found


@functools.lru_cache(maxsize=None)
def workspaces(device: torch.device, count: int = _STREAMS) -> Tuple[torch.Tensor, ...]:
    return tuple(torch.empty(WORKSPACE, dtype=torch.uint8, device=device) for _ in range(count))
