"""Softmax cross-entropy with the vocabulary sharded over a group: each rank has an equal number of columns, in rank order."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives

__all__ = ["divided_cross_entropy"]

_CHUNK = 1 << 24  # number of logits per step in the gradient's computation, to bound the FP32 temporaries


def _check_targets(targets: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """Checks the dtype of targets, and on a CPU also their values, as the single-rank op does."""
    if targets.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(f"parallel_cross_entropy: target has the dtype {targets.dtype}; it must be torch.int32 or torch.int64")
    if targets.device.type != "cpu":
        return
    outside = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
    if outside.any():
        at = int(outside.flatten().to(torch.uint8).argmax())
        raise InvalidArgument(f"parallel_cross_entropy: target number {at} is {int(targets.flatten()[at])}; it must lie in "
                              f"[0, {vocabulary}), the vocabulary that the ranks divide, or be {ignore_index}, which is ignored")


def _own_columns(targets: torch.Tensor, columns: int, group: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (the column of each row's target in this rank's shard, or 0; a mask of rows whose target is in this shard)."""
    column = targets.long() - columns * collectives.rank_in(group)
    own = (column >= 0) & (column < columns)
    return torch.where(own, column, 0), own


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of each row in FP32, in one pass over the logits."""
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return ops.cross_entropy_fwd(logits=logits, targets=first, label_smoothing=0.0, ignore_index=-100)[1]


def _of_all_ranks(logits: torch.Tensor, targets: torch.Tensor, smooths: bool, group: Any) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (log-sum-exp, the target's logit, the sum of logits) of each row over the whole vocabulary, with one collective."""
    column, own = _own_columns(targets, logits.shape[-1], group)
    at_target = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).float()
    rows = [_log_sum_exp(logits), torch.where(own, at_target, -torch.inf)]
    rows.append(logits.sum(-1, dtype=torch.float32) if smooths else torch.zeros_like(rows[0]))
    part = torch.stack(rows)
    every = part.new_empty(collectives.size_of(group), *part.shape)
    collectives.all_gather_into(every.flatten(0, 1), part, group)
    return torch.logsumexp(every[:, 0], 0), every[:, 1].amax(0), every[:, 2].sum(0)


def _write_gradient(grad: torch.Tensor, logits: torch.Tensor, lse: torch.Tensor, column: torch.Tensor, at_target: torch.Tensor,
                    rest: torch.Tensor, factor: torch.Tensor, ignored: torch.Tensor) -> None:
    """grad [rows, columns] = factor * (exp(logits - lse) - rest), minus factor * at_target in the target's column. Ignored rows get zeros explicitly,
    since 0 * exp(inf) is not 0. grad may share memory with the logits.
    """
    rows = max(1, _CHUNK // max(1, logits.shape[1]))
    for at in range(0, logits.shape[0], rows):
        part = slice(at, at + rows)
        values = logits[part].float().sub_(lse[part, None]).exp_().sub_(rest)
        values.scatter_add_(1, column[part, None], -at_target[part, None])
        grad[part] = values.mul_(factor[part, None]).masked_fill_(ignored[part, None], 0)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float, group: Any, ignore_index: int, overwrite: bool):
        lse, at_target, total = _of_all_ranks(logits, targets, label_smoothing > 0, group)
        loss = lse - at_target
        if label_smoothing > 0:
            vocabulary = logits.shape[-1] * collectives.size_of(group)
            loss = (1 - label_smoothing) * loss + label_smoothing * (lse - total / vocabulary)
        ctx.save_for_backward(logits, targets, lse)
        ctx.options = label_smoothing, group, ignore_index, overwrite
        ctx.used = False
        return torch.where(targets == ignore_index, 0.0, loss)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: torch.Tensor):
        label_smoothing, group, ignore_index, overwrite = ctx.options
        if overwrite and ctx.used:
            raise InvalidArgument("parallel_cross_entropy: overwrite_input=True allows one backward; leave it out for more")
        ctx.used = True
        logits, targets, lse = ctx.saved_tensors
        columns = logits.shape[-1]
        column, own = _own_columns(targets, columns, group)
        grad = logits.detach() if overwrite else torch.empty_like(logits)
        ignored = targets == ignore_index
        rest = torch.tensor(label_smoothing / (columns * collectives.size_of(group)), dtype=torch.float32, device=logits.device)
        _write_gradient(grad.view(-1, columns), logits.detach().view(-1, columns), lse.view(-1), column.view(-1),
                        own.view(-1).float() * (1.0 - label_smoothing), rest, grad_loss.float().reshape(-1), ignored.view(-1))
        if overwrite:
            torch.autograd.graph.increment_version(logits)
        return grad, None, None, None, None, None


def divided_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float, group: Any, ignore_index: int,
                          overwrite: bool) -> torch.Tensor:
    """Returns the FP32 loss [b, s] of each row over the whole vocabulary, equal on all ranks of `group`. All ranks must call it.

    logits: this rank's columns [b, s, vocabulary / ranks], contiguous. targets: ids [b, s] in the whole vocabulary, int32 or int64. On a CPU an id
    out of range raises InvalidArgument before the collective; on a device its loss is infinite. The backward needs no collective.
    """
    _check_targets(targets, logits.shape[-1] * collectives.size_of(group), ignore_index)
    return _Loss.apply(logits, targets, label_smoothing, group, ignore_index, overwrite)
