#!/usr/bin/env python3
"""Checks that block-scaled products of te-fl inside NVIDIA's package equal the package's bit for bit: FP8 partial sums over 128 along K, then an
FP32 fused multiply-add.

usage: block_products_on_gpus.py, with te_fl and transformer_engine on PYTHONPATH and TE_FL_PLUGIN_MODULES naming the CUDA plugin of a build. Needs a GPU of
compute capability 9.0. The partial sums are PyTorch's own FP8 products, torch._scaled_mm.
"""

import itertools
import sys

import te_fl

te_fl.inside_transformer_engine()

import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.constants import TE_DType  # noqa: E402

E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
SHAPES = ((128, 128, 128), (320, 64, 336), (320, 256, 336), (1024, 4096, 1024))  # M, K, N


def quantised(values, dtype, rows):
    """Quantises to row-wise and column-wise data, in blocks of 1x128 if `rows`, else of 128x128."""
    return te.Float8BlockQuantizer(TE_DType[dtype], rowwise=True, columnwise=True, block_scaling_dim=1 if rows else 2)(values)


def factors(tensor, rows, k, by_rows):
    """Expands the scales to [rows, blocks along K]."""
    scales = tensor._rowwise_scale_inv
    return scales.t()[:rows] if by_rows else scales.repeat_interleave(128, 0)[:rows, :-(-k // 128)]


def is_exact(shape, dtypes, out_dtype, by_rows, bias, accumulate):
    m, k, n = shape
    torch.manual_seed(0)
    x, w = (quantised(torch.randn(rows, k, device="cuda"), dtype, one) for rows, dtype, one in zip((m, n), dtypes, by_rows))
    offset = torch.randn(1, n, device="cuda", dtype=BF16) if bias else None
    before = torch.randn(m, n, device="cuda", dtype=out_dtype) if accumulate else None
    workspace = torch.empty(0, dtype=torch.uint8, device="cuda")
    got = tex.generic_gemm(w, True, x, False, before.clone() if accumulate else None, None, TE_DType[out_dtype], offset, TE_DType[BF16], False, None, False,
                           workspace, 0, accumulate, True)[0]
    total, one = torch.zeros(m, n, device="cuda", dtype=torch.float64), torch.ones((), device="cuda")
    of_x, of_w = (factors(t, rows, k, which) for t, rows, which in ((x, m, by_rows[0]), (w, n, by_rows[1])))
    for block, begin in enumerate(range(0, k, 128)):
        part = slice(begin, min(begin + 128, k))
        partial = torch._scaled_mm(x._rowwise_data.view(dtypes[0])[:, part].contiguous(), w._rowwise_data.view(dtypes[1])[:, part].contiguous().t(),
                                   scale_a=one, scale_b=one, out_dtype=F32, use_fast_accum=False)
        scale = of_x[:, block:block + 1].double() * of_w[:, block:block + 1].double().t()
        total = (total + partial.double() * scale).float().double()  # rounds once, as an FP32 fused multiply-add does
    want = total.float()
    if bias:
        want = want + offset
    want = want.to(out_dtype)
    return torch.equal(got, want + before if accumulate else want)


def main():
    cases = list(itertools.product(SHAPES, ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)), (BF16, F32), ((True, False), (True, True), (False, True)),
                                   (False, True), (False, True)))
    wrong = [case for case in cases if not is_exact(*case)]
    for case in wrong:
        print("apart:", *case)
    print(f"block-scaled products to the bit: {len(cases) - len(wrong)} of {len(cases)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
