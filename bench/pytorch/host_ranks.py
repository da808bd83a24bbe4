#!/usr/bin/env python3
"""Times the host's cost of dividing a module over ranks, in one process: the process groups are PyTorch's "fake" ones, which transfer nothing.

usage: host_ranks.py [--device DEVICE] [--blocks N] [--hidden N] [--tokens N] [--ranks N] [--delayed]
  --blocks  alternating blocks per row; each figure is the median of the blocks' means (default 21)
  --hidden, --tokens  size of the layer (default 1024 and 512; with small sizes a CPU run is host-bound too)

  --ranks   of the groups (default 2)
  --delayed runs the TransformerLayer in FP8 with delayed scaling, whose amaxes are all-reduced

The rows: collectives of te_fl.pytorch against the same calls of torch.distributed, as functions and in a layer; a Linear with and without a group of
one rank; and a TransformerLayer: as one call of te-fl, as the calls of its parts, and as one rank's shard with sequence_parallel. For the last row
the time inside torch.distributed's functions is subtracted and shown.
"""

import argparse
import time

import torch
import torch.distributed as dist
from host_time import medians
from torch.testing._internal.distributed.fake_pg import FakeStore

import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling
from te_fl.pytorch.distributed import collectives


class Watch:
    """Sums the time inside torch.distributed's functions, and counts their calls."""

    NAMES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")

    def __init__(self):
        self.seconds, self.calls = 0.0, 0

    def __enter__(self):
        self.own = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self.own.items():
            setattr(dist, name, self.timed(function))
        return self

    def __exit__(self, *error):
        for name, function in self.own.items():
            setattr(dist, name, function)

    def timed(self, function):
        def call(*arguments, **more):
            began = time.perf_counter()
            result = function(*arguments, **more)
            self.seconds += time.perf_counter() - began
            self.calls += 1
            return result
        return call


def collective_rows(device, blocks):
    """Prints the host time that te-fl's dispatch adds to torch.distributed's own, by collective."""
    part, whole = torch.ones(8, device=device), torch.empty(8 * dist.get_world_size(), device=device)
    pairs = {"all_reduce": (lambda: collectives.all_reduce(part), lambda: dist.all_reduce(part)),
             "all_gather": (lambda: collectives.all_gather_into(whole, part), lambda: dist.all_gather_into_tensor(whole, part)),
             "reduce_scatter": (lambda: collectives.reduce_scatter_into(part, whole), lambda: dist.reduce_scatter_tensor(part, whole)),
             "broadcast": (lambda: collectives.broadcast(part, 0), lambda: dist.broadcast(part, 0))}
    found = medians(device, {(name, by): call for name, calls in pairs.items() for by, call in zip(("te_fl.pytorch", "torch.distributed"), calls)},
                    blocks, 1000)
    for name in pairs:
        ours, theirs = found[name, "te_fl.pytorch"], found[name, "torch.distributed"]
        print(f"{name:14} {ours:8.1f} us, by torch.distributed alone {theirs:6.1f} us: {ours - theirs:.1f} us more")


def least(cases, blocks, calls=50):
    """Returns {name: microseconds of this thread's CPU time per call}, running the cases in turn. Takes the minimum over the blocks, since other work
    on the machine only adds time."""
    times = {name: [] for name in cases}
    for _ in range(4 * blocks):
        for name, call in cases.items():
            began = time.thread_time()
            for _ in range(calls):
                call()
            times[name].append((time.thread_time() - began) / calls * 1e6)
    return {name: min(t) for name, t in times.items()}


