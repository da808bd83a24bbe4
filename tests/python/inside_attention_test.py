"""Tests attention of NVIDIA's package on te-fl against FP64 sums: DotProductAttention over layouts, masks, biases, windows, sinks and dropout, and
te-fl's answers to the package's backend queries."""

import math
import unittest

import inside_package  # noqa: F401
import torch

import te_fl
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from te_fl.errors import Error, InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import attention as attention_calls
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as dpa
from transformer_engine.pytorch.attention.dot_product_attention.utils import FusedAttentionParams
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import fused_attn


def seen(lengths, total=None):
    """Returns the int32 boundaries of sequences with these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def oracle(q, k, v, *, scale=None, mask=None, bias=None, window=(-1, -1), lens=None, sink=None, bottom_right=False, keep=None, p=0.0):
    """Computes attention, softmax(scale q k^T + bias) v, in FP64 for [B, S, H, D]. lens: (query lengths, key lengths) of the sequences; sink: a logit
    for each head."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    batch, _, rows, columns = scores.shape
    i, j = torch.arange(rows).view(-1, 1), torch.arange(columns).view(1, -1)
    hidden = torch.zeros(batch, rows, columns, dtype=torch.bool)
    for b in range(batch):
        of_q, of_kv = (rows, columns) if lens is None else (lens[0][b], lens[1][b])
        shift = of_kv - of_q if bottom_right else 0
        hidden[b] |= (i >= of_q) | (j >= of_kv)
        if mask == "causal":
            hidden[b] |= j > i + shift
        if window[0] >= 0:
            hidden[b] |= j < i + shift - window[0]
        if window[1] >= 0:
            hidden[b] |= j > i + shift + window[1]
    scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(1, -1, 1, 1).expand(batch, -1, rows, 1)], -1)
    # A row whose keys are all masked yields zeros and has zero gradients.
    blind = hidden.all(-1).view(batch, 1, rows, 1)
    p_ = torch.softmax(scores.masked_fill(blind, 0.0), -1)[..., :columns].masked_fill(blind, 0.0)
    if keep is not None:
        p_ = p_ * keep / (1 - p)
    return torch.einsum("bhij,bjhd->bihd", p_, v)


class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(7)
        dpa._attention_backends["backend_selection_requires_update"] = True

    def near(self, got, want, tolerance=2e-2, what=""):
        self.assertEqual(tuple(got.shape), tuple(want.shape), what)
        self.assertFalse(got.isnan().any().item(), what)
        scale = max(want.double().abs().max().item(), 1e-3)
        error = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
        self.assertLess(error, tolerance * scale, f"{what}: {error} of {scale}")

    def inputs(self, batch, q_len, kv_len, heads, groups, dim, v_dim=None, dtype=torch.bfloat16):
        shapes = ((batch, q_len, heads, dim), (batch, kv_len, groups, dim), (batch, kv_len, groups, v_dim or dim))
        return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def used_backend():
    return "fused" if dpa._attention_backends["use_fused_attention"] else "unfused" if dpa._attention_backends["use_unfused_attention"] else "none"


