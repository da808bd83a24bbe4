"""Tests the state of te_fl.pytorch's modules: copies, files, state_dict, devices and dtypes, and the FP8 state of other programs' checkpoints."""

import unittest

import torch

from torch_oracle import DEVICES, randn, randomise
import te_fl.pytorch as te
from te_fl.common import recipe
from te_fl.common.recipe import DelayedScaling

F32, BF16 = torch.float32, torch.bfloat16
DELAYED = DelayedScaling(amax_history_len=4)
MODULES = {
    "Linear": lambda **k: te.Linear(32, 32, **k),
    "Linear in parts": lambda **k: te.Linear(32, 32, parameters_split=("a", "b"), **k),
    "LayerNorm": lambda **k: te.LayerNorm(32, **k),
    "RMSNorm": lambda **k: te.RMSNorm(32, **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(32, 32, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(32, 64, **k),
    "MultiheadAttention": lambda **k: te.MultiheadAttention(32, 4, attention_dropout=0, input_layernorm=True, **k),
    "TransformerLayer": lambda **k: te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, **k),
}


def scope(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def make_input(device="cpu", seed=1, dtype=F32):
    return randn(8, 2, 32, seed=seed, dtype=dtype, device=device).requires_grad_()


def step(module, device="cpu", recipe=None, seed=1, dtype=F32):
    """Returns the output and the gradients of the input and of the parameters."""
    module.zero_grad()
    x = make_input(device, seed, dtype)
    with scope(recipe):
        y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def trained(name, device="cpu", recipe=None, steps=3, **arguments):
    module = randomise(MODULES[name](device=device, **arguments))
    for seed in range(steps):
        step(module, device, recipe, seed)
    return module


def each(names=MODULES, recipes=(None,)):
    """Runs a test method for each module, device and recipe."""
    def decorate(test):
        def run(self):
            for device in DEVICES:
                for name in names:
                    for recipe in recipes:
                        with self.subTest(module=name, device=device, recipe=type(recipe).__name__):
                            test(self, name, device, recipe)
        run.__name__ = test.__name__
        return run
    return decorate


class State(unittest.TestCase):
    def same(self, got, want):
        self.assertEqual(len(got), len(want))
        for i, (a, b) in enumerate(zip(got, want)):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
            self.assertTrue(torch.equal(a, b), f"{i}: {(a.float() - b.float()).abs().max()}")
