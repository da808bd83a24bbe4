#!/usr/bin/env python3
"""Benchmarks te-fl's CUDA plugin against PyTorch, cuBLASLt, cuDNN and copy bandwidth, in one process. See bench/README.md.

usage: bench_gpu.py --build DIR [--only ops,gemm,joined,attention,terms,layers,host] [--match TEXT] [--json FILE] [--seconds S]
  --build DIR    folder with lib/libte_fl_bench_gpu.so and plugins/libte_fl_cuda.so (default build/release)
  --only LIST    parts to run (default all)
  --match TEXT   only rows whose name contains TEXT
  --seconds S    sustained time of each layer (default 2)
"""

import argparse
import gc
import json
import os
import statistics
import sys

try:
    import torch
except ModuleNotFoundError as missing:
    sys.exit(f"bench_gpu.py: {missing}; install PyTorch with CUDA (pip install torch), or run it with a Python that has it")

import attention_terms
import host_cost
import layer_cases
import layer_floor
import measure
import op_cases
from cublaslt_candidates import Product
from gemm_choices import Choices
from te_fl_bench import Library

rows = []


def show(part, name, **fields):
    row = {"part": part, "name": name, **fields}
    rows.append(row)
    text = "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items() if v not in ("", None))
    print(f"{part:10} {name:44} {text}", flush=True)


def meets(row):
    """Returns True if a row reaches its target: a fraction of its bound, or for layers a ratio of times."""
    if isinstance(row.get("error"), str):
        return False
    if row["part"] == "layer":
        return row["of_eager"] <= row["target"]
    for share in ("of_copy", "of_best", "of_cudnn"):
        if share in row:
            return row[share] >= row["target"]
    if "of_separate" in row:
        return row["of_separate"] <= row["target"]
    return row["over_bare_ns"] <= row["target"]


def refused(part, name, error):
    show(part, name, error=str(error).splitlines()[0][:160])


def run_ops(library, args):
    for case in op_cases.op_cases():
        if args.match and args.match not in case.name:
            continue
        try:
            first, moved = case.build(library)
            sets = [first] + [case.build(library)[0] for _ in range(min(measure.sets_for(moved), 48) - 1)]
            half = moved // 2 // 16 * 16
            buffers = [(torch.empty(half, dtype=torch.uint8, device="cuda").random_(),
                        torch.empty(half, dtype=torch.uint8, device="cuda")) for _ in range(len(sets))]
            copies = [lambda s=s, d=d: d.copy_(s) for s, d in buffers]
            graphs = {"te-fl": measure.Graph(sets), "copy": measure.Graph(copies)}
            if case.peer is not None:
                graphs["torch"] = measure.Graph([case.peer() for _ in range(len(sets))])
            times = measure.alternate(graphs, args.rounds)
            share, spread = measure.ratio(times["copy"], times["te-fl"])
            us = statistics.median(times["te-fl"])
            fields = dict(us=us, gb_s=moved / us / 1e3, copy_gb_s=2 * half / statistics.median(times["copy"]) / 1e3,
                          of_copy=share, spread=spread, target=case.target)
            if "torch" in times:
                fields["torch_us"] = statistics.median(times["torch"])
            show("op", case.name, **fields)
        except RuntimeError as error:
            refused("op", case.name, error)
        first = sets = buffers = copies = graphs = None
        gc.collect()
        torch.cuda.empty_cache()


NAMES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2"}


def algorithm_from(product, kind, dtype):
    """Returns where te-fl's choice of the cuBLASLt algorithm for a GEMM comes from, as text."""
    choices = Choices.in_use()
    if choices is None:
        return "heuristic"
    a, b, d, bias, _ = product.tensors
    scaling = "" if dtype != "block" else "2,2" if kind == "wgrad" else "2,3"
    found = choices.find(torch.cuda.get_device_name(), product.version(), *d.shape, a.numel() // d.shape[0],
                         ["bias"] if bias is not None else [], scaling, a=NAMES[a.dtype], b=NAMES[b.dtype], d=NAMES[d.dtype],
                         power_limit=measure.power_limit(), trans_a=int(kind == "wgrad"), trans_b=int(kind == "forward"))
    return "heuristic" if found is None else f"file: {found.get('config') or 'chosen'}"


