"""Tests te_fl.pytorch's functions against PyTorch in FP64: values, gradients, and torch.compile without a graph break."""

import os
import sys
import unittest

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_oracle import rotate  # noqa: E402

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.functions import cross_entropy, rope, softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: dict(atol=2e-6, rtol=2e-6), torch.bfloat16: dict(atol=2e-2, rtol=2e-2)}


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Compared(unittest.TestCase):
    def compare(self, served, oracle, inputs, **tolerance):
        """Compares values and gradients of served(*inputs) with oracle's in FP64, eagerly and under torch.compile."""
        grads = None
        for function, of in ((oracle, torch.float64), (served, None), (torch.compile(served, backend="aot_eager", fullgraph=True), None)):
            arguments = [x.detach().to(of or x.dtype).requires_grad_() for x in inputs]
            outputs = function(*arguments)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if grads is None:
                expected, grads = outputs, [torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE) for o in outputs]
            torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs)])
            if of is not None:
                gradients = [x.grad for x in arguments]
                continue
            tolerance = tolerance or TOLERANCE[inputs[0].dtype]
            for got, want in zip(outputs, expected):
                torch.testing.assert_close(got.double(), want, **tolerance)
            for got, want in zip(arguments, gradients):
                torch.testing.assert_close(got.grad.double(), want, **tolerance)


