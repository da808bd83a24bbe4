"""te_fl.pytorch's modules against plain PyTorch in FP64, over their arguments; FP8 against operands quantised by NumPy."""

import math
import tempfile
import os
import sys
import unittest
from unittest import mock

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch_oracle as oracle  # noqa: E402
from torch_oracle import ACTIVATIONS, DEVICES, PerBlock, PerTensor, allowed, compare, linear, near, randn, randomise  # noqa: E402
from torch_oracle import with_bias  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.errors import InvalidArgument, Unsupported  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
EVERYWHERE = [(device, dtype) for device in DEVICES for dtype in (F32, BF16)]


def grown(*shape, device, dtype, seed=1):
    return randn(*shape, seed=seed, dtype=dtype, device=device).requires_grad_()


class Modules(unittest.TestCase):
    def check(self, make, wanted, *shapes, call=None, where=EVERYWHERE, tolerance=None, **arguments):
        """make(device, params_dtype) -> module, whose results for inputs of these shapes are those of wanted(parameters, *inputs)."""
        for device, dtype in where:
            with self.subTest(device=device, dtype=dtype, **arguments):
                module = randomise(make(device=device, params_dtype=dtype, **arguments))
                inputs = [grown(*s, device=device, dtype=dtype, seed=i + 1) for i, s in enumerate(shapes)]
                served = module if call is None else (lambda *x: call(module, *x))
                for got in compare(self, served, module, wanted, inputs, tolerance):
                    self.assertEqual((got.dtype, got.device.type), (dtype, device))


