"""The functions that each rank runs for cross_entropy_test.py."""

import itertools

import torch
import torch.distributed as dist

from te_fl.errors import InvalidArgument
from te_fl.pytorch.functions.cross_entropy import parallel_cross_entropy
from te_fl.pytorch.distributed import collectives

SHAPE, VOCABULARY, IGNORED = (3, 5), 62, 7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of(logits, targets, grad, **options):
    x = logits.clone().requires_grad_()
    loss = parallel_cross_entropy(x * 1 if options.get("overwrite_input") else x, targets, **options)
    loss.backward(grad if loss.dim() else None)
    return loss.detach(), x.grad


def losses():
    """Returns by case: (loss, this rank's gradient) of the sharded vocabulary, and PyTorch's in FP64; and the collectives of a call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    whole = 4 * torch.randn(*SHAPE, VOCABULARY)
    targets, grad = torch.randint(0, VOCABULARY, SHAPE), torch.randn(SHAPE)
    targets[0, :2], targets[1, 1], targets[2, 2] = IGNORED, 0, VOCABULARY - 1
    results = {}
    for dtype, smoothing, reduces, ignored in itertools.product(DTYPES, (0.0, 0.1), (False, True), (-100, IGNORED)):
        logits = whole.to(dtype)
        collectives.reset_counts()
        got = of(logits.chunk(ranks, -1)[rank], targets, grad, label_smoothing=smoothing, reduce_loss=reduces, dist_process_group=dist.group.WORLD,
                 ignore_idx=ignored, overwrite_input=smoothing > 0)
        calls = sum(c.calls for c in collectives.counts().values())
        exact = logits.double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(exact.flatten(0, 1), targets.flatten(), ignore_index=ignored, label_smoothing=smoothing,
                                                 reduction="mean" if reduces else "none")
        loss.backward(None if reduces else grad.flatten().double())
        results[str(dtype), smoothing, reduces, ignored] = (*got, loss.detach().view(got[0].shape), exact.grad.chunk(ranks, -1)[rank], calls)
    return results


def extreme_logits():
    """Returns by case the loss and this rank's gradient with some ignored rows, and PyTorch's. The ignored rows contain infinite, huge and NaN
    logits, on one rank or on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for dtype, value, everywhere, smoothing, overwrite in itertools.product(DTYPES, (torch.inf, -torch.inf, torch.nan, 6e4, -6e4), (False, True),
                                                                             (0.0, 0.1), (False, True)):
        torch.manual_seed(1)
        whole, targets, grad = torch.randn(*SHAPE, VOCABULARY), torch.randint(0, VOCABULARY, SHAPE), torch.randn(SHAPE)
        targets[0, :2], targets[2, 2], grad[2, 2] = -100, -100, torch.inf
        whole[0, :2, slice(None) if everywhere else 3], whole[2, 2, -1] = value, value
        logits = whole.to(dtype)
        got = of(logits.chunk(ranks, -1)[rank], targets, grad, label_smoothing=smoothing, dist_process_group=dist.group.WORLD, ignore_idx=-100,
                 overwrite_input=overwrite)
        exact = logits.double().requires_grad_()
        kept = targets.flatten() != -100
        loss = torch.zeros(kept.shape, dtype=torch.float64)
        loss[kept] = torch.nn.functional.cross_entropy(exact.flatten(0, 1)[kept], targets.flatten()[kept], label_smoothing=smoothing, reduction="none")
        loss.backward(torch.where(kept, grad.flatten(), 0).double())
        results[str(dtype), value, everywhere, smoothing, overwrite] = *got, loss.detach().view(SHAPE), exact.grad.chunk(ranks, -1)[rank]
    return results


def all_ignored():
    logits = torch.randn(2, 2, 8)
    return of(logits, torch.full((2, 2), -100), None, reduce_loss=True, dist_process_group=dist.group.WORLD)


def refused_targets():
    """Returns the errors of ids outside of the vocabulary and of ids of other dtypes, and the loss of a later valid call."""
    logits = torch.zeros(2, 2, 8)
    errors = []
    for wrong in (torch.tensor([[0, 8 * dist.get_world_size()], [1, 2]]), torch.tensor([[0, 1], [-1, 2]]), torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int16)):
        try:
            parallel_cross_entropy(logits, wrong, dist_process_group=dist.group.WORLD)
        except InvalidArgument as error:
            errors.append(str(error))
    return errors, parallel_cross_entropy(logits, torch.zeros(2, 2, dtype=torch.int32), dist_process_group=dist.group.WORLD)