class Softmax(Compared):
    def test_plain(self):
        for dtype in TOLERANCE:
            x = randn(2, 3, 4, 16, dtype=dtype)
            self.compare(lambda x: softmax.scaled_softmax_forward(x, 0.5), lambda x: torch.softmax(0.5 * x, -1), [x])

    def test_given_mask(self):
        mask = randn(2, 1, 4, 16, seed=3) > 0.5
        mask[:, :, 1] = True
        def oracle(x):
            probabilities = torch.softmax((0.5 * x).masked_fill(mask, float("-inf")), -1)
            return torch.where(mask.all(-1, keepdim=True), 0.0, probabilities)
        x = randn(2, 3, 4, 16)
        with torch.no_grad():  # where the oracle's rows are NaN, gradients are not compared
            got = softmax.scaled_masked_softmax_forward(x, mask, 0.5)
            torch.testing.assert_close(got.double(), oracle(x.double()), atol=2e-6, rtol=2e-6)
        mask[:, :, 1] = False
        self.compare(lambda x: softmax.scaled_masked_softmax_forward(x, mask, 0.5), oracle, [x])

    def test_causal(self):
        def causal(x, shift):
            above = torch.ones(x.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1 + shift)
            return torch.softmax((0.5 * x).masked_fill(above, float("-inf")), -1)
        self.compare(lambda x: softmax.scaled_upper_triang_masked_softmax_forward(x, 0.5), lambda x: causal(x, 0), [randn(3, 8, 8)])
        self.compare(lambda x: softmax.scaled_aligned_causal_masked_softmax_forward(x, 0.5), lambda x: causal(x, 4), [randn(2, 3, 4, 8)])

    def test_the_module_over_mask_types(self):
        x = randn(2, 3, 4, 8)
        mask = randn(2, 1, 4, 8, seed=3) > 1
        layer = softmax.FusedScaleMaskSoftmax(softmax.attention_mask_func)
        def oracle(scale, *masks):
            return torch.softmax((scale * x.double()).masked_fill(sum(m.long() for m in masks) > 0, float("-inf")), -1)
        square = x[..., :4]
        def above(shift, sk=8):
            return torch.ones(4, sk, dtype=torch.bool, device=DEVICE).triu(1 + shift)
        nothing = torch.zeros(4, 8, dtype=torch.bool, device=DEVICE)
        for got, want in ((layer(x, None, "no_mask"), oracle(1, nothing)), (layer(x, mask, "no_mask", 0.5), oracle(0.5, nothing)),
                          (layer(x, mask, "padding"), oracle(1, mask)), (layer(x, mask[:1], "arbitrary"), oracle(1, mask[:1])),
                          (layer(x, None, "causal", 0.5), oracle(0.5, above(0))),
                          (layer(x, None, "causal_bottom_right"), oracle(1, above(4))),
                          (layer(x, mask, "causal_bottom_right"), oracle(1, above(4), mask))):
            torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(layer(square, None, "causal").double(),
                                   torch.softmax(square.double().masked_fill(above(0, 4), float("-inf")), -1), atol=2e-6, rtol=2e-6)

    def test_another_mask_function_is_called(self):
        x, mask = randn(2, 3, 4, 8), randn(2, 1, 4, 8, seed=3) > 0
        layer = softmax.FusedScaleMaskSoftmax(lambda scores, m: scores - 3.0 * m)
        torch.testing.assert_close(layer(x, mask, "padding", 2.0).double(), torch.softmax(2 * x.double() - 3.0 * mask, -1),
                                   atol=2e-6, rtol=2e-6)

    def test_what_is_refused(self):
        with self.assertRaisesRegex(Unsupported, "softmax_in_fp32"):
            softmax.FusedScaleMaskSoftmax(softmax.attention_mask_func, softmax_in_fp32=False)
        with self.assertRaisesRegex(InvalidArgument, "shape"):
            softmax.FusedScaleMaskSoftmax(softmax.attention_mask_func)(randn(3, 3), None, "no_mask")

    def test_a_second_derivative_is_an_error(self):
        x = randn(1, 1, 2, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(softmax.scaled_softmax_forward(x, 1.0).square().sum(), x, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "no second derivative"):
            gradient.sum().backward()


class CrossEntropy(Compared):
    TARGET = torch.tensor([[1, 4, -100], [0, 2, 3]], device=DEVICE)

    def oracle(self, smoothing, reduction):
        def loss(x):
            flat = torch.nn.functional.cross_entropy(x.flatten(0, 1), self.TARGET.flatten(), label_smoothing=smoothing, reduction=reduction)
            return flat.view(self.TARGET.shape) if reduction == "none" else flat
        return loss

    def test_rows_and_mean(self):
        for dtype in TOLERANCE:
            for smoothing in (0.0, 0.1):
                for reduce_loss, reduction in ((False, "none"), (True, "mean")):
                    with self.subTest(dtype=dtype, smoothing=smoothing, reduce_loss=reduce_loss):
                        self.compare(lambda x: cross_entropy.parallel_cross_entropy(x, self.TARGET, smoothing, reduce_loss),
                                     self.oracle(smoothing, reduction), [2 * randn(2, 3, 5, dtype=dtype)])

    def test_the_loss_is_fp32_and_the_logits_stay(self):
        x = randn(2, 3, 5, dtype=torch.bfloat16).requires_grad_()
        before = x.detach().clone()
        loss = cross_entropy.parallel_cross_entropy(x, self.TARGET)
        self.assertEqual(loss.dtype, torch.float32)
        loss.sum().backward()
        self.assertTrue(torch.equal(x, before))

    def test_another_ignored_token(self):
        x, target = randn(2, 3, 5), self.TARGET.clamp(min=4)
        target[0, 0] = 1
        loss = cross_entropy.parallel_cross_entropy(x, target, ignore_idx=4)
        self.assertEqual(int((loss != 0).sum()), 1)

    def test_overwriting_the_logits(self):
        leaf = randn(2, 3, 5).requires_grad_()
        logits = leaf * 1
        loss = cross_entropy.parallel_cross_entropy(logits, self.TARGET, reduce_loss=True, overwrite_input=True)
        loss.backward(retain_graph=True)
        wanted = leaf.detach().double().requires_grad_()
        self.oracle(0.0, "mean")(wanted).backward()
        torch.testing.assert_close(leaf.grad.double(), wanted.grad, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(logits.detach().double(), wanted.grad, atol=2e-6, rtol=2e-6)  # logits' memory now contains the gradient
        with self.assertRaisesRegex(InvalidArgument, "one backward"):
            loss.backward()

    def test_what_is_refused(self):
        loss = cross_entropy.parallel_cross_entropy
        with self.assertRaisesRegex(InvalidArgument, "shape"):
            loss(randn(6, 5), self.TARGET)
        with self.assertRaisesRegex(InvalidArgument, "target has 5 elements"):
            loss(randn(2, 3, 5), self.TARGET.flatten()[:5])
        with self.assertRaisesRegex(InvalidArgument, "label_smoothing is 2"):
            loss(randn(2, 3, 5), self.TARGET, 2.0)
        with self.assertRaisesRegex(InvalidArgument, "contiguous"):
            loss(randn(2, 5, 3).transpose(1, 2), self.TARGET, overwrite_input=True)
        if DEVICE == "cpu":
            with self.assertRaisesRegex(InvalidArgument, "must lie in"):
                loss(randn(2, 3, 5), self.TARGET + 7)
        with self.assertWarnsRegex(FutureWarning, "is_cg_capturable"):
            loss(randn(2, 3, 5), self.TARGET, is_cg_capturable=True)


def rotated(t, freqs, interleaved):
    """Rotates t [s, b, h, d] by freqs [s, 1 or b, 1, r], in pairs, with complex numbers."""
    r = freqs.shape[-1]
    turned, rest = t[..., :r], t[..., r:]
    if interleaved:
        angles, pairs = freqs[..., ::2], torch.view_as_complex(turned.unflatten(-1, (r // 2, 2)).contiguous())
        out = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    else:
        angles, (a, b) = freqs[..., :r // 2], turned.chunk(2, -1)
        pairs = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
        out = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((out, rest), -1)


class Rope(Compared):
    def test_angles(self):
        angles = rope.RotaryPositionEmbedding(8, rotary_base=100.0)(5, offset=2)
        positions = torch.arange(2, 7).double()[:, None] * 100.0 ** -(torch.arange(0, 8, 2).double() / 8)
        torch.testing.assert_close(angles.cpu().double().squeeze(), torch.cat((positions, positions), -1), atol=1e-6, rtol=1e-6)
        self.assertEqual(list(rope.RotaryPositionEmbedding(8).state_dict()), ["inv_freq"])
        interleaved = rope.RotaryPositionEmbedding(8, rotary_percent=0.5, interleaved=True)(3)
        self.assertEqual(tuple(interleaved.shape), (3, 1, 1, 4))
        self.assertTrue(torch.equal(interleaved[..., ::2], interleaved[..., 1::2]))

    def test_interpolation(self):
        plain = rope.RotaryPositionEmbedding(8)
        squeezed = rope.RotaryPositionEmbedding(8, seq_len_interpolation_factor=4, pretrained_max_position_embeddings=2)
        torch.testing.assert_close(squeezed(8), plain(8) / 4)
        torch.testing.assert_close(squeezed(16), plain(16) / 8)

    def test_layouts(self):
        for interleaved in (False, True):
            angles = rope.RotaryPositionEmbedding(6, interleaved=interleaved)(7)
            wide = angles.double()
            for fused in (False, True):
                self.compare(lambda t: rope.apply_rotary_pos_emb(t, angles, interleaved=interleaved, fused=fused),
                             lambda t: rotated(t, wide[:5], interleaved), [randn(5, 2, 3, 8)])
            self.compare(lambda t: rope.apply_rotary_pos_emb(t, angles, "bshd", interleaved=interleaved),
                         lambda t: rotated(t.transpose(0, 1), wide[:5], interleaved).transpose(0, 1), [randn(2, 5, 3, 8)])
            cu_seqlens = torch.tensor([0, 2, 7], device=DEVICE)
            self.compare(lambda t: rope.apply_rotary_pos_emb(t, angles, "thd", interleaved=interleaved, cu_seqlens=cu_seqlens),
                         lambda t: torch.cat([rotated(x[:, None], wide[:len(x)], interleaved)[:, 0] for x in t.split([2, 5])]),
                         [randn(7, 3, 8)])

    def test_angles_that_are_learnt(self):
        for interleaved in (False, True):
            angles = rope.RotaryPositionEmbedding(6, interleaved=interleaved)(7)
            self.compare(lambda t, f: rope.apply_rotary_pos_emb(t, f, interleaved=interleaved),  # noqa: B023
                         lambda t, f: rotate(t.transpose(0, 1), f, interleaved).transpose(0, 1), [randn(5, 2, 3, 8), angles], atol=2e-5, rtol=2e-5)  # noqa: B023
            self.compare(lambda t, f: rope.apply_rotary_pos_emb(t, f, "bshd", interleaved=interleaved),  # noqa: B023
                         lambda t, f: rotate(t, f, interleaved), [randn(2, 5, 3, 8), angles], atol=2e-5, rtol=2e-5)  # noqa: B023

    def test_start_positions(self):
        angles = rope.RotaryPositionEmbedding(8)(9)
        starts = torch.tensor([3, 1], device=DEVICE)
        by_sequence = torch.cat([angles[s:s + 5].double() for s in starts.tolist()], 1)
        self.compare(lambda t: rope.apply_rotary_pos_emb(t, angles, start_positions=starts), lambda t: rotated(t, by_sequence, False),
                     [randn(5, 2, 3, 8)])

    def test_context_parallel_chunks(self):
        angles = rope.RotaryPositionEmbedding(8)(8)
        mine = torch.cat((angles[2:4], angles[4:6])).double()  # with two ranks, rank 1 holds chunks 1 and 2 of 4
        self.compare(lambda t: rope.apply_rotary_pos_emb(t, angles, cp_size=2, cp_rank=1), lambda t: rotated(t, mine, False),
                     [randn(4, 2, 3, 8)])

    def test_packed_qkv(self):
        angles = rope.RotaryPositionEmbedding(8)(5)
        for layout in ("sbhd", "bshd"):
            def oracle(x):
                x = x if layout == "sbhd" else x.transpose(0, 1)
                q, k, v = x.split([16, 8, 4], -1)
                out = rotated(q.reshape(5, 2, 6, 8), angles.double(), False), rotated(k, angles.double(), False), v
                return tuple(o if layout == "sbhd" else o.transpose(0, 1) for o in out)
            shape = (5, 2, 3, 28) if layout == "sbhd" else (2, 5, 3, 28)
            self.compare(lambda x: rope.apply_fused_qkv_rotary_pos_emb(x, angles, angles, [16, 8, 4], layout), oracle, [randn(*shape)])

    def test_bfloat16_turns_in_fp32(self):
        angles = rope.RotaryPositionEmbedding(8)(5)
        self.compare(lambda t: rope.apply_rotary_pos_emb(t, angles), lambda t: rotated(t, angles.double(), False),
                     [randn(5, 2, 3, 8, dtype=torch.bfloat16)])

    def test_what_is_refused(self):
        angles, t = rope.RotaryPositionEmbedding(8)(5), randn(5, 2, 3, 8)
        with self.assertRaisesRegex(InvalidArgument, "tensor_format is 'bhsd'"):
            rope.apply_rotary_pos_emb(t, angles, "bhsd")
        with self.assertRaisesRegex(InvalidArgument, "cu_seqlens"):
            rope.apply_rotary_pos_emb(t[:, 0], angles, "thd")
        for more in (dict(fused=True), dict(start_positions=torch.tensor([0, 1], device=DEVICE))):
            with self.assertRaisesRegex(Unsupported, "freqs requires grad"):
                rope.apply_rotary_pos_emb(t, angles[:4].clone().requires_grad_(), **more)
            with torch.no_grad():
                rope.apply_rotary_pos_emb(t[:4], angles.clone().requires_grad_(), **more)
        with self.assertRaisesRegex(Unsupported, "'thd'"):
            rope.apply_fused_qkv_rotary_pos_emb(t, angles, angles, [4, 2, 2], "thd")
        with self.assertRaisesRegex(InvalidArgument, "add up"):
            rope.apply_fused_qkv_rotary_pos_emb(t, angles, angles, [4, 2, 1])
