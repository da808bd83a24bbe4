"""Tests modules under another default dtype, modules converted to another dtype, and modules first used in inference mode: te-fl's own tensors do not
depend on these defaults."""

import contextlib
import io
import unittest

import torch

import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

MAKERS = {
    "Linear": lambda: te.Linear(32, 32, device="cpu", params_dtype=torch.float32),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu", params_dtype=torch.float32),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, device="cpu", params_dtype=torch.float32),
    "GroupedLinear": lambda: te.GroupedLinear(2, 32, 32, device="cpu", params_dtype=torch.float32),
    "ops": lambda: te.ops.Sequential(te.ops.LayerNorm(32, device="cpu", dtype=torch.float32), te.ops.Linear(32, 32, device="cpu", dtype=torch.float32)),
    "attention": lambda: te.MultiheadAttention(32, 2, qk_norm_type="L2Normalization", softmax_type="learnable", device="cpu", params_dtype=torch.float32),
    "TransformerLayer": lambda: te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", params_dtype=torch.float32),
}
RECIPES = (None, DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling())


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def step(name, module, recipe, dtype=torch.float32):
    """Returns the output and the gradients of one step."""
    torch.manual_seed(1)
    x = torch.randn(16, 2, 32, dtype=torch.float32).to(dtype).requires_grad_()
    module.zero_grad()
    inputs = (x.view(32, 32), [20, 12]) if name == "GroupedLinear" else (x,)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(*inputs)
    y.backward(torch.randn(y.shape, dtype=torch.float32).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


class Defaults(unittest.TestCase):
    def test_the_default_dtype_changes_nothing(self):
        for name, make in MAKERS.items():
            for recipe in RECIPES:
                torch.manual_seed(0)
                right, module = make(), make()
                module.load_state_dict(right.state_dict())
                want = [step(name, right, recipe) for _ in range(2)]
                state = right.state_dict()
                for dtype in (torch.bfloat16, torch.float64):
                    with self.subTest(name, recipe=recipe, dtype=dtype), default(dtype):
                        fresh = make()
                        fresh.load_state_dict({key: value for key, value in module.state_dict().items() if "_extra_state" not in key}, strict=False)
                        for expected in want:
                            for a, b in zip(step(name, fresh, recipe), expected, strict=True):
                                self.assertTrue(a.dtype == b.dtype and torch.equal(a, b))
                        for key, value in fresh.state_dict().items():
                            self.assertTrue(torch.equal(value, state[key]) and value.dtype == state[key].dtype, key)
                        torch.save(fresh.state_dict(), io.BytesIO())

    def test_a_module_that_was_first_used_in_inference_mode_trains(self):
        for name, make in MAKERS.items():
            for recipe in RECIPES:
                with self.subTest(name, recipe=recipe):
                    torch.manual_seed(0)
                    module, right = make(), make()
                    right.load_state_dict(module.state_dict())
                    x = torch.randn(16, 2, 32, dtype=torch.float32)
                    with torch.inference_mode():
                        module(*((x.view(32, 32), [20, 12]) if name == "GroupedLinear" else (x,)))
                    for a, b in zip(step(name, module, recipe), step(name, right, recipe), strict=True):
                        self.assertTrue(torch.equal(a, b))

    def test_modules_that_were_converted(self):
        """Compares with a module that had the dtype from the start and has the same parameters."""
        for name, make in MAKERS.items():
            for dtype in (torch.bfloat16, torch.float16):
                for recipe in RECIPES:
                    with self.subTest(name, dtype=dtype, recipe=recipe):
                        torch.manual_seed(0)
                        module = make().to(dtype)
                        for part in step(name, module, recipe, dtype):
                            self.assertTrue(part.dtype == dtype and part.isfinite().all())


if __name__ == "__main__":
    unittest.main()
