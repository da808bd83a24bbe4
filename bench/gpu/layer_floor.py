#!/usr/bin/env python3
"""Computes a lower bound ("floor") of the quickstart layer's time from a run of bench_gpu.py: GEMMs and attention at the best speed that the run
measured for each of them alone, and the bytes that the passes between them must move, at copy bandwidth.

usage: layer_floor.py FILE
  FILE    output of bench_gpu.py --json with the parts ops, gemm, attention and layers

Every term was measured under sustained load in the same run, so a layer near its floor loses nothing between its kernels;
only faster products or fewer bytes would make it faster.
"""

import json
import statistics
import sys

TOKENS, HIDDEN, FFN = 8192, 4096, 16384
QKV = 3 * HIDDEN
WEIGHTS = HIDDEN * (QKV + HIDDEN + 2 * FFN)


def bytes_moved(recipe, cached):
    """Returns the least bytes that the kernels between GEMMs and attention move; None if unknown for this recipe. Under block scaling GELU is part of
    fc1's GEMM."""
    norm_gradients = 2 * TOKENS * HIDDEN * 2 * 4  # reads the gradient, the input and the residual's gradient; writes the result
    if recipe == "none":
        norms = 2 * TOKENS * HIDDEN * (2 + 2)
        bias_gradients = TOKENS * (QKV + HIDDEN + HIDDEN) * 2
        return norms + norm_gradients + bias_gradients
    if recipe not in ("delayed", "delayed+attention", "block"):
        return None
    both = 2 + 1 + 1  # reads BF16 (2 bytes), writes FP8 data row-wise and column-wise (1 byte each)
    norms = 2 * TOKENS * HIDDEN * both
    casts = TOKENS * (HIDDEN + HIDDEN + HIDDEN + QKV) * both  # casts attention's output, and the gradients for fc2, proj and qkv
    gelu_gradient = TOKENS * FFN * (2 + both)
    gelu = TOKENS * FFN * both if recipe == "block" else 0
    return norms + norm_gradients + casts + gelu + gelu_gradient + (0 if cached else WEIGHTS * both)


def attention_us(attention, recipe, causal):
    mask = "causal" if causal else "full"
    if recipe == "delayed+attention":
        return attention.get(f"fp8 both {mask}")
    parts = [attention.get(f"bf16 {direction} {mask}") for direction in ("forward", "backward")]
    return None if None in parts else sum(parts)


def floors(rows):
    """Returns {name of a layer's row: us of GEMMs, attention and the rest} for the layers whose terms the run measured."""
    products = {"bf16": [], "fp8": [], "block": []}
    attention, copies = {}, []
    for row in rows:
        if not isinstance(row.get("us"), float):  # the row was refused
            continue
        if row["part"] == "gemm":
            products[row["name"].split()[0]].append(row["us"] * min(1.0, row["of_best"]))
        elif row["part"] == "attention":
            attention[row["name"]] = row["us"] * min(1.0, row["of_cudnn"])
        elif row["part"] == "op" and "copy_gb_s" in row:
            copies.append(row["copy_gb_s"])
    found = {}
    for row in rows:
        words = row["name"].split()
        if row["part"] != "layer" or words[0] != "quickstart" or "graph" in words:
            continue
        causal, cached = "causal" in words, "cached" in words
        recipe = [w for w in words if w not in ("quickstart", "causal", "cached")][0]
        moved = bytes_moved(recipe, cached)
        multiplying = products[{"none": "bf16", "block": "block"}.get(recipe, "fp8")]
        attending = attention_us(attention, recipe, causal)
        if moved is None or len(multiplying) != 12 or attending is None or not copies:
            continue
        found[row["name"]] = {"products": sum(multiplying), "attention": attending, "rest": moved / statistics.median(copies) / 1e3}
    return found


def table(rows):
    eager = {"causal" in row["name"]: row["us"] for row in rows
             if row["part"] == "layer" and row["name"] in ("quickstart eager", "quickstart causal eager")}
    lines = [("layer", "products", "attention", "rest", "floor us", "measured", "over floor", "floor of eager")]
    measured = {row["name"]: row["us"] for row in rows if row["part"] == "layer"}
    for name, terms in floors(rows).items():
        floor = sum(terms.values())
        lines.append((name, *(f"{terms[t]:.0f}" for t in ("products", "attention", "rest")), f"{floor:.0f}", f"{measured[name]:.0f}",
                      f"{measured[name] / floor:.3f}", f"{floor / eager['causal' in name]:.3f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))) for line in lines]


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    try:
        with open(sys.argv[1]) as file:
            rows = json.load(file)["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"layer_floor.py: {sys.argv[1]}: {error!r}; name a file that bench_gpu.py --json has written")
    lines = table(rows)
    if len(lines) == 1:
        sys.exit(f"layer_floor.py: {sys.argv[1]} lacks a part; write it with bench_gpu.py --only ops,gemm,attention,layers --json FILE")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
