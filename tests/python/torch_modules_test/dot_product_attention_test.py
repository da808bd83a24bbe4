"""Tests DotProductAttention."""

import math
import unittest
import warnings

import torch

from common import EVERYWHERE, F32, Modules, grown
import torch_oracle as oracle
from torch_oracle import DEVICES, allowed, compare, near, randn
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling
from te_fl.errors import InvalidArgument, Unsupported


class DotProductAttentionTest(Modules):
    """The sizes of heads, groups, batch and lengths all differ, so that confusing two of them fails a test."""

    B, S, K, H, G, D = 2, 10, 14, 6, 2, 16

    def attend(self, wanted=None, fmt="sbhd", keys=None, groups=None, seen=None, bias=None, scale=None, call=None, where=EVERYWHERE,
               values=None, cap=0.0, **arguments):
        """Checks that the module with these constructor arguments, called by call(module, q, k, v), attends to the keys that `seen` marks. values:
        V's head size."""
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

    def test_expanded_inputs(self):
        """Tests expanded views: keys and values of one head for all heads, and queries of one sequence for several sequences."""
        module = te.DotProductAttention(self.H, self.D, qkv_format="bshd", attn_mask_type="no_mask")
        inputs = [randn(1, self.S, self.H, self.D).requires_grad_(), *(randn(self.B, self.K, 1, self.D, seed=s).requires_grad_() for s in (2, 3))]

        def expanded(q, k, v):
            return q.expand(self.B, -1, -1, -1), k.expand(-1, -1, self.H, -1), v.expand(-1, -1, self.H, -1)
        for device in DEVICES:
            compare(self, lambda *x: module(*expanded(*x)), module, lambda p, *x: oracle.attention(*expanded(*x)), [x.detach().to(device).requires_grad_() for x in inputs])

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
        for device in DEVICES:  # with a unit matrix as values the output shows the probabilities
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
        for bottom_right in (None, False, True):  # the mask's name decides the alignment
            self.attend(call=lambda m, *x: m(*x, attn_mask_type="causal", bottom_right_diagonal=bottom_right), keys=self.K,
                        seen=allowed(self.S, self.K, True))
        self.attend(call=lambda m, *x: m(*x, window_size=(2, 1)), seen=allowed(self.S, self.S, window=(2, 1)))

    def test_windows(self):
        self.attend(window_size=(3, 2), seen=allowed(self.S, self.S, window=(3, 2)))
        self.attend(attn_mask_type="causal", window_size=(3, 0), seen=allowed(self.S, self.S, True, window=(3, 0)))
        self.attend(attn_mask_type="causal_bottom_right", window_size=(3, 0), keys=self.K,
                    seen=allowed(self.S, self.K, True, True, window=(3, 0)))

    def test_windows_of_another_length(self):
        """Windows align at the bottom right unless bottom_right_diagonal is False; with padding, at the corner of each sequence."""
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

    def test_the_window_of_a_module_is_a_pair(self):
        """The attribute window_size is always a pair, as in Transformer Engine: without a window the pair follows from the module's mask type. A call
        with another mask type then has no window either."""
        for mask, size, want in (("causal", None, (-1, 0)), ("no_mask", None, (-1, -1)), ("padding_causal", (3, 0), (3, 0)), ("padding", (3, 2), (3, 2))):
            self.assertEqual(te.DotProductAttention(2, 16, attn_mask_type=mask, window_size=size).window_size, want)
        q, k, v = (randn(self.S, self.B, 2, 16, seed=seed) for seed in (1, 2, 3))
        causal, free = (te.DotProductAttention(2, 16, attn_mask_type=mask) for mask in ("causal", "no_mask"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertTrue(torch.equal(causal(q, k, v, attn_mask_type="no_mask"), free(q, k, v)))
            self.assertTrue(torch.equal(free(q, k, v, attn_mask_type="causal"), causal(q, k, v)))

    def test_what_transformer_engine_takes_for_another_window(self):
        """The window (-1, 0) is ignored with a mask that is not causal, as in Transformer Engine; with a causal mask, any right side of a window
        counts as 0."""
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
        """Makes a bool mask [batch, 1, 1, length], true in the padding."""
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
        # ALiBi slopes of six heads: those of four heads, then every other one of eight heads.
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

    def test_largest_scores(self):
        """Tests return_max_logit over masks, windows, layouts, biases, caps and sinks; the output equals that without the option."""
        slopes = 2.0 ** -torch.arange(1.0, 1 + self.H)
        distance = (torch.arange(self.S)[None, :] - torch.arange(self.S)[:, None]).double()
        arbitrary = randn(self.B, 1, self.S, self.S, seed=9) > 0.5
        lengths = torch.tensor([0, 7, 7 + 9], dtype=torch.int32)
        short = torch.arange(self.S) < lengths.diff()[:, None]
        padding = short[:, None, :, None] & short[:, None, None]
        bias = randn(1, self.H, self.S, self.S, seed=5)
        cases = [(dict(), {}, {}), (dict(scale=0.5), {}, dict(softmax_scale=0.5)), (dict(cap=0.5), {}, dict(softcap=0.5)),
                 (dict(seen=allowed(self.S, self.S, True)), {}, dict(attn_mask_type="causal", softmax_type="off-by-one")),
                 (dict(seen=allowed(self.S, self.S, True) & (distance >= -3)), {}, dict(attn_mask_type="causal", window_size=(3, 0))),
                 (dict(seen=~arbitrary), dict(attention_mask=arbitrary), dict(attn_mask_type="arbitrary")),
                 (dict(seen=padding), dict(attention_mask=~short[:, None, None]), dict(attn_mask_type="padding")),
                 (dict(bias=bias.double()), dict(core_attention_bias_type="post_scale_bias", core_attention_bias=bias), {}),
                 (dict(bias=slopes.double()[:, None, None] * distance, seen=allowed(self.S, self.S, True)),
                  dict(core_attention_bias_type="alibi", alibi_slopes=slopes), dict(attn_mask_type="causal"))]
        for device, dtype in EVERYWHERE:
            for groups, fmt in ((6, "bshd"), (2, "sbhd"), (3, "thd")):
                for wanted, call, arguments in cases:
                    if fmt == "thd" and (call or "seen" in wanted and arguments["attn_mask_type"] != "causal"):
                        continue
                    with self.subTest(device=device, dtype=dtype, fmt=fmt, arguments=arguments, call=list(call)):
                        arguments = {"attn_mask_type": "no_mask", **arguments}
                        q, k, v = (randn(self.B, self.S, n, self.D, seed=s, dtype=dtype, device=device) for s, n in ((1, self.H), (2, groups), (3, groups)))
                        want = oracle.compute_scores(q.double(), k.double(), **wanted).amax((0, 2, 3))
                        if fmt == "sbhd":
                            q, k, v = (t.transpose(0, 1).contiguous() for t in (q, k, v))
                        elif fmt == "thd":
                            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
                            call = dict(cu_seqlens_q=torch.arange(0, (self.B + 1) * self.S, self.S, dtype=torch.int32, device=device))
                        call = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
                        made = [te.DotProductAttention(self.H, self.D, num_gqa_groups=groups, qkv_format=fmt, return_max_logit=asked, **arguments)
                                for asked in (True, False)]
                        out, largest = made[0](q, k, v, **call)
                        self.assertTrue(torch.equal(out, made[1](q, k, v, **call)))
                        self.assertEqual((largest.dtype, largest.requires_grad), (dtype, False))
                        near(self, largest, want, 2e-2 if dtype is not F32 else 1e-5, "the largest scores")
        with te.autocast(recipe=DelayedScaling(fp8_dpa=True)), self.assertRaisesRegex(Unsupported, "return_max_logit"):
            te.DotProductAttention(2, 16, return_max_logit=True)(*[randn(16, 2, 2, 16)] * 3)

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
        """Dropout zeroes or doubles probabilities: with a unit matrix as values the output shows them."""
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


class PaddingBetweenSequences(unittest.TestCase):
    def test_it_is_honoured(self):
        """Two sequences of 3 and 2 tokens with a padding token between them give the same results as without the padding token."""
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
