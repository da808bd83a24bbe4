#!/usr/bin/env python3
"""Times the products of a mixture's experts: te_fl.pytorch's GroupedLinear beside PyTorch's grouped_mm, one dense product of the same work,
and Transformer Engine if it is installed. See bench/README.md.

usage: experts.py [--rows TEXT] [--part modules|products] [--recipes NAMES] [--blocks N] [--uneven] [--json FILE]
  --rows     only rows whose name contains TEXT, or one of several texts with commas between them
  --part     modules: forward and backward of the modules, host included, in milliseconds. products: grouped_gemm alone, in CUDA graphs,
             forward, gradient of the input and of the weights (default: both)
  --recipes  of BF16,delayed,current,block (default: all)
  --blocks   alternating blocks; each figure is the median of its blocks (default 9)
  --uneven   experts with different numbers of rows, as a router gives them, some without rows
  --json     writes all figures

Needs a GPU, te_fl on PYTHONPATH and TE_FL_PLUGIN_MODULES naming the CUDA plugin of a build. FP8 weights are cached
(is_first_microbatch=False). The chip is heated before each row. Ratios below 1 mean that te-fl is faster.
"""

import argparse
import importlib.util
import json
import statistics

import torch

import measure

BF16 = torch.bfloat16
# (experts, K, N, rows of all experts)
ROWS = [(8, 4096, 7168, 8192), (64, 2048, 1536, 8192), (128, 2048, 1536, 65536), (128, 768, 2048, 65536), (32, 7168, 4096, 32768)]


def split_rows(experts, rows, uneven):
    """Returns the number of rows of each expert; with `uneven`, drawn from a fixed seed, and every seventh expert has none."""
    if not uneven:
        return [rows // experts] * experts
    draw = torch.Generator().manual_seed(1)
    weights = torch.rand(experts, generator=draw, dtype=torch.float64) ** 2 + 0.05
    weights[::7] = 0
    counts = (weights / weights.sum() * rows).floor().to(torch.int64)
    counts[1] += rows - int(counts.sum())
    return counts.tolist()


def recipes(package):
    return {"BF16": None, "delayed": package.DelayedScaling(), "current": package.Float8CurrentScaling(), "block": package.Float8BlockScaling()}


def grouped_linear(te, recipe, shape, splits, x, dy):
    """Returns a function that runs a step of GroupedLinear of `te`, a package with Transformer Engine's names."""
    experts, k, n, _ = shape
    module = te.GroupedLinear(experts, k, n, bias=False, params_dtype=BF16, device="cuda")
    x = x.detach().clone().requires_grad_()
    parameters = list(module.parameters())

    def step(first=False):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, splits, is_first_microbatch=first if recipe is not None else None)
        for p in parameters:
            p.grad = None
        x.grad = None
        y.backward(dy)
    for _ in range(2):
        step(True)
    return step


def torch_grouped(shape, splits, x, dy):
    experts, k, n, _ = shape
    weight = torch.randn(experts, n, k, device="cuda", dtype=BF16, requires_grad=True)
    ends = torch.tensor(splits, device="cuda").cumsum(0).to(torch.int32)
    x = x.detach().clone().requires_grad_()

    def step():
        y = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
        weight.grad = x.grad = None
        y.backward(dy)
    return step


def dense(shape, x, dy):
    experts, k, n, _ = shape
    weight = torch.randn(n, k, device="cuda", dtype=BF16)

    def step():
        torch.mm(x, weight.t())
        torch.mm(dy, weight)
        torch.mm(dy.t(), x)
    return step


def modules(shape, splits, wanted, blocks):
    import te_fl.pytorch as ours
    from te_fl.common import recipe as our_recipes
    _, k, n, rows = shape
    x, dy = torch.randn(rows, k, device="cuda", dtype=BF16), torch.randn(rows, n, device="cuda", dtype=BF16)
    steps = {"dense": dense(shape, x, dy), "grouped_mm": torch_grouped(shape, splits, x, dy)}
    for name, recipe in recipes(our_recipes).items():
        if name in wanted:
            steps["te_fl " + name] = grouped_linear(ours, recipe, shape, splits, x, dy)
    if importlib.util.find_spec("transformer_engine") is not None:
        import transformer_engine.common.recipe as their_recipes
        import transformer_engine.pytorch as theirs
        for name, recipe in recipes(their_recipes).items():
            if name in wanted:
                steps["TE " + name] = grouped_linear(theirs, recipe, shape, splits, x, dy)
    measure.heat(1.0)
    times = {name: [] for name in steps}
    for block in range(blocks + 1):
        for name, step in steps.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            step()
            begin.record()
            for _ in range(4):
                step()
            end.record()
            end.synchronize()
            if block > 0:
                times[name].append(begin.elapsed_time(end) / 4)
    out = {name: statistics.median(t) for name, t in times.items()}
    return out, {name: measure.ratio(times[name], times["grouped_mm"])[0] for name in times}


