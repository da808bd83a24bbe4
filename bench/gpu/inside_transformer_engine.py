#!/usr/bin/env python3
"""Times NVIDIA's transformer_engine package on te-fl's ops against the same package on its own extension, on one GPU. A ratio below 1 means that
te-fl is faster.

usage: inside_transformer_engine.py [--extension FOLDER] [--blocks N] [--rows WORDS] [--profile ROW] [--json FILE]
  --extension  a folder with transformer_engine and its compiled libraries, for the peer's process (default: where Python finds them)
  --blocks     alternating blocks of each row; each figure is the median of the blocks' means (default 11)
  --rows       only rows whose name contains one of these words, separated by commas
  --profile    prints a profile of the host's time of one row on te-fl, and exits

te-fl's ops and NVIDIA's extension run in separate processes, since a process has one transformer_engine_torch; their blocks alternate on the same
GPU, which is warmed up before each row. The first process also times te_fl.pytorch's own modules. Needs te_fl on PYTHONPATH and TE_FL_PLUGIN_MODULES
naming the CUDA plugin of a build.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

WAYS = ("inside", "extension", "native")
RECIPES = ("BF16", "delayed", "current", "block")


def make_recipe(package, name):
    return {"BF16": lambda: None, "delayed": package.DelayedScaling, "current": package.Float8CurrentScaling, "block": package.Float8BlockScaling}[name]()


def shapes(torch):
    """Returns {row: (factory of a module of te, input shape, calls of a block, further arguments of a call)}."""
    bf16 = torch.bfloat16

    def linear(te):
        return te.Linear(768, 768, params_dtype=bf16, device="cuda")

    def layer(hidden, ffn, heads):
        return lambda te: te.TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=bf16, device="cuda",
                                              fuse_qkv_params=True, self_attn_mask_type="no_mask")

    def grouped(experts, columns, rows):
        return lambda te: te.GroupedLinear(experts, columns, rows, bias=False, params_dtype=bf16, device="cuda")
    return {"Linear 64 x 768": (linear, (64, 768), 60, ()),
            "small layer": (layer(1024, 4096, 16), (512, 1, 1024), 12, ()),
            "quickstart layer": (layer(4096, 16384, 32), (2048, 4, 4096), 4, ()),
            "8 experts 4096 x 7168": (grouped(8, 4096, 7168), (8192, 4096), 6, ([1024] * 8,)),
            "64 experts 2048 x 1536": (grouped(64, 2048, 1536), (8192, 2048), 6, ([128] * 64,))}


def make_step(torch, te, recipes, row, recipe_name):
    make, shape, _, further = shapes(torch)[row]
    torch.manual_seed(1)
    module, recipe = make(te), make_recipe(recipes, recipe_name)
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameters, kept = list(module.parameters()), {}

    def step():
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, *further)
        for p in parameters:
            p.grad = None
        x.grad = None
        y.backward(kept.setdefault("dy", torch.randn_like(y)))
    return step


def serve(way):
    """Runs in a child process: reads a line [row, recipe, calls, heat] and answers with microseconds per call, or with the reason why the row did not
    run."""
    import te_fl
    if way != "extension":
        te_fl.inside_transformer_engine()
    import torch
    from measure import heat
    if way == "native":
        import te_fl.pytorch as te
        from te_fl.common import recipe as recipes
    else:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes
    steps = {}
    print(json.dumps(torch.cuda.get_device_name()), flush=True)
    for line in sys.stdin:
        row, recipe, calls, hot = json.loads(line)
        try:
            if (row, recipe) not in steps:
                steps.clear()
                steps[row, recipe] = make_step(torch, te, recipes, row, recipe)
                for _ in range(3):
                    steps[row, recipe]()
            if hot:
                heat()
            steps[row, recipe]()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                steps[row, recipe]()
            torch.cuda.synchronize()
            answer = (time.perf_counter() - began) / calls * 1e6
        except Exception as error:
            answer = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        print(json.dumps(answer), flush=True)


class Child:
    def __init__(self, way, extension):
        environment = dict(os.environ)
        if way == "extension" and extension:
            environment["PYTHONPATH"] = os.pathsep.join([extension, environment.get("PYTHONPATH", "")])
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.device = self.answer()

    def answer(self):
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("inside_transformer_engine.py: a child ended; its error is above")
            try:
                return json.loads(line)
            except ValueError:
                print(line, end="")

    def ask(self, *question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()


def measured(children, row, recipe, calls, blocks):
    """Returns {name of a child process: median microseconds of its blocks, or the reason why the row did not run}."""
    times = {way: [] for way in children}
    for block in range(blocks + 1):
        for way, child in children.items():
            if isinstance(times[way], str):
                continue
            answer = child.ask(row, recipe, calls, block == 0)
            if isinstance(answer, str):
                times[way] = answer
            elif block:
                times[way].append(answer)
    return {way: t if isinstance(t, str) else statistics.median(t) for way, t in times.items()}


def profile(row, recipe):
    import cProfile
    import pstats

    import te_fl
    te_fl.inside_transformer_engine()
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
    step = make_step(torch, te, recipes, row, recipe)
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(200):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extension", default="")
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--rows", default="")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--profile")
    parser.add_argument("--json")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    if options.profile:
        return profile(options.profile, options.recipes.split(",")[0])
    import torch
    if not torch.cuda.is_available():
        parser.exit(1, "inside_transformer_engine.py: there is no GPU\n")
    children = {way: Child(way, options.extension) for way in WAYS}
    print(f"{children['inside'].device}, PyTorch {torch.__version__}; microseconds of a forward and backward")
    results = {}
    for row, (_, _, calls, _) in shapes(torch).items():
        if options.rows and not any(word in row for word in options.rows.split(",")):
            continue
        for recipe in options.recipes.split(","):
            times = results[f"{row}, {recipe}"] = measured(children, row, recipe, calls, options.blocks)
            for way, why in times.items():
                if isinstance(why, str):
                    print(f"{row:24} {recipe:8} {way} does not run it: {why}")
            numbers = {way: float("nan") if isinstance(t, str) else t for way, t in times.items()}
            print(f"{row:24} {recipe:8} inside {numbers['inside']:9.1f}  extension {numbers['extension']:9.1f}  native {numbers['native']:9.1f}  "
                  f"inside/extension {numbers['inside'] / numbers['extension']:6.3f}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
