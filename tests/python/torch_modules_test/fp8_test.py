"""Tests modules in FP8."""

import numpy
import torch

from common import BF16, EVERYWHERE, F32, Modules, grown
import torch_oracle as oracle
from torch_oracle import DEVICES, PerBlock, PerTensor, allowed, compare, near, randn, randomise
from torch_oracle import with_bias
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format

# After some steps with the same input each scale fits the current amax.
SETTLED = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")


class Fp8(Modules):
    """Values and gradients in FP8 equal those of an FP64 computation whose GEMM operands are quantised by NumPy."""

    # Tolerances by the 2-norm: where te-fl rounds differently from FP64, an element of a later operand may round to the neighbouring FP8 code.
    EXACT = {("cpu", F32): 1e-5, ("cpu", BF16): 5e-3, ("cuda", F32): 1e-2, ("cuda", BF16): 1e-2}
    FLIPS = {F32: 2e-2, BF16: 6e-2}

    def quantised(self, make, wanted, *shapes, recipe, steps=1, flips=False):
        for device, dtype in EVERYWHERE:
            with self.subTest(device=device, dtype=dtype, recipe=type(recipe).__name__):
                module = randomise(make(device=device, params_dtype=dtype))
                inputs = [grown(*s, device=device, dtype=dtype, seed=i + 1) for i, s in enumerate(shapes)]

                def served(*x):
                    with te.autocast(recipe=recipe):
                        return module(*x)
                for _ in range(steps - 1):  # the amaxes of these steps determine the scales of the last step
                    x = [t.detach().clone().requires_grad_() for t in inputs]
                    y = served(*x)
                    y.backward(randn(*y.shape, seed=11, device=device).to(y.dtype))
                compare(self, served, module, wanted, inputs, self.FLIPS[dtype] if flips else self.EXACT[device, dtype],
                        close=oracle.near_by_norm)

    def test_linear(self):
        for recipe, product, steps in ((Float8CurrentScaling(), PerTensor(), 1), (Float8BlockScaling(), PerBlock(), 1),
                                       (Float8BlockScaling(fp8_format=Format.HYBRID), PerBlock(gradient="e5m2"), 1),
                                       (DelayedScaling(amax_history_len=4), PerTensor(), 2),
                                       (DelayedScaling(amax_history_len=4, margin=2), PerTensor(margin=2), 2),
                                       (DelayedScaling(fp8_format=Format.E4M3), PerTensor(gradient="e4m3"), 2),
                                       (Float8CurrentScaling(use_power_2_scales=True), PerTensor(pow2=True), 1)):
            self.quantised(lambda **k: te.Linear(160, 144, **k), lambda p, x: product(x, p["weight"], p["bias"]), (160, 160), recipe=recipe,
                           steps=steps)

    def test_first_delayed_step_has_scale_one(self):
        for device in DEVICES:
            module = randomise(te.Linear(32, 16, bias=False, device=device))
            x = randn(16, 32, device=device)
            with te.autocast(recipe=DelayedScaling()):
                y = module(x)
            def codes(t):
                return torch.from_numpy(oracle.round_to(t.detach().cpu().numpy(), "e4m3"))
            near(self, y.cpu(), codes(x) @ codes(module.weight).T, 2e-2 if device == "cuda" else 1e-5, "output")

    def test_layernorm_linear(self):
        for recipe, product, steps in ((Float8CurrentScaling(), PerTensor(), 1), (Float8BlockScaling(), PerBlock(), 1),
                                       (Float8BlockScaling(fp8_format=Format.HYBRID), PerBlock(gradient="e5m2"), 1),
                                       (SETTLED, PerTensor(), 5)):
            self.quantised(lambda **k: te.LayerNormLinear(64, 48, **k),
                           lambda p, x: product(oracle.norm(x, p, "layer_norm_"), p["weight"], p["bias"]), (32, 64), recipe=recipe,
                           steps=steps, flips=True)

    def test_layernorm_mlp(self):
        for recipe, product, steps in ((Float8CurrentScaling(), PerTensor(), 1), (Float8BlockScaling(), PerBlock(), 1),
                                       (Float8BlockScaling(fp8_format=Format.HYBRID), PerBlock(gradient="e5m2"), 1),
                                       (SETTLED, PerTensor(), 6)):
            for name in ("gelu", "swiglu", "srelu"):
                self.quantised(lambda **k: te.LayerNormMLP(64, 96, activation=name, **k),
                               lambda p, x: with_bias(*oracle.mlp(p, x, activation=name, product=product)[:2]), (32, 64), recipe=recipe,
                               steps=steps, flips=True)

    def test_transformer_layer(self):
        for recipe, product, steps in ((Float8CurrentScaling(), PerTensor(), 1), (Float8BlockScaling(), PerBlock(), 1),
                                       (Float8BlockScaling(fp8_format=Format.HYBRID), PerBlock(gradient="e5m2"), 1),
                                       (SETTLED, PerTensor(), 6)):
            for variant in (dict(), dict(fuse_qkv_params=True)):
                options = dict(interleaved=variant.get("fuse_qkv_params", False), seen=allowed(16, 16, True))
                self.quantised(lambda **k: te.TransformerLayer(64, 96, 4, hidden_dropout=0, attention_dropout=0, **variant, **k),
                               lambda p, x: oracle.transformer(p, x, product=product, **options), (16, 2, 64), recipe=recipe, steps=steps,
                               flips=True)

    def test_a_recipe_differs_from_none(self):
        """If the oracle's quantisation were too fine, the comparisons above could not distinguish FP8 from no FP8."""
        module, x = randomise(te.Linear(64, 64, device="cpu")), randn(32, 64)
        plain = module(x)
        for recipe in (Float8CurrentScaling(), Float8BlockScaling(), DelayedScaling()):
            with te.autocast(recipe=recipe):
                y = module(x)
            self.assertGreater((y - plain).abs().max().item() / plain.abs().max().item(), 1e-3)

    def test_weights_kept_between_microbatches(self):
        module, x = randomise(te.Linear(32, 16, bias=False, device="cpu")), randn(16, 32)
        with te.autocast(recipe=Float8CurrentScaling()):
            first = module(x, is_first_microbatch=True)
            self.assertTrue(torch.equal(module(x, is_first_microbatch=False), first))
            with torch.no_grad():
                module.weight.mul_(2)
            for value in (False, True, None):  # the module notices a change of the weight
                self.assertTrue(torch.equal(module(x, is_first_microbatch=value), 2 * first))
            for true, false in ((1, 0), (numpy.True_, numpy.False_), (torch.tensor(True), torch.tensor(False))):
                module(x, is_first_microbatch=true)
                module.weight.data.mul_(2)  # a write that PyTorch's version counter misses
                before, after = (module(x, is_first_microbatch=value) for value in (false, true))
                self.assertTrue(torch.equal(after, 2 * before))

    def test_microbatches_have_the_same_gradients(self):
        for device in DEVICES:
            for name, make in (("Linear", lambda: te.Linear(32, 32, device=device)),
                               ("LayerNormMLP", lambda: te.LayerNormMLP(32, 64, device=device)),
                               ("TransformerLayer", lambda: te.TransformerLayer(32, 64, 4, attention_dropout=0, hidden_dropout=0,
                                                                                device=device))):
                for recipe in (None, Float8CurrentScaling(), Float8BlockScaling()):
                    with self.subTest(device=device, module=name, recipe=type(recipe).__name__):
                        results = []
                        for firsts in ((None, None, None), (True, False, False)):
                            module = randomise(make())
                            for seed, first in enumerate(firsts):
                                with te.autocast(enabled=recipe is not None, recipe=recipe):
                                    module(randn(8, 2, 32, seed=seed, device=device), is_first_microbatch=first).sum().backward()
                            results.append([p.grad for p in module.parameters()])
                        self.assertTrue(all(torch.equal(a, b) for a, b in zip(*results)))

    def test_calibration(self):
        module, x = randomise(te.Linear(32, 16, bias=False, device="cpu")), randn(16, 32)
        recipe = DelayedScaling(amax_history_len=4)
        with torch.no_grad():
            with te.autocast(enabled=False, calibrating=True, recipe=recipe):
                near(self, module(x), x.double() @ module.weight.double().T, 1e-5, "high precision")
            with te.autocast(recipe=recipe):
                y = module(x)
        want = PerTensor()(x.double(), module.weight.double())
        near(self, y, want, 1e-5, "output")

    def test_gradients_are_in_fp8_outside_the_scope(self):
        module, x = randomise(te.Linear(32, 16, device="cpu")), randn(16, 32).requires_grad_()
        with te.autocast(recipe=Float8CurrentScaling()):
            y = module(x)
        g = randn(16, 16, seed=3)
        y.backward(g)
        near(self, x.grad, oracle.per_tensor(g, "e5m2") @ oracle.per_tensor(module.weight, "e4m3"), 1e-5, "gradient")
