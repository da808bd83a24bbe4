#!/usr/bin/env python3
"""Times a token through a stack of Transformer layers in FP8, with weights quantised once and with weights quantised in each call.

usage: serving.py [--device DEVICE] [--layers N] [--hidden N] [--heads N] [--tokens N] [--json FILE]
  --tokens  number of timed tokens, after three untimed ones; the figure is their median

Inside te.cache_quantized_weights() a weight is quantised once; outside, a parameter may change between calls, so each call quantises. The results
are the same. The last column is the number of quantisations per token.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time

import torch

import te_fl
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES = {"none": None, "delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}


def quantised() -> int:
    return sum(row["calls"] for row in te_fl.usage() if row["op"] == "quantize" or row["op"].startswith("quantize_"))


def run(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def measure(layers, x, recipe, tokens):
    """Returns the output, milliseconds per token, and quantisations per token."""
    times, before = [], 0
    for i in range(tokens + 3):
        if i == 3:
            before = quantised()
        began = time.perf_counter()
        with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(layers, x)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        times.append((time.perf_counter() - began) * 1e3)
    return y, statistics.median(times[3:]), (quantised() - before) / tokens


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("layers", 12), ("hidden", 768), ("heads", 12), ("tokens", 15)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    torch.manual_seed(1)
    layers = torch.nn.ModuleList(
        te.TransformerLayer(options.hidden, 4 * options.hidden, options.heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype,
                            device=options.device) for _ in range(options.layers)).eval()
    x = torch.randn(1, 1, options.hidden, device=options.device, dtype=dtype)
    print(f"a token through {options.layers} layers of {options.hidden} on {options.device}, {str(dtype).removeprefix('torch.')} weights")
    print(f"{'recipe':8} {'weights':10} {'ms a token':>10} {'quantisations':>14}")
    rows = []
    for name, make in RECIPES.items():
        recipe, outputs = make and make(), []
        if name == "delayed":  # collects the amaxes that give delayed scaling its scales
            with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=recipe):
                run(layers, x)
        for weights in ("each call", "once"):
            with te.cache_quantized_weights() if weights == "once" else contextlib.nullcontext():
                y, ms, count = measure(layers, x, recipe, options.tokens)
            outputs.append(y)
            rows.append({"recipe": name, "weights": weights, "ms": ms, "quantisations": count})
            print(f"{name:8} {weights:10} {ms:10.1f} {count:14.1f}", flush=True)
        if not torch.equal(*outputs):
            print(f"the results of {name} scaling differ")
            return 1
    if options.json:
        options.json.write_text(json.dumps({**vars(options), "json": None, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