def run_gemm(library, args):
    for dtype in ("bf16", "fp8", "block"):
        for kind in ("forward", "dgrad", "wgrad"):
            for name in layer_cases.PRODUCTS:
                title = f"{dtype} {kind} {name}"
                if args.match and args.match not in title:
                    continue
                try:
                    pairs, flops = layer_cases.product(library, name, kind, dtype, 2)
                    products = [Product(*bare) for _, bare in pairs]
                    best, tried = products[0].best()
                    bares = [lambda p=p: p.run(best) for p in products]
                    graphs = {"te-fl": measure.Graph([c for c, _ in pairs]), "best": measure.Graph(bares)}
                    times = measure.alternate(graphs, args.rounds)
                    share, spread = measure.ratio(times["best"], times["te-fl"])
                    us = statistics.median(times["te-fl"])
                    show("gemm", title, us=us, tflops=flops / us / 1e6, best_tflops=flops / statistics.median(times["best"]) / 1e6,
                         of_best=share, spread=spread, candidates=tried, target=0.98, algorithm=algorithm_from(products[0], kind, dtype))
                except RuntimeError as error:
                    refused("gemm", title, error)
                pairs = products = bares = graphs = None
                gc.collect()
                torch.cuda.empty_cache()


def run_joined(library, args):
    """Benchmarks GEMMs with GELU or its gradient in the epilogue, which nn uses under TE_FL_OP_CHEAP_EPILOGUES and which must not be slower than
    separate calls."""
    for recipe in ("bf16", "fp8", "fp8 current"):
        for kind in ("forward", "backward"):
            title = f"{recipe} {'fc1 and gelu' if kind == 'forward' else 'fc2 dgrad, dgelu and bias gradient'}"
            if args.match and args.match not in title:
                continue
            one, both = layer_cases.joined(library, kind, recipe)
            times = measure.alternate({"joined": measure.Graph([one]), "separate": measure.Graph([lambda: [c() for c in both]])},
                                      args.rounds)
            share, spread = measure.ratio(times["joined"], times["separate"])
            show("joined", title, us=statistics.median(times["joined"]), separate_us=statistics.median(times["separate"]),
                 of_separate=share, spread=spread, target=1.02)
            one = both = times = None
            gc.collect()
            torch.cuda.empty_cache()


ATTENTION_FACTOR = {"forward": 1, "backward": 2.5, "both": 3.5}  # multiples of the forward's operations
FP8_ATTENTION_TARGET = {"forward": 1.3, "both": 1.1}


def show_attention(library, title, pair, factor, flops, args, target, same=None, **more):
    """Prints a row. `pair`: te-fl's call and cuDNN's plain call. `same`: cuDNN's call with the same additional term (bias, dropout, ..) as te-fl's
    call."""
    library.usage()
    graphs = {"te-fl": measure.Graph([pair[0]]), "cudnn": measure.Graph([pair[1]])}
    if same is not None:
        graphs["same"] = measure.Graph([same])
    times = measure.alternate(graphs, args.rounds)
    if same is not None:
        more |= dict(cudnn_own=measure.ratio(times["cudnn"], times["same"])[0])
    share, spread = measure.ratio(times["cudnn"], times["te-fl"])
    us = statistics.median(times["te-fl"])
    served = ",".join(sorted({u["impl"] for u in library.usage()}))
    show("attention", title, us=us, cudnn_us=statistics.median(times["cudnn"]), tflops=factor * flops / us / 1e6,
         of_cudnn=share, spread=spread, target=target, impl=served, **more)


def run_attention(library, args):
    for is_fp8 in (False, True):
        for shape in (layer_cases.QUICKSTART, layer_cases.CAUSAL):
            try:
                if is_fp8:
                    pairs, errors, flops = layer_cases.attention_fp8(library, shape)
                else:
                    pairs, flops = layer_cases.attention(library, shape)
                for kind, pair in pairs.items():
                    title = f"{'fp8' if is_fp8 else 'bf16'} {kind} {'causal' if shape.causal else 'full'}"
                    if args.match and args.match not in title:
                        continue
                    factor = ATTENTION_FACTOR[kind.split()[0]]
                    if is_fp8:
                        show_attention(library, title, pair, factor, flops, args, FP8_ATTENTION_TARGET.get(kind),
                                       error=errors[kind])
                    else:
                        target = None if "deterministic" in kind else 0.98
                        show_attention(library, title, pair, factor, flops, args, target)
            except RuntimeError as error:
                refused("attention", f"{'fp8' if is_fp8 else 'bf16'} {shape.name}", error)


