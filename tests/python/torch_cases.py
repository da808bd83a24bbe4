"""Modules, recipes and helpers shared by the tests of te_fl.pytorch inside PyTorch."""

import os
import unittest

import torch

os.environ.setdefault("TE_FL_VALIDATE", "1")  # a layer's result outside of memory that PyTorch allocated becomes an error

from torch_oracle import DEVICES, randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
RECIPES = (None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling())
MODULES = {
    "Linear": lambda **k: te.Linear(32, 32, **k),
    "LayerNorm": lambda **k: te.LayerNorm(32, **k),
    "RMSNorm": lambda **k: te.RMSNorm(32, **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(32, 32, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(32, 64, **k),
    "MultiheadAttention": lambda **k: te.MultiheadAttention(32, 4, attention_dropout=0, input_layernorm=True, **k),
    "TransformerLayer": lambda **k: te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, **k),
}
PRODUCTS = [n for n in MODULES if n not in ("LayerNorm", "RMSNorm")]


def scope(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def make_input(device="cpu", seed=1, dtype=F32):
    return randn(8, 2, 32, seed=seed, dtype=dtype, device=device).requires_grad_()


def each(names=MODULES, recipes=(None,)):
    """Runs a test method for each module, device and recipe."""
    def decorate(test):
        def run(self):
            for device in DEVICES:
                for name in names:
                    for recipe in recipes:
                        with self.subTest(module=name, device=device, recipe=type(recipe).__name__):
                            test(self, randomise(MODULES[name](device=device)), device, recipe)
        run.__name__ = test.__name__
        return run
    return decorate


class Each(unittest.TestCase):
    def same(self, got, want, message=None):
        self.assertEqual(len(got), len(want))
        for i, (a, b) in enumerate(zip(got, want)):
            self.assertTrue(torch.equal(a, b), f"{message or ''} {i}")


def gradients(module, x=None):
    return [p.grad.clone() for p in module.parameters()] + ([] if x is None else [x.grad.clone()])
