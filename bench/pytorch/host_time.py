#!/usr/bin/env python3
"""Times the host's work for te_fl.pytorch's modules against torch.nn.Linear and te-fl's own C++ layer, in one process.

usage: host_time.py [--device DEVICE] [--blocks N] [--build FOLDER] [--no-quickstart] [--json FILE]
  --blocks  alternating blocks per row; each figure is the median of the blocks' means (default 21)
  --build   a build with bench/gpu's library, for the rows that compare with C++; needs a GPU. TE_FL_PLUGIN_MODULES must name that
            build's CUDA plugin, so that both run the same plugin.
  --no-quickstart  leaves out the large layer, which is bound by the GPU

A block enqueues its calls without waiting and synchronises the device at its end. Shapes are small enough to be host-bound.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch

import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.pytorch.autograd import call
from te_fl.pytorch.modules import base, layers

ROWS, WIDTH = 64, 768
TORCH = "torch.nn.Linear BF16"
GRAPHED = ", graphed"  # suffix of a row whose forward and backward replay CUDA graphs
PYTHON = ", node in Python"  # suffix of a row that uses the autograd node in Python; the row without it uses the node in C++, if that is built


def nodes():
    """Returns {suffix of a row's name: implementation of the autograd node}."""
    return {"": call.run} if call.run is call.python_run else {"": call.run, PYTHON: call.python_run}


def use(node):
    layers.run = node
    base.plain = call.plain if node is call.run else None


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians(device, cases, blocks, calls):
    """Returns {name: microseconds per call}, running the cases in turn."""
    times = {name: [] for name in cases}
    for block in range(blocks + 3):
        for name, call in cases.items():
            synchronize(device)
            began = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize(device)
            if block >= 3:
                times[name].append((time.perf_counter() - began) / calls * 1e6)
    return {name: statistics.median(t) for name, t in times.items()}


def own_linear(device, recipe):
    """Returns (te.Linear, its recipe, keyword arguments of its forward), after steps that set the scales and the quantised weights that
    is_first_microbatch=False reuses."""
    module = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device)
    if recipe is not None:
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(recipe=recipe):
                module(x, is_first_microbatch=True).sum().backward()
    return module, recipe, {} if recipe is None else {"is_first_microbatch": False}


def run_entered(device, blocks, backward, calls=200):
    """Returns {name: microseconds per call}, running the cases in turn as a program calls a layer: with autograd, entering an autocast for each
    call."""
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    delayed, current = DelayedScaling(), Float8CurrentScaling()
    cases = {TORCH: (torch.nn.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16), None, {}),
             "te_fl BF16, no autocast": own_linear(device, None), "te_fl BF16, autocast(enabled=False)": own_linear(device, None),
             "te_fl FP8 delayed, weights cached": own_linear(device, delayed),
             "te_fl FP8 current, weights cached": own_linear(device, current)}

    def step(name):
        module, recipe, settings = cases[name]
        scope = None if name in (TORCH, "te_fl BF16, no autocast") else {"enabled": recipe is not None, "recipe": recipe}

        def call():
            if scope is None:
                y = module(x)
            else:
                with te.autocast(**scope):
                    y = module(x, **settings)
            if backward:
                y.backward(dy)

        return call

    return medians(device, {name: step(name) for name in cases}, blocks, calls)


def run_autocast(device, blocks, calls=1000):
    """Returns {name: microseconds} of entering and leaving an empty autocast."""
    recipe = DelayedScaling()

    def enter(**settings):
        def call():
            with te.autocast(**settings):
                pass
        return call

    return medians(device, {"autocast(enabled=False)": enter(enabled=False), "autocast()": enter(), "autocast(recipe=..)": enter(recipe=recipe)},
                   blocks, calls)


def run_linear(device, blocks, backward, calls=200):
    """Returns {name: microseconds per call}, running the cases in turn, with one autocast around the calls that are timed together, as around a whole training step.
    Autograd is off if `backward` is false."""
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=backward)
    dy = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)

    def ours(recipe):
        return own_linear(device, recipe)

    own = {"te_fl BF16": ours(None), "te_fl FP8 delayed, weights cached": ours(DelayedScaling()),
           "te_fl FP8 current, weights cached": ours(Float8CurrentScaling())}
    cases = {TORCH: (call.run, torch.nn.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16), None, {}),
             **{name + suffix: (node, *case) for name, case in own.items() for suffix, node in nodes().items()}}
    times = {name: [] for name in cases}
    for block in range(blocks + 3):
        for name, (node, module, recipe, settings) in cases.items():
            use(node)
            with te.autocast(enabled=recipe is not None, recipe=recipe), torch.set_grad_enabled(backward):
                synchronize(device)
                began = time.perf_counter()
                for _ in range(calls):
                    y = module(x, **settings)
                    if backward:
                        y.backward(dy)
                synchronize(device)
                took = time.perf_counter() - began
            if block >= 3:
                times[name].append(took / calls * 1e6)
    use(call.run)
    return {name: statistics.median(t) for name, t in times.items()}


