#!/usr/bin/env python3
"""Times what dividing a module over ranks costs on the host, in one process: its process groups are PyTorch's "fake" ones, which move nothing.

usage: host_ranks.py [--device DEVICE] [--blocks N] [--hidden N] [--tokens N]
  --blocks  alternating blocks per row; each figure is the median of the blocks' means (default 21)
  --hidden, --tokens  of the layer (default 1024 and 512; with few of both the host decides on a CPU too)

The rows are collectives of te_fl.pytorch beside the same calls of torch.distributed, a Linear with and without a group of one rank, and a
TransformerLayer: as one call of te-fl, as the calls of its parts, and as the part
of one of two ranks with sequence_parallel. Of the last, the time inside the collectives' functions is taken off and shown.
"""

import argparse
import time

import torch
import torch.distributed as dist
from host_time import medians
from torch.testing._internal.distributed.fake_pg import FakeStore

import te_fl.pytorch as te
from te_fl.pytorch.distributed import collectives


class Watch:
    """Sums the time inside the collectives' functions."""

    NAMES = ("all_reduce", "all_gather_into", "reduce_scatter_into")

    def __init__(self):
        self.seconds, self.calls = 0.0, 0
        for name in self.NAMES:
            setattr(collectives, name, self.timed(getattr(collectives, name)))

    def timed(self, function):
        def call(*arguments, **more):
            began = time.perf_counter()
            result = function(*arguments, **more)
            self.seconds += time.perf_counter() - began
            self.calls += 1
            return result
        return call


def collective_rows(device, blocks):
    """Prints what te-fl's dispatch adds to torch.distributed's own host time, by collective."""
    part, whole = torch.ones(8, device=device), torch.empty(16, device=device)
    pairs = {"all_reduce": (lambda: collectives.all_reduce(part), lambda: dist.all_reduce(part)),
             "all_gather": (lambda: collectives.all_gather_into(whole, part), lambda: dist.all_gather_into_tensor(whole, part)),
             "reduce_scatter": (lambda: collectives.reduce_scatter_into(part, whole), lambda: dist.reduce_scatter_tensor(part, whole)),
             "broadcast": (lambda: collectives.broadcast(part, 0), lambda: dist.broadcast(part, 0))}
    found = medians(device, {(name, by): call for name, calls in pairs.items() for by, call in zip(("te_fl.pytorch", "torch.distributed"), calls)},
                    blocks, 1000)
    for name in pairs:
        ours, theirs = found[name, "te_fl.pytorch"], found[name, "torch.distributed"]
        print(f"{name:14} {ours:8.1f} us, by torch.distributed alone {theirs:6.1f} us: {ours - theirs:.1f} us more")


def step_of(module, x):
    dy = torch.randn_like(module(x))
    parameters = list(module.parameters())

    def step():
        for p in parameters:
            p.grad = None
        x.grad = None
        module(x).backward(dy)
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
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    alone = dist.new_group([0])

    collective_rows(device, options.blocks)

    def x_of(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    small = {name: step_of(te.Linear(64, 64, params_dtype=dtype, device=device, parallel_mode="column", tp_group=group), x_of(8, 64))
             for name, group in (("without a group", None), ("tp_group of one rank", alone))}
    found = medians(device, small, options.blocks, 500)
    for name, us in found.items():
        print(f"Linear [8, 64], forward and backward, {name:22} {us:8.1f} us")
    print(f"the group costs {found['tp_group of one rank'] - found['without a group']:.1f} us  target 10")

    hidden, tokens, heads = options.hidden, options.tokens, max(options.hidden // 64, 2)
    parts = layer(hidden, heads, device, dtype)
    parts._fused = None
    divided = layer(hidden, heads, device, dtype, tp_group=dist.group.WORLD, sequence_parallel=True)
    watch = Watch()
    cases = {"one call": step_of(layer(hidden, heads, device, dtype), x_of(tokens, 1, hidden)), "in parts": step_of(parts, x_of(tokens, 1, hidden)),
             "two ranks": step_of(divided, x_of(tokens // 2, 1, hidden))}
    watch.seconds, watch.calls = 0.0, 0
    calls = 200 if hidden * tokens < 1 << 14 else 4
    found = medians(device, cases, options.blocks, calls)
    steps = (options.blocks + 3) * calls
    inside = watch.seconds / steps * 1e6
    for name, us in found.items():
        print(f"TransformerLayer hidden {hidden}, {tokens} tokens, forward and backward, {name:10} {us:10.1f} us")
    beyond = found["two ranks"] - inside
    print(f"two ranks beyond {watch.calls // steps} collectives ({inside:.1f} us): {beyond:.1f} us, of one call {beyond / found['one call']:.2f} (target 1.15), "
          f"of parts {beyond / found['in parts']:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
