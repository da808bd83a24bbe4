"""Numbers in device tensors that the host needs: row counts of groups, offsets, and factors of products.

Reading a device tensor makes the host wait, so the values of tensors made by te-fl are cached. splits_to_offsets() and splits_to_offsets_multi() make
tensors that a forward and its backward share. These functions record here either a tensor's values, or the tensor that its values are computed from.
A tensor whose version counter in PyTorch has changed since is read again. A tensor that te-fl did not make is read at each call, because programs can
write such a tensor without a change of the version counter, for example in a CUDA graph.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, List, NamedTuple, Optional

import torch

from te_fl.tensors import read_on_host

_NOTE = "_te_fl_numbers"


class _Sums(NamedTuple):
    """Records that a tensor holds the prefix sums of another tensor's values, times a stride."""

    of: torch.Tensor
    stride: int
    leading_zero: bool


class _Note:
    __slots__ = ("version", "numbers", "sums")

    def __init__(self, tensor: torch.Tensor, numbers: Optional[list], sums: Optional[_Sums]):
        self.version, self.numbers, self.sums = tensor._version, numbers, sums

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.version == tensor._version


def note(tensor: torch.Tensor, numbers: Optional[list] = None, sums: Optional[_Sums] = None) -> torch.Tensor:
    """Records the values of a tensor that te-fl has just made, and returns the tensor. numbers: the values, if the host knows them; sums: how the
    values are computed from another tensor.
    """
    if not tensor.is_inference():  # inference tensors have no version counter
        setattr(tensor, _NOTE, _Note(tensor, numbers, sums))
    return tensor


def running_sums(tensor: torch.Tensor, stride: int, leading_zero: bool) -> _Sums:
    return _Sums(tensor, stride, leading_zero)


def read(tensor: Any, what: str) -> List[int]:
    """The tensor's values as a list. `what`: the name in the error raised during graph capture."""
    found: Optional[_Note] = getattr(tensor, _NOTE, None)
    if found is None or not found.holds(tensor):
        return read_on_host(tensor, what)
    if found.numbers is None:
        source: Optional[_Note] = None if found.sums is None else getattr(found.sums.of, _NOTE, None)
        if source is None or not source.holds(found.sums.of):  # the source tensor was written since
            found.numbers = read_on_host(tensor, what)
        else:
            ends = itertools.accumulate(n * found.sums.stride for n in read(found.sums.of, what))
            found.numbers = [0, *ends] if found.sums.leading_zero else list(ends)
    return list(found.numbers)


def factors(tensor: torch.Tensor, what: str) -> List[float]:
    """The values of alpha or beta. Transformer Engine's default constants are never written, so they need not be read."""
    gemm = sys.modules["transformer_engine.pytorch.cpp_extensions.gemm"]
    for name, value in (("_get_fp32_ones_tensor", 1.0), ("_get_fp32_zeros_tensor", 0.0)):
        make = getattr(gemm, name, None)
        if make is not None and make(tensor.numel(), tensor.device) is tensor:
            return [value] * tensor.numel()
    return read_on_host(tensor, what)
