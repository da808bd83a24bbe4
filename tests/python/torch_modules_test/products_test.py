"""Tests Linear, the norms, LayerNormLinear and LayerNormMLP."""

import torch

from common import BF16, EVERYWHERE, Modules
import torch_oracle as oracle
from torch_oracle import ACTIVATIONS, DEVICES, linear, randn
from torch_oracle import with_bias
import te_fl.pytorch as te


class LinearTest(Modules):
    def test_plain(self):
        for bias in (True, False):
            for shape in ((5, 24), (3, 4, 24), (24,)):
                self.check(lambda **k: te.Linear(24, 40, **k), lambda p, x: linear(x, p["weight"], p.get("bias")), shape, bias=bias)

    def test_bias_apart(self):
        self.check(lambda **k: te.Linear(24, 40, **k), lambda p, x: (linear(x, p["weight"]), p["bias"]), (6, 24), return_bias=True)

    def test_bias_apart_without_bias(self):
        y, bias = te.Linear(24, 40, bias=False, return_bias=True, device="cpu")(randn(2, 24))
        self.assertEqual((y.shape, bias), ((2, 40), None))

    def test_parts(self):
        def wanted(p, x):
            return linear(x, torch.cat([p["a_weight"], p["b_weight"], p["c_weight"]]), torch.cat([p["a_bias"], p["b_bias"], p["c_bias"]]))
        for split in (("a", "b_", "c"), {"a": 8, "b": 12, "c_": 4}):
            self.check(lambda **k: te.Linear(16, 24, **k), wanted, (4, 16), parameters_split=split)

    def test_inputs_that_are_not_contiguous(self):
        self.check(lambda **k: te.Linear(24, 8, **k), lambda p, x: linear(x.transpose(0, 1), p["weight"], p["bias"]), (3, 4, 24),
                   call=lambda m, x: m(x.transpose(0, 1)))

    def test_views_that_are_to_be_negated(self):
        """PyTorch marks a negated view by a flag and leaves the memory unchanged; te-fl must apply the negation."""
        layer, x, g = te.Linear(24, 8, device="cpu"), randn(4, 24), randn(4, 8, seed=3)
        for view in (lambda t: -t, torch._neg_view):
            leaf = x.clone().requires_grad_()
            layer(view(leaf)).backward(view(g))
            with self.subTest(view):
                torch.testing.assert_close(layer(view(x)), linear(-x, layer.weight, layer.bias).float())
                torch.testing.assert_close(leaf.grad, g @ layer.weight.detach(), check_layout=False)

    def test_no_rows(self):
        for device, dtype in EVERYWHERE:
            module = te.Linear(8, 4, device=device, params_dtype=dtype)
            x = torch.zeros(0, 8, device=device, dtype=dtype, requires_grad=True)
            y = module(x)
            y.sum().backward()
            self.assertEqual((y.shape, x.grad.shape), ((0, 4), (0, 8)))
            self.assertEqual(module.weight.grad.abs().max().item(), 0)

    def test_half_precision(self):
        self.check(lambda **k: te.Linear(24, 8, **k), lambda p, x: linear(x, p["weight"], p["bias"]), (4, 24), tolerance=5e-3,
                   where=[(d, torch.float16) for d in DEVICES])


class NormTest(Modules):
    def test_over_arguments(self):
        for kind in ("LayerNorm", "RMSNorm"):
            for zero_centered in (False, True):
                for shape, dims in ((32, 1), ((4, 8), 2)):
                    self.check(lambda **k: getattr(te, kind)(shape, eps=1e-3, **k),
                               lambda p, x: oracle.norm(x, p, "", kind, 1e-3, zero_centered, dims),
                               (3, 5, 32) if dims == 1 else (3, 4, 8), zero_centered_gamma=zero_centered)

    def test_its_older_names(self):
        a = te.LayerNorm(hidden_size=16, device="cpu", dtype=BF16)
        self.assertEqual((a.weight.shape, a.weight.dtype), ((16,), BF16))
        self.assertEqual(a.weight.min().item(), 1)
        self.assertEqual(te.RMSNorm(16, zero_centered_gamma=True, device="cpu").weight.max().item(), 0)


class LayerNormLinearTest(Modules):
    def test_over_arguments(self):
        for kind in ("LayerNorm", "RMSNorm"):
            for zero_centered in (False, True):
                for bias in (True, False):
                    self.check(lambda **k: te.LayerNormLinear(32, 24, normalization=kind, eps=1e-3, **k),
                               lambda p, x: linear(oracle.norm(x, p, "layer_norm_", kind, 1e-3, zero_centered), p["weight"], p.get("bias")),
                               (2, 3, 32), zero_centered_gamma=zero_centered, bias=bias)

    def test_what_it_returns(self):
        def wanted(p, x):
            h = oracle.norm(x, p, "layer_norm_")
            return linear(h, p["weight"]), p["bias"], h
        self.check(lambda **k: te.LayerNormLinear(32, 24, **k), wanted, (6, 32), return_bias=True, return_layernorm_output=True)

    def test_normalised_input_alone(self):
        def wanted(p, x):
            h = oracle.norm(x, p, "layer_norm_", "RMSNorm")
            return linear(h, p["weight"], p["bias"]), h
        self.check(lambda **k: te.LayerNormLinear(32, 24, normalization="RMSNorm", **k), wanted, (6, 32), return_layernorm_output=True)

    def test_parts(self):
        def wanted(p, x):
            h = oracle.norm(x, p, "layer_norm_")
            return linear(h, torch.cat([p["a_weight"], p["b_weight"]]), torch.cat([p["a_bias"], p["b_bias"]]))
        self.check(lambda **k: te.LayerNormLinear(32, 24, **k), wanted, (6, 32), parameters_split={"a": 16, "b": 8})


class LayerNormMLPTest(Modules):
    def test_activations(self):
        for name in ACTIVATIONS:
            self.check(lambda **k: te.LayerNormMLP(32, 48, **k),
                       lambda p, x: with_bias(*oracle.mlp(p, x, activation=name)[:2]), (5, 32), activation=name)

    def test_limit_and_alpha(self):
        self.check(lambda **k: te.LayerNormMLP(32, 48, activation="clamped_swiglu", **k),
                   lambda p, x: with_bias(*oracle.mlp(p, x, activation="clamped_swiglu", limit=0.5, alpha=1.1)[:2]), (5, 32),
                   activation_params={"limit": 0.5, "alpha": 1.1})

    def test_over_arguments(self):
        for kind in ("LayerNorm", "RMSNorm"):
            for zero_centered in (False, True):
                for bias in (True, False):
                    def wanted(p, x):
                        return with_bias(*oracle.mlp(p, x, activation="swiglu", kind=kind, zero_centered=zero_centered, eps=1e-3)[:2])
                    self.check(lambda **k: te.LayerNormMLP(32, 48, normalization=kind, activation="swiglu", eps=1e-3, **k), wanted,
                               (2, 3, 32), zero_centered_gamma=zero_centered, bias=bias)

    def test_what_it_returns(self):
        self.check(lambda **k: te.LayerNormMLP(32, 48, **k), lambda p, x: oracle.mlp(p, x), (6, 32), return_bias=True,
                   return_layernorm_output=True)
