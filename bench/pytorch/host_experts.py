#!/usr/bin/env python3
"""Times the host's cost of moe_dispatch() and moe_combine(), in one process: the process group is PyTorch's "fake" one, which transfers nothing.

usage: host_experts.py [--experts N] [--ranks N] [--rows N] [--hidden N] [--calls N]

With a capacity, so that the sizes do not depend on what other ranks would have sent. Prints microseconds of a forward and a backward, median of the calls, without and with
probabilities, and the collectives of a step with their bytes.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import te_fl.pytorch as te
from te_fl.pytorch.distributed import collectives


def step(rows, counts, probs, capacity):
    """One forward and backward; returns the seconds of each."""
    begin = time.perf_counter()
    got, moved, handle = te.moe_dispatch(rows, counts, None, probs=probs, capacity=capacity)
    out = te.moe_combine(got if moved is None else got * moved[:, None], handle)
    middle = time.perf_counter()
    out.backward(rows.detach())
    return middle - begin, time.perf_counter() - middle


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("experts", 64), ("ranks", 8), ("rows", 128), ("hidden", 64), ("calls", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=a.ranks)
    torch.set_num_threads(1)
    counts = torch.full((a.experts,), a.rows // a.experts)
    rows = torch.randn(int(counts.sum()), a.hidden, requires_grad=True)
    capacity = max(1, a.rows // a.experts)
    for name, probs in (("rows", None), ("rows and probabilities", torch.ones(len(rows), requires_grad=True))):
        times = [step(rows, counts, probs, capacity) for _ in range(a.calls)]
        forward, backward = (1e6 * statistics.median(part) for part in zip(*times))
        print(f"{name}: forward {forward:.0f} us, backward {backward:.0f} us")
    collectives.reset_counts()
    step(rows, counts, None, capacity)
    print(collectives.summary())


if __name__ == "__main__":
    main()
