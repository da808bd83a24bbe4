"""User-defined functions for the amaxes and scales of delayed scaling."""

from __future__ import annotations

from typing import Any

import torch

from te_fl import _native
from te_fl.common.recipe import Functions
from te_fl.pytorch.runtime.dtypes import LIKE
from te_fl.torch_streams import on_stream


def _largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0)


def _newest(history: torch.Tensor) -> torch.Tensor:
    return history[0]


def native_of(functions: Functions) -> Any:
    """The _native object for the functions; each call with equal functions returns the same object."""
    if functions.native is not None:
        return functions.native
    recipe = functions.recipe
    find_amax = functions.amax or (_newest if recipe.amax_compute_algo == "most_recent" else _largest)

    def write_amax(history: torch.Tensor, out: torch.Tensor, stream: int) -> None:
        with torch.no_grad(), on_stream(out.device, stream):
            out.copy_(find_amax(history))

    def write_scale(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, stream: int) -> None:
        with torch.no_grad(), on_stream(scale.device, stream):
            scale.copy_(functions.scale(amax, scale, fp8_max, recipe))

    name = getattr(functions.amax or functions.scale, "__name__", "a function")
    functions.native = _native.scale_functions(name, write_amax, None if functions.scale is None else write_scale, LIKE)
    return functions.native
