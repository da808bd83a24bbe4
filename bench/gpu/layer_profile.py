#!/usr/bin/env python3
"""Prints the time or the memory traffic of each kernel in a layer's forward and backward, in launch order.

usage: layer_profile.py --build DIR [--layer SHAPE] [--recipe NAME] [--recast] [--peer] [--bytes] [--json FILE]
  --build DIR    folder with lib/libte_fl_bench_gpu.so and plugins/libte_fl_cuda.so (default build/release)
  --layer SHAPE  quickstart, causal, llama or small (default quickstart)
  --recipe NAME  none, delayed, current, block or delayed+attention (default delayed)
  --recast       quantises the weights in each step instead of caching them
  --peer         eager PyTorch in BF16 instead of te-fl
  --bytes        bytes that each kernel moves through device memory, read by Nsight Compute (ncu), instead of times
"""

import argparse
import csv
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys

try:
    import torch
except ModuleNotFoundError as missing:
    sys.exit(f"layer_profile.py: {missing}; install PyTorch with CUDA (pip install torch), or run it with a Python that has it")

import layer_cases
import measure
from te_fl_bench import Library

SHAPES = {"quickstart": layer_cases.QUICKSTART, "causal": layer_cases.CAUSAL, "llama": layer_cases.LLAMA,
          "small": layer_cases.SMALL}
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")


def short(name):
    """Shortens a kernel's name: drops its namespaces, return type and most template arguments."""
    name = re.sub(r"\(anonymous namespace\)::|\b[a-z_0-9]+::", "", re.sub(r"^void ", "", name))
    return re.sub(r"\(.*", "", name)[:76]


def group(name):
    if re.search(r"fmha|flash|sdpa|attention|cudnn_generated|compute_dot_do_o|dq_accum|convert_dq", name, re.I):
        return "attention"
    if re.search(r"nvjet|gemm|cutlass|cublas|splitK|sm90_xmma", name, re.I):
        return "gemm"
    return "rest"


def stepper(library, args):
    shape = SHAPES[args.layer]
    x, dy = layer_cases.activations(shape)
    if args.peer:
        return layer_cases.Eager(shape, x, dy).step
    layer = layer_cases.te_fl_layer(library, shape, x, dy, args.recipe, not args.recast)
    for _ in range(3):  # after two steps the weights' scales no longer change
        layer.step()
    return layer.step


def warm(step, seconds):
    """Runs steps until the chip has the clocks of sustained work; returns milliseconds per step."""
    return statistics.median(measure.sustained({"step": step}, seconds)["step"]) / 1000


def by_time(step, steps=20):
    """Returns [(kernel name, us in each step)] in launch order."""
    plain_ms = warm(step, 1.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    each = len(events) // steps
    if each == 0 or each * steps != len(events):
        sys.exit(f"layer_profile.py: {len(events)} kernels in {steps} steps: the steps differ; nothing to add up")
    found = []
    for i in range(each):
        of_kernel = events[i::each]
        if len({e.name for e in of_kernel}) != 1:
            sys.exit(f"layer_profile.py: launch {i} is not the same kernel in every step")
        found.append({"kernel": of_kernel[0].name, "us": statistics.median(e.time_range.end - e.time_range.start for e in of_kernel)})
    span = [events[(i + 1) * each - 1].time_range.end - events[i * each].time_range.start for i in range(steps)]
    return found, {"step_ms": plain_ms, "first_to_last_ms": statistics.median(span) / 1000}


def by_bytes(args):
    """Times the step, and runs this script again under ncu for the bytes of one step."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [ncu, "--profile-from-start", "off", "--csv", "--page", "raw", "--clock-control", "none", "--cache-control", "none",
               "--metrics", ",".join(METRICS), "--target-processes", "application-only", sys.executable, os.path.abspath(__file__),
               *[a for a in sys.argv[1:] if a != "--bytes"], "--one-step"]
    profiled = subprocess.run(command, capture_output=True, text=True)
    lines = profiled.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        sys.exit(f"layer_profile.py: ncu gave no table: {(profiled.stdout + profiled.stderr)[-600:]}")
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, table = table[0], table[1:]
    factor = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1e-3, "us": 1, "usecond": 1, "nsecond": 1e-3, "ms": 1e3,
              "msecond": 1e3}
    found = []
    for line in table:
        read, written, us = (float(line[m].replace(",", "")) * factor[units[m]] for m in METRICS)
        found.append({"kernel": line["Kernel Name"], "us": us, "mb": (read + written) / 1e6})
    return found, {}


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--layer", default="quickstart", choices=SHAPES)
    parser.add_argument("--recipe", default="delayed", choices=["none", "delayed", "current", "block", "delayed+attention"])
    parser.add_argument("--recast", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--one-step", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("layer_profile.py: PyTorch finds no CUDA device; run it where there is one")
    if args.bytes:
        library = None
        found, extra = by_bytes(args)
    else:
        build = os.path.abspath(args.build)
        library = None if args.peer else Library(os.path.join(build, "lib"), os.path.join(build, "plugins", "libte_fl_cuda.so"))
        torch.zeros(1, device="cuda")
        step = stepper(library, args)
        if args.one_step:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            step()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            return
        found, extra = by_time(step)
    unit = "mb" if args.bytes else "us"
    totals = {g: {"us": 0.0, "mb": 0.0, "launches": 0} for g in ("gemm", "attention", "rest")}
    for i, row in enumerate(found):
        row["group"] = group(row["kernel"])
        totals[row["group"]]["launches"] += 1
        for key in ("us", "mb"):
            totals[row["group"]][key] += row.get(key, 0.0)
        print(f"{i:3} {row['group']:9} {row['us']:8.1f} us " + (f"{row['mb']:8.1f} MB " if args.bytes else "") + short(row["kernel"]))
    what = "eager PyTorch" if args.peer else args.recipe + (" recast" if args.recast else " cached" if args.recipe != "none" else "")
    for name, t in totals.items():
        print(f"total {args.layer} {what}: {name:9} {t['launches']:3} launches {t['us']:9.1f} us" +
              (f" {t['mb'] / 1e3:7.3f} GB" if args.bytes else ""))
    if extra:
        kernels = sum(t["us"] for t in totals.values()) / 1000
        print(f"total {args.layer} {what}: step {extra['step_ms']:.3f} ms; kernels {kernels:.3f} ms; first launch to last, profiled, "
              f"{extra['first_to_last_ms']:.3f} ms")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": measure.machine(library), "layer": args.layer, "what": what, "unit": unit, "totals": totals, **extra,
                       "kernels": found}, file, indent=1)


if __name__ == "__main__":
    main()
