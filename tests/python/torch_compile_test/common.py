"""Tests te_fl.pytorch's modules in functions compiled by torch.compile: without graph breaks, and with eager's numbers and FP8 state.

The default backend is aot_eager, whose graphs are those of inductor before code generation, at a tenth of the time."""

import copy
import unittest

import torch
import torch._dynamo
import torch._inductor.config
import torch.utils.checkpoint

from torch_cases import make_input, scope
from torch_oracle import DEVICES, near, randomise
from te_fl.common.recipe import DelayedScaling
from te_fl.pytorch.fp8 import quantization

DEVICE = DEVICES[-1]
DELAYED = DelayedScaling(amax_history_len=4)


def copy_state(model):
    """Returns parameters, buffers and FP8 state by name."""
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        if hasattr(module, "_fp8_state"):
            state.update((f"{path}.{name}", t.clone()) for name, t in module._fp8_state())
    return state


class Compiled(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    def tearDown(self):
        self.assertFalse(quantization._state.scopes, "a scope was left behind")

    def close(self, got, want, message):
        self.assertEqual(got.shape, want.shape, message)
        self.assertEqual(got.dtype, want.dtype, message)
        if got.device.type == "cpu":
            self.assertTrue(torch.equal(got, want), f"{message}: off by {(got.double() - want.double()).abs().max()}")
        else:
            near(self, got, want, 1e-3, message, 1e-6)

    def both(self, make, run, recipe=None, steps=2, backend="aot_eager", give=make_input, fullgraph=True, dynamic=None):
        """Trains a model of make() eagerly and compiled by run(model, x); checks that outputs, gradients, parameters and FP8 states are equal."""
        base, found = randomise(make()), []
        for compiled in (False, True):
            model = copy.deepcopy(base)
            called = torch.compile(run, backend=backend, fullgraph=fullgraph, dynamic=dynamic) if compiled else run
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if any(p.requires_grad for p in model.parameters()) else None
            torch.manual_seed(5)
            tensors = []
            for step in range(steps):
                x = give(DEVICE, seed=step + 1)
                model.zero_grad()
                with scope(recipe):
                    y = called(model, x)
                y.float().square().mean().backward()
                tensors += [(f"output of step {step}", y.detach())]
                tensors += [(f"gradient of the input of step {step}", x.grad)] if x.requires_grad else []
                if optimizer is not None:
                    optimizer.step()
            found.append((tensors, copy_state(model)))
        (eager, eager_state), (other, other_state) = found
        for (name, want), (_, got) in zip(eager, other):
            self.close(got, want, name)
        self.assertEqual(eager_state.keys(), other_state.keys())
        for name, want in eager_state.items():
            self.close(other_state[name], want, name)
        return found

    def graphs(self):
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def call(module, x):
    return module(x)
