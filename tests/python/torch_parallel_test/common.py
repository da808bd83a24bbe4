"""Helpers of the cases: compare a module on one rank with its shards on several ranks."""

import torch

from te_fl.pytorch.distributed import collectives

RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
_GATED = "fc1_"


def randomise(module, std=0.2):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * std)
    return module


def cut(tensor, name, param, size, rank, gated=False):
    """Returns a rank's shard of an unsharded parameter, or of its gradient."""
    dim = getattr(param, "partition_dim", None)
    if dim is None or tensor.shape == param.shape:
        return tensor
    if gated and _GATED in name:  # each of the two halves of a gated activation's weight is sharded
        halves = tensor.unflatten(0, (2, -1)).chunk(size, 1)[rank]
        return halves.flatten(0, 1)
    return tensor.chunk(size, dim)[rank]


def share(whole, part, size, rank, gated=False):
    """Copies this rank's shards of the unsharded module's parameters into the sharded module `part`."""
    named = dict(part.named_parameters())
    assert named.keys() == dict(whole.named_parameters()).keys()
    with torch.no_grad():
        for name, p in whole.named_parameters():
            named[name].copy_(cut(p, name, named[name], size, rank, gated))
    return part


def close(got, want, what, relative=None):
    """Raises AssertionError unless each element is within `relative` times the largest element of `want`."""
    relative = RELATIVE[want.dtype] if relative is None else relative
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    error, size = (got.float() - want.float()).abs().max().item(), want.float().abs().max().item()
    assert error <= relative * max(size, 0.1), f"{what}: off by {error:.3g} of {size:.3g}"


def rows(tensor, size, rank, divided):
    return tensor.chunk(size)[rank] if divided else tensor


def same_gradients(whole, part, group, gated=False, summed=(), relative=None):
    """Compares gradients. First sums over the group the gradients of parameters marked sequence_parallel, as frameworks do, and those whose names
    contain one of `summed`."""
    size, rank = group.size(), group.rank()
    for (name, p), q in zip(whole.named_parameters(), part.parameters()):
        got = q.grad.clone()
        if getattr(q, "sequence_parallel", False) or any(word in name for word in summed):
            collectives.all_reduce(got, group)
        close(got, cut(p.grad, name, q, size, rank, gated), f"the gradient of {name}", relative)


def compare(make, inputs, group, sp, gated=False, summed=(), divided_in=True, divided_out=True, call=None, dtype=torch.float32, relative=None):
    """Compares make(**parallel arguments) on one rank and over the group: outputs and gradients.

    inputs: whole tensors. With sp the module's inputs (unless divided_in=False) and its outputs are divided in the first dimension.
    call: (module, *inputs) -> output or a tuple.
    """
    size, rank = group.size(), group.rank()
    call = call or (lambda module, *x: module(*x))
    whole = randomise(make())
    part = share(whole, make(tp_group=group, sequence_parallel=sp), size, rank, gated)
    wholes = [x.clone().to(dtype).requires_grad_() for x in inputs]
    own = [rows(x.detach(), size, rank, sp and divided_in).clone().requires_grad_() for x in wholes]
    want, got = call(whole, *wholes), call(part, *own)
    want, got = (o if isinstance(o, tuple) else (o,) for o in (want, got))
    grads = [torch.randn_like(o) for o in want]
    for i, (w, g) in enumerate(zip(want, got)):
        w, gy = (rows(t, size, rank, sp and divided_out and t.dim() > 1) for t in (w, grads[i]))
        close(g, w, f"output {i}", relative)
    torch.autograd.backward(want, grads)
    # Each rank returns the whole bias, while the rows to which it is added are sharded.
    torch.autograd.backward(got, [rows(g, size, rank, sp and divided_out) if g.dim() > 1 else g / (size if sp else 1) for g in grads])
    for i, (x, o) in enumerate(zip(wholes, own)):
        close(o.grad, rows(x.grad, size, rank, sp and divided_in), f"the gradient of input {i}", relative)
    same_gradients(whole, part, group, gated, summed, relative)