class DotProductAttention(Case):
    def check(self, q, k, v, want_backend="fused", layout="bshd", tolerance=2e-2, module=None, **options):
        """Compares the module's forward and gradients with the oracle's; q, k, v: [B, S, H, D]. options: `call` holds arguments of the module's call,
        the others are the oracle's."""
        call = dict(options.pop("call", {}))
        settings = dict(options.pop("settings", {}))
        heads, groups, dims = q.shape[2], k.shape[2], (q.shape[3], v.shape[3])
        attention = te.DotProductAttention(heads, dims if dims[0] != dims[1] else dims[0], num_gqa_groups=groups, attention_dropout=0.0,
                                           qkv_format=layout, **settings)
        form = (lambda x: x.transpose(0, 1)) if layout == "sbhd" else (lambda x: x)
        out = attention(form(q), form(k), form(v), **call)
        self.assertEqual(used_backend(), want_backend)
        want = oracle(q, k, v, **options)
        out = form(out.view(*out.shape[:2], heads, dims[1]))
        grad = torch.randn(out.shape).to(out.dtype)
        lens = options.get("lens")
        if lens is not None:
            for b, length in enumerate(lens[0]):
                grad[b, length:] = 0
        got_grads = torch.autograd.grad(out, (q, k, v), grad)
        want_grads = torch.autograd.grad(want, (q, k, v), grad.double())
        real = torch.ones(q.shape[:2], dtype=torch.bool)
        if lens is not None:
            for b, length in enumerate(lens[0]):
                real[b, length:] = False
        self.near(out[real], want[real], tolerance, "o")
        for name, got, expected in zip("qkv", got_grads, want_grads):
            self.near(got, expected, tolerance * 1.5, f"d{name}")
        return out

    def test_self_attention(self):
        for layout in ("bshd", "sbhd"):
            for dtype in (torch.bfloat16, torch.float16):
                q, k, v = self.inputs(2, 17, 17, 4, 4, 16, dtype=dtype)
                self.check(q, k, v, layout=layout, mask="causal", settings={"attn_mask_type": "causal"})
                self.check(q, k, v, layout=layout, settings={"attn_mask_type": "no_mask"})

    def test_training_after_inference_mode(self):
        """Autograd cannot save inference-mode tensors, so te-fl must not cache any from a first call in inference mode."""
        attention_calls._NO_DROPOUT.clear()
        q, k, v = self.inputs(1, 5, 5, 2, 2, 16)
        with torch.inference_mode():
            te.DotProductAttention(2, 16, attention_dropout=0.0, qkv_format="bshd")(q.detach(), k.detach(), v.detach())
        self.check(q, k, v, mask="causal", settings={"attn_mask_type": "causal"})

    def test_fp32_is_unfused(self):
        q, k, v = self.inputs(2, 9, 9, 2, 2, 8, dtype=torch.float32)
        self.check(q, k, v, "unfused", mask="causal", settings={"attn_mask_type": "causal"}, tolerance=1e-4)

    def test_grouped_queries_and_other_value_sizes(self):
        q, k, v = self.inputs(2, 13, 19, 6, 2, 16, 24)
        self.check(q, k, v, settings={"attn_mask_type": "no_mask"})
        self.check(q, k, v, settings={"attn_mask_type": "no_mask", "softmax_scale": 0.4}, scale=0.4)

    def test_masks_of_cross_attention(self):
        q, k, v = self.inputs(2, 5, 11, 2, 2, 16)
        self.check(q, k, v, mask="causal", settings={"attn_mask_type": "causal"})
        self.check(q, k, v, mask="causal", bottom_right=True, settings={"attn_mask_type": "causal_bottom_right"})

    def test_windows(self):
        q, k, v = self.inputs(2, 15, 15, 2, 2, 16)
        self.check(q, k, v, mask="causal", window=(3, 0), settings={"attn_mask_type": "causal", "window_size": (3, 0)})
        self.check(q, k, v, window=(2, 4), settings={"attn_mask_type": "no_mask", "window_size": (2, 4)})
        q, k, v = self.inputs(2, 6, 15, 2, 2, 16)
        self.check(q, k, v, mask="causal", bottom_right=True, window=(3, 0), settings={"attn_mask_type": "causal_bottom_right", "window_size": (3, 0)})

    def test_padding(self):
        q, k, v = self.inputs(3, 9, 9, 2, 2, 16)
        lens = [9, 4, 1]
        padded = (torch.arange(9) >= torch.tensor(lens).view(-1, 1)).view(3, 1, 1, 9)
        for mask, of in (("padding", None), ("padding_causal", "causal")):
            for layout in ("bshd", "sbhd"):
                self.check(q, k, v, layout=layout, mask=of, lens=(lens, lens), settings={"attn_mask_type": mask}, call={"attention_mask": padded})
        q, k, v = self.inputs(2, 5, 9, 2, 2, 16)
        of_q, of_kv = [5, 2], [7, 9]
        masks = tuple((torch.arange(n) >= torch.tensor(of).view(-1, 1)).view(2, 1, 1, n) for n, of in ((5, of_q), (9, of_kv)))
        self.check(q, k, v, lens=(of_q, of_kv), settings={"attn_mask_type": "padding", "attention_type": "cross"}, call={"attention_mask": masks})
        self.check(q, k, v, lens=(of_q, of_kv), mask="causal", bottom_right=True,
                   settings={"attn_mask_type": "padding_causal_bottom_right", "attention_type": "cross"}, call={"attention_mask": masks})

    def test_an_arbitrary_mask_is_unfused(self):
        q, k, v = self.inputs(2, 6, 6, 2, 2, 16)
        hidden = torch.rand(2, 1, 6, 6) > 0.5
        hidden[..., 0] = False
        bias = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(hidden, -math.inf)
        self.check(q, k, v, "unfused", bias=bias, settings={"attn_mask_type": "arbitrary"}, call={"attention_mask": hidden})

    def test_biases(self):
        q, k, v = self.inputs(2, 7, 9, 2, 2, 16)
        for shape in ((1, 2, 7, 9), (2, 2, 7, 9), (2, 1, 7, 9), (1, 1, 7, 9), (1, 1, 1, 9)):
            bias = torch.randn(shape).bfloat16()
            self.check(q, k, v, bias=bias, settings={"attn_mask_type": "no_mask"},
                       call={"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias})
        bias = torch.randn(1, 2, 7, 9).bfloat16()
        self.check(q, k, v, "unfused", bias=bias.double() / 4, settings={"attn_mask_type": "no_mask"},
                   call={"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": bias})

    def test_the_gradient_of_a_bias(self):
        for shape in ((1, 2, 7, 9), (2, 1, 7, 9), (1, 1, 7, 9)):
            q, k, v = self.inputs(2, 7, 9, 2, 2, 16)
            bias = torch.randn(shape).bfloat16().requires_grad_()
            attention = te.DotProductAttention(2, 16, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="no_mask")
            out = attention(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
            self.assertEqual(used_backend(), "fused")
            grad = torch.randn(out.shape).bfloat16()
            got, = torch.autograd.grad(out, bias, grad)
            want, = torch.autograd.grad(oracle(q, k, v, bias=bias), bias, grad.double().view(2, 7, 2, 16))
            self.near(got, want)

    def test_the_gradient_of_a_bias_for_all_queries(self):
        """For a bias [1, 1, 1, Sk] that needs a gradient the module does not call fused attention, so this test calls the functions directly."""
        q, k, v = self.inputs(2, 7, 9, 2, 2, 16)
        bias = torch.randn(1, 1, 1, 9).bfloat16().requires_grad_()
        args = (7, 9, seen([7, 7]), seen([9, 9]), q, k, v)
        options = dict(qkv_layout="bshd_bshd_bshd", o_format="bshd", attn_mask_type="no_mask", attn_bias_type="post_scale_bias")
        out, aux = fused_attn.fused_attn_fwd(True, *args, torch.bfloat16, 1, bias, **options)
        grad = torch.randn(out.shape).bfloat16()
        *_, got, _ = fused_attn.fused_attn_bwd(*args, out, grad, torch.bfloat16, aux, 1, do_format="bshd", dqkv_layout="bshd_bshd_bshd", **options)
        want, = torch.autograd.grad(oracle(q, k, v, bias=bias), bias, grad.double())
        self.near(got, want)

    def test_alibi(self):
        # ALiBi slopes of 6 heads: the 4 of 4 heads, then every other one of 8 heads
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])
        i, j = torch.arange(9).view(-1, 1), torch.arange(9).view(1, -1)
        bias = -slopes.view(1, -1, 1, 1) * (i - j).abs()
        q, k, v = self.inputs(2, 9, 9, 6, 6, 16)
        self.check(q, k, v, mask="causal", bias=bias, settings={"attn_mask_type": "causal"}, call={"core_attention_bias_type": "alibi"})
        dpa._alibi_cache["_alibi_slopes_require_update"] = dpa._alibi_cache["_alibi_bias_require_update"] = True
        self.check(q, k, v, "unfused", bias=bias, settings={"attn_mask_type": "no_mask"}, call={"core_attention_bias_type": "alibi"})
        own = torch.tensor([0.5, 0.25, 0.1, 0.2, 0.3, 0.4])
        dpa._alibi_cache["_alibi_slopes_require_update"] = dpa._alibi_cache["_alibi_bias_require_update"] = True
        self.check(q, k, v, mask="causal", bias=-own.view(1, -1, 1, 1) * (i - j).abs(), settings={"attn_mask_type": "causal"},
                   call={"core_attention_bias_type": "alibi", "alibi_slopes": own})

    def test_softmax_with_a_sink(self):
        q, k, v = self.inputs(2, 9, 9, 4, 2, 16)
        self.check(q, k, v, mask="causal", sink=torch.zeros(4), settings={"attn_mask_type": "causal", "softmax_type": "off-by-one"})
        for softmax in ("learnable", "off-by-one"):
            attention = te.DotProductAttention(4, 16, num_gqa_groups=2, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="causal",
                                               softmax_type=softmax)
            offset = attention.softmax_offset.requires_grad_()
            if softmax == "learnable":
                with torch.no_grad():
                    offset.copy_(torch.randn(offset.shape))
            out = attention(q, k, v)
            self.assertEqual(used_backend(), "fused")
            sink = offset.detach().double().view(-1).requires_grad_()
            want = oracle(q, k, v, mask="causal", sink=sink)
            self.near(out.view(want.shape), want)
            grad = torch.randn(out.shape).bfloat16()
            out.backward(grad)
            expected, = torch.autograd.grad(want, sink, grad.double().view(want.shape))
            self.near(offset.grad.view(-1), expected)

    def thd(self, lens, padded, heads=4, groups=2, dim=16):
        """Returns (q, k, v of all tokens, boundaries of the lengths, boundaries of the padded lengths)."""
        total = sum(padded)
        q, k, v = (torch.randn(total, of, dim).bfloat16().requires_grad_() for of in (heads, groups, groups))
        return q, k, v, seen(lens), seen(padded)

    def test_sequences_one_behind_the_other(self):
        for lens, padded in (([5, 1, 9], [5, 1, 9]), ([5, 0, 9], [8, 2, 11])):
            for mask in ("padding", "padding_causal"):
                q, k, v, cu, cu_padded = self.thd(lens, padded)
                attention = te.DotProductAttention(4, 16, num_gqa_groups=2, attention_dropout=0.0, qkv_format="thd", attn_mask_type=mask)
                pad = {} if lens == padded else dict(cu_seqlens_q_padded=cu_padded, cu_seqlens_kv_padded=cu_padded, pad_between_seqs=True)
                out = attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lens), max_seqlen_kv=max(lens), **pad)
                self.assertEqual(used_backend(), "fused")
                grad = torch.randn(out.shape).bfloat16()
                got = torch.autograd.grad(out, (q, k, v), grad)
                want = torch.zeros(out.shape, dtype=torch.float64).view(-1, 4, 16)
                for begin, length in zip(cu_padded.tolist(), lens):
                    part = [x[begin:begin + length].unsqueeze(0) for x in (q, k, v)]
                    want = torch.cat([want[:begin], oracle(*part, mask=mask.removeprefix("padding_"))[0] if length else want[:0],
                                      want[begin + length:]])
                self.near(out.view(want.shape), want, what="o")
                for g, w in zip(got, torch.autograd.grad(want, (q, k, v), grad.double().view(want.shape))):
                    self.near(g, w, 3e-2)

    def test_packed_layouts(self):
        """q, k and v are views of one tensor. The module recognises that, and the gradients are views of one tensor too."""
        for layout, dims in (("bshd", (2, 9)), ("sbhd", (9, 2))):
            for shape, dim in (((3, 4, 16), -3), ((4, 3, 16), -2)):
                whole = torch.randn(*dims, *shape).bfloat16().requires_grad_()
                q, k, v = whole.unbind(dim)
                attention = te.DotProductAttention(4, 16, attention_dropout=0.0, qkv_format=layout, attn_mask_type="causal")
                out = attention(q, k, v)
                self.assertEqual(used_backend(), "fused")
                form = (lambda x: x.transpose(0, 1)) if layout == "sbhd" else (lambda x: x)
                want = form(oracle(form(q), form(k), form(v), mask="causal"))
                self.near(out.view(want.shape), want)
                grad = torch.randn(out.shape).bfloat16()
                got, = torch.autograd.grad(out, whole, grad)
                self.near(got, torch.autograd.grad(want, whole, grad.double().view(want.shape))[0], 3e-2)

    def test_dropout(self):
        q, k, v = self.inputs(2, 32, 32, 2, 2, 16)
        attention = te.DotProductAttention(2, 16, attention_dropout=0.25, qkv_format="bshd", attn_mask_type="no_mask")
        with torch.no_grad():
            v.fill_(1)
        torch.manual_seed(3)
        first = attention(q, k, v)
        self.assertEqual(used_backend(), "fused")
        second = attention(q, k, v)
        torch.manual_seed(3)
        again = attention(q, k, v)
        self.assertTrue(torch.equal(first, again))
        self.assertFalse(torch.equal(first, second))
        # Each output is the sum of the kept probabilities, which sum to 1 before dropout, divided by 0.75: 1 on average.
        self.assertAlmostEqual(first.float().mean().item(), 1.0, delta=0.02)
        self.assertGreater(first.float().std().item(), 0.03)
        attention.eval()
        self.near(attention(q, k, v).view(v.shape), torch.ones(v.shape))

    def test_dropout_backward_drops_the_same(self):
        """The output is linear in v, so the gradient of v times v equals the output's gradient times the output."""
        q, k, v = self.inputs(1, 8, 8, 2, 2, 16)
        attention = te.DotProductAttention(2, 16, attention_dropout=0.5, qkv_format="bshd", attn_mask_type="no_mask")
        out = attention(q, k, v)
        grad = torch.randn(out.shape).bfloat16()
        dv, = torch.autograd.grad(out, v, grad)
        self.assertAlmostEqual((dv.double() * v.double()).sum().item(), (grad.double() * out.double()).sum().item(), delta=0.1)

    def test_the_largest_logit(self):
        """return_max_logit returns the largest score of each head, in addition to the output; gradients stay right."""
        q, k, v = self.inputs(2, 6, 9, 4, 2, 16)
        i, j = torch.arange(6).view(-1, 1), torch.arange(9).view(1, -1)
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)).detach() / 4
        bias = torch.randn(1, 4, 6, 9).bfloat16()
        for mask, window, hidden, added in (("no_mask", (-1, -1), j < 0, None), ("causal", (1, 0), (j > i) | (j < i - 1), None),
                                            ("causal_bottom_right", (2, 0), (j > i + 3) | (j < i + 1), None), ("no_mask", (-1, -1), j < 0, bias)):
            attention = te.DotProductAttention(4, 16, num_gqa_groups=2, attention_dropout=0.0, qkv_format="bshd", attn_mask_type=mask, window_size=window,
                                               attention_type="cross", return_max_logit=True)
            bias_type = "no_bias" if added is None else "post_scale_bias"
            out, largest = attention(q, k, v, core_attention_bias_type=bias_type, core_attention_bias=added)
            self.assertEqual(used_backend(), "fused")
            self.near(largest, (scores + (0 if added is None else added)).masked_fill(hidden, -math.inf).amax((0, 2, 3)))
            self.assertTrue(all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v))))
        attention = te.DotProductAttention(4, 16, num_gqa_groups=2, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal",
                                           return_max_logit=True)
        lens = seen([6, 3])
        rows = [torch.cat([x[0, :6], x[1, :3]]) for x in (q, k, v)]
        _, largest = attention(*rows, cu_seqlens_q=lens, cu_seqlens_kv=lens, max_seqlen_q=6, max_seqlen_kv=6)
        self.assertEqual(used_backend(), "fused")
        wanted = torch.stack([part.masked_fill((j > i)[:n, :n], -math.inf).amax((1, 2)) for part, n in ((scores[0, :, :6, :6], 6), (scores[1, :, :3, :3], 3))])
        self.near(largest, wanted.amax(0))

    def test_a_top_left_window_without_a_causal_mask(self):
        """te-fl's op aligns such a window at the bottom right, so te-fl accepts only calls with as many queries as keys, where both alignments agree;
        for other calls the package uses its own PyTorch attention."""
        q, k, v = self.inputs(2, 9, 9, 2, 2, 16)
        settings = {"attn_mask_type": "no_mask", "window_size": (2, 3), "bottom_right_diagonal": False}
        self.check(q, k, v, window=(2, 3), settings=settings)
        q, k, v = self.inputs(2, 6, 9, 2, 2, 16)
        self.check(q, k, v, "unfused", window=(2, 3), settings=settings)

    def test_deterministic_gradients(self):
        q, k, v = self.inputs(2, 16, 16, 2, 2, 16)
        out, aux = fused_attn.fused_attn_fwd(True, 16, 16, seen([16, 16]), seen([16, 16]), q, k, v, torch.bfloat16, 1, qkv_layout="bshd_bshd_bshd",
                                             o_format="bshd", attn_mask_type="causal")
        args = (16, 16, seen([16, 16]), seen([16, 16]), q, k, v, out, out, torch.bfloat16, aux, 1)
        options = dict(qkv_layout="bshd_bshd_bshd", o_format="bshd", do_format="bshd", dqkv_layout="bshd_bshd_bshd", attn_mask_type="causal")
        first, second = (fused_attn.fused_attn_bwd(*args, deterministic=True, **options) for _ in range(2))
        for a, b in zip(first[:3], second[:3]):
            self.assertTrue(torch.equal(a, b))

    def test_nothing(self):
        """The module cannot reshape an empty result, so this test calls the functions that the module uses; they accept empty tensors."""
        for q_shape, k_shape in (((0, 5, 2, 16), (0, 5, 2, 16)), ((2, 0, 2, 16), (2, 3, 2, 16)), ((2, 3, 2, 16), (2, 0, 2, 16))):
            q, k = torch.ones(q_shape).bfloat16(), torch.ones(k_shape).bfloat16()
            lengths = [seen([x.shape[1]] * x.shape[0]) for x in (q, k)]
            args = (q.shape[1], k.shape[1], *lengths, q, k, k)
            options = dict(qkv_layout="bshd_bshd_bshd", o_format="bshd", attn_mask_type="no_mask")
            out, aux = fused_attn.fused_attn_fwd(True, *args, torch.bfloat16, 1, **options)
            self.assertTrue(torch.equal(out, torch.zeros(q_shape).bfloat16()))
            grads = fused_attn.fused_attn_bwd(*args, out, out, torch.bfloat16, aux, 1, do_format="bshd", dqkv_layout="bshd_bshd_bshd", **options)
            for got, like in zip(grads, (q, k, k)):
                self.assertTrue(torch.equal(got, torch.zeros_like(like)))


