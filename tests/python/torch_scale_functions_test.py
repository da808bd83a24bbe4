"""Tests delayed scaling whose amaxes and scales are computed by the program's functions, and FP8 attention under its other name."""

import copy
import os
import pickle
import sys
import unittest

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_cases import MODULES, make_input  # noqa: E402
from torch_oracle import randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl import errors  # noqa: E402
from te_fl.common.recipe import DelayedScaling  # noqa: E402
from te_fl.pytorch.modules.base import TransformerEngineBaseModule  # noqa: E402


def own_scale(amax, scale, fp8_max, recipe):
    """Computes the scale with Transformer Engine's formula."""
    found = torch.full_like(amax, fp8_max) / amax / 2**recipe.margin  # PyTorch divides a number by a tensor by multiplying with the reciprocal
    return torch.where((amax > 0) & torch.isfinite(amax), found, scale)


class Functions(unittest.TestCase):
    def trained(self, make, arguments):
        """Returns outputs, gradients and FP8 state of a few steps."""
        seen, module = [], randomise(make(device="cpu"))
        fp8 = DelayedScaling(amax_history_len=3, margin=1, **arguments)
        for step in range(4):
            x = make_input(seed=step)
            with te.autocast(recipe=fp8):
                y = module(x * (4 if step == 1 else 1))
            y.sum().backward()
            seen += [y, x.grad] + [p.grad.clone() for p in module.parameters()]
            seen += [t for m in module.modules() if isinstance(m, TransformerEngineBaseModule) for _, t in m._fp8_state()]
        return seen

    def test_functions_that_do_what_the_words_say(self):
        for name in ("Linear", "LayerNormMLP", "TransformerLayer"):
            for word, function in (("max", lambda history: history.max(dim=0).values), ("most_recent", lambda history: history[0])):
                want = self.trained(MODULES[name], {"amax_compute_algo": word})
                for arguments in ({"amax_compute_algo": function}, {"amax_compute_algo": word, "scaling_factor_compute_algo": own_scale},
                              {"amax_compute_algo": function, "scaling_factor_compute_algo": own_scale}):
                    with self.subTest(module=name, word=word, arguments=arguments):
                        found = self.trained(MODULES[name], arguments)
                        self.assertEqual(len(found), len(want))
                        for i, (a, b) in enumerate(zip(found, want)):
                            self.assertTrue(torch.equal(a, b), i)

    def test_a_step_without_an_amax(self):
        """Without an amax in a step: with the named algorithms neither history nor scale changes, as in Transformer Engine's kernel; with functions
        the history rolls, as in Transformer Engine's loop over functions. Some inputs are zeros, so that one tensor of a state has no amax while its
        neighbour has one."""
        for length in (1, 2, 4):
            for arguments in ({"amax_compute_algo": "max"}, {"amax_compute_algo": "most_recent"}, {"amax_compute_algo": lambda history: history.amax(0)},
                              {"scaling_factor_compute_algo": own_scale}):
                module, fp8 = te.Linear(16, 16, bias=False, device="cpu"), DelayedScaling(amax_history_len=length, **arguments)
                history, scale = torch.zeros(length, 2), torch.ones(2)
                for step, factor in enumerate((8, 2, 0, 0, 1, 0, 4)):
                    x = make_input(seed=step)[..., :16].contiguous() * factor
                    with te.autocast(recipe=fp8):
                        module(x).sum().backward()
                    history[0] = torch.stack([x.detach().abs().max(), module.weight.detach().abs().max()])
                    for slot in range(2):
                        column = history[:, slot]
                        last, largest = column[0].item(), column.max().item()
                        if last == 0 and len(arguments) == 1 and isinstance(arguments.get("amax_compute_algo"), str):
                            continue
                        amax = last if arguments.get("amax_compute_algo") == "most_recent" else largest
                        if amax:
                            scale[slot] = torch.tensor(448.0) / torch.tensor(amax)
                        history[:, slot] = torch.roll(column, -1)
                        history[0, slot] = 0
                    state = dict(module._fp8_state())
                    with self.subTest(length=length, arguments=arguments, step=step):
                        self.assertTrue(torch.equal(state["fp8.fwd.amax_history"], history), (state["fp8.fwd.amax_history"], history))
                        torch.testing.assert_close(state["fp8.fwd.scale"], scale, rtol=1e-6, atol=0)

    def test_what_they_are_given_and_give(self):
        seen = []

        def scale(amax, scale, fp8_max, recipe):
            seen.append((tuple(amax.shape), tuple(scale.shape), fp8_max, recipe))
            return torch.full_like(scale, 8)

        module, fp8 = te.Linear(32, 32, device="cpu"), DelayedScaling(amax_compute_algo=lambda history: history.sum(0),
                                                                    scaling_factor_compute_algo=scale)
        with te.autocast(recipe=fp8):
            y = module(make_input())
        self.assertEqual(seen, [((2,), (2,), 448.0, fp8)])
        self.assertIs(seen[0][3], fp8)
        y.sum().backward()
        self.assertEqual(seen[1:], [((1,), (1,), 57344.0, fp8)])
        self.assertEqual({n: t.tolist() for n, t in module._fp8_state() if n.endswith("scale")}, {"fp8.fwd.scale": [8, 8], "fp8.bwd.scale": [8]})

    def test_an_error_of_theirs_is_the_cause(self):
        def broken(history):
            raise KeyError("no amax today")

        module = te.Linear(32, 32, device="cpu")
        with self.assertRaisesRegex(errors.Internal, "(?s)\"broken\".*no amax today") as caught, te.autocast(recipe=DelayedScaling(amax_compute_algo=broken)):
            module(make_input())
        self.assertIsInstance(caught.exception.__cause__, KeyError)
        with te.autocast(recipe=DelayedScaling()):
            module(make_input()).sum().backward()

    def test_checkpoints_and_copies_of_modules_that_used_them(self):
        module = te.Linear(32, 32, device="cpu")
        with te.autocast(recipe=DelayedScaling(amax_compute_algo=lambda history: history[0])):
            module(make_input()).sum().backward()
        other = te.Linear(32, 32, device="cpu")
        other.load_state_dict(module.state_dict())
        for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            for (n, a), (_, b) in zip(module._fp8_state(), twin._fp8_state(), strict=True):
                self.assertTrue(torch.equal(a, b), n)

    def test_compiled_functions_refuse_them(self):
        module, fp8 = te.Linear(32, 32, device="cpu"), DelayedScaling(amax_compute_algo=lambda history: history[0])

        def step(x):
            with te.autocast(recipe=fp8):
                return module(x)
        with self.assertRaisesRegex(Exception, "hold no functions for amaxes and scales"):
            torch.compile(step, fullgraph=True, backend="eager")(make_input())

    def test_fp8_mha_computes_attention_in_fp8(self):
        results = []
        for arguments in ({}, {"fp8_dpa": True}, {"fp8_mha": True}):
            results.append(self.trained(MODULES["MultiheadAttention"], arguments))
        self.assertEqual(len(results[1]), len(results[2]))
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(results[1], results[2])))
        self.assertGreater(len(results[1]), len(results[0]))  # attention's scales are additional entries of the state


if __name__ == "__main__":
    unittest.main()