def products(shape, splits, blocks):
    """Times the three products of a step alone. Returns {name: (microseconds of te-fl, of grouped_mm, of the dense product)}."""
    from te_fl import ops
    experts, k, n, rows = shape
    x, dy = torch.randn(rows, k, device="cuda", dtype=BF16), torch.randn(rows, n, device="cuda", dtype=BF16)
    weight = torch.randn(experts, n, k, device="cuda", dtype=BF16)
    y, dx, dw = torch.empty(rows, n, device="cuda", dtype=BF16), torch.empty_like(x), torch.empty_like(weight)
    ends = torch.tensor(splits, device="cuda").cumsum(0).to(torch.int32)
    one = torch.randn(n, k, device="cuda", dtype=BF16)
    xs, dys, ys, dxs = (list(t.split(splits)) for t in (x, dy, y, dx))
    weights, dws = list(weight), list(dw)
    # Each entry: te-fl's call, PyTorch's and the dense one.
    calls = {
        "forward": (lambda: ops.grouped_gemm(a=xs, b=weights, d=ys, trans_b=True), lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends),
                    lambda: torch.mm(x, one.t())),
        "input gradient": (lambda: ops.grouped_gemm(a=dys, b=weights, d=dxs), lambda: torch._grouped_mm(dy, weight, offs=ends), lambda: torch.mm(dy, one)),
        "weight gradient": (lambda: ops.grouped_gemm(a=dys, b=xs, d=dws, trans_a=True), lambda: torch._grouped_mm(dy.t(), x, offs=ends),
                            lambda: torch.mm(dy.t(), x))}
    out = {}
    for name, (mine, theirs, plain) in calls.items():
        mine()
        got = {"forward": y, "input gradient": dx, "weight gradient": dw}[name]
        want = theirs().float()
        off = ((got.float() - want).norm() / want.norm()).item()
        if not off < 2e-3:
            raise SystemExit(f"experts.py: {name} of {shape}: te-fl differs from grouped_mm by {off} of its norm")
        graphs = {label: measure.Graph([call], calls=8) for label, call in (("te_fl", mine), ("grouped_mm", theirs), ("dense", plain))}
        measure.heat(0.5)
        times = measure.alternate(graphs, blocks)
        out[name] = {label: statistics.median(t) for label, t in times.items()}
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="")
    parser.add_argument("--part", choices=["modules", "products", "both"], default="both")
    parser.add_argument("--recipes", default="BF16,delayed,current,block")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    wanted = options.recipes.split(",")
    unknown = set(wanted) - {"BF16", "delayed", "current", "block"}
    if unknown:
        parser.error(f"--recipes has {', '.join(sorted(unknown))}; known: BF16, delayed, current, block")
    if not torch.cuda.is_available():
        parser.exit(1, "experts.py: there is no GPU here\n")
    results, lines = {"machine": measure.machine()}, []
    for shape in ROWS:
        experts, k, n, rows = shape
        name = f"{experts} x {k} x {n}, {rows}"
        if not any(text in name for text in options.rows.split(",")):
            continue
        splits = split_rows(experts, rows, options.uneven)
        work = 2.0 * rows * k * n
        if options.part != "modules":
            got = products(shape, splits, options.blocks)
            results[name + " products"] = got
            for part, t in got.items():
                lines.append(f"{name:26} {part:16} us: te_fl {t['te_fl']:8.1f} ({work / t['te_fl'] / 1e6:4.0f} TFLOP/s)  grouped_mm {t['grouped_mm']:8.1f}"
                             f"  dense {t['dense']:8.1f}  of grouped_mm {t['te_fl'] / t['grouped_mm']:5.2f}  of dense {t['te_fl'] / t['dense']:5.2f}")
                print(lines[-1], flush=True)
        if options.part != "products":
            times, ratios = modules(shape, splits, wanted, options.blocks)
            results[name + " modules"] = times
            lines.append(f"{name:26} ms: " + "  ".join(f"{label} {t:.3f} ({ratios[label]:.2f})" for label, t in times.items()))
            print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    if not lines:
        parser.error(f"--rows: no row's name contains {options.rows!r}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
