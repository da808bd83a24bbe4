"""Tests MultiheadAttention and TransformerLayer."""

import unittest.mock

import torch

from common import EVERYWHERE, F32, Modules, grown
import torch_oracle as oracle
from torch_oracle import DEVICES, allowed, near, randn, randomise
from torch_oracle import with_bias
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling


def angles(positions, channels, seed=None):
    frequencies = 1e4 ** (-torch.arange(0, channels, 2).float() / channels)
    half = torch.arange(positions).float()[:, None] * frequencies[None]
    return torch.cat([half, half], -1)[:, None, None]


class MultiheadAttentionTest(Modules):
    B, S, K = 2, 6, 9

    def heads(self, seen=None, of=None, call=None, fmt="sbhd", encoder=False, causal=True, where=EVERYWHERE, returned=1, **arguments):
        """Checks MultiheadAttention(32, 4, **arguments); `of` holds the oracle's options."""
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
        """The fused layer and the layer part by part agree bit for bit, except where a sum has another order, or where the fused layer rounds the sum
        with the residual once and the parts round twice."""
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

    def test_hooks_of_all_modules_run(self):
        layer, ran = te.TransformerLayer(32, 64, 4, device="cpu"), []
        layer(randn(6, 2, 32))
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: ran.append(module))
        try:
            layer(randn(6, 2, 32))
        finally:
            handle.remove()
        self.assertIn(layer.layernorm_mlp, ran)

    def test_a_forward_that_a_program_sets_runs(self):
        """A program may replace a module's forward, as Accelerate does for its hooks; a call of the layer then runs the replacement."""
        layer, ran = te.TransformerLayer(32, 64, 4, device="cpu"), []
        layer(randn(6, 2, 32))
        own = layer.self_attention.proj.forward
        layer.self_attention.proj.forward = lambda *args, **kwargs: ran.append(1) or own(*args, **kwargs)
        layer(randn(6, 2, 32))
        self.assertEqual(ran, [1])
        layer, forward = te.TransformerLayer(32, 64, 4, device="cpu"), te.Linear.forward
        layer(randn(6, 2, 32))
        with unittest.mock.patch.object(te.Linear, "forward", lambda *args, **kwargs: ran.append(2) or forward(*args, **kwargs)):
            layer(randn(6, 2, 32))
        self.assertEqual(ran, [1, 2])

    def test_attention_in_another_mode(self):
        x = randn(6, 2, 32)
        for drops in (True, False):
            layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0.5, device="cpu").train(not drops)
            layer.self_attention.core_attention.train(drops)
            self.assertNotEqual(torch.equal(layer(x), layer(x)), drops)

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

    def test_settings_that_a_program_changes_are_used(self):
        x, turned = randn(4, 2, 32), angles(4, 8)
        for path, name, value, options in (("self_attention.layernorm_qkv", "eps", 0.5, dict(eps=0.5)),
                                           ("self_attention.core_attention", "softmax_scale", 2.0, {}),
                                           ("self_attention", "rotary_pos_interleaved", True, dict(rope_interleaved=True)),
                                           ("self_attention", "qkv_format", "bshd", dict(fmt="bshd", seen=allowed(2, 2, True))),
                                           ("", "parallel_attention_mlp", True, dict(parallel=True)),
                                           ("layernorm_mlp", "apply_bias", False, {}), ("self_attention.proj", "apply_bias", False, {})):
            with self.subTest(name=name):
                module = randomise(te.TransformerLayer(32, 48, 4, hidden_dropout=0, attention_dropout=0, device="cpu"))
                before = module(x, rotary_pos_emb=turned)
                setattr(module.get_submodule(path), name, value)
                p = {n: t.double() for n, t in module.named_parameters()}
                if name == "softmax_scale":
                    for n in ("query_weight", "query_bias"):
                        p[f"self_attention.layernorm_qkv.{n}"] *= value * 8 ** 0.5
                if name == "apply_bias":
                    p[f"{path}.{'fc2_bias' if path == 'layernorm_mlp' else 'bias'}"] *= 0
                got = module(x, rotary_pos_emb=turned)
                near(self, got, oracle.transformer(p, x.double(), **{"seen": allowed(4, 4, True), "angles": turned.double(), **options}), 1e-5, "output")
                self.assertGreater((got - before).abs().max().item(), 1e-3)

    def test_drop_path(self):
        module = te.TransformerLayer(32, 48, 4, drop_path_rate=0.5, hidden_dropout=0, attention_dropout=0, device="cpu",
                                     attn_input_format="bshd")
        x = randn(1, 4, 32)
        torch.manual_seed(0)
        self.assertTrue(any(torch.equal(module(x), x) for _ in range(40)))
        module.eval()
        self.assertFalse(torch.equal(module(x), x))
