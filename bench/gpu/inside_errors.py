#!/usr/bin/env python3
"""Compares the errors of NVIDIA's transformer_engine package on te-fl's ops with those on its own extension, on one GPU against FP64. A ratio is
te-fl's error over NVIDIA's.

usage: inside_errors.py [--extension FOLDER] [--seeds N] [--device cuda|cpu] [--json FILE]
  --extension  a folder with transformer_engine and its compiled libraries, for the peer's process (default: where Python finds them)
  --seeds      number of random weights and inputs of each row, whose errors are averaged (default 4)
  --device     cpu: tries the program without NVIDIA's extension (default cuda)

te-fl's ops and NVIDIA's extension run in separate processes, since a process has one transformer_engine_torch. Both get the same weights, inputs and
output gradients; a process's error of the output, of the input's gradient and of the parameters' gradients is its norm of the difference over the
norm, with FP64 computed by PyTorch from the same weights. Exits 1 if a ratio is above 1.02. Needs te_fl on PYTHONPATH and TE_FL_PLUGIN_MODULES
naming the CUDA plugin of a build.
"""

import argparse
import json
import os
import subprocess
import sys

WAYS = ("inside", "extension")
RECIPES = ("BF16", "delayed", "current", "block")
TARGET = 1.02
PARTS = ("output", "input's gradient", "parameters' gradients")


def norm(torch, x, p, name):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), p[f"{name}layer_norm_weight"], p[f"{name}layer_norm_bias"], 1e-5)


def product(torch, x, p, name, number=""):
    return torch.nn.functional.linear(x, p[f"{name}weight{number}"], p.get(f"{name}bias{number}"))


def mlp(torch, x, p, name):
    inner = torch.nn.functional.linear(norm(torch, x, p, name), p[f"{name}fc1_weight"], p[f"{name}fc1_bias"])
    return torch.nn.functional.linear(torch.nn.functional.gelu(inner, approximate="tanh"), p[f"{name}fc2_weight"], p[f"{name}fc2_bias"])


def layer(torch, x, p, heads):
    length, batch, hidden = x.shape
    qkv = product(torch, norm(torch, x, p, "self_attention.layernorm_qkv."), p, "self_attention.layernorm_qkv.")
    q, k, v = qkv.view(length, batch, heads, 3, hidden // heads).permute(3, 1, 2, 0, 4)
    y = torch.softmax(q @ k.transpose(-1, -2) / (hidden // heads) ** 0.5, -1) @ v
    x = x + product(torch, y.permute(2, 0, 1, 3).reshape(x.shape), p, "self_attention.proj.")
    return x + mlp(torch, x, p, "layernorm_mlp.")


def grouped(torch, x, p, splits):
    return torch.cat([product(torch, part, p, "", i) for i, part in enumerate(x.split(splits))])


SPLITS = [128, 0, 384, 256, 64, 192]


def rows(torch):
    """Returns {row: (factory of a module of te, input shape, further arguments of a call, the same function in PyTorch of an input and
    parameters)}."""
    options = dict(params_dtype=torch.bfloat16, device="cuda")
    return {
        "Linear": (lambda te: te.Linear(1024, 768, **options), (512, 1024), (), lambda x, p: product(torch, x, p, "")),
        "LayerNormLinear": (lambda te: te.LayerNormLinear(1024, 768, **options), (512, 1024), (), lambda x, p: product(torch, norm(torch, x, p, ""), p, "")),
        "LayerNormMLP": (lambda te: te.LayerNormMLP(512, 2048, **options), (512, 512), (), lambda x, p: mlp(torch, x, p, "")),
        "GroupedLinear": (lambda te: te.GroupedLinear(6, 512, 768, **options), (sum(SPLITS), 512), (SPLITS,), lambda x, p: grouped(torch, x, p, SPLITS)),
        "TransformerLayer": (lambda te: te.TransformerLayer(512, 2048, 8, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
                                                            self_attn_mask_type="no_mask", **options),
                             (256, 2, 512), (), lambda x, p: layer(torch, x, p, 8))}


def make_recipe(package, name):
    return {"BF16": lambda: None, "delayed": package.DelayedScaling, "current": package.Float8CurrentScaling, "block": package.Float8BlockScaling}[name]()


def errors(torch, te, recipe, row, seed):
    """Returns the errors of the output, the input gradient and all parameter gradients in the second step. Delayed scaling needs the first step for
    its scales."""
    make, shape, further, exact = row
    torch.manual_seed(seed)
    module = make(te)
    generator = torch.Generator().manual_seed(seed)

    def drawn(like, scale=1.0):
        return (torch.randn(like.shape, generator=generator) * scale).to(like)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(drawn(p, 0.1) + 1 if name.endswith("layer_norm_weight") else drawn(p, p.shape[-1] ** -0.5))
    x = drawn(torch.empty(shape, dtype=torch.bfloat16, device="cuda")).requires_grad_()
    for _ in range(2):
        module.zero_grad()
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, *further)
        dy = drawn(y)
        y.backward(dy)
    wide = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    want = exact(wide_x, wide)
    want.backward(dy.double())

    def apart(found, wanted):
        difference = sum((f.double() - w).square().sum() for f, w in zip(found, wanted))
        return (difference / sum(w.square().sum() for w in wanted)).sqrt().item()
    return [apart([y], [want]), apart([x.grad], [wide_x.grad]),
            apart([p.grad for p in module.parameters()], [wide[name].grad for name, _ in module.named_parameters()])]


def measure(way, seeds, device):
    """Runs in a child process: prints {(row, recipe): errors, or the reason why the row did not run}."""
    import te_fl
    if way == "inside":
        te_fl.inside_transformer_engine(**({"device": "cpu"} if device == "cpu" else {}))
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
    found = {}
    for name, row in rows(torch).items():
        for recipe in RECIPES:
            try:
                each = [errors(torch, te, make_recipe(recipes, recipe), row, seed) for seed in range(seeds)]
                found[f"{name}, {recipe}"] = [sum(e) / seeds for e in zip(*each)]
            except Exception as error:
                found[f"{name}, {recipe}"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    print("RESULT " + json.dumps(found), flush=True)


def child(way, options):
    environment = dict(os.environ)
    if way == "extension" and options.extension:
        environment["PYTHONPATH"] = os.pathsep.join([options.extension, environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__, "--measure", way, f"--seeds={options.seeds}", f"--device={options.device}"], env=environment,
                          capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    raise SystemExit(f"inside_errors.py: {way} does not run:\n{done.stderr[-2000:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extension", default="")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure, options.seeds, options.device)
    results = {way: child(way, options) for way in (WAYS if options.device == "cuda" else WAYS[:1])}
    above = 0
    for row, found in results["inside"].items():
        peer = results.get("extension", {}).get(row, "not requested")
        text = found if isinstance(found, str) else ", ".join(f"{part} {e:.3e}" for part, e in zip(PARTS, found))
        if isinstance(found, str) or isinstance(peer, str):
            above += isinstance(found, str)
            print(f"{row:28} inside: {text}; extension: {peer if isinstance(peer, str) else 'runs it'}")
            continue
        ratios = [a / b for a, b in zip(found, peer)]
        above += max(ratios) > TARGET
        print(f"{row:28} {text}; of the extension's {', '.join(f'{r:.3f}' for r in ratios)}{'  above' if max(ratios) > TARGET else ''}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    sys.exit(above > 0)


if __name__ == "__main__":
    main()
