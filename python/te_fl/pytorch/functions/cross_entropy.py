"""Softmax cross-entropy of token ids in FP32, which stores no probabilities."""

from __future__ import annotations

import warnings
from typing import Optional

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.functions.divided_cross_entropy import divided_cross_entropy
from te_fl.pytorch.functions.function import differentiable_op

__all__ = ["parallel_cross_entropy"]


_loss = differentiable_op("cross_entropy_fwd", "cross_entropy_fwd", "cross_entropy_bwd")


class _OverwritingLoss(torch.autograd.Function):
    """_loss() whose backward writes the gradient over the logits."""

    @staticmethod
    def forward(ctx, logits, targets, label_smoothing, ignore_index):
        loss, lse = _loss.forward.run(logits, targets, label_smoothing, ignore_index)
        ctx.save_for_backward(logits, targets, lse)
        ctx.options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
        ctx.used = False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        if ctx.used:
            raise InvalidArgument("parallel_cross_entropy: overwrite_input=True allows one backward; leave it out for more")
        logits, targets, lse = ctx.saved_tensors
        ctx.used = True
        grad = logits.detach()
        ops.cross_entropy_bwd(grad_loss=grad_loss.contiguous(), logits=grad, targets=targets, lse=lse, grad_logits=grad, **ctx.options)
        torch.autograd.graph.increment_version(logits)
        return grad, None, None, None


def _check(inp, target, label_smoothing, ranks, overwrite_input):
    if ranks > 1 and torch.compiler.is_compiling():
        raise Unsupported("parallel_cross_entropy: dist_process_group of several ranks is not supported under torch.compile; call the function "
                          "outside of the compiled one")
    if inp.dim() != 3:
        raise InvalidArgument(f"parallel_cross_entropy: inp has shape {tuple(inp.shape)}; it is [b, s, vocabulary] or [s, b, vocabulary]")
    if target.numel() != inp.shape[0] * inp.shape[1]:
        raise InvalidArgument(f"parallel_cross_entropy: target has {target.numel()} elements; inp has {inp.shape[0] * inp.shape[1]} rows")
    if not 0.0 <= label_smoothing <= 1.0:
        raise InvalidArgument(f"parallel_cross_entropy: label_smoothing is {label_smoothing}; it is within 0 and 1")
    if overwrite_input and not inp.is_contiguous():
        raise InvalidArgument("parallel_cross_entropy: overwrite_input=True needs a contiguous inp; give inp.contiguous(), or leave it out")
    if overwrite_input and torch.compiler.is_compiling():
        raise Unsupported("parallel_cross_entropy: overwrite_input=True is not supported under torch.compile; leave it out there")


def parallel_cross_entropy(inp: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, reduce_loss: bool = False,
                           dist_process_group: Optional["torch.distributed.ProcessGroup"] = None, ignore_idx: int = -100,
                           is_cg_capturable: bool = False, *, overwrite_input: bool = False,
                           _input: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Returns the FP32 loss of each row of logits. With reduce_loss, the mean over the rows whose target is not ignore_idx; 0 if there are none.

    inp: logits [b, s, vocabulary] or [s, b, vocabulary]. target: a token id for each row. overwrite_input: the backward writes the gradient over inp,
    which must not be read afterwards. dist_process_group: the vocabulary is sharded over its ranks. inp has this rank's columns, and targets are ids
    of the whole vocabulary. An id out of range is an error on a CPU, and gives an infinite loss on a device. is_cg_capturable has no effect: the ops
    can always be captured.
    """
    if _input is not None:
        warnings.warn("parallel_cross_entropy: _input is deprecated; give inp", FutureWarning)
        inp = _input
    if is_cg_capturable:
        warnings.warn("parallel_cross_entropy: is_cg_capturable is deprecated: the ops may always be captured; leave it out", FutureWarning)
    ranks = 1 if dist_process_group is None else collectives.size_of(dist_process_group)
    _check(inp, target, label_smoothing, ranks, overwrite_input)
    rows = target.reshape(inp.shape[:2]).contiguous()
    if ranks > 1:
        loss = divided_cross_entropy(inp.contiguous(), rows, float(label_smoothing), dist_process_group, ignore_idx, overwrite_input)
    else:
        options = float(label_smoothing), ignore_idx
        loss = _OverwritingLoss.apply(inp, rows, *options) if overwrite_input else _loss(inp.contiguous(), rows, *options)[0]
    if reduce_loss:
        return loss.sum() / (rows != ignore_idx).sum().clamp_min(1)
    return loss
