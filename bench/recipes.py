#!/usr/bin/env python3
"""Trains the example GPT with every recipe and several seeds and prints the validation losses relative to high precision.

usage: bench/recipes.py [--train-gpt PATH] [--seeds N] [--curve STEPS] [--json FILE] [-- ARGUMENTS OF train_gpt]

Exits 1 if the mean of an FP8 recipe is more than --tolerance (2 %) above that without FP8, or if a run on a CUDA device
(--device cuda:0) ran an op on an implementation other than vendor.cuda and those built on it, or on copies in host memory.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

RECIPES = ["none", "delayed", "current", "block"]
CUDA = "vendor.cuda"


def run(program, recipe, seed, arguments):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        code = subprocess.run([program, "--recipe", recipe, "--seed", str(seed), "--sample-bytes", "0", "--json", out.name, *arguments],
                              stdout=subprocess.DEVNULL).returncode
        if code != 0:
            sys.exit(f"recipes.py: {program} ended with {code} for recipe {recipe}, seed {seed}; what it printed says why")
        return json.load(open(out.name))


def served_elsewhere(result):
    """Returns one line for each op of a CUDA run that ran in an implementation other than the CUDA plugin's, or on host copies. Returns [] for other
    devices."""
    if not result["device"].startswith("cuda"):
        return []
    usage = result.get("usage", [])
    if not usage:
        return ["no op at all, says its usage"]
    lines = []
    for row in usage:
        own = row["impl"] == CUDA or row["impl"].startswith(CUDA + ".")
        if not own or row["staged_calls"] != 0:
            lines.append(f"{row['op']} by {row['impl']}, {row['calls']} calls, {row['staged_calls']} of them on copies in host memory")
    return lines


def print_curves(results, every):
    """Prints the training loss by recipe: the mean over seeds and over `every` steps."""
    print(f"\n| steps | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    steps = len(results["none"][0]["training_loss"])
    for begin in range(0, steps, every):
        means = []
        for runs in results.values():
            part = [x for run in runs for x in run["training_loss"][begin:begin + every]]
            means.append(sum(part) / len(part))
        print(f"| {begin + 1} to {min(begin + every, steps)} | {' | '.join(f'{m:.4f}' for m in means)} |")


def main():
    own, rest = (sys.argv[1:], []) if "--" not in sys.argv else (
        sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:])
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-gpt", default=str(root / "build/release/bin/train_gpt"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--curve", type=int, default=0, help="also print the training loss, averaged over this many steps at a time")
    parser.add_argument("--json", help="write every run's results here")
    options = parser.parse_args(own)
    if not os.access(options.train_gpt, os.X_OK) or os.path.isdir(options.train_gpt):
        sys.exit(f"recipes.py: {options.train_gpt} is not there or no program; build the target train_gpt, or name it with --train-gpt")
    if options.json:
        try:  # checks this before the runs, which take minutes
            open(options.json, "a").close()
        except OSError as error:
            sys.exit(f"recipes.py: --json {options.json} cannot be written ({error.strerror}); name a file in a folder that can")
    results = {r: [run(options.train_gpt, r, s + 1, rest) for s in range(options.seeds)] for r in RECIPES}
    mean = {r: sum(x["validation_loss"] for x in v) / len(v) for r, v in results.items()}
    steps = results["none"][0]["steps"]
    print(f"| recipe | validation loss, mean of {options.seeds} seeds (nats/byte) | by seed | against none | seconds for {steps} steps |")
    print("|---|---|---|---|---|")
    for r, runs in results.items():
        seeds = " ".join(f"{x['validation_loss']:.4f}" for x in runs)
        seconds = sum(x["seconds"] for x in runs) / len(runs)
        name = f"{runs[0]['dtype'].upper()} (none)" if r == "none" else r
        print(f"| {name} | {mean[r]:.4f} | {seeds} | {100 * (mean[r] / mean['none'] - 1):+.2f} % | {seconds:.1f} |")
    if options.curve > 0:
        print_curves(results, options.curve)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    strays = [f"{r}, seed {x['seed']}: {line}" for r, runs in results.items() for x in runs for line in served_elsewhere(x)]
    for line in strays:
        print(f"recipes.py: not run by {CUDA}: {line}; load the plugin (TE_FL_PLUGIN_MODULES) and see te-fl explain", file=sys.stderr)
    worst = max(mean[r] / mean["none"] - 1 for r in RECIPES[1:])
    return 0 if worst <= options.tolerance and not strays else 1


if __name__ == "__main__":
    sys.exit(main())
