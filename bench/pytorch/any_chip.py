#!/usr/bin/env python3
"""Times TransformerLayers of te_fl.pytorch beside the same layer in eager PyTorch, on a device that te-fl makes from PyTorch's (docs/pytorch.md, Another
vendor's device): with TE_FL_SKIP_CUDA=1 on an NVIDIA GPU, or on any accelerator of PyTorch's.

usage: any_chip.py [--blocks N] [--json FILE]. Prints, for each shape and recipe, the time of a forward and backward as a share of eager BF16's, the
median of alternating blocks after the chip is hot, and which implementations served.
"""

import argparse
import collections
import contextlib
import json
import statistics
import time

import torch

import te_fl
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

DEVICE = torch.accelerator.current_accelerator()
BF16 = torch.bfloat16
# name: hidden, ffn, heads, sequence, batch
SHAPES = {"quickstart": (4096, 16384, 32, 2048, 4), "small": (1024, 4096, 16, 512, 1)}
RECIPES = {"BF16": None, "FP8 delayed": DelayedScaling(), "FP8 current": Float8CurrentScaling(), "FP8 block": Float8BlockScaling()}


class Eager(torch.nn.Module):
    """The layer as a PyTorch user writes it: pre-norm, [sequence, batch, hidden]."""

    def __init__(self, hidden, ffn, heads):
        super().__init__()
        self.heads, make = heads, {"device": DEVICE, "dtype": BF16}
        self.norm1, self.norm2 = (torch.nn.LayerNorm(hidden, **make) for _ in range(2))
        self.qkv, self.proj = torch.nn.Linear(hidden, 3 * hidden, **make), torch.nn.Linear(hidden, hidden, **make)
        self.fc1, self.fc2 = torch.nn.Linear(hidden, ffn, **make), torch.nn.Linear(ffn, hidden, **make)

    def forward(self, x):
        s, b, hidden = x.shape
        q, k, v = (t.permute(1, 2, 0, 3) for t in self.qkv(self.norm1(x)).view(s, b, self.heads, -1).chunk(3, -1))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = x + self.proj(o.permute(2, 0, 1, 3).reshape(s, b, hidden))
        return h + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm2(h)), approximate="tanh"))


def run(shape, blocks):
    hidden, ffn, heads, sequence, batch = shape
    x = torch.randn(sequence, batch, hidden, device=DEVICE, dtype=BF16, requires_grad=True)
    dy = torch.randn_like(x) * 0.1
    cases = {"eager BF16": (Eager(hidden, ffn, heads), contextlib.nullcontext)}
    for name, recipe in RECIPES.items():
        layer = te.TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device=DEVICE)
        cases[name] = layer, (lambda recipe=recipe: te.autocast(enabled=recipe is not None, recipe=recipe))
    times, served = collections.defaultdict(list), {}
    calls = 3 if hidden > 2048 else 20
    for block in range(blocks + 2):
        for name, (layer, scope) in cases.items():
            te_fl.reset_usage()
            torch.accelerator.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                with scope():
                    y = layer(x)
                y.backward(dy)
            torch.accelerator.synchronize()
            if block >= 2:
                times[name].append((time.perf_counter() - began) / calls * 1e3)
            served[name] = sorted({f"{row['op']}: {row['impl_id']}" + (" (staged)" if row.get("staged") else "") for row in te_fl.usage()})
    eager = statistics.median(times["eager BF16"])
    return {name: {"ms": statistics.median(t), "of_eager": statistics.median(t) / eager, "served": served[name]} for name, t in times.items()}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--blocks", type=int, default=7)
parser.add_argument("--json")
options = parser.parse_args()
results = {}
for name, shape in SHAPES.items():
    results[name] = run(shape, options.blocks)
    for case, row in results[name].items():
        print(f"{name:12} {case:12} {row['ms']:9.3f} ms  {row['of_eager']:6.2f} of eager", flush=True)
    print("  served:", "; ".join(sorted({s for row in results[name].values() for s in row["served"]})), flush=True)
if options.json:
    with open(options.json, "w") as file:
        json.dump({"device": str(DEVICE), "torch": torch.__version__, "rows": results}, file, indent=1)
