#!/usr/bin/env python3
"""Times te_fl.pytorch against NVIDIA's Transformer Engine in one process on one GPU. A ratio below 1 means that te-fl is faster.

usage: beside_transformer_engine.py [--blocks N] [--no-quickstart] [--json FILE]
  --blocks         alternating blocks of each row; each figure is the median of the blocks' means (default 11)
  --no-quickstart  leaves out the large layer

Needs transformer_engine[pytorch] 2.20 (its common library is on PyPI as transformer_engine_cu13, its PyTorch extension is compiled on
installation), te_fl on PYTHONPATH, and TE_FL_PLUGIN_MODULES naming the CUDA plugin of a build. Host-bound rows (Linear [64, 768] and the
small layer) show the host's time of a call; the quickstart layer is bound by the GPU, which is warmed up before.
"""

import argparse
import importlib.util
import json
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "pytorch"))
from host_time import ROWS, WIDTH, medians  # noqa: E402

BF16 = torch.bfloat16


def recipes(package):
    return {"BF16": None, "delayed": package.DelayedScaling(), "current": package.Float8CurrentScaling(), "block": package.Float8BlockScaling()}


def make_step(te, make, recipe, x, dy, backward, cached):
    """Returns a function without arguments that runs one step of a module of `te`, a package with Transformer Engine's names."""
    module = make(te)
    x = x.detach().clone().requires_grad_(backward)
    parameters = list(module.parameters())
    first = {"is_first_microbatch": True} if cached else {}
    for _ in range(2):  # creates the FP8 state and the quantised weights that is_first_microbatch=False reuses
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x.detach().requires_grad_(), **first)
        y.backward(dy)
    later = {"is_first_microbatch": False} if cached else {}

    def step():
        with te.autocast(enabled=recipe is not None, recipe=recipe), torch.set_grad_enabled(backward):
            y = module(x, **later)
        if backward:
            for p in parameters:
                p.grad = None
            x.grad = None
            y.backward(dy)
    return step


def rows(options):
    """Lists the rows: (name, factory, input shape, backward, weights cached, calls of a block)."""
    def linear(te):
        return te.Linear(WIDTH, WIDTH, params_dtype=BF16, device="cuda")

    def layer(hidden, ffn, heads):
        return lambda te: te.TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device="cuda",
                                              fuse_qkv_params=True, self_attn_mask_type="no_mask")
    out = [("Linear forward", linear, (ROWS, WIDTH), False, True, 100), ("Linear forward and backward", linear, (ROWS, WIDTH), True, True, 100),
           ("small layer, forward and backward", layer(1024, 4096, 16), (512, 1, 1024), True, False, 20)]
    if not options.no_quickstart:
        out.append(("quickstart layer, forward and backward", layer(4096, 16384, 32), (2048, 4, 4096), True, False, 4))
    return out


def heat(device, seconds=3.0):
    a = torch.randn(8192, 8192, device=device, dtype=BF16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    spent = 0.0
    while spent < seconds * 1e3:
        start.record()
        for _ in range(20):
            a @ a
        end.record()
        end.synchronize()
        spent += start.elapsed_time(end)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--no-quickstart", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "beside_transformer_engine.py: there is no GPU, and Transformer Engine runs on nothing else\n")
    if importlib.util.find_spec("transformer_engine") is None:
        parser.exit(1, "beside_transformer_engine.py: Transformer Engine is not installed; pip install transformer_engine[pytorch]==2.20.2\n")
    import transformer_engine
    import transformer_engine.common.recipe as their_recipes
    import transformer_engine.pytorch as theirs

    import te_fl.pytorch as ours
    from te_fl.common import recipe as our_recipes
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Transformer Engine {transformer_engine.__version__}")
    results = {}
    for name, make, shape, backward, cached, calls in rows(options):
        x = torch.randn(*shape, device=device, dtype=BF16)
        dy = torch.randn_like(x)
        for recipe, mine in recipes(our_recipes).items():
            cases = {}
            for label, te, used in (("te-fl", ours, mine), ("Transformer Engine", theirs, recipes(their_recipes)[recipe])):
                try:
                    cases[label] = make_step(te, make, used, x, dy, backward, cached and used is not None)
                except Exception as error:
                    print(f"{name:40} {recipe:8} {label} does not run it: {str(error).splitlines()[0][:160]}")
            heat(device)
            times = medians(device, cases, options.blocks, calls)
            results[f"{name}, {recipe}"] = times
            ratio = times["te-fl"] / times["Transformer Engine"] if len(times) == 2 else float("nan")
            print(f"{name:40} {recipe:8} te-fl {times.get('te-fl', float('nan')):9.1f} us, "
                  f"Transformer Engine {times.get('Transformer Engine', float('nan')):9.1f} us  {ratio:6.3f}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
