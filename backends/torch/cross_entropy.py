"""Softmax cross-entropy of integer targets and its gradient by PyTorch's operations, computed in FP32."""

from __future__ import annotations

from typing import Tuple, Union

import torch

from te_fl._native import LentTensor
from te_fl.reference_torch.checks import require
from te_fl.reference_torch.values import values

_NAN = float("nan")


def _checked(targets: torch.Tensor, classes: int, ignored: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns which rows count, and which of them have a class."""
    counts, known = targets != ignored, (targets >= 0) & (targets < classes)
    rule = f"it must lie in [0, {classes}), the classes, or be ignore_index"
    require(known | ~counts, lambda at: f"targets[{at}] is {int(targets.reshape(-1)[at])}; {rule}", f"an element of targets is wrong; {rule}")
    return counts, known


def cross_entropy_fwd(logits: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor, lse: torch.Tensor, label_smoothing: float,
                      ignore_index: int) -> None:
    x, classes = values(logits), logits.shape[-1]
    counts, known = _checked(targets, classes, ignore_index)
    sums = x.logsumexp(-1)
    result = sums
    if label_smoothing != 1:  # a term with factor 0 may be infinite
        result = result - (1 - label_smoothing) * x.gather(-1, targets.long().clamp(0, classes - 1)[..., None])[..., 0]
    if label_smoothing != 0:
        result = result - label_smoothing * x.mean(-1)
    loss.copy_(torch.where(counts, torch.where(known, result, _NAN), 0.0))
    lse.copy_(sums)


def cross_entropy_bwd(grad_loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, grad_logits: torch.Tensor,
                      label_smoothing: float, ignore_index: int) -> None:
    classes = logits.shape[-1]
    counts, known = _checked(targets, classes, ignore_index)
    result = torch.exp(values(logits) - lse[..., None]) - label_smoothing / classes
    at_target = torch.arange(classes, device=targets.device) == targets[..., None]
    result = grad_loss[..., None] * (result - (1 - label_smoothing) * at_target)
    grad_logits.copy_(torch.where(counts[..., None], torch.where(known[..., None], result, _NAN), 0.0))


def supports(logits: LentTensor) -> Union[bool, str]:
    return True if logits.shape[-1] > 0 else "logits without classes are not implemented"


OPS = {"cross_entropy_fwd": cross_entropy_fwd, "cross_entropy_bwd": cross_entropy_bwd}
