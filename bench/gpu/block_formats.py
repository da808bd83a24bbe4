#!/usr/bin/env python3
"""Times modules of te_fl.pytorch in MXFP8 and NVFP4 beside BF16, and compares MXFP8's products with FP64 on dequantised codes.

usage: block_formats.py [--blocks N] [--json FILE]
  --blocks  alternating blocks of 10 steps per row; each figure is the median of the blocks' means (default 15)

Exits 1 if a product differs from FP64 by more than BF16's rounding, or if an op of an MXFP8 step ran on the host.
"""
import argparse
import json
import statistics
import sys

import torch

import te_fl
import te_fl.pytorch as te
from te_fl import ops, torch_mxfp8
from te_fl.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling

BF16 = torch.bfloat16
RECIPES = {"BF16": None, "MXFP8": MXFP8BlockScaling(), "NVFP4": NVFP4BlockScaling()}
CALLS = 10


def values(x, columns):
    """x after MXFP8, in FP64."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if columns:
        made = torch_mxfp8.columnwise(codes, torch_mxfp8.column_scales(*x.shape, x.device))
    else:
        made = torch_mxfp8.rowwise(codes, torch_mxfp8.row_scales(*x.shape, x.device))
    ops.quantize(input=x, output=made)
    return ops.dequantize(input=made, output=torch.float32).double()


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def check():
    """The largest relative difference of MXFP8's products of a Linear from FP64 on the codes' values."""
    worst = 0.0
    for rows, inner, outer in ((512, 1024, 768), (200, 96, 72), (37, 64, 48)):
        layer = te.Linear(inner, outer, bias=False, params_dtype=BF16, device="cuda")
        x, dy = torch.randn(rows, inner, device="cuda", dtype=BF16, requires_grad=True), torch.randn(rows, outer, device="cuda", dtype=BF16)
        with te.autocast(recipe=MXFP8BlockScaling()):
            y = layer(x)
        y.backward(dy)
        w, inp = layer.weight.detach(), x.detach()
        worst = max(worst, relative(y, values(inp, False) @ values(w, False).t()), relative(x.grad, values(dy, False) @ values(w, True)),
                    relative(layer.weight.grad, values(dy, True).t() @ values(inp, True)))
    return worst


def make_step(make, shape, recipe):
    module, x = make(), torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True)
    dy = None

    def step():
        nonlocal dy
        for p in module.parameters():
            p.grad = None
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        dy = torch.randn_like(y) if dy is None else dy
        y.backward(dy)

    return step


def mean_us(step):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / CALLS


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    worst = check()
    on_host = sorted({(row["op"], row["impl_id"]) for row in te_fl.usage() if row["impl_id"].endswith((".host", ".cpu"))})
    print(f"MXFP8's products of Linear: at most {worst:.2e} from FP64 on the codes' values; ops on the host: {on_host or 'none'}")
    rows = {
        "Linear 4096 x 4096, 8192 rows": (lambda: te.Linear(4096, 4096, params_dtype=BF16, device="cuda"), (8192, 4096)),
        "Linear 8192 x 8192, 8192 rows": (lambda: te.Linear(8192, 8192, params_dtype=BF16, device="cuda"), (8192, 8192)),
        "TransformerLayer 4096, 16384, 32 heads, 2048 x 4": (
            lambda: te.TransformerLayer(4096, 16384, 32, hidden_dropout=0, attention_dropout=0, params_dtype=BF16, device="cuda"), (2048, 4, 4096)),
    }
    results = {}
    for name, (make, shape) in rows.items():
        steps = {label: make_step(make, shape, recipe) for label, recipe in RECIPES.items()}
        times = {label: [] for label in steps}
        for step in steps.values():
            mean_us(step)
        for _ in range(options.blocks):
            for label, step in steps.items():
                times[label].append(mean_us(step))
        results[name] = {label: statistics.median(found) for label, found in times.items()}
        base = results[name]["BF16"]
        print(f"{name}: " + ", ".join(f"{label} {us:.0f} us ({us / base:.2f} of BF16)" for label, us in results[name].items()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "relative": worst, "us": results}, file, indent=1)
    return int(worst > 4e-3 or bool(on_host))


if __name__ == "__main__":
    sys.exit(main())
