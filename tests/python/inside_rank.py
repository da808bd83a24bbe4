"""usage: inside_rank.py FOLDER RANK. One of the two ranks of inside_formats_test.py: quantises its part of a matrix with the amax of both ranks, and
computes its part of Linear under sequence parallelism, whose activations travel between ranks as codes."""

import datetime
import sys
import time

import inside_package  # noqa: F401
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
import transformer_engine_torch as tex  # registered by inside_package
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, NVFP4Quantizer
from transformer_engine.pytorch.constants import DType

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60),
                        device_id=torch.device("cuda", rank))
options = dist.ProcessGroupNCCL.Options() if dist.is_nccl_available() else None
assert dist.get_backend() == dist.get_backend(dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl", pg_options=options)) == "gloo"
dist.barrier(device_ids=[rank])
# ReduceOp.AVG and coalesced collectives exist only in NCCL, so te-fl emulates them over Gloo. Tests both; the coalesced gather has two dtypes, and
# one rank arrives late.
mine, parts = torch.full((4,), rank + 1.0), torch.empty(2)
dist.reduce_scatter_tensor(parts, mine, op=dist.ReduceOp.AVG)
dist.all_reduce(mine, dist.ReduceOp.AVG)
assert mine.tolist() == [1.5] * 4 and parts.tolist() == [1.5] * 2, (mine, parts)
gathered = [torch.zeros(6, dtype=kind) for kind in (torch.bfloat16, torch.uint8)]
time.sleep(0.1 * rank)
with torch.distributed._coalescing_manager(async_ops=True) as joined:
    for whole in gathered:
        dist.all_gather_into_tensor(whole, torch.full((3,), rank + 5, dtype=whole.dtype), async_op=True)
    message = torch.zeros(1)
    dist.isend(torch.tensor([rank + 7.0]), 1 - rank)
    dist.irecv(message, 1 - rank)
joined.wait()
assert [whole.tolist() for whole in gathered] == [[5, 5, 5, 6, 6, 6]] * 2 and message.tolist() == [8.0 - rank], (gathered, message)
whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
whole[40, 3] = 9.0  # the largest value, which rank 1 holds
mine, group = slice(32 * rank, 32 * rank + 32), dist.group.WORLD
got, want = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group)(whole[mine]), NVFP4Quantizer()(whole)
assert got._amax_rowwise.tolist() == got._amax_columnwise.tolist() == [9.0]
assert torch.equal(got._rowwise_data, want._rowwise_data[mine])
quantizers = [Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu", with_amax_reduction=True, amax_reduction_group=group) for _ in range(2)]
# Rank 0 has no rows of either tensor and nevertheless joins both amax reductions.
parts = tex.split_quantize(whole[:0] if rank == 0 else whole, [0, 0] if rank == 0 else [32, 32], quantizers)
scales = [part._scale_inv.item() for part in parts]
largest = torch.stack([whole[:32].abs().max(), whole[32:].abs().max()])
assert scales == (1 / (torch.full((2,), 448.0) / largest)).tolist(), scales


def step(module, x, recipe, grad):
    x = x.clone().requires_grad_()
    with te.autocast(recipe=recipe, amax_reduction_group=group):
        y = module(x)
    y.backward(grad)
    return y, x.grad, module.weight.grad


def divided(mode, w):
    module = te.Linear(*reversed(w.shape), bias=False, params_dtype=torch.bfloat16) if mode is None else te.Linear(
        w.shape[1] * (2 if mode == "row" else 1), w.shape[0] * (2 if mode == "column" else 1), bias=False, params_dtype=torch.bfloat16,
        parallel_mode=mode, sequence_parallel=True, tp_group=group, tp_size=2)
    module.weight.data.copy_(w)
    return module


# Both ranks' shards of each tensor are equal, so the amax of a shard is that of the whole tensor, and the shards' codes are those of the whole
# tensor.
generator = torch.Generator().manual_seed(4)
w = (torch.randn(64, 32, generator=generator) / 8).bfloat16().repeat(2, 2)
x, dy = (torch.randn(64, n, generator=generator).bfloat16().repeat(1, 2) for n in (32, 64))
tokens, outputs, inputs = slice(32 * rank, 32 * rank + 32), slice(64 * rank, 64 * rank + 64), slice(32 * rank, 32 * rank + 32)
for recipe in (recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)):
    y, dx, dw = step(divided(None, w), x, recipe, dy)
    by_columns = step(divided("column", w[outputs]), x[tokens], recipe, dy[:, outputs].contiguous())
    by_rows = step(divided("row", w[:, inputs]), x[:, inputs].contiguous(), recipe, dy[tokens])
    for found, want in (*zip(by_columns, (y[:, outputs], dx[tokens], dw[outputs])), *zip(by_rows, (y[tokens], dx[:, inputs], dw[:, inputs]))):
        # The ranks' partial sums are rounded to BF16 before they are added: an error of 2^-9 of a value.
        assert (found.float() - want.float()).norm() <= 0.004 * want.float().norm(), (type(recipe).__name__, found, want)
torch.save(scales, f"{folder}/{rank}")
dist.destroy_process_group()
