"""Tests weight gradients that backward_dw() computes (delay_wgrad_compute=True): they equal, bit for bit, those of an ordinary backward."""

import os
import sys
import unittest

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_oracle import DEVICES, randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402
from te_fl.errors import FailedPrecondition  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
RECIPES = (None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling())
MODULES = {
    "Linear": lambda **k: te.Linear(32, 48, **k),
    "Linear without bias": lambda **k: te.Linear(32, 48, bias=False, **k),
    "Linear that returns its bias": lambda **k: te.Linear(32, 48, return_bias=True, **k),
    "Linear in parts": lambda **k: te.Linear(32, 48, parameters_split={"a": 16, "b": 32}, **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(32, 48, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(32, 64, **k),
    "LayerNormMLP, SwiGLU, repeated": lambda **k: te.LayerNormMLP(32, 64, activation="swiglu", normalization="RMSNorm", checkpoint=True, **k),
}


def made(name, delays, recipe=None, codes=False, **arguments):
    with te.quantized_model_init(codes, recipe):
        module = MODULES[name](delay_wgrad_compute=delays, **arguments)
    return randomise(module)


def forward(module, seed, recipe=None, dtype=F32, device="cpu"):
    x = randn(16, 2, 32, seed=seed, device=device, dtype=dtype).requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    if isinstance(y, tuple):
        y = y[0] + y[1]
    return x, y


def backward(y, seed):
    y.backward(randn(*y.shape, seed=10 + seed, device=y.device).to(y.dtype))


def gradients(module, delays, order, recipe=None, dtype=F32, device="cpu"):
    """Returns the gradients of inputs and parameters after two steps of three microbatches. order: the sequence of forward passes, backward passes
    and backward_dw() calls."""
    seen = []
    for step in range(2):
        module.zero_grad()
        counts, runs = dict.fromkeys("FBW", 0), []
        for what in order:
            if what == "F":
                runs.append(forward(module, 3 * step + counts["F"], recipe, dtype, device))
            elif what == "B":
                backward(runs[counts["B"]][1], counts["B"])
            elif delays:
                module.backward_dw()
            counts[what] += 1
        seen += [x.grad for x, _ in runs] + [p.grad.clone() for p in module.parameters()]
    return seen


class Gradients(unittest.TestCase):
    def same(self, got, want):
        self.assertEqual(len(got), len(want))
        for i, (a, b) in enumerate(zip(got, want)):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
            self.assertTrue(torch.equal(a, b), f"{i}: {(a.float() - b.float()).abs().max()}")

    def test_bit_for_bit(self):
        for device in DEVICES:
            for name in MODULES:
                for recipe in RECIPES:
                    for dtype in (F32, BF16):
                        for order in ("FBWFBWFBW", "FFFBBBWWW", "FFBBWFBWW"):
                            with self.subTest(device=device, name=name, recipe=type(recipe).__name__, dtype=dtype, order=order):
                                self.same(*(gradients(made(name, delays, device=device), delays, order, recipe, dtype, device)
                                            for delays in (True, False)))

    def test_of_parameters_in_16_bits_and_of_codes(self):
        for name in ("Linear", "LayerNormLinear", "LayerNormMLP"):
            for recipe in RECIPES[1:]:
                for codes in (True, False):
                    self.same(*(gradients(made(name, delays, recipe, codes, device="cpu", params_dtype=BF16), delays, "FFBBWFBWW", recipe, BF16)
                                for delays in (True, False)))

    def test_main_grad(self):
        for name in ("Linear", "Linear in parts", "LayerNormLinear", "LayerNormMLP"):
            for recipe in RECIPES:
                for counted in (True, False):
                    results = []
                    for delays in (True, False):
                        module = made(name, delays, device="cpu", fuse_wgrad_accumulation=True)
                        weights = [p for p in module.parameters() if p.dim() == 2]
                        for p in weights:
                            p.main_grad = torch.ones(p.shape)
                            if counted:
                                p.grad_added_to_main_grad = False
                        for microbatch in range(2):
                            _, y = forward(module, microbatch, recipe)
                            before = [p.main_grad.clone() for p in weights]
                            backward(y, microbatch)
                            if delays:
                                self.same([p.main_grad for p in weights], before)
                                module.backward_dw()
                            self.assertTrue(all(getattr(p, "grad_added_to_main_grad", None) is (True if counted else None) for p in weights))
                            self.assertTrue(all((p.grad is not None) == counted for p in weights))
                        results.append([p.main_grad for p in weights] + [p.grad for p in module.parameters() if p.dim() == 1])
                    self.same(*results)

    def test_frozen_parameters(self):
        for frozen in (["fc1_weight"], ["fc2_weight", "fc2_bias"], ["fc1_bias"], ["fc1_weight", "fc2_weight"]):
            for recipe in RECIPES:
                results = []
                for delays in (True, False):
                    module = made("LayerNormMLP", delays, device="cpu")
                    for name in frozen:
                        getattr(module, name).requires_grad_(False)
                    x, y = forward(module, 1, recipe)
                    backward(y, 1)
                    module.backward_dw()
                    self.assertEqual([n for n, p in module.named_parameters() if p.grad is None], frozen)
                    results.append([x.grad] + [p.grad for p in module.parameters() if p.grad is not None])
                self.same(*results)

    def test_of_a_retained_graph(self):
        results = []
        for delays in (True, False):
            module = made("Linear", delays, device="cpu")
            _, y = forward(module, 1)
            y.sum().backward(retain_graph=True)
            y.square().sum().backward()
            module.backward_dw()
            if delays:
                module.backward_dw()
            results.append([p.grad for p in module.parameters()])
        self.same(*results)

    def test_inside_recomputation(self):
        results = []
        for delays in (True, False):
            module, x = made("LayerNormLinear", delays, device="cpu"), randn(16, 2, 32).requires_grad_()
            with te.autocast(recipe=RECIPES[1]):
                y = te.checkpoint(module, x)
            backward(y, 1)
            module.backward_dw()
            results.append([x.grad] + [p.grad for p in module.parameters()])
        self.same(*results)


    def test_compiled(self):
        for name in ("Linear", "LayerNormMLP"):
            for recipe in RECIPES[:3]:
                results = []
                for compiles in (True, False):
                    module = made(name, True, device="cpu")
                    torch._dynamo.reset()
                    called = torch.compile(module, backend="aot_eager") if compiles else module
                    x, y = forward(called, 1, recipe)
                    backward(y, 1)
                    self.assertIsNone((module.weight if name == "Linear" else module.fc1_weight).grad)
                    module.backward_dw()
                    results.append([x.grad] + [p.grad for p in module.parameters()])
                self.same(*results)


class Rules(unittest.TestCase):
    def test_the_backward_leaves_them(self):
        for recipe in RECIPES:
            module = made("LayerNormMLP", True, device="cpu")
            self.assertTrue(module.need_backward_dw())
            _, y = forward(module, 1, recipe)
            backward(y, 1)
            left = [n for n, p in module.named_parameters() if p.grad is None]
            # In FP8 the biases' gradients are computed with the quantisation of the output gradients, as in Transformer Engine.
            biases = [] if recipe is not None else ["fc1_bias", "fc2_bias"]
            self.assertEqual(set(left) - set(biases), {"fc1_weight", "fc2_weight"})
            module.backward_dw()
            self.assertTrue(all(p.grad is not None for p in module.parameters()))

    def test_without_it(self):
        for module in (made("Linear", False, device="cpu"), te.DotProductAttention(2, 16), te.LayerNorm(16, device="cpu")):
            self.assertFalse(module.need_backward_dw())
            module.backward_dw()
        module = made("Linear", False, device="cpu")
        self.assertFalse(hasattr(module.weight, "skip_backward_post_hook"))

    def test_one_call_for_each_backward(self):
        module = made("Linear", True, device="cpu")
        with self.assertRaisesRegex(FailedPrecondition, "no backward has left"):
            module.backward_dw()
        backward(forward(module, 1)[1], 1)
        module.backward_dw()
        with self.assertRaisesRegex(FailedPrecondition, "no backward has left"):
            module.backward_dw()

    def test_memory_that_went_before(self):
        """backward_dw() checks, as a backward does, that the operands' memory still exists."""
        module = made("Linear", True, device="cpu")
        for gone in ("input", "gradient"):
            x, y = forward(module, 1)
            grad = randn(*y.shape, seed=3)
            y.backward(grad)
            {"input": x, "gradient": grad}[gone].detach().untyped_storage().resize_(0)
            with self.assertRaisesRegex(FailedPrecondition, gone):
                module.backward_dw()

    def test_what_is_called_afterwards(self):
        module, seen = made("Linear", True, device="cpu"), []
        module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.weight.grad is not None))
        backward(forward(module, 1)[1], 1)
        self.assertEqual(seen, [])
        module.backward_dw()
        self.assertEqual(seen, [True])

    def test_marks_for_frameworks(self):
        for module in (made("LayerNormMLP", True, device="cpu"), MODULES["LayerNormMLP"](delay_wgrad_compute=True, device="meta")):
            if module.fc1_weight.is_meta:
                module.reset_parameters()
            marked = [n for n, p in module.named_parameters() if getattr(p, "skip_backward_post_hook", False)]
            self.assertEqual(marked, ["fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"])
        with te.quantized_model_init():
            module = MODULES["LayerNormMLP"](delay_wgrad_compute=True, device="cpu")
        self.assertTrue(module.fc1_weight.skip_backward_post_hook)

    def test_hooks_that_would_not_run(self):
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            for recipe in RECIPES:
                module = made("LayerNormMLP", True, device="cpu")
                handle = getattr(module.layer_norm_weight, register)(lambda *operands: None)  # the norm weight's gradient is computed in the backward
                forward(module, 1, recipe)
                getattr(module.fc2_weight, register)(lambda *operands: None)
                with self.assertRaisesRegex(FailedPrecondition, "fc2_weight has a hook"):
                    forward(module, 1, recipe)
                with torch.no_grad():
                    forward(module, 1, None)
                handle.remove()

    def test_overlapped_communication(self):
        for make in (te.Linear, te.LayerNormLinear, te.LayerNormMLP):
            with self.assertRaisesRegex(ValueError, "ub_bulk_wgrad"):
                make(16, 16, delay_wgrad_compute=True, ub_bulk_wgrad=True, device="cpu")


if __name__ == "__main__":
    unittest.main()
