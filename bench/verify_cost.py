#!/usr/bin/env python3
"""Times the cost of TE_FL_VERIFY in the example's training: runs train_gpt without it and at several rates, alternately.
usage: bench/verify_cost.py [--train-gpt PATH] [--data TEXT] [--rates 0.01,0.05] [--steps N] [--rounds N] [--json FILE]"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

# 3.3 million parameters; every option is explicit, so that changes of the example's defaults do not matter.
MODEL = "--device cpu --style gpt --dtype f32 --hidden 256 --layers 4 --heads 8 --seq-len 128 --batch 8 --lr 0.0015".split()
ROOT = pathlib.Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--train-gpt", default=str(ROOT / "build/release/bin/train_gpt"))
parser.add_argument("--data", default=str(ROOT / "build/data/text.txt"))
parser.add_argument("--rates", default="0.01,0.05")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--json", help="write all times to this file")
options = parser.parse_args()


def seconds(rate, folder):
    """Runs train_gpt; returns the seconds of its training steps."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TE_FL_")}
    environment.update(TE_FL_PLUGIN_PATH="", TE_FL_QUARANTINE_FILE="", TE_FL_VERIFY_DIR="", TEFL_LOG_LEVEL="WARNING")
    if rate:
        environment["TE_FL_VERIFY"] = rate
    result = os.path.join(folder, "run.json")
    run = subprocess.run([options.train_gpt, *MODEL, "--data", options.data, "--steps", str(options.steps), "--eval-batches", "1",
                          "--sample-bytes", "1", "--report-every", "100000", "--json", result],
                         env=environment, capture_output=True, text=True, check=True)
    if "does not agree" in run.stderr:
        raise SystemExit(run.stderr)
    with open(result, encoding="utf-8") as file:
        return json.load(file)["seconds"]


rates = [""] + options.rates.split(",")
times = {rate: [] for rate in rates}
with tempfile.TemporaryDirectory() as folder:
    for _ in range(options.rounds):
        for rate in rates:
            times[rate].append(seconds(rate, folder))
rows = []
for rate in rates:
    middle, least = statistics.median(times[rate]), min(times[rate])
    rows.append({"rate": float(rate or 0), "seconds": times[rate], "median": middle, "least": least,
                 "of_off": middle / statistics.median(times[""]), "least_of_off": least / min(times[""])})
    print(f"TE_FL_VERIFY {rate or 'off':6} {middle:8.2f} s median, {least:8.2f} s at best, {rows[-1]['of_off']:.2f} of the run without")
if options.json:
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump({"steps": options.steps, "rows": rows}, file, indent=1)