def product_rows(device, dtype, blocks):
    """Prints the host time of a layer's collective: the forward of a small Linear that gathers or scatters its rows, less that of a Linear with as
    many GEMMs and no group."""
    ranks, own = dist.get_world_size(), {"params_dtype": dtype, "device": device}
    group = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
    pairs = {"all_gather": (te.Linear(64, 64 * ranks, parallel_mode="column", **group, **own), te.Linear(64, 64, **own), 8, 8 * ranks),
             "reduce_scatter": (te.Linear(64 * ranks, 64, parallel_mode="row", bias=False, **group, **own), te.Linear(64, 64, bias=False, **own), 8 * ranks,
                                8 * ranks)}
    part, whole = torch.ones(8, 64, device=device, dtype=dtype), torch.ones(8 * ranks, 64, device=device, dtype=dtype)
    raw = {"all_gather": lambda: dist.all_gather_into_tensor(whole, part), "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole)}
    cases = {}
    for name, (divided, alone, rows, all_rows) in pairs.items():
        cases[name, "divided"] = make_forward(divided, torch.ones(rows, 64, device=device, dtype=dtype))
        cases[name, "alone"] = make_forward(alone, torch.ones(all_rows, 64, device=device, dtype=dtype))
        cases[name, "raw"] = raw[name]
    found = least(cases, blocks)
    for name in pairs:
        more = found[name, "divided"] - found[name, "alone"]
        print(f"{name:14} of a layer {more:8.1f} us, by torch.distributed alone {found[name, 'raw']:6.1f} us: {more - found[name, 'raw']:.1f} us more")


def make_forward(module, x):
    def forward():
        with torch.no_grad():
            module(x)
    return forward


def make_step(module, x, recipe=None):
    parameters = list(module.parameters())

    def forward():
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return module(x)
    dy = torch.randn_like(forward())

    def step():
        for p in parameters:
            p.grad = None
        x.grad = None
        forward().backward(dy)
    return step


def layer(hidden, heads, device, dtype, **more):
    return te.TransformerLayer(hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, device=device, fuse_qkv_params=True,
                               self_attn_mask_type="no_mask", set_parallel_mode=True, **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--delayed", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    alone = dist.new_group([0])

    collective_rows(device, options.blocks)
    product_rows(device, dtype, options.blocks)

    def random_input(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    small = {name: make_step(te.Linear(64, 64, params_dtype=dtype, device=device, parallel_mode="column", tp_group=group), random_input(8, 64))
             for name, group in (("without a group", None), ("tp_group of one rank", alone))}
    found = medians(device, small, options.blocks, 500)
    for name, us in found.items():
        print(f"Linear [8, 64], forward and backward, {name:22} {us:8.1f} us")
    print(f"the group costs {found['tp_group of one rank'] - found['without a group']:.1f} us  target 10")

    hidden, tokens, heads = options.hidden, options.tokens, max(options.hidden // 64, options.ranks)
    recipe = DelayedScaling() if options.delayed else None
    parts = layer(hidden, heads, device, dtype)
    parts._fused = None
    divided = make_step(layer(hidden, heads, device, dtype, tp_group=dist.group.WORLD, sequence_parallel=True), random_input(tokens // options.ranks, 1, hidden), recipe)
    watch = Watch()

    def watched():
        with watch:
            divided()
    name = f"{options.ranks} ranks"
    cases = {"one call": make_step(layer(hidden, heads, device, dtype), random_input(tokens, 1, hidden), recipe),
             "in parts": make_step(parts, random_input(tokens, 1, hidden), recipe), name: watched}
    calls = 200 if hidden * tokens < 1 << 14 else 4
    found = medians(device, cases, options.blocks, calls)
    steps = (options.blocks + 3) * calls
    inside = watch.seconds / steps * 1e6
    for case, us in found.items():
        print(f"TransformerLayer hidden {hidden}, {tokens} tokens, {'FP8 delayed, ' if recipe else ''}forward and backward, {case:10} {us:10.1f} us")
    beyond = found[name] - inside
    print(f"{name} beyond {watch.calls // steps} calls of torch.distributed ({inside:.1f} us): {beyond:.1f} us, of one call "
          f"{beyond / found['one call']:.2f} (target 1.15), of parts {beyond / found['in parts']:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
