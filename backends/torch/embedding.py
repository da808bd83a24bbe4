"""Lookup of rows of a table and its gradient by PyTorch's operations."""

from __future__ import annotations

import torch

from te_fl.reference_torch.checks import within
from te_fl.reference_torch.values import values


def add_rows(total: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    """total[at[i]] += rows[i] in FP32, in the order of i, so that the result is the same in each run."""
    if total.device.type == "cpu":
        total.index_add_(0, at, rows)
    else:  # PyTorch sorts the indices stably, and adds the rows of one index one after another
        total.index_put_((at,), rows, accumulate=True)


def embedding_fwd(indices: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
    rows = weight.shape[0]
    known = within("indices", indices, 0, rows, ", the rows of weight").reshape(-1, 1)
    if rows == 0:
        output.fill_(float("nan"))
        return
    found = values(weight.index_select(0, indices.reshape(-1).clamp(0, rows - 1)))
    output.copy_(torch.where(known, found, float("nan")).reshape(output.shape))


def embedding_bwd(indices: torch.Tensor, grad_output: torch.Tensor, grad_weight: torch.Tensor, accumulate: bool) -> None:
    rows, width = grad_weight.shape
    known = within("indices", indices, 0, rows, ", the rows of weight").reshape(-1)
    total = torch.zeros(rows + 1, width, dtype=torch.float32, device=grad_weight.device)  # the last row takes what is left out
    if accumulate:
        total[:rows] = grad_weight
    add_rows(total, torch.where(known, indices.reshape(-1).long(), rows), values(grad_output).reshape(indices.numel(), width))
    grad_weight.copy_(total[:rows])


OPS = {"embedding_fwd": embedding_fwd, "embedding_bwd": embedding_bwd}
