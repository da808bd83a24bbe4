#!/usr/bin/env python3
"""Tests TE_FL_TP_OVERLAP=1 between a host's GPUs: results equal those without it, in graphs, on several streams and after a failed product.

usage: torchrun --nproc-per-node N overlap_on_gpus.py [--lose-rank]
  --lose-rank  instead kills the last rank in the middle of a step; the others have to end

tools/ranks_check.py runs this program. overlap_cases.py tests the same over Gloo on a host without GPUs.
"""

import contextlib
import os
import signal
import sys
from unittest import mock

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import te_fl  # noqa: E402
import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from te_fl.pytorch.distributed import peer_copies  # noqa: E402

HIDDEN, FFN, HEADS, ROWS = 1024, 4096, 16, 8192
BF16 = torch.bfloat16
# relative to the norm; another GEMM algorithm rounds differently before FP8 quantisation
LIMIT = {None: 1e-2, DelayedScaling: 4e-2, Float8CurrentScaling: 4e-2}


def layer(group, overlapped):
    torch.manual_seed(3)
    with mock.patch.dict(os.environ, {"TE_FL_TP_OVERLAP": str(int(overlapped))}):
        te_fl.reload()
        module = te.TransformerLayer(HIDDEN, FFN, HEADS, tp_group=group, set_parallel_mode=True, sequence_parallel=True, attention_dropout=0, hidden_dropout=0,
                                     params_dtype=BF16, device="cuda", self_attn_mask_type="no_mask")
        with torch.no_grad():
            # the layer reads the setting at the first use of its group
            module(torch.zeros(ROWS // group.size(), 1, HIDDEN, device="cuda", dtype=BF16))
    te_fl.reload()
    return module


def tensors(group, step):
    torch.manual_seed(100 * step + group.rank())
    return (torch.randn(ROWS // group.size(), 1, HIDDEN, device="cuda", dtype=BF16) for _ in range(2))


def one_step(module, group, recipe, x, dy):
    module.zero_grad()
    x.grad = None
    with te.autocast(recipe=recipe(), amax_reduction_group=group) if recipe else contextlib.nullcontext():
        y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def steps(module, group, recipe, streams=()):
    results = []
    for i in range(4):
        if streams and recipe is DelayedScaling:  # delayed scaling reads scales of earlier steps, which a program must order by events
            streams[i % len(streams)].wait_stream(streams[(i - 1) % len(streams)])
        with torch.cuda.stream(streams[i % len(streams)]) if streams else contextlib.nullcontext():
            x, dy = tensors(group, i)
            results += [t.clone() for t in one_step(module, group, recipe, x.requires_grad_(), dy)]
    torch.cuda.synchronize()
    return results


def close(got, want, limit, text):
    worst = max(((a - b).float().norm() / b.float().norm().clamp_min(1e-6)).item() for a, b in zip(got, want, strict=True))
    assert worst <= limit, f"{text}: apart by {worst:.2e} of the norm, of {limit:g}"
    return worst


def check_results(group, recipe):
    with mock.patch.object(peer_copies, "Scatter", wraps=peer_copies.Scatter) as scatter, mock.patch.object(peer_copies, "Gather", wraps=peer_copies.Gather) as gather:
        got = steps(layer(group, True), group, recipe)
    assert scatter.call_count and gather.call_count, "no copies between GPUs were made"
    worst = close(got, steps(layer(group, False), group, recipe), LIMIT[recipe], "four steps")
    return f"{scatter.call_count} sums and {gather.call_count} gathers by copies, apart by at most {worst:.1e}"


def check_streams(group, recipe):
    module, streams = layer(group, True), [torch.cuda.Stream() for _ in range(3)]
    want = steps(layer(group, True), group, recipe)
    return f"apart by {close(steps(module, group, recipe, streams), want, LIMIT[recipe], 'steps on three streams in turns'):.1e}"


def check_graph(group, recipe):
    want = steps(layer(group, True), group, recipe)
    module = layer(group, True)
    x, dy = tensors(group, 0)
    x, dy = x.clone().requires_grad_(), dy.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(4):  # four steps, so that the replays use the amaxes that the last step of `want` uses
            for to, value in zip((x.data, dy), tensors(group, i)):
                to.copy_(value)
            one_step(module, group, recipe, x, dy)
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        results = one_step(module, group, recipe, x, dy)
    last = want[3 * len(results):]
    for _ in range(3):
        for to, value in zip((x.data, dy), tensors(group, 3)):
            to.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
    worst = close(results, last, LIMIT[recipe], "a graph's replays")
    # an eager step between replays, on the same memory
    between = one_step(layer(group, True), group, None, *(t.requires_grad_() for t in tensors(group, 3)))
    graph.replay()
    torch.cuda.synchronize()
    close(results, last, LIMIT[recipe], "a replay after another layer's step")
    assert all(torch.isfinite(t).all() for t in between)
    return f"apart by at most {worst:.1e}"


def check_failure(group):
    """A GEMM for which no implementation is allowed fails on all ranks, and later calls are right."""
    module = layer(group, True)
    want = steps(module, group, None)
    x, _ = tensors(group, 0)
    with te_fl.policy(per_op={"generic_gemm": ["vendor:NOBODYS"]}, strict=True):
        try:
            module(x)
        except te_fl.errors.Error as error:
            text = str(error).splitlines()[0]
        else:
            raise AssertionError("a product was computed that the policy denies")
    close(steps(module, group, None), want, LIMIT[None], "steps after a product that failed")
    return text[:90]


def lose_rank(group):
    module = layer(group, True)
    x, dy = tensors(group, 0)
    x.requires_grad_()
    for i in range(10000):
        if i == 20 and group.rank() == group.size() - 1:
            y = module(x)
            os.kill(os.getpid(), signal.SIGKILL)
        one_step(module, group, DelayedScaling, x, dy)
        if i % 10 == 0:
            torch.cuda.synchronize()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    group = dist.group.WORLD
    if "--lose-rank" in sys.argv:
        lose_rank(group)
        sys.exit("the group went on without a rank")
    checks = [(f"{'BF16' if recipe is None else recipe.__name__}, {name}", lambda check=check, recipe=recipe: check(group, recipe))
              for recipe in (None, DelayedScaling, Float8CurrentScaling)
              for name, check in (("results", check_results), ("streams", check_streams), ("graph", check_graph))]
    failed = 0
    for name, check in (*checks, ("a product that fails", lambda: check_failure(group))):
        try:
            text, bad = check(), 0
        except Exception as error:  # sends the error to the other ranks
            text, bad = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}", 1
        all_bad = torch.tensor([bad], device="cuda")
        dist.all_reduce(all_bad)
        failed += int(all_bad.item() > 0)
        if group.rank() == 0 or bad:
            print(f"rank {group.rank()}: {name:34} {'FAILED' if bad else 'passed'}  {text}", flush=True)
    if group.rank() == 0:
        print(f"{len(checks) + 1 - failed} passed, {failed} failed", flush=True)
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
