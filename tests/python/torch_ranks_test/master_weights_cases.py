"""The functions that each rank runs for master_weights_test.py: a flat buffer of codes, of which each rank updates its half, as in distributed
optimizers."""

import torch
import torch.distributed as dist

import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.fp8 import master_weights as masters

CURRENT, BLOCK = Float8CurrentScaling(), Float8BlockScaling()
RECIPES = {"delayed": DelayedScaling(), "margin": DelayedScaling(margin=1), "current": CURRENT, "block": BLOCK,
           "pow2": Float8CurrentScaling(use_power_2_scales=True)}
SHAPES = ((160, 144), (144, 300), (256, 128), (16, 32))  # (inputs, outputs) of the weights


def modules(recipe, dtype):
    torch.manual_seed(3)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return [te.Linear(i, o, bias=False, params_dtype=dtype, device="cpu") for i, o in SHAPES]


def backward(module, recipe, dtype):
    torch.manual_seed(1)
    x = torch.randn(16, module.in_features, dtype=dtype, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = module(x)
    y.float().square().sum().backward()
    return x.grad


def cast(recipe, dtype, to_shards, by_hand):
    """Returns (whether codes, scales, amaxes and gradients equal those of the whole cast, the number of collectives)."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, parts = modules(recipe, dtype), modules(recipe, dtype)
    sizes = [m.weight.numel() for m in parts]
    half = -(-sum(sizes) // ranks)
    buffer = torch.zeros(ranks * half, dtype=torch.uint8)
    for module, piece in zip(parts, buffer[:sum(sizes)].split(sizes)):
        masters.replace_raw_data(module.weight, piece)
        backward(module, recipe, dtype)  # creates the transpose, which the cast does not make
    for module in whole:
        backward(module, recipe, dtype)
    torch.manual_seed(9)
    values = [torch.randn(m.weight.shape) * 10.0 ** torch.randn(m.weight.shape[0], 1) for m in parts]
    begin, end = rank * half, (rank + 1) * half
    at, own, offsets, shards = 0, [], [], []
    for v in values:
        first, last = max(begin - at, 0), min(end - at, v.numel())
        own.append(v.reshape(-1)[first:last] if first < last else None)
        offsets.append(first if first < last else None)
        shards.append(torch.zeros(max(last - first, 0), dtype=torch.uint8))
        at += v.numel()
    collectives.reset_counts()
    masters.quantize_master_weights([m.weight for m in parts], own, offsets, dist.group.WORLD, shards if to_shards else None, by_hand)
    taken = sum(count.calls for count in collectives.counts().values())
    if to_shards:
        for module, shard, offset in zip(parts, shards, offsets):
            if offset is not None:
                module.weight._data.view(-1)[offset:offset + shard.numel()] = shard
    dist.all_gather_into_tensor(buffer, buffer[begin:end].clone())
    if by_hand:
        masters.post_all_gather_processing([m.weight for m in parts])
    same = []
    for module, other, v in zip(whole, parts, values):
        with torch.no_grad():
            module.weight.copy_(v.to(dtype))
        same.append(torch.equal(module.weight._data, other.weight._data) and torch.equal(module.weight._scale_inv, other.weight._scale_inv))
        amaxes = module.weight._codes.amax, other.weight._codes.amax
        same.append(amaxes[0] is None or torch.equal(*amaxes))
        same.append(torch.equal(backward(module, recipe, dtype), backward(other, recipe, dtype)))
        same.append(other.weight.get_high_precision_init_val() is None if hasattr(other.weight, "get_high_precision_init_val") else True)
    return same, taken


def casts():
    return {(name, str(dtype), to_shards, by_hand): cast(recipe, dtype, to_shards, by_hand) for name, recipe in RECIPES.items()
            for dtype, to_shards, by_hand in ((torch.float32, False, False), (torch.bfloat16, True, True))}
