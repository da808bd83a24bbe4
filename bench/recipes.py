#!/usr/bin/env python3
"""Trains the example GPT with every recipe and several seeds and prints validation losses against high precision.

usage: bench/recipes.py [--train-gpt PATH] [--seeds N] [--curve STEPS] [--json FILE] [-- ARGUMENTS OF train_gpt]

Exits 1 if the mean of an FP8 recipe is more than --tolerance (2 %) above that without FP8.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

RECIPES = ["none", "delayed", "current", "block"]


def run(program, recipe, seed, arguments):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([program, "--recipe", recipe, "--seed", str(seed), "--sample-bytes", "0", "--json", out.name, *arguments],
                       check=True, stdout=subprocess.DEVNULL)
        return json.load(open(out.name))


def print_curves(results, every):
    """Training loss by recipe: the mean over seeds and `every` steps."""
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
        slim = {r: [{k: x[k] for k in x if k != "usage"} for x in v] for r, v in results.items()}
        pathlib.Path(options.json).write_text(json.dumps(slim, indent=1) + "\n")
    worst = max(mean[r] / mean["none"] - 1 for r in RECIPES[1:])
    return 0 if worst <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