class Names(unittest.TestCase):
    def test_a_misspelt_keyword_names_the_nearest(self):
        one = [torch.nn.Parameter(torch.zeros(2))]
        for make, near in ((lambda: te.Linear(8, 8, biass=False), "bias"), (lambda: te.LayerNormLinear(8, 8, epss=1), "eps"),
                           (lambda: te.LayerNorm(8, sm_margn=0), "sm_margin"), (lambda: te.RMSNorm(8, zero_centred_gamma=True), "zero_centered_gamma"),
                           (lambda: te.LayerNormMLP(8, 8, activatoin="gelu"), "activation"),
                           (lambda: te.DotProductAttention(2, 8, atention_dropout=0.0), "attention_dropout"),
                           (lambda: te.MultiheadAttention(8, 2, atention_dropout=0.0), "attention_dropout"),
                           (lambda: te.TransformerLayer(8, 8, 2, hiden_dropout=0.0), "hidden_dropout"),
                           (lambda: te.optimizers.FusedAdam(one, weigth_decay=1), "weight_decay"),
                           (lambda: te.autocast(enabeld=True), "enabled"), (lambda: te.fp8_autocast(fp8_recpie=None), "fp8_recipe"),
                           (lambda: te.quantized_model_init(recpie=None).__enter__(), "recipe"), (lambda: te.fp8_model_init(enable=True), "enabled")):
            with self.assertRaisesRegex(TypeError, rf"\(\) has no argument '\w+'; did you mean '{near}'\?"):
                make()

        class Derived(te.Linear):
            def __init__(self, **options):
                super().__init__(8, 8, device="cpu", **options)
        self.assertFalse(Derived(bias=False).use_bias)
        with self.assertRaisesRegex(TypeError, r"Derived\(\) has no argument 'biass'"):
            Derived(biass=False)

    def test_a_profiler_shows_layers_under_their_modules_names(self):
        layers = {"te_fl.pytorch.Linear qkv": te.Linear(8, 8, name="qkv", device="cpu"), "te_fl.pytorch.RMSNorm": te.RMSNorm(8, device="cpu"),
                  "te_fl.pytorch.LayerNormMLP": te.LayerNormMLP(8, 8, device="cpu"),
                  "te_fl.pytorch.TransformerLayer": te.TransformerLayer(8, 8, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")}
        x = torch.randn(3, 1, 8, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for layer in layers.values():
                layer(x).sum().backward()
        seen = {event.key: event.count for event in profile.key_averages()}
        self.assertEqual({name: seen.get(name) for name in layers}, dict.fromkeys(layers, 1))

    def test_a_module_that_is_not_served_tells_the_way_out(self):
        with self.assertRaisesRegex(AttributeError, "'GroupedLinear', which Transformer Engine has; use one Linear for each group"):
            te.GroupedLinear
        with self.assertRaisesRegex(AttributeError, "did you mean 'Linear'"):
            te.Linaer


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


class DotProductAttentionTest(Modules):
    """Sizes are such that heads, groups, batch and lengths all differ."""

    B, S, K, H, G, D = 2, 10, 14, 6, 2, 16

    def attend(self, wanted=None, fmt="sbhd", keys=None, groups=None, seen=None, bias=None, scale=None, call=None, where=EVERYWHERE,
               values=None, cap=0.0, **arguments):
        """The module with these constructor arguments, called by call(module, q, k, v), sees what `seen` says. values: v's head size."""
        keys, groups, d = keys or self.S, groups or self.H, self.D
        turn = (lambda t: t.transpose(0, 1)) if fmt == "sbhd" else (lambda t: t)

        def plain(p, q, k, v):
            q, k, v = turn(q), turn(k), turn(v)
            return turn(oracle.attention(q, k, v, seen, bias, scale, sink=p.get("softmax_offset"), cap=cap))

        def make(device, params_dtype):
            arguments.setdefault("attn_mask_type", "no_mask")
            return te.DotProductAttention(self.H, d if values is None else (d, values), num_gqa_groups=groups, qkv_format=fmt,
                                          softmax_scale=scale, **arguments).to(device)

        shapes = [(self.B, self.S, self.H, d), (self.B, keys, groups, d), (self.B, keys, groups, values or d)]
        if fmt == "sbhd":
            shapes = [(s[1], s[0], *s[2:]) for s in shapes]
        self.check(make, wanted or plain, *shapes, call=call, where=where)

    def test_formats_and_groups(self):
        for fmt in ("sbhd", "bshd"):
            for groups in (6, 2, 1):
                with self.subTest(fmt=fmt, groups=groups):
                    self.attend(fmt=fmt, groups=groups, keys=self.K)

    def test_scale(self):
        self.attend(scale=0.5)

    def test_softcap(self):
        for cap in (30.0, 0.5):
            for fmt in ("sbhd", "bshd"):
                with self.subTest(cap=cap, fmt=fmt):
                    self.attend(fmt=fmt, softcap=cap, cap=cap, groups=2, attn_mask_type="causal", seen=allowed(self.S, self.S, True))
        self.attend(softcap=0.5, cap=0.5, scale=2.0, softmax_type="learnable", keys=self.K)
        self.attend(call=lambda m, *x: m(*x, softcap=0.5), cap=0.5)
        self.attend(softcap=0.5, call=lambda m, *x: m(*x, softcap=0.0))
        self.attend(softcap=0.5, call=lambda m, *x: m(*x, softcap=0.25), cap=0.25)

    def test_softcap_is_before_the_bias(self):
        bias = randn(1, self.H, self.S, self.S, seed=5)
        self.attend(softcap=0.5, cap=0.5, bias=bias, where=[(d, F32) for d in DEVICES],
                    call=lambda m, *x: m(*x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias.to(x[0])))
        slopes = 2.0 ** -torch.arange(1.0, 1 + self.H)
        distance = torch.arange(self.S)[None, :] - torch.arange(self.S)[:, None]
        self.attend(softcap=0.5, cap=0.5, bias=(slopes[:, None, None] * distance).double()[None], attn_mask_type="causal",
                    seen=allowed(self.S, self.S, True), where=[(d, F32) for d in DEVICES],
                    call=lambda m, *x: m(*x, core_attention_bias_type="alibi", alibi_slopes=slopes.to(x[0].device)))

    def test_softcap_and_the_gradient_of_a_bias(self):
        for device in DEVICES:
            module = te.DotProductAttention(self.H, self.D, attn_mask_type="no_mask", qkv_format="bshd", softcap=0.5).to(device)
            operands = [randn(2, self.S, self.H, self.D, seed=s, device=device) for s in (1, 2, 3)] + [
                randn(1, self.H, self.S, self.S, seed=4, device=device)]
            own = [t.clone().requires_grad_() for t in operands]
            y = module(*own[:3], core_attention_bias_type="post_scale_bias", core_attention_bias=own[3])
            y.square().sum().backward()
            exact = [t.double().requires_grad_() for t in operands]
            want = oracle.attention(*exact[:3], bias=exact[3], cap=0.5)
            want.square().sum().backward()
            near(self, y, want, 1e-5, "output")
            for name, one, other in zip(("q", "k", "v", "bias"), own, exact, strict=True):
                near(self, one.grad, other.grad, 1e-5, f"gradient of {name}")

    def test_softcap_that_is_none(self):
        for value in (-1.0, math.inf, math.nan):
            with self.assertRaisesRegex(ValueError, f"DotProductAttention: softcap is {value}; it must be finite"):
                te.DotProductAttention(self.H, self.D, softcap=value)
            with self.assertRaisesRegex(ValueError, f"DotProductAttention: softcap is {value}; it must be finite"):
                te.DotProductAttention(self.H, self.D)(*[randn(self.S, self.B, self.H, self.D)] * 3, softcap=value)
            with self.assertRaisesRegex(ValueError, f"TransformerLayer: softcap is {value}; it must be finite"):
                te.TransformerLayer(32, 32, 4)(randn(self.S, self.B, 32), softcap=value)

    def test_values_of_another_size(self):
        for values in (8, 32):
            for fmt in ("sbhd", "bshd"):
                with self.subTest(values=values, fmt=fmt):
                    self.attend(values=values, fmt=fmt, keys=self.K, groups=self.G)
                    self.attend(values=values, fmt=fmt, attn_mask_type="causal", window_size=(3, 0), softmax_type="learnable",
                                seen=allowed(self.S, self.S, True, window=(3, 0)), where=[(d, F32) for d in DEVICES])
        with self.assertRaisesRegex(ValueError, r"kv_channels is \(16, 8, 8\); it is the head size, or a pair"):
            te.DotProductAttention(6, (16, 8, 8))
        q = randn(self.S, self.B, self.H, self.D)
        with self.assertRaisesRegex(InvalidArgument, r"v is .*; it must be .*6, 8\]"):
            te.DotProductAttention(self.H, (self.D, 8))(q, q, q)

    def test_values_of_another_size_with_a_mask_and_dropout(self):
        mask = self.padding((7, 10), self.S)
        self.attend(values=24, attn_mask_type="padding_causal", seen=~mask & ~mask.transpose(2, 3) & allowed(self.S, self.S, True), fmt="bshd",
                    call=lambda m, *x: m(*x, attention_mask=mask.to(x[0].device)))
        for device in DEVICES:  # the unit matrix shows the probabilities
            module = te.DotProductAttention(1, (8, 16), attention_dropout=0.5, attn_mask_type="no_mask", qkv_format="bshd").to(device)
            q = torch.zeros(64, 16, 1, 8, device=device)
            v = torch.eye(16, device=device).view(1, 16, 1, 16).expand(64, -1, -1, -1).contiguous().requires_grad_()
            y = module(q, q, v)
            self.assertAlmostEqual((y > 0).float().mean().item(), 0.5, delta=0.02)
            y.sum().backward()
            near(self, v.grad, (y.detach().sum(1)[:, :, None, None]).expand_as(v), 1e-5, "gradient of v")

    def test_causal(self):
        self.attend(attn_mask_type="causal", seen=allowed(self.S, self.S, True), groups=2)
        self.attend(attn_mask_type="causal", seen=allowed(self.S, self.K, True), keys=self.K)
        self.attend(attn_mask_type="causal_bottom_right", seen=allowed(self.S, self.K, True, True), keys=self.K)

    def test_mask_by_call(self):
        for bottom_right in (None, False, True):  # the mask's name decides
            self.attend(call=lambda m, *x: m(*x, attn_mask_type="causal", bottom_right_diagonal=bottom_right), keys=self.K,
                        seen=allowed(self.S, self.K, True))
        self.attend(call=lambda m, *x: m(*x, window_size=(2, 1)), seen=allowed(self.S, self.S, window=(2, 1)))

    def test_windows(self):
        self.attend(window_size=(3, 2), seen=allowed(self.S, self.S, window=(3, 2)))
        self.attend(attn_mask_type="causal", window_size=(3, 0), seen=allowed(self.S, self.S, True, window=(3, 0)))
        self.attend(attn_mask_type="causal_bottom_right", window_size=(3, 0), keys=self.K,
                    seen=allowed(self.S, self.K, True, True, window=(3, 0)))

    def test_windows_of_another_length(self):
        """They end in the corner at the bottom right unless bottom_right_diagonal is False; with padding, in that of each sequence."""
        of_q, of_k = self.padding((7, 10), self.S), self.padding((14, 5), self.K)
        arbitrary = randn(self.B, 1, self.S, self.K, seed=5) > 0.5
        behind = torch.arange(self.K) - torch.arange(self.S)[:, None]
        each = torch.tensor([14 - 7, 5 - 10])[:, None, None, None]
        where = [(d, F32) for d in DEVICES]
        for bottom_right in (None, True, False):
            seen = allowed(self.S, self.K, False, bottom_right is not False, (2, 1))
            by_sequence = behind - (0 if bottom_right is False else each)
            for mask, operands, wanted in (("no_mask", None, seen), ("arbitrary", arbitrary, seen & ~arbitrary),
                                        ("padding", (of_q, of_k), ~of_k & ~of_q.transpose(2, 3) & (by_sequence >= -2) & (by_sequence <= 1))):
                def call(m, *x):
                    on = [t.to(x[0].device) for t in (operands if isinstance(operands, tuple) else (operands,))] if operands is not None else [None]
                    return m(*x, attention_mask=on[0] if len(on) == 1 else tuple(on), window_size=(2, 1))
                with self.subTest(mask=mask, bottom_right=bottom_right):
                    self.attend(attn_mask_type=mask, bottom_right_diagonal=bottom_right, keys=self.K, seen=wanted, call=call, where=where)

    def test_padding_of_one_mask_with_a_window(self):
        mask = self.padding((7, 10), self.S)
        self.attend(attn_mask_type="padding", window_size=(2, 1), where=[(d, F32) for d in DEVICES],
                    seen=~mask & ~mask.transpose(2, 3) & allowed(self.S, self.S, window=(2, 1)),
                    call=lambda m, *x: m(*x, attention_mask=(mask.to(x[0].device), mask.clone().to(x[0].device))))

    def test_what_transformer_engine_takes_for_another_window(self):
        """(-1, 0) is none with a mask that is not causal, and a causal mask has no keys to the right of its own."""
        where = [(d, F32) for d in DEVICES]
        with self.assertWarnsRegex(UserWarning, r"\(-1, 0\) with mask 'no_mask'"):
            self.attend(window_size=(-1, 0), where=where)
        with self.assertWarnsRegex(UserWarning, r"\(3, 0\) is taken"):
            self.attend(attn_mask_type="causal", window_size=(3, 2), seen=allowed(self.S, self.S, True, window=(3, 0)), where=where)

    def test_a_mask_beside_the_causal_one(self):
        mask = randn(self.B, 1, self.S, self.K, seed=5) > 0.5
        mask[..., 0] = False
        where = [(d, F32) for d in DEVICES]
        for name in ("no_mask", "causal", "causal_bottom_right"):
            seen = allowed(self.S, self.K, "causal" in name, name != "causal", (4, 0))
            for operands in (mask, ~seen[None, None]):
                with self.subTest(mask=name):
                    self.attend(attn_mask_type=name, window_size=(4, 0), keys=self.K, seen=seen & ~operands,
                                call=lambda m, *x: m(*x, attention_mask=operands.to(x[0].device)), where=where)

    def padding(self, lengths, length):
        """bool [batch, 1, 1, length], true in the padding."""
        return torch.arange(length)[None, None, None] >= torch.tensor(lengths)[:, None, None, None]

    def test_padding(self):
        mask = self.padding((7, 10), self.S)
        rows = ~mask.transpose(2, 3)
        for name, more in (("padding", True), ("padding_causal", allowed(self.S, self.S, True))):
            self.attend(attn_mask_type=name, seen=~mask & rows & more,
                        call=lambda m, *x: m(*x, attention_mask=mask.to(x[0].device)), fmt="bshd")

    def test_padding_by_lengths(self):
        mask, cumulative = self.padding((7, 9), self.S), torch.tensor([0, 7, 16], dtype=torch.int32)
        def call(m, *x):
            lengths = cumulative.to(x[0].device)
            return m(*x, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=self.S, max_seqlen_kv=self.S)
        self.attend(attn_mask_type="padding", seen=~mask & ~mask.transpose(2, 3), call=call)

    def test_padding_of_another_input(self):
        of_q, of_k = self.padding((7, 10), self.S), self.padding((14, 5), self.K)
        self.attend(attn_mask_type="padding", keys=self.K, seen=~of_k & ~of_q.transpose(2, 3), groups=2,
                    call=lambda m, *x: m(*x, attention_mask=(of_q.to(x[0].device), of_k.to(x[0].device))))

    def test_arbitrary(self):
        for shape in ((self.B, 1, self.S, self.K), (1, self.H, self.S, self.K), (1, 1, self.S, self.K)):
            mask = randn(*shape, seed=5) > 0.3
            mask[..., 0] = False
            self.attend(attn_mask_type="arbitrary", keys=self.K, seen=~mask, call=lambda m, *x: m(*x, attention_mask=mask.to(x[0].device)))

    def test_bias(self):
        for device, dtype in EVERYWHERE:
            with self.subTest(device=device, dtype=dtype):
                module = te.DotProductAttention(self.H, self.D, attn_mask_type="causal", qkv_format="bshd").to(device)
                q, k, v = (grown(self.B, self.S, self.H, self.D, device=device, dtype=dtype, seed=i) for i in range(3))
                bias = grown(1, self.H, self.S, self.S, device=device, dtype=dtype, seed=4)
                for kind, factor in (("post_scale_bias", 1), ("pre_scale_bias", self.D ** -0.5)):
                    compare(self, lambda q, k, v, b: module(q, k, v, core_attention_bias_type=kind, core_attention_bias=b), module,
                            lambda p, q, k, v, b: oracle.attention(q, k, v, allowed(self.S, self.S, True), b * factor), [q, k, v, bias])

    def test_alibi(self):
        # Six heads: those of four, then every other one of eight.
        slopes = torch.tensor([2.0 ** -2, 2.0 ** -4, 2.0 ** -6, 2.0 ** -8, 2.0 ** -1, 2.0 ** -3], dtype=torch.float64)
        distance = torch.arange(self.S)[None] - torch.arange(self.S)[:, None]
        where = [(device, dtype) for device, dtype in EVERYWHERE if device == "cpu"]
        self.attend(attn_mask_type="causal", seen=allowed(self.S, self.S, True), bias=slopes[:, None, None] * distance, where=where,
                    call=lambda m, *x: m(*x, core_attention_bias_type="alibi"))
        operands = torch.linspace(0.1, 0.9, self.H)
        self.attend(attn_mask_type="causal", seen=allowed(self.S, self.S, True), bias=operands.double()[:, None, None] * distance, where=where,
                    call=lambda m, *x: m(*x, core_attention_bias_type="alibi", alibi_slopes=operands.to(x[0].device)))

    def test_alibi_counts_from_the_masks_diagonal(self):
        slopes = torch.linspace(0.1, 0.9, self.H)
        distance = torch.arange(self.K) - torch.arange(self.S)[:, None]
        where = [(d, F32) for d in DEVICES]
        for name, softmax in (("causal", "off-by-one"), ("causal_bottom_right", "off-by-one"), ("causal", "vanilla"), ("no_mask", "vanilla")):
            shift = 0 if name == "causal" else self.K - self.S
            bias = -(distance - shift).abs() * slopes.double()[:, None, None]
            seen = allowed(self.S, self.K, "causal" in name, name != "causal")

            def wanted(p, q, k, v):
                sink = torch.zeros(self.H, dtype=torch.float64, device=q.device) if softmax == "off-by-one" else None
                return oracle.attention(q, k, v, seen, bias, sink=sink)
            with self.subTest(mask=name, softmax=softmax):
                self.attend(wanted, attn_mask_type=name, softmax_type=softmax, keys=self.K, fmt="bshd", where=where,
                            call=lambda m, *x: m(*x, core_attention_bias_type="alibi", alibi_slopes=slopes.to(x[0].device)))

    def test_arguments_that_say_nothing_are_refused(self):
        module = te.DotProductAttention(self.H, self.D)
        q = randn(self.S, self.B, self.H, self.D, device=DEVICES[-1])
        for message, operands in (("alibi_slopes are given", {"alibi_slopes": torch.ones(self.H)}),
                               ("core_attention_bias is given", {"core_attention_bias": torch.zeros(1, 1, self.S, self.S)}),
                               ("attention_mask is torch.float32", {"attention_mask": torch.zeros(1, 1, self.S, self.S)})):
            with self.assertRaisesRegex(ValueError, message):
                module(q, q, q, **operands)

    def test_sinks(self):
        def off_by_one(p, q, k, v):
            return oracle.attention(q, k, v, sink=torch.zeros(self.H, dtype=torch.float64, device=q.device))
        self.attend(off_by_one, fmt="bshd", softmax_type="off-by-one")
        self.attend(fmt="bshd", softmax_type="learnable", where=[(d, F32) for d in DEVICES])

    def test_packed(self):
        lengths, cumulative = (5, 1, 8), torch.tensor([0, 5, 6, 14], dtype=torch.int32)
        for name, causal, values in (("padding", False, self.D), ("padding_causal", True, self.D), ("padding_causal", True, 24)):
            for device, dtype in EVERYWHERE:
                with self.subTest(mask=name, values=values, device=device, dtype=dtype):
                    module = te.DotProductAttention(self.H, (self.D, values), num_gqa_groups=self.G, qkv_format="thd",
                                                    attn_mask_type=name).to(device)
                    sizes = ((self.H, self.D), (self.G, self.D), (self.G, values))
                    inputs = [grown(14, n, d, device=device, dtype=dtype, seed=i) for i, (n, d) in enumerate(sizes)]
                    at = cumulative.to(device)

                    def wanted(p, q, k, v):
                        parts = [t.split(lengths) for t in (q, k, v)]
                        return torch.cat([oracle.attention(a[None], b[None], c[None], allowed(len(a), len(a), causal))[0]
                                          for a, b, c in zip(*parts)])
                    compare(self, lambda *x: module(*x, cu_seqlens_q=at, cu_seqlens_kv=at, max_seqlen_q=8, max_seqlen_kv=8), module, wanted,
                            inputs)

    def test_views_of_one_product(self):
        def wanted(p, x):
            q, k, v = x.unflatten(-1, (self.H, 3, self.D)).unbind(-2)
            return oracle.attention(q, k, v, allowed(self.S, self.S, True))
        def call(m, x):
            return m(*x.unflatten(-1, (self.H, 3, self.D)).unbind(-2))
        self.check(lambda device, params_dtype: te.DotProductAttention(self.H, self.D, qkv_format="bshd").to(device), wanted,
                   (self.B, self.S, self.H * 3 * self.D), call=call)

    def test_dropout(self):
        """Probabilities are dropped or doubled: with values that are the unit matrix the output shows them."""
        for device in DEVICES:
            module = te.DotProductAttention(1, 16, attention_dropout=0.5, attn_mask_type="no_mask", qkv_format="bshd").to(device)
            q = torch.zeros(64, 16, 1, 16, device=device)
            v = torch.eye(16, device=device).view(1, 16, 1, 16).expand(64, -1, -1, -1).contiguous()
            torch.manual_seed(3)
            y = module(q, q, v)
            kept = (y > 0).float().mean().item()
            self.assertAlmostEqual(kept, 0.5, delta=0.02)
            self.assertTrue(((y == 0) | ((y - 2 / 16).abs() < 1e-6)).all())
            self.assertFalse(torch.equal(y, module(q, q, v)))
            torch.manual_seed(3)
            self.assertTrue(torch.equal(y, module(q, q, v)))
            module.eval()
            self.assertLess((module(q, q, v) - 1 / 16).abs().max().item(), 1e-6)


def angles(positions, channels, seed=None):
    frequencies = 1e4 ** (-torch.arange(0, channels, 2).float() / channels)
    half = torch.arange(positions).float()[:, None] * frequencies[None]
    return torch.cat([half, half], -1)[:, None, None]


class MultiheadAttentionTest(Modules):
    B, S, K = 2, 6, 9

    def heads(self, seen=None, of=None, call=None, fmt="sbhd", encoder=False, causal=True, where=EVERYWHERE, returned=1, **arguments):
        """MultiheadAttention(32, 4, **arguments), the oracle's options in `of`."""
        arguments.setdefault("attn_mask_type", "causal" if causal and not encoder else "no_mask")
        fused = arguments.get("fuse_qkv_params", False)
        options = dict(groups=arguments.get("num_gqa_groups"), interleaved=fused and arguments.get("qkv_weight_interleaved", True), fmt=fmt,
                       norms=arguments.get("normalization", "LayerNorm"), input_layernorm=arguments.get("input_layernorm", False),
                       zero_centered=arguments.get("zero_centered_gamma", False), qk_norm=arguments.get("qk_norm_type"),
                       norm_first=arguments.get("qk_norm_before_rope", False), **(of or {}))
        if seen is None and arguments["attn_mask_type"] == "causal":
            seen = allowed(self.S, self.S, True)

        def wanted(p, x, e=None):
            y, b, h = oracle.multihead(p, x, seen=seen, encoder=e, **options)
            out = (y, b) if arguments.get("return_bias") else (with_bias(y, b),)
            return (*out, h) if arguments.get("return_layernorm_output") else out

        extra = [(self.K, self.B, 32) if fmt == "sbhd" else (self.B, self.K, 32)] if encoder else []
        if call is None and encoder:
            call = lambda m, x, e: m(x, encoder_output=e)  # noqa: E731
        self.check(lambda **k: te.MultiheadAttention(32, 4, attention_dropout=0.0, qkv_format=fmt,
                                                     attention_type="cross" if encoder else "self",
                                                     **arguments, **k),
                   wanted, (self.S, self.B, 32) if fmt == "sbhd" else (self.B, self.S, 32), *extra, call=call, where=where)

    def test_projections(self):
        for fused, interleaved in ((False, True), (True, True), (True, False)):
            for groups in (None, 2):
                for bias in (True, False):
                    with self.subTest(fused=fused, interleaved=interleaved, groups=groups, bias=bias):
                        self.heads(fuse_qkv_params=fused, qkv_weight_interleaved=interleaved, num_gqa_groups=groups, bias=bias)

    def test_norm_and_format(self):
        for kind in ("LayerNorm", "RMSNorm"):
            for fmt in ("sbhd", "bshd"):
                with self.subTest(kind=kind, fmt=fmt):
                    self.heads(fmt=fmt, input_layernorm=True, normalization=kind, zero_centered_gamma=True, fuse_qkv_params=True)

    def test_what_it_returns(self):
        self.heads(input_layernorm=True, return_bias=True, return_layernorm_output=True)

    def test_rope(self):
        for interleaved in (False, True):
            for channels in (8, 4):
                with self.subTest(interleaved=interleaved, channels=channels):
                    f = angles(12, channels)
                    if interleaved:
                        f = f[..., :channels // 2].repeat_interleave(2, -1)
                    self.heads(of=dict(angles=f, rope_interleaved=interleaved), rotary_pos_interleaved=interleaved, num_gqa_groups=2,
                               call=lambda m, x: m(x, rotary_pos_emb=f.to(x.device)))

    def test_rope_of_a_pair(self):
        f, g = angles(12, 8), 0.5 * angles(12, 8)
        self.heads(of=dict(angles=(f, g)), fmt="bshd", call=lambda m, x: m(x, rotary_pos_emb=(f.to(x.device), g.to(x.device))))

    def test_norms_of_queries_and_keys(self):
        f = angles(6, 8)
        for kind in ("L2Normalization", "RMSNorm", "LayerNorm"):
            for first in (False, True):
                with self.subTest(kind=kind, first=first):
                    self.heads(of=dict(angles=f), qk_norm_type=kind, qk_norm_before_rope=first, num_gqa_groups=2,
                               call=lambda m, x: m(x, rotary_pos_emb=f.to(x.device)))

    def test_cross_attention(self):
        for fused, interleaved in ((False, True), (True, True), (True, False)):
            for layernorm in (False, True):
                with self.subTest(fused=fused, interleaved=interleaved, layernorm=layernorm):
                    self.heads(encoder=True, fuse_qkv_params=fused, qkv_weight_interleaved=interleaved, input_layernorm=layernorm)

    def test_cross_attention_in_groups(self):
        self.heads(encoder=True, num_gqa_groups=2, fmt="bshd")

    def test_softcap(self):
        self.heads(of=dict(cap=0.125), softcap=0.125, num_gqa_groups=2)
        self.heads(of=dict(cap=0.125), encoder=True, call=lambda m, x, e: m(x, encoder_output=e, softcap=0.125))

    def test_masks_and_windows(self):
        self.heads(attn_mask_type="causal", window_size=(2, 0), seen=allowed(self.S, self.S, True, window=(2, 0)))
        mask = torch.zeros(self.B, 1, 1, self.S, dtype=torch.bool)
        mask[0, ..., 4:] = True
        self.heads(attn_mask_type="padding", seen=~mask & ~mask.transpose(2, 3), call=lambda m, x: m(x, attention_mask=mask.to(x.device)))


class TransformerLayerTest(Modules):
    B, S, K = 2, 6, 9

    def layer(self, of=None, call=None, whole=True, fmt="sbhd", decoder=False, where=EVERYWHERE, recipe=None, tolerance=None, **arguments):
        fused = arguments.get("fuse_qkv_params", False)
        options = dict(groups=arguments.get("num_gqa_groups"), interleaved=fused and arguments.get("qkv_weight_interleaved", True), fmt=fmt,
                       norms=arguments.get("normalization", "LayerNorm"), zero_centered=arguments.get("zero_centered_gamma", False),
                       qk_norm=arguments.get("qk_norm_type"), activation=arguments.get("activation", "gelu"),
                       output_layernorm=arguments.get("output_layernorm", False), parallel=arguments.get("parallel_attention_mlp", False),
                       post_residual=arguments.get("apply_residual_connection_post_layernorm", False), seen=allowed(self.S, self.S, True))
        options.update(of or {})
        def wanted(p, x, e=None):
            return oracle.transformer(p, x, encoder=e, **options)
        def make(**k):
            made = te.TransformerLayer(32, 48, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format=fmt,
                                       layer_type="decoder" if decoder else "encoder", **arguments, **k)
            if not whole:
                made._fused = None
            return made
        extra = [(self.K, self.B, 32) if fmt == "sbhd" else (self.B, self.K, 32)] if decoder else []
        if call is None and decoder:
            call = lambda m, x, e: m(x, encoder_output=e)  # noqa: E731
        self.check(make, wanted, (self.S, self.B, 32) if fmt == "sbhd" else (self.B, self.S, 32), *extra, call=call, where=where,
                   tolerance=tolerance)

    VARIANTS = (dict(), dict(fuse_qkv_params=True), dict(fuse_qkv_params=True, qkv_weight_interleaved=False), dict(num_gqa_groups=2),
                dict(bias=False), dict(output_layernorm=True), dict(apply_residual_connection_post_layernorm=True),
                dict(parallel_attention_mlp=True), dict(normalization="RMSNorm", activation="swiglu", zero_centered_gamma=True, bias=False),
                dict(qk_norm_type="RMSNorm", fuse_qkv_params=True, num_gqa_groups=2))

    def test_variants(self):
        for variant in self.VARIANTS:
            with self.subTest(**variant):
                self.layer(**variant)

    def test_variants_part_by_part(self):
        for variant in self.VARIANTS:
            with self.subTest(**variant):
                self.layer(whole=False, where=[(d, F32) for d in DEVICES], **variant)

    def test_batch_first(self):
        self.layer(fmt="bshd")

    def test_decoder(self):
        for variant in (dict(), dict(fuse_qkv_params=True, normalization="RMSNorm"), dict(apply_residual_connection_post_layernorm=True)):
            with self.subTest(**variant):
                self.layer(decoder=True, **variant)

    def test_softcap(self):
        for whole in (True, False):
            self.layer(of=dict(cap=0.125), whole=whole, softcap=0.125)
            self.layer(of=dict(cap=0.125), whole=whole, call=lambda m, x: m(x, softcap=0.125))
            self.layer(whole=whole, softcap=0.125, call=lambda m, x: m(x, softcap=0.0))
        self.layer(of=dict(cap=0.5), decoder=True, softcap=0.5)

    def test_decoder_with_output_layernorm(self):
        self.layer(decoder=True, output_layernorm=True)

    def test_rope(self):
        f = angles(12, 8)
        self.layer(of=dict(angles=f), num_gqa_groups=2, normalization="RMSNorm", call=lambda m, x: m(x, rotary_pos_emb=f.to(x.device)))

    def test_masks(self):
        self.layer(of=dict(seen=None), self_attn_mask_type="no_mask")
        self.layer(of=dict(seen=None), call=lambda m, x: m(x, self_attn_mask_type="no_mask"))
        self.layer(of=dict(seen=allowed(self.S, self.S, True, window=(2, 0))), window_size=(2, 0))
        mask = torch.zeros(self.B, 1, 1, self.S, dtype=torch.bool)
        mask[0, ..., 4:] = True
        self.layer(of=dict(seen=~mask & ~mask.transpose(2, 3)), self_attn_mask_type="padding",
                   call=lambda m, x: m(x, attention_mask=mask.to(x.device)))
        free = (randn(1, 1, self.S, self.S, seed=3) > 0.2) & ~torch.eye(self.S, dtype=torch.bool)
        self.layer(of=dict(seen=~free), self_attn_mask_type="arbitrary", call=lambda m, x: m(x, attention_mask=free.to(x.device)))

    def test_attention_bias(self):
        bias = randn(1, 4, self.S, self.S, seed=6)
        self.layer(of=dict(bias=bias.double()), where=[("cpu", F32)],
                   call=lambda m, x: m(x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias))

    def test_whole_and_its_parts(self):
        """Bit for bit, but where a sum has another order or the whole rounds a residual's sum once and the parts twice."""
        other = "apply_residual_connection_post_layernorm"
        for device, dtype in EVERYWHERE:
            for recipe in (None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()):
                for variant in self.VARIANTS:
                    with self.subTest(device=device, dtype=dtype, recipe=type(recipe).__name__, **variant):
                        results = []
                        for whole in (True, False):
                            torch.manual_seed(5)
                            module = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0.1, device=device,
                                                                   params_dtype=dtype, **variant))
                            if not whole:
                                module._fused = None
                            x = grown(8, 2, 32, device=device, dtype=dtype)
                            torch.manual_seed(6)
                            for _ in range(2):
                                with te.autocast(enabled=recipe is not None, recipe=recipe):
                                    y = module(x)
                                y.backward(randn(8, 2, 32, seed=8, dtype=dtype, device=device))
                            results.append([y, x.grad, *(p.grad for p in module.parameters())])
                        names = ["output", "input", *(n for n, _ in module.named_parameters())]
                        if dtype is F32 and device == "cpu" and not {"parallel_attention_mlp", other} & set(variant):
                            self.assertEqual([n for n, a, b in zip(names, *results) if not torch.equal(a, b)], [])
                            continue
                        least = 0.1 * max(t.abs().max().item() for t in results[1])
                        for name, a, b in zip(names, *results):
                            oracle.near_by_norm(self, a, b, 1e-5 if (dtype, recipe) == (F32, None) else 0.15, name, least)

    def test_hooks_on_parts_run(self):
        for path in ("self_attention", "self_attention.layernorm_qkv", "self_attention.core_attention", "self_attention.proj",
                     "layernorm_mlp"):
            for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
                with self.subTest(path=path, register=register):
                    module = randomise(te.TransformerLayer(32, 48, 4, hidden_dropout=0, attention_dropout=0, device="cpu"))
                    x = grown(4, 2, 32, device="cpu", dtype=F32)
                    want = module(x)
                    ran = []
                    handle = getattr(module.get_submodule(path), register)(lambda *a: ran.append(1))
                    y = module(x)
                    y.sum().backward()
                    self.assertEqual(len(ran), 1)
                    self.assertTrue(torch.equal(y, want))
                    handle.remove()
                    module(x).sum().backward()
                    self.assertEqual(len(ran), 1)

    def test_hooks_of_parameters_run(self):
        module = te.TransformerLayer(32, 48, 4, device="cpu")
        ran = []
        for n, p in module.named_parameters():
            p.register_hook(lambda g, n=n: ran.append(n))
        module(randn(4, 2, 32)).sum().backward()
        self.assertEqual(sorted(ran), sorted(n for n, _ in module.named_parameters()))

    def test_replaced_parts_are_used(self):
        module = randomise(te.TransformerLayer(32, 48, 4, hidden_dropout=0, attention_dropout=0, device="cpu"))
        x = randn(4, 2, 32)
        module(x)

        class Half(torch.nn.Module):
            def forward(self, x, *a, **k):
                return 0.5 * x

        module.layernorm_mlp = Half()
        p = {n: t.double() for n, t in module.named_parameters()}
        y, b, _ = oracle.multihead(p, x.double(), "self_attention.", input_layernorm=True, seen=allowed(4, 4, True))
        near(self, module(x), 1.5 * (x + y + b), 1e-5, "output")

    def test_replaced_parameters_are_used(self):
        module = randomise(te.TransformerLayer(32, 48, 4, hidden_dropout=0, attention_dropout=0, device="cpu"))
        x = randn(4, 2, 32)
        module(x)
        module.layernorm_mlp.fc2_weight = torch.nn.Parameter(randn(32, 48, seed=20))
        p = {n: t.double() for n, t in module.named_parameters()}
        near(self, module(x), oracle.transformer(p, x.double(), seen=allowed(4, 4, True)), 1e-5, "output")

    def test_drop_path(self):
        module = te.TransformerLayer(32, 48, 4, drop_path_rate=0.5, hidden_dropout=0, attention_dropout=0, device="cpu",
                                     attn_input_format="bshd")
        x = randn(1, 4, 32)
        torch.manual_seed(0)
        self.assertTrue(any(torch.equal(module(x), x) for _ in range(40)))
        module.eval()
        self.assertFalse(torch.equal(module(x), x))


# After some steps of the same input each scale is that of the amax which it meets.
SETTLED = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")


class Fp8(Modules):
    """Values and gradients in FP8 are the FP64 computation's whose products have operands quantised by NumPy."""

    # By the 2-norm: where the served computation rounds another way than FP64's, a code of an operand further on may be its neighbour.
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
                for _ in range(steps - 1):  # the amaxes of the steps before give the scales of the last
                    x = [t.detach().clone().requires_grad_() for t in inputs]
                    y = served(*x)
                    y.backward(randn(*y.shape, seed=11, device=device).to(y.dtype))
                compare(self, served, module, wanted, inputs, self.FLIPS[dtype] if flips else self.EXACT[device, dtype],
                        close=oracle.near_by_norm)

    def test_linear(self):
        for recipe, product, steps in ((Float8CurrentScaling(), PerTensor(), 1), (Float8BlockScaling(), PerBlock(), 1),
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
                                       (SETTLED, PerTensor(), 5)):
            self.quantised(lambda **k: te.LayerNormLinear(64, 48, **k),
                           lambda p, x: product(oracle.norm(x, p, "layer_norm_"), p["weight"], p["bias"]), (32, 64), recipe=recipe,
                           steps=steps, flips=True)

    def test_layernorm_mlp(self):
        for recipe, product, steps in ((Float8CurrentScaling(), PerTensor(), 1), (Float8BlockScaling(), PerBlock(), 1),
                                       (SETTLED, PerTensor(), 6)):
            for name in ("gelu", "swiglu", "srelu"):
                self.quantised(lambda **k: te.LayerNormMLP(64, 96, activation=name, **k),
                               lambda p, x: with_bias(*oracle.mlp(p, x, activation=name, product=product)[:2]), (32, 64), recipe=recipe,
                               steps=steps, flips=True)

    def test_transformer_layer(self):
        for recipe, product, steps in ((Float8CurrentScaling(), PerTensor(), 1), (Float8BlockScaling(), PerBlock(), 1),
                                       (SETTLED, PerTensor(), 6)):
            for variant in (dict(), dict(fuse_qkv_params=True)):
                options = dict(interleaved=variant.get("fuse_qkv_params", False), seen=allowed(16, 16, True))
                self.quantised(lambda **k: te.TransformerLayer(64, 96, 4, hidden_dropout=0, attention_dropout=0, **variant, **k),
                               lambda p, x: oracle.transformer(p, x, product=product, **options), (16, 2, 64), recipe=recipe, steps=steps,
                               flips=True)

    def test_a_recipe_differs_from_none(self):
        """The comparisons above could not tell FP8 from none if the oracle's quantisation were too fine."""
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
            for value in (False, True, None):  # a change is noticed
                self.assertTrue(torch.equal(module(x, is_first_microbatch=value), 2 * first))

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


class Arguments(unittest.TestCase):
    """Wrong arguments are refused where they are given, and those that mean nothing on one rank are taken."""

    def test_wrong_values(self):
        for message, make in (("num_attention_heads 3, which does not divide it", lambda: te.MultiheadAttention(100, 3)),
                              ("attn_mask_type is 'casual'", lambda: te.MultiheadAttention(32, 4, attn_mask_type="casual")),
                              ("TransformerLayer: attn_mask_type is 'casual'", lambda: te.TransformerLayer(32, 32, 4, self_attn_mask_type="casual"))):
            with self.assertRaisesRegex(ValueError, message):
                make()
        for module in (te.Linear(8, 8, device="cpu"), te.LayerNorm(8, device="cpu"), te.TransformerLayer(8, 8, 1, device="cpu")):
            with self.assertRaisesRegex(Unsupported, type(module).__name__ + ".*torch.float64"):
                module(torch.zeros(2, 1, 8, dtype=torch.float64))

    def test_dtypes_of_outputs(self):
        """A bias has the output's, and a normalisation's is the weight's."""
        for device in DEVICES:
            x = randn(4, 32, dtype=BF16, device=device).requires_grad_()
            for make in (te.LayerNorm, te.RMSNorm):
                module = randomise(make(32, device=device))
                compare(self, module, module, lambda p, x: oracle.norm(x, p, "", make.__name__), [x])
                self.assertEqual(module(x).dtype, F32)
                with torch.autocast(device, dtype=BF16):
                    self.assertEqual(module(x.float()).dtype, BF16)
            for module in (te.Linear(32, 32, return_bias=True, device=device), te.LayerNormMLP(32, 32, return_bias=True, device=device)):
                with torch.autocast(device, dtype=BF16):
                    self.assertEqual([t.dtype for t in module(x.float())], [BF16, BF16])

    def test_attributes_set_after_a_forward(self):
        x = randn(4, 32)
        for make, name, value in ((lambda **k: te.LayerNorm(32, device="cpu", **k), "eps", 1.0),
                                  (lambda **k: te.LayerNormLinear(32, 32, device="cpu", **k), "eps", 1.0),
                                  (lambda **k: te.LayerNormMLP(32, 32, device="cpu", **k), "activation", "relu")):
            module, other = randomise(make()), randomise(make(**{name: value}))
            before = module(x)
            setattr(module, name, value)
            self.assertTrue(torch.equal(module(x), other(x)))
            self.assertFalse(torch.equal(module(x), before))
        layers = [randomise(te.TransformerLayer(32, 32, 4, device="cpu", hidden_dropout=0, attention_dropout=0, activation=a)) for a in ("gelu", "relu")]
        layers[0](x[:, None])
        layers[0].layernorm_mlp.activation = "relu"
        self.assertTrue(torch.equal(layers[0](x[:, None]), layers[1](x[:, None])))

    def test_a_group_of_one_rank(self):
        import torch.distributed as dist
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                group = dist.group.WORLD
                for make in (lambda **k: te.Linear(32, 32, **k), lambda **k: te.LayerNormMLP(32, 32, **k), lambda **k: te.DotProductAttention(4, 8, **k),
                             lambda **k: te.TransformerLayer(32, 32, 4, **k)):
                    make(tp_group=group, tp_size=1, sequence_parallel=True).set_tensor_parallel_group(group)
                attention = te.DotProductAttention(4, 8, cp_group=group, cp_global_ranks=[0])
                attention.set_context_parallel_group(group, [0], None, "p2p")
                attention.set_context_parallel_group([group, group], [0], None, "a2a+p2p")
            finally:
                dist.destroy_process_group()
        with self.assertRaisesRegex(Unsupported, "tp_group"):
            te.Linear(32, 32, tp_group="a group")
        norm = te.LayerNorm(32, sequence_parallel=True)
        self.assertTrue(norm.weight.sequence_parallel and norm.bias.sequence_parallel)

    def test_no_offload(self):
        context, same = te.get_cpu_offload_context()
        with context:
            self.assertEqual(same(3), 3)
        self.assertIsNone(te.get_cpu_offload_context(manual_synchronization=True)[2])
        with self.assertRaisesRegex(Unsupported, "enabled = True"):
            te.get_cpu_offload_context(enabled=True)


class NothingOfTorchs(unittest.TestCase):
    """With torch's own kernels patched to raise, everything works."""

    NAMES = ([(torch.nn.functional, n) for n in ("linear", "layer_norm", "rms_norm", "scaled_dot_product_attention", "gelu", "silu", "relu",
                                                 "softmax")]
             + [(torch, n) for n in ("matmul", "bmm", "addmm", "mm", "baddbmm", "einsum", "softmax", "layer_norm", "rms_norm")]
             + [(torch.Tensor, n) for n in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "softmax")])

    def test_forward_and_backward(self):
        def raiser(name):
            def called(*a, **k):
                raise AssertionError(f"torch's {name} was called")
            return called

        modules = {
            "Linear": lambda **k: te.Linear(32, 32, **k), "LayerNorm": lambda **k: te.LayerNorm(32, **k),
            "RMSNorm": lambda **k: te.RMSNorm(32, **k),
            "LayerNormLinear": lambda **k: te.LayerNormLinear(32, 32, **k), "LayerNormMLP": lambda **k: te.LayerNormMLP(32, 64, **k),
            "MultiheadAttention": lambda **k: te.MultiheadAttention(32, 4, **k),
            "qk norms": lambda **k: te.MultiheadAttention(32, 4, qk_norm_type="L2Normalization", input_layernorm=True, **k),
            "TransformerLayer": lambda **k: te.TransformerLayer(32, 64, 4, **k),
            "decoder": lambda **k: te.TransformerLayer(32, 64, 4, layer_type="decoder", **k),
            "drop path": lambda **k: te.TransformerLayer(32, 64, 4, drop_path_rate=0.1, **k),
        }
        for device in DEVICES:
            for name, make in modules.items():
                for recipe in (None, Float8CurrentScaling(), DelayedScaling(), Float8BlockScaling()):
                    with self.subTest(device=device, module=name, recipe=type(recipe).__name__):
                        module = make(device=device)
                        x, encoder = grown(8, 2, 32, device=device, dtype=F32), randn(8, 2, 32, device=device)
                        more = {"encoder_output": encoder} if name == "decoder" else {}
                        patches = [mock.patch.object(owner, n, raiser(n)) for owner, n in self.NAMES if hasattr(owner, n)]
                        for patch in patches:
                            patch.start()
                        try:
                            with te.autocast(enabled=recipe is not None, recipe=recipe):
                                y = module(x, **more)
                            y.sum().backward()
                        finally:
                            for patch in patches:
                                patch.stop()
                        self.assertTrue(torch.isfinite(x.grad).all())


class PaddingBetweenSequences(unittest.TestCase):
    def test_it_is_honoured(self):
        """Two sequences of 3 and 2 tokens with a token between them give the same as without it."""
        q, k, v = (randn(6, 4, 8, seed=s) for s in (1, 2, 3))
        lengths, starts = (torch.tensor(n, dtype=torch.int32) for n in ([0, 3, 5], [0, 4, 6]))
        attention = te.DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding_causal")
        operands = dict(cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=3, max_seqlen_kv=3)
        padded = dict(cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
        for between in (None, True):
            with_gap = attention(q, k, v, pad_between_seqs=between, **operands, **padded)
            near(self, with_gap[[0, 1, 2, 4, 5]], attention(*(t[[0, 1, 2, 4, 5]] for t in (q, k, v)), **operands), 1e-6, "with a gap")
        dense = attention(q[:5], k[:5], v[:5], **operands)
        near(self, attention(q[:5], k[:5], v[:5], pad_between_seqs=False, **operands, **padded), dense, 1e-6, "without")
        with self.assertRaisesRegex(ValueError, "pad_between_seqs is True; give cu_seqlens_q_padded"):
            attention(q, k, v, pad_between_seqs=True, **operands)


if __name__ == "__main__":
    unittest.main()
