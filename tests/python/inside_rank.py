"""usage: inside_rank.py FOLDER RANK. One of the two ranks of inside_formats_test.py: quantises its part of a matrix by the amax of both."""

import datetime
import sys

import inside_package  # noqa: F401
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te  # noqa: F401
import transformer_engine_torch as tex  # the package brings it
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, NVFP4Quantizer
from transformer_engine.pytorch.constants import DType

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
whole[40, 3] = 9.0  # the largest, of rank 1
mine, group = slice(32 * rank, 32 * rank + 32), dist.group.WORLD
got, want = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group)(whole[mine]), NVFP4Quantizer()(whole)
assert got._amax_rowwise.tolist() == got._amax_columnwise.tolist() == [9.0]
assert torch.equal(got._rowwise_data, want._rowwise_data[mine])
quantizers = [Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu", with_amax_reduction=True, amax_reduction_group=group) for _ in range(2)]
# Rank 0 has no rows of either part, and takes part in both reductions all the same.
parts = tex.split_quantize(whole[:0] if rank == 0 else whole, [0, 0] if rank == 0 else [32, 32], quantizers)
scales = [part._scale_inv.item() for part in parts]
largest = torch.stack([whole[:32].abs().max(), whole[32:].abs().max()])
assert scales == (1 / (torch.full((2,), 448.0) / largest)).tolist(), scales
torch.save(scales, f"{folder}/{rank}")
dist.destroy_process_group()
