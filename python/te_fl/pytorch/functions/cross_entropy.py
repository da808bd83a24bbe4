"""Softmax cross-entropy of token ids in FP32, which stores no probabilities."""

from __future__ import annotations

import warnings
from typing import Optional

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.functions.divided_cross_entropy import divided_cross_entropy
from te_fl.pytorch.functions.function import Op, differentiable

__all__ = ["parallel_cross_entropy"]


def _forward(logits, targets, label_smoothing, ignore_index, overwrite):
    loss = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    ops.cross_entropy_fwd(logits=logits, targets=targets, loss=loss, lse=lse, label_smoothing=label_smoothing, ignore_index=ignore_index)
    return loss, lse


def _backward(grad_loss, logits, targets, lse, label_smoothing, ignore_index):
    grad = torch.empty_like(logits)
    ops.cross_entropy_bwd(grad_loss=grad_loss.contiguous(), logits=logits, targets=targets, lse=lse, grad_logits=grad,
                          label_smoothing=label_smoothing, ignore_index=ignore_index)
    return grad


def _save(ctx, inputs, output):
    logits, targets, ctx.label_smoothing, ctx.ignore_index, ctx.overwrite = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.used = False


def _overwrite_logits(ctx, grad_loss):
    """Writes the gradient over the logits."""
    if ctx.used:
        raise InvalidArgument("parallel_cross_entropy: overwrite_input=True allows one backward; leave it out for more")
    logits, targets, lse = ctx.saved_tensors
    ctx.used = True
    grad = logits.detach()
    ops.cross_entropy_bwd(grad_loss=grad_loss.contiguous(), logits=grad, targets=targets, lse=lse, grad_logits=grad,
                          label_smoothing=ctx.label_smoothing, ignore_index=ctx.ignore_index)
    torch.autograd.graph.increment_version(logits)
    return grad


def _gradient(op, ctx, grad_loss, grad_lse=None):
    if grad_loss is None:
        grad = None
    elif ctx.overwrite:
        grad = _overwrite_logits(ctx, grad_loss)
    else:
        grad = op(grad_loss, *ctx.saved_tensors, ctx.label_smoothing, ctx.ignore_index)
    return grad, None, None, None, None


def _fake_forward(logits, targets, label_smoothing, ignore_index, overwrite):
    return tuple(torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(2))


_loss = differentiable(
    Op("cross_entropy_fwd(Tensor logits, Tensor targets, float label_smoothing, int ignore_index, bool overwrite) -> (Tensor, Tensor)",
       _forward, _fake_forward),
    Op("cross_entropy_bwd(Tensor grad_loss, Tensor logits, Tensor targets, Tensor lse, float label_smoothing, int ignore_index) -> Tensor",
       _backward, lambda grad_loss, logits, *rest: torch.empty_like(logits)),
    _save, _gradient)


def _check(inp, target, label_smoothing, ranks, overwrite_input):
    if ranks > 1 and torch.compiler.is_compiling():
        raise Unsupported("parallel_cross_entropy: dist_process_group of several ranks is not served under torch.compile; call the function "
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
        raise Unsupported("parallel_cross_entropy: overwrite_input=True is not served under torch.compile; leave it out there")


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
        loss = _loss(inp.contiguous(), rows, float(label_smoothing), ignore_idx, overwrite_input)[0]
    if reduce_loss:
        return loss.sum() / (rows != ignore_idx).sum().clamp_min(1)
    return loss
