"""usage: torchrun --nproc-per-node N context_on_gpus.py, with N GPUs. Compares attention over NCCL ranks with FP64, and checks that p2p's messages lie
beside attention: with sequences of --tokens it prints the time of forward and backward for each form, and of p2p with the messages on the stream of
the attention."""

import argparse
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(pathlib.Path(__file__).resolve().parents[1])]

import te_fl.pytorch as te  # noqa: E402
from context_cases import Case  # noqa: E402


def timed(module, shape, repeat=10):
    q, k, v = (torch.randn(*shape, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    times = []
    for _ in range(repeat + 3):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        module(q, k, v).sum().backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times[3:])[repeat // 2] * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    Case.device = torch.device("cuda", torch.cuda.current_device())
    for kind in ("p2p", "all_gather", "a2a"):
        for layout in ("bshd", "sbhd", "thd"):
            for causal in (True, False):
                case = Case(size, rank, layout, causal, torch.bfloat16, heads=8, groups=8, dim=64)
                module = case.module(group, kind)
                (one, _), (two, _) = (case.check(module, 3e-2, f"{kind}, {layout}, causal {causal}") for _ in range(2))
                assert torch.equal(one, two), kind
    if rank == 0:
        print(f"equal to FP64 and bit for bit repeated over {size} GPUs", flush=True)
    shape = (1, options.tokens // size)
    for kind, stream in (("p2p", None), ("p2p", torch.cuda.current_stream()), ("all_gather", None), ("a2a", None)):
        module = te.DotProductAttention(16, 128, qkv_format="bshd", attn_mask_type="causal", cp_group=group, cp_comm_type=kind, cp_stream=stream)
        took = timed(module, shape)
        if rank == 0:
            print(f"{kind}{', messages on the stream of the attention' if stream else ''}: {took:.2f} ms for {options.tokens} tokens", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
