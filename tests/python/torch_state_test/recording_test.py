"""Tests of the amaxes and scales that te-fl records for a model."""

import concurrent.futures
import os
import tempfile
import unittest

import torch

from common import BF16, F32, scope, step
from torch_oracle import DEVICES, near, randn, randomise
import te_fl.pytorch as te
from te_fl.common import recipe
from te_fl.common.recipe import DelayedScaling


def on_device(*shape, **options):
    """Makes a tensor on the device of te-fl's modules that are made without a device argument."""
    return randn(*shape, **options).to(DEVICES[-1])


class Recording(unittest.TestCase):
    """A module may have several C++ layers; amaxes update the module's scales, whichever C++ layer a call used."""

    LATEST = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")

    def of(self, module, name):
        return dict(module._fp8_state())[name]

    def each_twice(self, first, second, of_state):
        """Runs steps of two forwards and one backward, in which one output's gradients are 100 and the other's are 1; asserts that of_state() is the
        same whichever output it is."""
        for factors in ((1, 100), (100, 1)):
            for _ in range(2):
                with scope(self.LATEST):
                    a, b = first(), second()
                (factors[0] * a.float().sum() + factors[1] * b.float().sum()).backward()
            self.assertEqual(of_state().item(), torch.tensor(573.44).item(), factors)

    def test_a_layer_used_twice_in_one_backward(self):
        for recipe in (self.LATEST, DelayedScaling(amax_history_len=1), DelayedScaling(amax_history_len=3)):
            for order in (1, -1):
                module, exact = randomise(te.Linear(32, 32)), torch.nn.Linear(32, 32, device=DEVICES[-1])
                exact.load_state_dict({n: t for n, t in module.state_dict().items() if n != "_extra_state"})
                x, history = on_device(64, 32), []
                for step in range(3):
                    for m, chosen in ((module, recipe), (exact, None)):
                        m.zero_grad()
                        with scope(chosen):
                            parts = [m(x), m(x)][::order]
                        (parts[0].sum() + 1e4 * parts[1].sum()).backward()
                    history.append(self.of(module, "fp8.bwd.amax_history"))
                self.assertEqual(self.of(module, "fp8.bwd.scale").item(), torch.tensor(57344 / 1e4).item())
                near(self, module.weight.grad, exact.weight.grad, 0.05, "the weight's gradient")
                if recipe.amax_history_len == 3:  # one row per step
                    self.assertEqual(history[1].flatten().tolist(), [0, 0, 1e4] if step == 0 else [0, 1e4, 1e4])

    def test_two_dtypes_in_one_step(self):
        x = on_device(64, 32)
        for first, second in ((F32, BF16), (BF16, F32)):
            module = randomise(te.Linear(32, 32))
            self.each_twice(lambda: module(x.to(first)), lambda: module(4 * x.to(second)), lambda: self.of(module, "fp8.bwd.scale"))
            self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / (4 * x.to(second).abs().max().item()), 3)

    def test_two_masks_in_one_step(self):
        recipe = DelayedScaling(amax_history_len=1, fp8_dpa=True)
        for masks in (("causal", "no_mask"), ("no_mask", "causal")):
            module = te.DotProductAttention(2, 16)
            q, k, v = (on_device(16, 2, 2, 16, seed=i).requires_grad_() for i in range(3))
            for _ in range(2):
                with te.autocast(recipe=recipe):
                    a, b = (module(q * n, k, v, attn_mask_type=mask) for n, mask in zip((1, 3), masks))
                (a.sum() + 50 * b.sum()).backward()
            self.assertEqual(self.of(module, "fp8.bwd.scale")[0].item(), torch.tensor(57344 / 50).item())
            self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / (3 * q.abs().max().item()), 3)
            layer = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0))
            x = on_device(16, 2, 32).requires_grad_()
            self.each_twice(lambda: layer(x, self_attn_mask_type=masks[0]), lambda: layer(x, self_attn_mask_type=masks[1]),
                            lambda: self.of(layer.layernorm_mlp, "fc2_fp8.bwd.scale"))

    def test_an_evaluation_with_gradients_before_the_backward(self):
        layer = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0.1, attention_dropout=0.1))
        x = on_device(16, 2, 32)
        for _ in range(2):
            with scope(self.LATEST):
                y = layer.train()(x)
                evaluated = layer.eval()(x)
            (evaluated.sum() + 100 * y.sum()).backward()
            self.assertIsNone(x.grad)
        self.assertLess(self.of(layer.layernorm_mlp, "fc2_fp8.bwd.scale").item(), 574)  # dropout's factor makes gradients larger

    def test_parts_and_the_whole_layer_in_one_step(self):
        layer = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0))
        x = on_device(16, 2, 32)
        self.each_twice(lambda: layer(x), lambda: layer(x, checkpoint_core_attention=True),
                        lambda: self.of(layer.layernorm_mlp, "fc2_fp8.bwd.scale"))

    def test_several_threads(self):
        module, x = randomise(te.Linear(32, 32)), on_device(64, 32)

        def train(dtype, factor):
            for _ in range(20):
                with te.autocast(recipe=DelayedScaling(amax_history_len=64)):
                    y = module(x.to(dtype))
                torch.autograd.grad(factor * y.float().sum(), module.weight)

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(train, dtype, n) for n, dtype in enumerate((F32, BF16, F32, BF16), 1)]:
                done.result()
        self.assertEqual(self.of(module, "fp8.bwd.scale").item(), 57344 / 4)
        self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / max(x.abs().max(), x.to(BF16).abs().max()).item(), 3)

    def test_a_frozen_layer_follows_its_data(self):
        x = on_device(64, 32)
        for training in (True, False):
            module = randomise(te.Linear(32, 32))
            for _ in range(2):
                with scope(self.LATEST):
                    y = module(x)
                y.sum().backward()
            module.requires_grad_(False).train(training)
            want = torch.nn.functional.linear(100 * x, module.weight, module.bias)
            for _ in range(2):
                with scope(self.LATEST):
                    y = module(100 * x)
            near(self, y, want, 0.1, "the output")
            before = self.of(module, "fp8.fwd.scale")
            for _ in range(2):  # as in Transformer Engine: without gradients the end of an autocast updates nothing
                with torch.no_grad(), scope(self.LATEST):
                    module(x)
            self.assertEqual(self.of(module, "fp8.fwd.scale").tolist(), before.tolist())
            with scope(self.LATEST):
                module(x / 10)  # the update uses the amaxes of the evaluations
            self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / x.abs().max().item(), 3)

    def test_an_evaluation_before_the_first_step(self):
        x, recipe = on_device(64, 32), DelayedScaling()
        module = randomise(te.Linear(32, 32))
        codes = lambda t: t.to(torch.float8_e4m3fn).float()  # quantises with scale 1
        want = codes(x) @ codes(module.weight).T + module.bias
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), te.autocast(recipe=recipe):
                y = module.eval()(x)
            near(self, y, want, 1e-5 if DEVICES == ["cpu"] else 1e-4, "the output")
        self.assertEqual(self.of(module, "fp8.fwd.scale").tolist(), [1, 1])
        self.assertEqual(self.of(module, "fp8.fwd.amax_history")[0].tolist(), [x.abs().max().item(), module.weight.abs().max().item()])
        # A teacher whose autocasts all end without gradients gets its scales at the end of the student's autocast.
        student = randomise(te.Linear(32, 32))
        with te.autocast(recipe=recipe):
            student(x).sum().backward()
        self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / x.abs().max().item(), 3)

    def test_saturation_is_said_once(self):
        big = torch.full((16, 32), 1000.0, device=DEVICES[-1])
        big[:, 8:] = 1.0
        outputs = []
        for module, inputs in ((te.Linear(32, 32), (big,)), (te.TransformerLayer(32, 64, 4, attn_input_format="bshd"), (on_device(2, 8, 32),)),
                               (te.DotProductAttention(2, 16), [big.view(16, 1, 2, 16)] * 3)):
            with tempfile.TemporaryFile() as file:
                kept = os.dup(2)
                os.dup2(file.fileno(), 2)
                try:
                    for _ in range(3):
                        with torch.no_grad(), te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
                            module.eval()(*inputs)
                finally:
                    os.dup2(kept, 2)
                    os.close(kept)
                file.seek(0)
                outputs.append(file.read().decode())
        self.assertEqual([text.count("saturate") for text in outputs], [1, 0, 1], outputs)
        self.assertIn("25 % of its inputs saturate", outputs[0])
        self.assertIn("[32,32]", outputs[0])
        self.assertIn("attention", outputs[2])
