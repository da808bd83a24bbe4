"""Pads the rows of each expert, for products whose kernels need row counts that are multiples of 16 or more."""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument
from te_fl.pytorch.fp8.availability import get_align_size_for_quantization
from te_fl.pytorch.fp8.global_state import FP8GlobalStateManager
from te_fl.pytorch.functions.function import Op, differentiable
from te_fl.pytorch.runtime import refuse as rules

__all__ = ["Fp8Padding", "Fp8Unpadding"]


def _pad(rows: torch.Tensor, splits: List[int], padded: List[int]) -> torch.Tensor:
    output = rows.new_empty((sum(padded), rows.shape[1]))
    ops.fused_multi_row_padding(input=rows.contiguous(), output=output, input_rows=splits, padded_rows=padded)
    return output


def _unpad(rows: torch.Tensor, splits: List[int], padded: List[int]) -> torch.Tensor:
    output = rows.new_empty((sum(splits), rows.shape[1]))
    ops.fused_multi_row_unpadding(input=rows.contiguous(), output=output, input_rows=padded, unpadded_rows=splits)
    return output


def _save(ctx, inputs, output):
    ctx.splits, ctx.padded = map(list, inputs[1:])  # copied, because the program owns these lists and may modify them


def _gradient(op, ctx, grad):
    return op(grad, ctx.splits, ctx.padded), None, None


_padding = Op("moe_pad_rows(Tensor rows, int[] splits, int[] padded) -> Tensor", _pad,
              lambda rows, splits, padded: rows.new_empty((sum(padded), rows.shape[1])))
_unpadding = Op("moe_unpad_rows(Tensor rows, int[] splits, int[] padded) -> Tensor", _unpad,
                lambda rows, splits, padded: rows.new_empty((sum(splits), rows.shape[1])))
_padded_rows, _unpadded_rows = (differentiable(*pair, _save, _gradient) for pair in ((_padding, _unpadding), (_unpadding, _padding)))


class _Aligned(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: Optional[int] = None) -> None:
        super().__init__()
        where = type(self).__name__
        rules.size(where, "num_gemms", num_gemms)
        if align_size is not None:
            rules.size(where, "align_size", align_size)
        self.num_gemms, self.align_size = num_gemms, align_size

    def _sizes(self, m_splits: List[int]) -> Tuple[List[int], List[int]]:
        """Returns the row counts of the experts without and with padding."""
        if len(m_splits) != self.num_gemms:
            raise InvalidArgument(f"{type(self).__name__}: m_splits has {len(m_splits)} elements; num_gemms is {self.num_gemms}")
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        splits = [int(m) for m in m_splits]
        return splits, [-(-m // self.align_size) * self.align_size for m in splits]


class Fp8Padding(_Aligned):
    """Pads the rows of each expert with zero rows to a multiple of align_size; None: the first forward's recipe determines it."""

    def forward(self, inp: torch.Tensor, m_splits: List[int]) -> Tuple[torch.Tensor, List[int]]:
        """Returns (inp [.., H], padded, as a matrix; the row counts with padding). inp has m_splits[i] rows for expert i. Without padding, inp itself
        is returned.
        """
        splits, padded = self._sizes(m_splits)
        if splits == padded:
            return inp, m_splits
        return _padded_rows(inp.reshape(-1, inp.shape[-1]), splits, padded), padded


class Fp8Unpadding(_Aligned):
    """Removes the rows that Fp8Padding has added. align_size: as for Fp8Padding."""

    def forward(self, inp: torch.Tensor, m_splits: List[int]) -> torch.Tensor:
        """m_splits: the row counts of the experts without padding."""
        splits, padded = self._sizes(m_splits)
        if splits == padded:
            return inp
        return _unpadded_rows(inp.reshape(-1, inp.shape[-1]), splits, padded)