def run_attention_terms(library, args):
    """Benchmarks attention with a bias, ALiBi, sinks, a mask tensor or dropout against cuDNN's attention without that term."""
    for shape in (layer_cases.QUICKSTART, layer_cases.CAUSAL):
        try:
            cases, flops = attention_terms.terms(library, shape)
            for kind, (call, bare, same, error, forward) in cases.items():
                title = f"bf16 {kind} {'causal' if shape.causal else 'full'}"
                if args.match and args.match not in title:
                    continue
                forward()  # the backward needs the forward's results
                show_attention(library, title, (call, bare), ATTENTION_FACTOR[kind.split()[0]], flops, args, 0.5, same, error=error)
        except RuntimeError as error:
            refused("attention", f"terms {shape.name}", error)
        cases = None
        gc.collect()
        torch.cuda.empty_cache()


def check_layer(ours, eager):
    """Returns the largest relative difference ||a - b|| / ||b|| of output, input gradient and weight gradients."""
    pairs = eager.copy_parameters(ours)
    ours.step()
    eager.step()
    torch.cuda.synchronize()
    worst = {}
    def compare(name, a, b):
        worst[name] = ((a.float() - b.float()).norm() / b.float().norm()).item()
    compare("y", ours.view(0, eager.y.shape), eager.y)
    compare("dx", ours.view(1, eager.x.shape), eager.x.grad)
    for i, p, target in pairs:
        compare(p["name"], ours.view(2 + i, p["shape"]), target.grad)
    name = max(worst, key=worst.get)
    return worst[name], name


