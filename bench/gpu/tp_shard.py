#!/usr/bin/env python3
"""Times one rank's shard of te_fl.pytorch's TransformerLayer on one GPU against the whole layer: the cost of sharding without any communication.

usage: tp_shard.py [--seconds N] [--degrees 2 4] [--recipes R..] [--eager] [--profile] [--json FILE]
  --seconds  of each case, in alternating blocks (default 6)
  --degrees  numbers of ranks that divide the layer (default 2 4)
  --recipes  BF16, delayed, current and block, or some of them
  --eager    calls the layer instead of replaying a CUDA graph of it, so that the time of a host-bound layer is the host's
  --profile  prints each case's kernels with their times, most expensive first, and measures nothing

The shape is the quickstart layer's (hidden 4096, ffn 16384, 32 heads, 2048 x 4 tokens), forward and backward, with sequence_parallel. The process groups are
PyTorch's "fake" ones, and collectives are left out: receive buffers stay uninitialised. Each row is the time of the whole layer divided by the
degree, over the rank's own time: 1 means no loss. Floor: the efficiency of the products alone at a rank's sizes.
"""

import argparse
import json
import statistics

import torch
import torch.distributed as dist
from measure import machine, sustained
from torch.testing._internal.distributed.fake_pg import FakeStore

import te_fl.pytorch as te

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 4096, 16384, 32, 2048, 4
TARGETS = {2: 0.977, 4: 0.954}  # efficiency of the GEMMs alone
RECIPES = {"BF16": None, "delayed": te.DelayedScaling(), "current": te.Float8CurrentScaling(), "block": te.Float8BlockScaling()}


class Done:
    """A work handle that is complete from the start, for a collective that was left out."""

    def wait(self):
        return True


def leave_out_collectives():
    """Replaces the fake groups' collectives by nothing, because the fake collectives copy a rank's shard with kernels, whose time a network transfer
    would not take."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(dist, name, lambda *arguments, async_op=False, **more: Done() if async_op else None)


def make_step(recipe, group, degree):
    divided = dict(tp_group=group, set_parallel_mode=True, sequence_parallel=True) if degree > 1 else {}
    module = te.TransformerLayer(HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device="cuda",
                                 self_attn_mask_type="no_mask", fuse_qkv_params=True, **divided)
    x = torch.randn(SEQUENCE // degree, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x) * 0.1
    parameters = list(module.parameters())

    def step():
        for p in parameters:
            p.grad = None
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group):
            y = module(x)
        y.backward(dy)
    return step


def replayed(step):
    """Captures the step as a CUDA graph; returns its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def print_kernels(name, step, steps=5):
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = sorted(((e.self_device_time_total / steps, e.count / steps, e.key) for e in profile.key_averages()), reverse=True)
    print(f"== {name}: {sum(us for us, _, _ in found):.0f} us in kernels")
    for us, count, key in found[:40]:
        print(f"{us:9.1f} us {count:5.1f} x {key[:130]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(options.degrees))
    groups = {1: dist.new_group([0])}
    groups.update({n: dist.new_group(list(range(n))) for n in options.degrees})
    leave_out_collectives()
    rows = []
    for name in options.recipes:
        steps = {n: make_step(RECIPES[name], group, n) for n, group in groups.items()}
        if options.profile:
            for n, step in steps.items():
                print_kernels(f"{name}, degree {n}", step)
            continue
        times = sustained(steps if options.eager else {n: replayed(step) for n, step in steps.items()}, options.seconds)
        for n in options.degrees:
            pairs = [whole / (n * part) for whole, part in zip(times[1], times[n])]
            row = dict(recipe=name, degree=n, whole_us=statistics.median(times[1]), part_us=statistics.median(times[n]), efficiency=statistics.median(pairs),
                       target=TARGETS.get(n))
            rows.append(row)
            print(f"{name:8} tp {n}: whole {row['whole_us']:8.0f} us, a rank's part {row['part_us']:8.0f} us, efficiency {row['efficiency']:.3f}"
                  + (f" (target {row['target']})" if row["target"] else ""), flush=True)
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
