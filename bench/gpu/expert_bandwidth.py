#!/usr/bin/env python3
"""Compares the ops of mixture-of-experts with a plain copy of as many bytes on the same device: permutation by index and by mask, router, padding,
chunk sort, grouped quantisation. See bench/README.md.

usage: expert_bandwidth.py [--device cuda|cpu] [--sizes full|small] [--match TEXT] [--rounds N] [--no-inside] [--json FILE]
  --device     cpu: tries the program without a GPU (default cuda)
  --sizes      small: shapes for a host (default: full on a GPU, small on a host)
  --match      only rows whose name contains TEXT, or one of several texts with commas between them
  --rounds     paired rounds of an op and its copy (default 21)
  --no-inside  leaves out the rows of NVIDIA's package (group_quantize) and does not import it

Needs te_fl on PYTHONPATH, and on a GPU TE_FL_PLUGIN_MODULES naming the CUDA plugin of a build. A row's bytes are those of the tensors that it
reads and writes, each once (under current scaling the input twice); its copy reads half of them and writes the other half, in whole pieces of 4 KiB. Both are captured as CUDA
graphs of many calls over rotating tensors that exceed the caches, and alternate on a chip that was heated; of_copy is the median of the paired
ratios. A row that cannot be captured says `launches`, and its time includes the host's where that is longer. The table comes last.
"""

import argparse
import gc
import json
import os
import statistics
import sys

import torch

import measure

TARGET = 0.85
COPY_UNIT = 4096  # a copy of 2^27 + 64 bytes takes 1.5 times as long as one of 2^27


def make_copies(count, moved, device):
    half = max(1, round(moved / 2 / COPY_UNIT)) * COPY_UNIT
    closures = []
    for _ in range(count):
        source = torch.randint(0, 256, (half,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        closures.append(lambda s=source, t=target: t.copy_(s))
    return closures


def make_timer(closures, device):
    """Returns (an object that times the closures, its kind: "graphs", "launches" or "host")."""
    if device == "cpu":
        return measure.HostCalls(closures), "host"
    try:
        return measure.Graph(closures), "graph"
    except (RuntimeError, ValueError):  # NVIDIA's tensor groups raise ValueError during capture
        torch.cuda.synchronize()
        return measure.Graph(closures, capture=False), "launches"


def measured(case, device, rounds):
    first, moved = case.build(device)
    count = min(measure.sets_for(moved), 48) if device == "cuda" else 2
    sets = [first] + [case.build(device)[0] for _ in range(count - 1)]
    te_fl_timer, timed = make_timer(sets, device)
    copy_timer, _ = make_timer(make_copies(count, moved, device), device)
    if device == "cuda":
        measure.heat(0.5)
    times = measure.alternate({"te-fl": te_fl_timer, "copy": copy_timer}, rounds)
    share, spread = measure.ratio(times["copy"], times["te-fl"])
    us, copy_us = statistics.median(times["te-fl"]), statistics.median(times["copy"])
    return {"name": case.name, "bytes": moved, "us": us, "copy_us": copy_us, "gb_s": moved / us / 1e3, "of_copy": share, "spread": spread, "timed": timed}


def table(rows):
    lines = [f"{'op':62} {'MB':>8} {'us':>9} {'copy us':>9} {'GB/s':>7} {'of copy':>8} {'spread':>7}  timed"]
    for r in rows:
        if "error" in r:
            lines.append(f"{r['name']:62} does not run: {r['error']}")
            continue
        below = "" if r["of_copy"] >= TARGET else "  below"
        lines.append(f"{r['name']:62} {r['bytes'] / 1e6:8.2f} {r['us']:9.1f} {r['copy_us']:9.1f} {r['gb_s']:7.0f} {r['of_copy']:8.3f} {r['spread']:7.3f}  "
                     f"{r['timed']}{below}")
    met = sum(1 for r in rows if r.get("of_copy", 0) >= TARGET)
    return "\n".join([*lines, f"targets: {met} of {len(rows)} rows at {TARGET} of a copy or more"])


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=("full", "small"))
    parser.add_argument("--match", default="")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-inside", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("expert_bandwidth.py: PyTorch finds no GPU; --device cpu tries it on the host")
    if options.device == "cuda":
        os.environ.setdefault("TE_FL_MAX_STAGED_BYTES", "0")  # no host fallback: a row whose op has no kernel for the device is an error
    import te_fl
    if not options.no_inside:
        te_fl.inside_transformer_engine(**({"device": "cpu"} if options.device == "cpu" else {}))
    from expert_cases import expert_cases
    torch.manual_seed(1)
    if options.device == "cuda":
        measure.heat()
    rows = []
    for case in expert_cases(options.sizes or ("full" if options.device == "cuda" else "small"), not options.no_inside):
        if not any(text in case.name for text in options.match.split(",")):
            continue
        try:
            rows.append(measured(case, options.device, options.rounds))
        except (RuntimeError, ValueError) as error:
            rows.append({"name": case.name, "error": str(error).splitlines()[0][:160]})
        print(table(rows[-1:]).splitlines()[1], flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    served = sorted(f"{u['op']}: {u['impl_id']}" for u in te_fl.usage())
    record = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "host", "torch": torch.__version__, "target": TARGET,
              "machine": measure.machine() if options.device == "cuda" else None, "served": served, "rows": rows}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)
    print(f"\n{record['device']}, PyTorch {torch.__version__}\n{table(rows)}")


if __name__ == "__main__":
    main()