class Layouts(Case):
    """Runs the functions that the module uses in every layout; the gradients may have another layout."""

    ORDERS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}

    def lies(self, x, form):
        """Permutes [B, S, H, D] into the memory order of a format; for thd, concatenates the sequences, which have equal lengths."""
        return x.reshape(-1, *x.shape[2:]) if form == "thd" else x.permute(self.ORDERS[form]).contiguous()

    def back(self, x, form, like):
        if form == "thd":
            return x.reshape(like.shape)
        return x.permute([self.ORDERS[form].index(i) for i in range(4)]).reshape(like.shape)

    def together(self, parts, group, formats):
        """Makes q, k and v as views of shared memory where the layout requires it."""
        q, k, v = (self.lies(x, form) for x, form in zip(parts, formats))
        if group in ("3hd", "h3d"):
            dim = -3 if group == "3hd" else -2
            return torch.stack((q, k, v), dim).unbind(dim)
        if group in ("2hd", "h2d"):
            dim = -3 if group == "2hd" else -2
            return (q, *torch.stack((k, v), dim).unbind(dim))
        return q, k, v

    def list_formats(self, layout):
        parts = layout.removeprefix("paged_kv_").split("_")
        group = next((g for g in ("3hd", "h3d", "2hd", "h2d") if parts[-1].endswith(g)), "")
        q, kv = ("".join(c for c in p if c.isalpha()) for p in (parts[0], parts[-1]))
        return group, (q, kv, kv)

    def test_layouts(self):
        for layout in fused_attn.QKVLayout:
            if layout.startswith("paged"):
                continue
            group, formats = self.list_formats(layout)
            with self.subTest(layout=layout):
                parts = self.inputs(3, 6, 6, 2, 2, 16)
                q, k, v = self.together(parts, group, formats)
                cu, thd = seen([6] * 3), "thd" in formats
                o_form = "thd" if thd else "sbhd" if formats[0] == "bshd" else "bshd"
                mask = "padding_causal" if thd else "causal"
                args = (6, 6, cu, cu, q, k, v)
                out, aux = fused_attn.fused_attn_fwd(True, *args, torch.bfloat16, 1, qkv_layout=layout, o_format=o_form, attn_mask_type=mask)
                self.assertTrue(out.is_contiguous())
                self.assertEqual(tuple(aux[0].shape), (18, 2, 1) if thd else (3, 2, 6, 1))
                self.assertEqual((aux[1].dtype, tuple(aux[1].shape)), (torch.int64, (2,)))
                want = oracle(*parts, mask="causal")
                self.near(self.back(out, o_form, want), want)
                scores = torch.einsum("bihd,bjhd->bhij", parts[0].double(), parts[1].double()) / 4
                lse = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf).logsumexp(-1)
                got = aux[0].view(3, 6, 2).transpose(1, 2) if thd else aux[0].squeeze(-1)
                self.near(got, lse, 1e-3)
                if thd and formats[1] != "thd":
                    continue  # a layout for KV caches, which has no backward
                grad = torch.randn(want.shape).bfloat16()
                d_form, other = o_form, {"bshd": "sbh3d", "sbhd": "bsh3d", "bhsd": "bshd_bshd_bshd", "thd": layout}[formats[0]]
                for d_layout in (layout, other):
                    d_group, d_formats = self.list_formats(d_layout)
                    got = fused_attn.fused_attn_bwd(*args, out, self.lies(grad, d_form), torch.bfloat16, aux, 1, qkv_layout=layout, o_format=o_form,
                                                    do_format=d_form, dqkv_layout=d_layout, attn_mask_type=mask)
                    if d_group:
                        self.assertEqual(got[1].untyped_storage().data_ptr(), got[2].untyped_storage().data_ptr())
                    expected = torch.autograd.grad(want, parts, grad.double(), retain_graph=True)
                    for g, w, form in zip(got, expected, d_formats):
                        self.near(self.back(g, form, w), w, 3e-2)


