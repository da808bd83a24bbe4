#!/usr/bin/env python3
"""Compares bench_dispatch of two builds, run alternately: median CPU time per call of each row, and their ratio. usage: bench/compare_dispatch.py
BEFORE AFTER [--rounds N] [--filter REGEX] [--json FILE]"""
import argparse
import json
import statistics
import subprocess

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("before", help="bench_dispatch of one build")
parser.add_argument("after", help="and of the other")
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--filter", default="^(control|call|call_in_scope|handle|handle_in_scope)/", help="rows")
parser.add_argument("--json", help="write all times to this file")
options = parser.parse_args()

times = {}  # row -> side -> ns, one number per round
for number in range(options.rounds):
    sides = [("before", options.before), ("after", options.after)]
    for side, binary in sides if number % 2 == 0 else sides[::-1]:
        run = subprocess.run([binary, "--benchmark_filter=" + options.filter, "--benchmark_min_time=0.1",
                              "--benchmark_format=json"], capture_output=True, text=True, check=True)
        for row in json.loads(run.stdout)["benchmarks"]:
            times.setdefault(row["name"], {}).setdefault(side, []).append(row["cpu_time"])

result = []
for name, sides in times.items():
    if len(sides) != 2:
        continue  # only one build has this row
    before, after = (statistics.median(sides[s]) for s in ("before", "after"))
    print(f"{name:40} {before:8.2f} ns  {after:8.2f} ns  {after / before:.3f}")
    result.append({"name": name, "before_ns": before, "after_ns": after, "ratio": after / before, "rounds": sides})
if options.json:
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
