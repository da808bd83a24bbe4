#!/usr/bin/env python3
"""Measures in how many stripes products by rows are best cut under sequence parallelism, on all ranks, into a file for TE_FL_STRIPES_FILE.

usage: torchrun --nproc-per-node N bench/gpu/tune_stripes.py --file FILE [--shapes ROWSxINxOUT ..] [--operands O ..] [--stripes K ..]
                [--rounds N] [--calls N] [--margin F] [--device D]
  --file      of the choices; what it has of other products stays
  --shapes    of the whole products, rows x in_features x out_features; default: the quickstart layer's projection and fc2
  --operands  bf16, f16, f32, fp8 (codes scaled by tensor) and fp8_block; default bf16 fp8
  --stripes   the cuts that are tried beside none (default 2 4)
  --rounds    in each, all cuts take turns; a round's time is the slowest rank's (default 15)
  --calls     of a forward in a row for one time, after a quarter as many that are not timed (default 20)
  --margin    a cut is taken if its median ratio to none is below 1 - margin, and three quarters of the rounds are below 1 (default 0.01)
  --device    cuda or cpu; default: cuda where there is one. The process group is NCCL's or Gloo's

A row is the forward of te.Linear(parallel_mode="row", sequence_parallel=True) without a bias. Beside it stand the rank's product alone and the
reduce_scatter alone: their sum is what no overlap takes, and the larger of both what no cut gets below. Rank 0 prints and writes.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

import te_fl
import te_fl.pytorch as te
from te_fl import _native
from te_fl.pytorch.distributed import collectives

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
RECIPES = {"fp8": te.DelayedScaling, "fp8_block": te.Float8BlockScaling}
MULTIPLES = {"fp8": 16, "fp8_block": 128}  # of a stripe's features
KEY = ("device", "ranks", "operands", "output", "rows", "in", "out")


def product_of(shape, operands, ranks, device):
    """The product's entry without stripes; ValueError for what the ranks do not divide."""
    rows, features, out = shape
    if rows % ranks or features % ranks:
        raise ValueError(f"{rows}x{features}x{out}: {ranks} ranks do not divide rows and in_features")
    name = "cpu" if device.type == "cpu" else f"cuda:{device.index}"
    return {"device": _native.device_name(name), "ranks": ranks, "operands": operands, "output": operands if operands in DTYPES else "bf16", "rows": rows,
            "in": features // ranks, "out": out}


def write(path, entries):
    """Replaces the file."""
    text = json.dumps({"te_fl_stripes": 1, "entries": entries}, indent=1) + "\n"
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


def read(path):
    """The entries of the file; none if there is none."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return json.load(file)["entries"]


@contextlib.contextmanager
def choices():
    """A function that makes te-fl take an entry, in this process, until the next call and at most until the end."""
    before = os.environ.get("TE_FL_STRIPES_FILE")
    with tempfile.TemporaryDirectory() as folder:
        def take(entry):
            path = os.path.join(folder, f"{entry['stripes']}-{'-'.join(str(entry[k]) for k in KEY[1:])}.json")
            write(path, [entry])
            os.environ["TE_FL_STRIPES_FILE"] = path
            te_fl.reload()
        try:
            yield take
        finally:
            os.environ.pop("TE_FL_STRIPES_FILE")
            if before is not None:
                os.environ["TE_FL_STRIPES_FILE"] = before
            te_fl.reload()


def timed(device, call, calls):
    """us of one of `calls` calls in a row, after some that warm up."""
    def synchronize():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    for _ in range(max(2, calls // 4)):
        call()
    synchronize()
    dist.barrier()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) * 1e6 / calls


def slowest(times, device):
    """The rounds' times, of the slowest rank each."""
    values = torch.tensor(times, device=device, dtype=torch.float32)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


class Turns:
    """A call that takes the functions in turn."""

    def __init__(self, functions):
        self.functions, self.at = functions, 0

    def __call__(self):
        self.at += 1
        return self.functions[self.at % len(self.functions)]()


def closures(product, group, device):
    """Forwards of the divided product, products of this rank's part alone, and sums of their results alone, each over two weights and three inputs,
    so that neither lies in a cache for the next call."""
    dtype = DTYPES.get(product["operands"], torch.bfloat16)
    ranks = product["ranks"]
    size = dict(bias=False, params_dtype=dtype, device=device)
    divided = [te.Linear(product["in"] * ranks, product["out"], parallel_mode="row", sequence_parallel=True, tp_group=group, **size) for _ in range(2)]
    alone = [te.Linear(product["in"], product["out"], **size) for _ in range(2)]
    inputs = [torch.randn(product["rows"], product["in"], device=device, dtype=dtype) for _ in range(3)]
    whole = [torch.randn(product["rows"], product["out"], device=device, dtype=DTYPES[product["output"]]) for _ in range(2)]
    part = torch.empty(product["rows"] // ranks, product["out"], device=device, dtype=whole[0].dtype)
    return (Turns([lambda i=i: divided[i % 2](inputs[i % 3]) for i in range(6)]), Turns([lambda i=i: alone[i % 2](inputs[i % 3]) for i in range(6)]),
            Turns([lambda i=i: collectives.reduce_scatter_into(part, whole[i], group) for i in range(2)]))


def measure(product, cuts, group, device, rounds, calls):
    """({stripes: [us, one per round]}, us of the product alone, us of the sum alone)."""
    forward, alone, total = closures(product, group, device)
    recipe = RECIPES.get(product["operands"])
    scope = te.autocast(recipe=recipe(), amax_reduction_group=group) if recipe is not None else contextlib.nullcontext()
    times, parts = {cut: [] for cut in cuts}, {alone: [], total: []}
    with choices() as take, torch.no_grad(), scope:
        results = []
        for cut in cuts:  # all kernels are chosen and loaded before the first time
            take({**product, "stripes": cut})
            forward.at = 0
            results.append(forward().float())
        for cut, result in zip(cuts, results):
            torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-2 * results[0].abs().max().item(), msg=lambda m, cut=cut: f"{cut} stripes: {m}")
        for _ in range(rounds):
            for cut in cuts:
                take({**product, "stripes": cut})
                times[cut].append(timed(device, forward, calls))
            for call, found in parts.items():
                found.append(timed(device, call, calls))
    times = {cut: slowest(found, device) for cut, found in times.items()}
    return times, *(statistics.median(slowest(found, device)) for found in parts.values())


def choose(times, margin):
    """(the stripes to take, {stripes: median ratio to none})."""
    ratios = {cut: [a / b for a, b in zip(found, times[1])] for cut, found in times.items()}
    medians = {cut: statistics.median(found) for cut, found in ratios.items()}
    surely = [cut for cut, found in ratios.items() if cut > 1 and medians[cut] < 1 - margin and sorted(found)[3 * len(found) // 4] < 1]
    return min(surely, key=medians.get, default=1), medians


def tune(shapes, operands, cuts, group, device, rounds=15, calls=20, margin=0.01, say=print):
    """(the entries of products that a cut makes faster, the products that were measured). All ranks of the group call it."""
    ranks, taken, measured = dist.get_world_size(group), [], []
    for shape in shapes:
        for name in operands:
            product = product_of(shape, name, ranks, device)
            fitting = [1] + [k for k in cuts if k > 1 and shape[2] % k == 0 and shape[2] // k % MULTIPLES.get(name, 1) == 0]
            times, alone, total = measure(product, fitting, group, device, rounds, calls)
            stripes, ratios = choose(times, margin)
            one = statistics.median(times[1])
            measured.append(product)
            say(f"{product['rows']}x{product['in']}x{product['out']} {name:9} {ranks} ranks: product {alone:8.1f} us, sum {total:8.1f} us, together "
                f"{one:8.1f} us; " + ", ".join(f"{k} stripes {statistics.median(times[k]):8.1f} us ({ratios[k]:.3f})" for k in fitting[1:]) + f": {stripes}")
            if stripes > 1:
                taken.append({**product, "stripes": stripes, "us": round(statistics.median(times[stripes]), 2), "us_of_one": round(one, 2)})
    return taken, measured


def merged(before, taken, measured):
    """The entries of a file that had others."""
    def key(entry):
        return tuple(entry[k] for k in KEY)
    again = {key(product) for product in measured}
    return [entry for entry in before if key(entry) not in again] + taken


def shape_of(text):
    numbers = [int(part) for part in text.split("x")]
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxINxOUT")
    return tuple(numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True)
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=[(8192, 4096, 4096), (8192, 16384, 4096)])
    parser.add_argument("--operands", nargs="+", choices=[*DTYPES, *RECIPES], default=["bf16", "fp8"])
    parser.add_argument("--stripes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--margin", type=float, default=0.01)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    first = dist.get_rank() == 0
    say = (lambda text: print(text, flush=True)) if first else (lambda text: None)
    taken, measured = tune(options.shapes, options.operands, options.stripes, dist.group.WORLD, device, options.rounds, options.calls, options.margin, say)
    if first:
        write(options.file, merged(read(options.file), taken, measured))
        say(f"{options.file}: {len(taken)} of {len(measured)} products are faster in stripes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