class Enquiry(Case):
    """Tests the results of get_fused_attn_backend, and the errors of calls that it reports as unsupported."""

    def params(self, **changes):
        known = dict(qkv_layout=tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, o_format=tex.NVTE_QKV_Format.NVTE_BSHD,
                     do_format=tex.NVTE_QKV_Format.NVTE_BSHD, dqkv_layout=tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, batch_size=2, num_attn_heads=4,
                     num_gqa_groups=2, head_dim_qk=16, head_dim_v=16, max_seqlen_q=8, max_seqlen_kv=8)
        return FusedAttentionParams(**{**known, **changes})

    def test_answers(self):
        fp8 = dict(qkv_dtype=DType.kFloat8E4M3, o_dtype=DType.kFloat8E4M3, do_dtype=DType.kFloat8E5M2, dqkv_dtype=DType.kFloat8E5M2)
        layouts, masks, biases = tex.NVTE_QKV_Layout, tex.NVTE_Mask_Type, tex.NVTE_Bias_Type
        for expected, pattern, changes in (
                (1, "^$", {}), (1, "^$", dict(qkv_dtype=DType.kFloat16)), (2, "^$", fp8),
                (1, "^$", dict(qkv_layout=layouts.NVTE_THD_THD_THD)), (1, "^$", dict(qkv_layout=layouts.NVTE_SBHD_BSHD_BSHD)),
                (1, "^$", dict(qkv_layout=layouts.NVTE_THD_SBHD_SBHD)), (1, "^$", dict(qkv_layout=layouts.NVTE_BHSD_BHSD_BHSD)),
                (1, "^$", dict(qkv_layout=layouts.NVTE_Paged_KV_THD_BSHD_BSHD)),
                (-1, "NVTE_QKV_Layout, and set", dict(qkv_layout=layouts.NVTE_QKV_Layout_NOT_SET)),
                (1, "^$", dict(return_max_logit=True)), (-1, "max_logit in FP8", dict(fp8, return_max_logit=True)),
                (1, "^$", dict(attn_mask_type=masks.NVTE_CAUSAL_MASK, window_size_left=2, max_seqlen_kv=9)),
                (-1, "groups divide the heads", dict(num_gqa_groups=3)),
                (-1, "before the scale", dict(bias_type=biases.NVTE_PRE_SCALE_BIAS)),
                (-1, "a bias with layout thd", dict(bias_type=biases.NVTE_POST_SCALE_BIAS, qkv_layout=layouts.NVTE_THD_THD_THD)),
                (-1, "without a causal mask", dict(bias_type=biases.NVTE_ALIBI)),
                (1, "^$", dict(bias_type=biases.NVTE_ALIBI, attn_mask_type=masks.NVTE_CAUSAL_MASK)),
                (-1, "has a sink", dict(bias_type=biases.NVTE_ALIBI, attn_mask_type=masks.NVTE_CAUSAL_MASK,
                                        softmax_type=tex.NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX)),
                (-1, "from the top-left diagonal", dict(window_size_left=2, window_size_right=2, bottom_right_diagonal=False, max_seqlen_kv=9)),
                (-1, "NVTE_MXFP8_1D_SCALING", dict(fp8, scaling_mode=tex.NVTEScalingMode.NVTE_MXFP8_1D_SCALING)),
                (-1, "FP8 with o in torch.bfloat16", dict(fp8, o_dtype=DType.kBFloat16)), (-1, "'q' is i32", dict(qkv_dtype=DType.kInt32))):
            backend, why = tex.get_fused_attn_backend(self.params(**changes))
            self.assertEqual(int(backend), expected, (changes, why))
            self.assertRegex(why, pattern, changes)

    def test_a_policy_that_denies(self):
        with te_fl.policy(per_op={"get_fused_attn_backend": ["vendor"]}):
            backend, why = tex.get_fused_attn_backend(self.params())
        self.assertEqual(int(backend), -1)
        self.assertIn("get_fused_attn_backend", why)

    def test_errors(self):
        q = torch.randn(2, 8, 4, 16).bfloat16()
        k = torch.randn(2, 8, 2, 16).bfloat16()

        def call(error, pattern, q=q, k=k, v=k, layout="bshd_bshd_bshd", **options):
            with self.assertRaisesRegex(error, pattern):
                fused_attn.fused_attn_fwd(True, 8, 8, seen([8, 8]), seen([8, 8]), q, k, v, torch.bfloat16, 1, qkv_layout=layout, o_format="bshd",
                                          attn_mask_type=options.pop("mask", "no_mask"), **options)

        call(Error, "k has 3 heads, expected a divisor of q's 4", k=torch.randn(2, 8, 3, 16).bfloat16())
        call(Error, "v has 7 positions, expected 8 as k", v=k[:, :7])
        call(Error, "argument 'q' is i32", q=q.int(), k=k.int(), v=k.int())
        call(Error, "q has shape", q=q[0])
        call(InvalidArgument, "give page_table_k", layout="paged_kv_bshd_bshd_bshd")
        call(InvalidArgument, "in no pages", page_table_k=seen([1]), page_table_v=seen([1]))
        call(Unsupported, "return_max_logit with ALiBi", return_max_logit=True, attn_bias_type="alibi", mask="causal")
        call(InvalidArgument, "without softmax_offset", softmax_type="learnable")
        call(Error, "cu_seqlens_q has shape", mask="padding", k=k[:1], v=k[:1], q=q[:1])
        call(Error, "bias has shape", attn_bias=torch.zeros(1, 4, 8, 9).bfloat16(), attn_bias_type="post_scale_bias")


if __name__ == "__main__":
    unittest.main()
