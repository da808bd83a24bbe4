"""Numbers in tensors on a device that the host needs: those of a group's rows, their offsets, and factors of products.

The host waits for a device where it reads there, so it reads once what te-fl itself has written: splits_to_offsets() and splits_to_offsets_multi()
make the tensors that the calls of one forward and its backward share, and note here what they hold, or that it follows from another's numbers.
A tensor that PyTorch has written since, by its count of writes, is read again, and so is, at each call, one that te-fl did not make: programs write
theirs in ways that PyTorch does not count, as a CUDA graph does.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, List, NamedTuple, Optional

import torch

from te_fl.tensors import read_on_host

_NOTE = "_te_fl_numbers"


class _Sums(NamedTuple):
    """The sums of another tensor's numbers times a stride."""

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
    """The tensor, which te-fl has just made. numbers: what it holds, if the host knows; sums: what it follows from."""
    if not tensor.is_inference():  # those have no count of writes
        setattr(tensor, _NOTE, _Note(tensor, numbers, sums))
    return tensor


def sums_of(tensor: torch.Tensor, stride: int, leading_zero: bool) -> _Sums:
    return _Sums(tensor, stride, leading_zero)


def read(tensor: Any, what: str) -> List[int]:
    """The tensor's numbers. `what`: their name, for the refusal while a stream is captured."""
    found: Optional[_Note] = getattr(tensor, _NOTE, None)
    if found is None or not found.holds(tensor):
        return read_on_host(tensor, what)
    if found.numbers is None:
        source: Optional[_Note] = None if found.sums is None else getattr(found.sums.of, _NOTE, None)
        if source is None or not source.holds(found.sums.of):  # The splits have other numbers now.
            found.numbers = read_on_host(tensor, what)
        else:
            ends = itertools.accumulate(n * found.sums.stride for n in read(found.sums.of, what))
            found.numbers = [0, *ends] if found.sums.leading_zero else list(ends)
    return list(found.numbers)


def factors(tensor: torch.Tensor, what: str) -> List[float]:
    """alpha or beta of products. The package gives constants of its own where its caller gives none, which nothing writes."""
    gemm = sys.modules["transformer_engine.pytorch.cpp_extensions.gemm"]
    for name, value in (("_get_fp32_ones_tensor", 1.0), ("_get_fp32_zeros_tensor", 0.0)):
        make = getattr(gemm, name, None)
        if make is not None and make(tensor.numel(), tensor.device) is tensor:
            return [value] * tensor.numel()
    return read_on_host(tensor, what)
