#!/usr/bin/env python3
"""Prints calls, bytes and host time of attention over ranks, for each form of context parallelism, over Gloo ranks on this machine's CPU.

One line for each form: the collectives and messages of one forward and backward of a rank with their bytes, counted by
te_fl.pytorch.distributed.collectives, and the median time of a forward and backward of a sequence so short that the host's work is nearly all of it.

usage: context_parallel.py [--ranks 2] [--tokens 16] [--heads 8] [--groups 8] [--size 64] [--repeat 50] [--fp8]
"""
import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 2), ("tokens", 16), ("heads", 8), ("groups", 8), ("size", 64), ("repeat", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fp8", action="store_true", help="FP8 attention by delayed scaling")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(options):
    import torch
    import torch.distributed as dist

    import te_fl.pytorch as te
    from te_fl.pytorch.distributed import collectives
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=options.ranks, timeout=datetime.timedelta(seconds=120))
    whole, forms = dist.group.WORLD, [("p2p", None), ("all_gather", None), ("a2a", None)]
    if options.ranks % 2 == 0 and options.ranks > 2:
        rows = [dist.new_group(list(range(first, first + 2))) for first in range(0, options.ranks, 2)]
        columns = [dist.new_group(list(range(place, options.ranks, 2))) for place in range(2)]
        forms.append(("a2a+p2p", [rows[options.rank // 2], columns[options.rank % 2]]))
    shape = (1, options.tokens // options.ranks)
    q, k, v = (torch.randn(*shape, heads, options.size, dtype=torch.bfloat16, requires_grad=True) for heads in (options.heads, options.groups, options.groups))

    def step(module):
        with te.autocast(enabled=options.fp8, recipe=te.recipe.DelayedScaling(fp8_dpa=options.fp8)):
            out = module(q, k, v)
        out.backward(torch.ones_like(out))

    for kind, groups in forms:
        module = te.DotProductAttention(options.heads, options.size, num_gqa_groups=options.groups, qkv_format="bshd", attn_mask_type="causal",
                                        cp_group=groups or whole, cp_comm_type=kind)
        for _ in range(3):
            step(module)
        collectives.reset_counts()
        step(module)
        counts, times = collectives.counts(), []
        for _ in range(options.repeat):
            dist.barrier()
            begin = time.perf_counter()
            step(module)
            times.append(time.perf_counter() - begin)
        if options.rank == 0:
            calls = ", ".join(f"{count.calls} {name} of {count.bytes} bytes" for (name, _), count in sorted(counts.items()))
            print(f"{kind}: {calls}; {statistics.median(times) * 1e6:.0f} us", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    options = parsed()
    if options.rank is not None:
        work(options)
        return 0
    if options.tokens % (2 * options.ranks):
        sys.exit(f"--tokens is {options.tokens}; give a multiple of {2 * options.ranks}, two chunks for each rank")
    print(f"{options.ranks} ranks, causal, BF16{', FP8 attention' if options.fp8 else ''}, {options.tokens} tokens, {options.heads} heads and {options.groups} groups of "
          f"{options.size}; of rank 0, a forward and a backward")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--rank", str(rank), "--store", os.path.join(folder, "store")],
                                  env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank in range(options.ranks)]
        return max(abs(process.wait()) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
