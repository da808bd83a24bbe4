"""Writes and reads checkpoints with NVIDIA's Transformer Engine itself, for te_checkpoint_test.py. Needs NVIDIA's package 2.20.2.

usage: transformer_engine_checkpoint.py --write FILE   writes modules, their state_dict() after FP8 steps, and their results
       transformer_engine_checkpoint.py --read FILE    loads a file of te_fl.pytorch, and compares the results

On a GPU the FP8 state comes from two training steps, and the file has outputs too. Without a GPU NVIDIA's modules compute nothing:
the script makes their FP8 state with the functions that a forward would call, fills it with numbers, and saves and loads it by their own code.
"""

import argparse
import contextlib
import os
import sys
import types
import unittest.mock

import torch

HIDDEN = 32
GPU = torch.cuda.is_available()
H100 = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)


def without_gpu():
    """Lets NVIDIA's package construct modules, and keep their FP8 state, on the CPU."""
    stack = contextlib.ExitStack()
    if GPU:
        return stack
    import transformer_engine.pytorch.quantization as theirs
    state = theirs.DelayedScalingRecipeState
    plain = state.__init__

    def on_cpu(self, recipe, **arguments):
        plain(self, recipe, **{**arguments, "device": torch.device("cpu")})

    for target, name, value in ((torch.cuda, "is_available", lambda: True), (torch.cuda, "synchronize", lambda *device: None),
                                (torch.cuda, "current_device", lambda: 0), (torch.cuda, "get_device_properties", lambda device: H100),
                                (state, "__init__", on_cpu)):
        stack.enter_context(unittest.mock.patch.object(target, name, value))
    return stack


def modules(te):
    """Returns {name: module} of te_fl.pytorch or of NVIDIA's package."""
    common = dict(device="cuda" if GPU else "cpu", params_dtype=torch.bfloat16)
    return {"Linear": te.Linear(HIDDEN, 2 * HIDDEN, **common),
            "LayerNormLinear": te.LayerNormLinear(HIDDEN, 2 * HIDDEN, normalization="RMSNorm", bias=False, **common),
            "LayerNormMLP": te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", **common),
            "TransformerLayer": te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
                                                    **common)}


def samples():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(16, 2, HIDDEN, generator=generator).bfloat16() for _ in range(3)]


def quantised_parts(module):
    return [(name, part) for name, part in module.named_modules() if hasattr(part, "fp8_meta") and not name.endswith("attention")]


def write(path):
    import transformer_engine
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling
    recipe = DelayedScaling(amax_history_len=4)
    torch.manual_seed(11)
    out = {"version": transformer_engine.__version__, "samples": samples(), "modules": {}}
    with without_gpu():
        for name, module in modules(te).items():
            kept = {}
            if GPU:
                for x in out["samples"][:2]:
                    with te.autocast(enabled=True, recipe=recipe):
                        y = module(x.cuda())
                    y.sum().backward()
                state = {k: v.cpu().clone() for k, v in module.state_dict().items()}  # a forward without FP8 would discard the loaded state
                kept["high"] = module(out["samples"][2].cuda()).detach().cpu()
                module.eval()
                with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
                    kept["fp8"] = module(out["samples"][2].cuda()).cpu()
            else:
                fill(module, recipe)
                state = {k: v.clone() for k, v in module.state_dict().items()}
            out["modules"][name] = {"state": state, **kept}
    torch.save(out, path)


def fill(module, recipe):
    from transformer_engine.pytorch.module import LayerNormMLP
    generator = torch.Generator().manual_seed(13)
    for _, part in quantised_parts(module):
        part.fp8_meta.update(num_gemms=2 if isinstance(part, LayerNormMLP) else 1, fp8_checkpoint=True, recipe=recipe)
        part.init_fp8_meta_tensors(recipe)
        for which in ("scaling_fwd", "scaling_bwd"):
            meta = part.fp8_meta[which]
            meta.scale.copy_(2.0 ** torch.randint(2, 8, meta.scale.shape, generator=generator))
            meta.amax_history.copy_(torch.rand(meta.amax_history.shape, generator=generator))


def read(path):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling
    arguments = torch.load(path, weights_only=False)
    with without_gpu():
        for name, module in modules(te).items():
            kept = arguments["modules"][name]
            module.load_state_dict(kept["state"])
            for part, own in quantised_parts(module):
                wanted = kept["scales"][part]
                for which, (scale, history) in wanted.items():
                    meta, places = own.fp8_meta[which], kept["places"][which]
                    columns = [i for i in range(meta.scale.numel()) if i % places[1] < places[0]]
                    assert torch.equal(meta.scale.cpu()[columns], scale), (name, part, which, meta.scale, scale)
                    assert torch.equal(meta.amax_history.cpu()[:, columns], history), (name, part, which)
            if GPU:
                module.eval()
                x = arguments["samples"][2].cuda()
                with torch.no_grad():
                    compare(name, module(x).cpu(), kept["high"])
                    with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4)):
                        compare(name + " in FP8", module(x).cpu(), kept["fp8"])
            print(f"{name}: loaded, {len(quantised_parts(module))} parts with FP8 state" + (", outputs agree" if GPU else ""))


def compare(what, got, want):
    off = float((got.float() - want.float()).norm() / want.float().norm())
    assert off < 2e-2, f"{what} is off by {off}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write")
    group.add_argument("--read")
    options = parser.parse_args()
    os.environ.setdefault("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # otherwise the package refuses to load FP8 state
    write(options.write) if options.write else read(options.read)


if __name__ == "__main__":
    sys.exit(main())