def peak_memory(library, layer, before):
    """Returns te-fl's peak memory in GiB during a step of this layer, parameters and gradients included, and the uses of the memory at the peak."""
    library.memory()
    layer.step()
    peak = library.memory()["peak"]
    library.memory(record_at=peak)
    layer.step()
    others = {(h["use"], h["bytes"] // h["count"]): h["count"] for h in before["holders"]}
    holders = []
    for h in library.memory()["recorded"]:
        each = h["bytes"] // h["count"]
        count = h["count"] - others.get((h["use"], each), 0)
        if count > 0:
            holders.append((count * each, count, h["use"]))
    account = ", ".join(f"{size / 2**20:.0f} MiB {count} x {use}" for size, count, use in sorted(holders, reverse=True)[:8])
    return (peak - before["bytes"]) / 2**30, account


LAYERS = [  # shape, recipe, weights cached, target, stretch target
    (layer_cases.QUICKSTART, "none", True, 0.92, 0.90),
    (layer_cases.QUICKSTART, "delayed", True, 0.60, 0.575),
    (layer_cases.QUICKSTART, "delayed", False, 0.615, 0.59),
    (layer_cases.QUICKSTART, "delayed+attention", True, 0.575, 0.55),
    (layer_cases.QUICKSTART, "current", True, 0.64, None),
    (layer_cases.QUICKSTART, "block", True, 0.72, None),
    (layer_cases.CAUSAL, "delayed", True, 0.59, 0.565),
    (layer_cases.LLAMA, "none", True, None, None),
    (layer_cases.LLAMA, "delayed", True, None, None),
    (layer_cases.SMALL, "none", True, 0.35, None),
    (layer_cases.SMALL, "delayed", True, None, None),
]


def run_layers(library, args):
    for shape in (layer_cases.QUICKSTART, layer_cases.CAUSAL, layer_cases.LLAMA, layer_cases.SMALL):
        chosen = [c for c in LAYERS if c[0] is shape and (not args.match or args.match in f"{shape.name} {c[1]}")]
        if not chosen:
            continue
        x, dy = layer_cases.activations(shape)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        eager = layer_cases.Eager(shape, x, dy)
        for _ in range(2):
            eager.step()
        torch.cuda.synchronize()
        eager_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        steps, layers = {"eager": eager.step}, {}
        for _, recipe, cached, _, _ in chosen:
            name = f"{recipe}{' cached' if cached and recipe != 'none' else ''}"
            try:
                before = library.memory()
                layer = layer_cases.te_fl_layer(library, shape, x, dy, recipe, cached)
                error, where = check_layer(layer, eager)
                library.usage()
                layer.step()
                torch.cuda.synchronize()
                used = library.usage()
                others = sorted({f"{u['op']}:{u['impl']}" for u in used if not u["impl"].startswith("vendor.cuda")})
                peak_gib, account = peak_memory(library, layer, before)
                layers[name] = dict(error=error, where=where, calls=sum(u["calls"] for u in used), elsewhere=",".join(others),
                                    peak_gib=peak_gib, holders=account)
                steps[name] = layer.step
                if args.graph:
                    graph = measure.Graph([layer.step], calls=1)
                    steps[name + " graph"] = graph.launch
                    layers[name + " graph"] = layers[name]
            except RuntimeError as problem:
                refused("layer", f"{shape.name} {name}", problem)
        if args.graph:
            # Eager PyTorch gets a stream of its own and first runs on it. The graph is captured on that same stream, because autograd remembers the
            # stream of its leaves.
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graphed = layer_cases.Eager(shape, x, dy)
                graph = measure.Graph([graphed.step], calls=1, stream=stream)
            steps["eager graph"] = graph.launch
        times = measure.sustained(steps, args.seconds)
        eager_us = statistics.median(times["eager"])
        show("layer", f"{shape.name} eager", us=eager_us, peak_gib=eager_gib)
        if args.graph:
            show("layer", f"{shape.name} eager graph", us=statistics.median(times["eager graph"]))
        targets = {f"{r}{' cached' if c and r != 'none' else ''}": (goal, stretch) for _, r, c, goal, stretch in chosen}
        for name, fields in layers.items():
            share, spread = measure.ratio(times[name], times["eager"])
            goal, stretch = targets.get(name.removesuffix(" graph"), (None, None))
            show("layer", f"{shape.name} {name}", us=statistics.median(times[name]), of_eager=share, spread=spread,
                 target=goal, stretch=stretch, **fields)
        del steps, layers, eager
        gc.collect()
        torch.cuda.empty_cache()


def run_host(library, args):
    host_cost.run(library, show)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--only", default="ops,gemm,joined,attention,terms,layers,host")
    parser.add_argument("--match", default="")
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--graph", action="store_true", help="also layers captured into a CUDA graph")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu.py: PyTorch finds no CUDA device; run it where there is one")
    parts = {"ops": run_ops, "gemm": run_gemm, "joined": run_joined, "attention": run_attention, "terms": run_attention_terms, "layers": run_layers, "host": run_host}
    unknown = [p for p in args.only.split(",") if p not in parts]
    if unknown:
        sys.exit(f"bench_gpu.py: no part is named {unknown[0]}; known: {', '.join(parts)}")
    build = os.path.abspath(args.build)
    library = Library(os.path.join(build, "lib"), os.path.join(build, "plugins", "libte_fl_cuda.so"))
    torch.zeros(1, device="cuda")
    before = measure.machine(library)
    for part in args.only.split(","):
        parts[part](library, args)
    for part in sorted({row["part"] for row in rows}):
        met, below = [], []
        for row in rows:
            if row["part"] == part and (isinstance(row.get("error"), str) or row.get("target") is not None):
                (met if meets(row) else below).append(row["name"])
        if met or below:
            print(f"targets {part} {len(met)} {len(met) + len(below)}" + (f"; below: {', '.join(below)}" if below else ""))
    floors = layer_floor.floors(rows)
    if floors:
        print("\n".join(layer_floor.table(rows)))
    choices = Choices.in_use()
    record = {"machine": before, "machine_after": measure.machine(), "rows": rows, "layer_floors_us": floors,
              "gemm_choices": None if choices is None else {"file": os.path.basename(choices.path), "sha256": choices.sha256}}
    print(json.dumps(record["machine"]), json.dumps(record["machine_after"]["gpu"]))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
