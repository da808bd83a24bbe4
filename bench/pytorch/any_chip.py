#!/usr/bin/env python3
"""Times TransformerLayers of te_fl.pytorch beside the same layer in eager PyTorch, on a device that te-fl makes from PyTorch's (docs/pytorch.md, Another
vendor's device): with TE_FL_SKIP_CUDA=1 on an NVIDIA GPU, or on any accelerator of PyTorch's.

usage: any_chip.py [--blocks N] [--recipes NAMES] [--shapes NAMES] [--json FILE] [--values FILE | --kernels]. Prints, for each shape and recipe, the time of a forward
and backward as a share of eager BF16's, the median of alternating blocks after the chip is hot, and which implementations served.

--kernels: in place of times, the kernels of a step of each case by PyTorch's profiler, the longest first.

--values FILE: in place of times, runs a small layer with each recipe, without a wait for the device, and as a captured graph. Writes its results to FILE;
if FILE exists (written with the CUDA plugin, say), prints how far the results are from those in it, and BF16's from FP64.
"""

import argparse
import collections
import contextlib
import json
import os
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


def problem(shape, recipes):
    """The input, the output's gradient, and the layer and scope of each case."""
    hidden, ffn, heads, sequence, batch = shape
    x = torch.randn(sequence, batch, hidden, device=DEVICE, dtype=BF16, requires_grad=True)
    cases = {"eager BF16": (Eager(hidden, ffn, heads), contextlib.nullcontext)}
    for name in recipes:
        recipe = RECIPES[name]
        layer = te.TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device=DEVICE)
        cases[name] = layer, (lambda recipe=recipe: te.autocast(enabled=recipe is not None, recipe=recipe))
    return x, torch.randn_like(x) * 0.1, cases


def print_kernels(shape, recipes):
    x, dy, cases = problem(shape, recipes)
    for name, (layer, scope) in cases.items():
        def step(layer=layer, scope=scope):
            with scope():
                y = layer(x)
            y.backward(dy)
        for _ in range(5):
            step()
        torch.accelerator.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                step()
            torch.accelerator.synchronize()
        rows = [(e.self_device_time_total / 3e3, e.count / 3, e.key) for e in profile.key_averages() if e.device_type != torch.autograd.DeviceType.CPU]
        print(f"{name}: {sum(row[0] for row in rows):.3f} ms of kernels in a step")
        for taken, count, key in sorted(rows, reverse=True)[:24]:
            print(f"  {taken:8.3f} ms  {count:5.1f} x  {key[:150]}", flush=True)


def run(shape, recipes, blocks):
    hidden = shape[0]
    x, dy, cases = problem(shape, recipes)
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


def distance(one, other):
    """The norm of the difference as a share of the norm."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def compared(named):
    """All parameters but the keys' bias, whose gradient is 0."""
    return [p for name, p in named if not name.endswith("key_bias")]


def layer_values(recipe):
    """The output, the input's gradient and the weights' gradients of one step, and the output of the step's graph."""
    torch.manual_seed(1)
    hidden, ffn, heads, sequence, batch = 512, 2048, 8, 256, 2
    layer = te.TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device="cpu").to(DEVICE)
    x = torch.randn(sequence, batch, hidden).to(DEVICE, BF16).requires_grad_()
    dy = torch.randn(sequence, batch, hidden).to(DEVICE, BF16) * 0.1

    def step():
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        grads = torch.autograd.grad(y, [x, *compared(layer.named_parameters())], dy)
        return [y.detach(), *grads]
    first = step()
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
    graphed = None
    if recipe is None and DEVICE.type == "cuda":
        captured = te.make_graphed_callables(layer, (x.detach().requires_grad_(),))
        graphed = captured(x).detach()
    return {"values": [t.cpu() for t in first], "graphed": None if graphed is None else graphed.cpu(), "layer": layer, "x": x, "dy": dy}


def exact_values(layer, x, dy):
    """Runs the same step in FP64 by PyTorch's functions on the CPU."""
    own = {name: p.detach().double().cpu().requires_grad_() for name, p in layer.named_parameters()}
    x, dy = x.detach().double().cpu().requires_grad_(), dy.double().cpu()
    f = torch.nn.functional

    def get(end):
        return next(p for name, p in own.items() if name.endswith(end))
    s, b, hidden = x.shape
    normed = f.layer_norm(x, (hidden,), get("layernorm_qkv.layer_norm_weight"), get("layernorm_qkv.layer_norm_bias"))
    q, k, v = (f.linear(normed, get(f"{name}_weight"), get(f"{name}_bias")).view(s, b, 8, -1).permute(1, 2, 0, 3) for name in ("query", "key", "value"))
    scores = q @ k.transpose(-1, -2) * (hidden // 8) ** -0.5
    o = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v
    h = x + f.linear(o.permute(2, 0, 1, 3).reshape(s, b, hidden), get("proj.weight"), get("proj.bias"))
    up = f.linear(f.layer_norm(h, (hidden,), get("layernorm_mlp.layer_norm_weight"), get("layernorm_mlp.layer_norm_bias")), get("fc1_weight"), get("fc1_bias"))
    y = h + f.linear(f.gelu(up, approximate="tanh"), get("fc2_weight"), get("fc2_bias"))
    return [y.detach(), *torch.autograd.grad(y, [x, *compared(own.items())], dy)]


def compare_values(path):
    found = {name: layer_values(recipe) for name, recipe in RECIPES.items()}
    bf16 = found["BF16"]
    exact = exact_values(bf16["layer"], bf16["x"], bf16["dy"])
    print(f"BF16 from FP64: largest distance {max(map(distance, bf16['values'], exact)):.2e}; graph from eager call {distance(bf16['graphed'], bf16['values'][0]):.1e}"
          if bf16["graphed"] is not None else f"BF16 from FP64: {max(map(distance, bf16['values'], exact)):.2e}")
    if not os.path.exists(path):
        torch.save({name: row["values"] for name, row in found.items()}, path)
        return
    for name, values in torch.load(path).items():
        pairs = list(map(distance, found[name]["values"], values))
        print(f"{name}: output {pairs[0]:.2e}, input's gradient {pairs[1]:.2e}, largest of weights' {max(pairs[2:]):.2e} from {path}")
    print("  served:", "; ".join(sorted({f"{row['op']}: {row['impl_id']}" for row in te_fl.usage()})))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--blocks", type=int, default=7)
parser.add_argument("--json")
parser.add_argument("--values")
parser.add_argument("--kernels", action="store_true")
parser.add_argument("--recipes", default=",".join(RECIPES), help="a comma-separated selection")
parser.add_argument("--shapes", default=",".join(SHAPES), help="a comma-separated selection")
options = parser.parse_args()
if options.values:
    compare_values(options.values)
    raise SystemExit
results = {}
for name in options.shapes.split(","):
    shape, recipes = SHAPES[name], options.recipes.split(",")
    if options.kernels:
        print(name)
        print_kernels(shape, recipes)
        continue
    results[name] = run(shape, recipes, options.blocks)
    for case, row in results[name].items():
        print(f"{name:12} {case:12} {row['ms']:9.3f} ms  {row['of_eager']:6.2f} of eager", flush=True)
    print("  served:", "; ".join(sorted({s for row in results[name].values() for s in row["served"]})), flush=True)
if options.json:
    with open(options.json, "w") as file:
        json.dump({"device": str(DEVICE), "torch": torch.__version__, "rows": results}, file, indent=1)