def layer_cases(device, te_fl_bench, library, hidden, ffn, heads, length, batch, recipes, blocks, calls, graphed=False):
    """Returns {recipe and autograd node: (step of te_fl.pytorch, step of the C++ layer)}. A step is forward, backward and scale updates. graphed:
    adds rows with make_graphed_callables."""
    out = {}
    for name, recipe in recipes.items():
        x = torch.randn(length, batch, hidden, device=device, dtype=torch.bfloat16)
        dy = torch.randn_like(x)
        theirs = te_fl_bench.Layer(library, x, dy, hidden=hidden, ffn=ffn, heads=heads, groups=0, causal=False, llama=False,
                                     recipe=name, cached=False)
        own = x.clone().requires_grad_()

        def ours(layer, parameters, node):
            use(node)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(own)
            for p in parameters:
                p.grad = None
            own.grad = None
            y.backward(dy)

        def case(node, graphed=False):
            use(node)
            layer = te.TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
                                        device=device, fuse_qkv_params=True, self_attn_mask_type="no_mask")
            parameters = list(layer.parameters())
            if graphed:
                layer = te.make_graphed_callables(layer, (x.clone().requires_grad_(),), enabled=recipe is not None, recipe=recipe,
                                                  clone_param_grads_on_return=False)
            return lambda: ours(layer, parameters, node)
        every = {suffix: case(node) for suffix, node in nodes().items()}
        if graphed:
            every[GRAPHED] = case(call.run, graphed=True)
        result = medians(device, {**every, "C++": theirs.step}, blocks, calls)
        theirs.close()
        use(call.run)
        out.update({name + suffix: (result[suffix], result["C++"]) for suffix in every})
    return out


def print_linear(what, row, targets):
    base = row[TORCH]
    for name, us in row.items():
        target = targets.get(name)
        print(f"Linear [{ROWS}, {WIDTH}] {what:38} {name:52} {us:8.1f} us  {us / base:5.2f}" + (f"  target {target}" if target else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--build")
    parser.add_argument("--no-quickstart", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    device = torch.device(options.device)
    library = None
    if options.build and device.type == "cuda":
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "gpu"))
        import te_fl_bench
        library = te_fl_bench.Library(os.path.join(options.build, "lib"), os.path.join(options.build, "plugins", "libte_fl_cuda.so"))
    results = {}
    targets = {False: {"te_fl BF16": 1.3, "te_fl FP8 delayed, weights cached": 1.8, "te_fl FP8 current, weights cached": 2.0},
               True: {"te_fl BF16": 1.2, "te_fl FP8 delayed, weights cached": 1.6}}
    for backward in (False, True):
        what = "forward and backward" if backward else "forward, autograd off"
        row = results[what] = run_linear(device, options.blocks, backward)
        print_linear(what, row, targets[backward])
    entered = {False: {"te_fl BF16, no autocast": 1.3, "te_fl BF16, autocast(enabled=False)": 1.3, "te_fl FP8 delayed, weights cached": 1.8,
                       "te_fl FP8 current, weights cached": 2.0},
               True: {"te_fl BF16, no autocast": 1.2, "te_fl FP8 delayed, weights cached": 1.6, "te_fl FP8 current, weights cached": 1.6}}
    for backward in (False, True):
        what = ("forward and backward" if backward else "forward") + ", autocast entered"
        row = results[what] = run_entered(device, options.blocks, backward)
        print_linear(what, row, entered[backward])
    results["autocast alone"] = run_autocast(device, options.blocks)
    for name, us in results["autocast alone"].items():
        print(f"autocast alone, {name:30} {us:8.2f} us  target 3")
    if PYTHON not in nodes():
        print("te_fl.pytorch's autograd node in C++ is not built or is switched off: python -m te_fl build-node")
    if library is not None:
        small = layer_cases(device, te_fl_bench, library, 1024, 4096, 16, 512, 1, {"none": None, "delayed": DelayedScaling()}, options.blocks, 50,
                            graphed=True)
        quick = {} if options.no_quickstart else layer_cases(device, te_fl_bench, library, 4096, 16384, 32, 2048, 4,
            {"none": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling(), "block": Float8BlockScaling()}, 7, 4)
        for shape, rows, target in (("hidden 1024, 512 tokens", small, 1.3), ("quickstart", quick, 1.01)):
            results[shape] = rows
            for name, (ours, theirs) in rows.items():
                print(f"TransformerLayer {shape}, forward and backward, {name:25} {ours:10.1f} us, C++ {theirs:10.1f} us  {ours / theirs:5.3f}"
                      f"  target {target}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
