"""Tests the functions of transformer_engine_torch around attention: RoPE, softmax, dropout, caches, and the helpers of sequences and of context
parallelism; against PyTorch in FP64 or hand-computed numbers."""

import math
import unittest

import torch

import te_fl
import te_fl.transformer_engine_torch as tex
from te_fl.errors import Error, InvalidArgument

SBHD, BSHD, THD = (getattr(tex.NVTE_QKV_Format, f"NVTE_{n}") for n in ("SBHD", "BSHD", "THD"))


def boundaries(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)

    def near(self, got, want, tolerance=1e-5):
        self.assertEqual(tuple(got.shape), tuple(want.shape))
        torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)

    def refuses(self, pattern, call, error=InvalidArgument):
        with self.assertRaisesRegex(error, pattern):
            call()


def rotated(x, freqs, interleaved):
    """Applies RoPE to x [..., D] in FP64; freqs: angles [..., R]."""
    r = freqs.shape[-1]
    part, rest = x[..., :r], x[..., r:]
    if interleaved:
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
    return torch.cat((part * freqs.cos() + turned * freqs.sin(), rest), -1)


class Rope(Case):
    def oracle(self, x, freqs, positions, interleaved):
        """Applies RoPE to x [B, S, H, D] at positions [B, S]."""
        return rotated(x.double(), freqs.double().view(freqs.shape[0], -1)[positions].unsqueeze(2), interleaved)

    def check(self, x, freqs, form, positions, interleaved=False, starts=None, cp=(1, 0), tolerance=1e-5):
        """Compares fused RoPE with the oracle for x [B, S, H, D]."""
        lies = (lambda t: t.transpose(0, 1)) if form is SBHD else (lambda t: t)
        turned = lies(x)
        got = tex.fused_rope_forward(turned, freqs, starts, form, interleaved, None, *cp)
        self.assertTrue(got.is_contiguous())
        self.near(lies(got), self.oracle(x, freqs, positions, interleaved), tolerance)
        grad, x = torch.randn(x.shape), x.detach().double().requires_grad_()
        want, = torch.autograd.grad(self.oracle(x, freqs, positions, interleaved), x, grad.double())
        self.near(lies(tex.fused_rope_backward(lies(grad), freqs, starts, form, interleaved, None, *cp)), want, 1e-5)

    def test_layouts_and_pairs(self):
        x, freqs = torch.randn(2, 5, 3, 10), torch.rand(7, 1, 1, 6) * 6
        for form in (SBHD, BSHD):
            for interleaved in (False, True):
                self.check(x, freqs, form, torch.arange(5).expand(2, 5), interleaved)
        self.check(torch.randn(2, 5, 10, 3).transpose(2, 3), freqs, BSHD, torch.arange(5).expand(2, 5))  # a non-contiguous input
        self.check(torch.randn(2, 5, 3, 3, 10)[:, :, 1], freqs, SBHD, torch.arange(5).expand(2, 5))

    def test_starts_and_ranks(self):
        x, freqs = torch.randn(2, 4, 3, 8), torch.rand(20, 1, 1, 8) * 6
        starts = torch.tensor([3, 9], dtype=torch.int32)
        for longer in (starts, torch.cat((starts, starts + 30))):
            for form in (BSHD, SBHD):
                self.check(x, freqs, form, torch.arange(4) + starts.view(2, 1), starts=longer)
        # With two ranks, rank 1 holds chunks 1 and 2 of the four chunks; a chunk has two tokens.
        self.check(x, freqs, SBHD, torch.tensor([2, 3, 4, 5]).expand(2, 4), cp=(2, 1))
        self.check(x, freqs, SBHD, torch.tensor([0, 1, 6, 7]).expand(2, 4), cp=(2, 0))

    def test_sequences(self):
        x, freqs = torch.randn(9, 3, 8), torch.rand(6, 1, 1, 8) * 6
        got = tex.fused_rope_forward(x, freqs, None, THD, False, boundaries(5, 0, 4), 1, 0)
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
        self.near(got.unsqueeze(0), self.oracle(x.unsqueeze(0), freqs, positions, False))
        grad, z = torch.randn(9, 3, 8), x.double().requires_grad_()
        want, = torch.autograd.grad(self.oracle(z.unsqueeze(0), freqs, positions, False), z, grad.double().unsqueeze(0))
        self.near(tex.fused_rope_backward(grad, freqs, None, THD, False, boundaries(5, 0, 4), 1, 0), want)
        # `starts` may have as many entries as the boundaries; only the first, one for each sequence, are read.
        starts, moved = torch.tensor([1, 7, 2, 9], dtype=torch.int32), torch.tensor([[1, 2, 3, 4, 5, 2, 3, 4, 5]])
        got = tex.fused_rope_forward(x, freqs, starts, THD, False, boundaries(5, 0, 4), 1, 0)
        self.near(got.unsqueeze(0), self.oracle(x.unsqueeze(0), freqs, moved, False))
        want, = torch.autograd.grad(self.oracle(z.unsqueeze(0), freqs, moved, False), z, grad.double().unsqueeze(0))
        self.near(tex.fused_rope_backward(grad, freqs, starts, THD, False, boundaries(5, 0, 4), 1, 0), want)
        self.refuses("start_positions|cu_seqlens", lambda: tex.fused_rope_forward(x, freqs, starts[:2], THD, False, boundaries(5, 0, 4), 1, 0))
        # With two ranks, rank 0 holds chunks 0 and 3 of the four chunks of each sequence.
        got = tex.fused_rope_forward(x[:4], freqs, None, THD, False, boundaries(4, 4), 2, 0)
        self.near(got.unsqueeze(0), self.oracle(x[:4].unsqueeze(0), freqs, torch.tensor([[0, 3, 0, 3]]), False))

    def test_packed(self):
        for form in (SBHD, BSHD):
            for interleaved in (False, True):
                freqs = torch.rand(6, 1, 1, 8) * 6
                k_freqs = torch.rand(6, 1, 1, 4) * 6
                qkv = torch.randn(2, 5, 3, 32)  # last dimension of a group: two queries, a key and a value of 8 each
                lies = (lambda t: t.transpose(0, 1)) if form is SBHD else (lambda t: t)
                q, k, v = tex.fused_qkv_rope_forward(lies(qkv).contiguous(), freqs, k_freqs, None, [16, 8, 8], form, interleaved, 1, 0)
                positions = torch.arange(5).expand(2, 5)
                x = qkv.double().requires_grad_()
                parts = (x[..., :16].reshape(2, 5, 6, 8), x[..., 16:24], x[..., 24:])
                want = (self.oracle(parts[0], freqs, positions, interleaved), self.oracle(parts[1], k_freqs, positions, interleaved), parts[2])
                for got, expected in zip((q, k, v), want):
                    self.near(lies(got), expected)
                starts = torch.tensor([1, 0, 30], dtype=torch.int32)  # one entry more than there are sequences
                moved = positions + starts[:2].view(2, 1)
                got = tex.fused_qkv_rope_forward(lies(qkv).contiguous(), freqs, k_freqs, starts, [16, 8, 8], form, interleaved, 1, 0)
                self.near(lies(got[0]), self.oracle(parts[0], freqs, moved, interleaved))
                self.near(lies(got[1]), self.oracle(parts[1], k_freqs, moved, interleaved))
                grads = [torch.randn(w.shape) for w in want]
                expected, = torch.autograd.grad(want, x, [g.double() for g in grads])
                got = tex.fused_qkv_rope_backward(*(lies(g).contiguous() for g in grads), freqs, k_freqs, [16, 8, 8], form, interleaved, 1, 0)
                self.near(lies(got), expected)

    def test_errors(self):
        x, freqs = torch.randn(2, 5, 3, 8), torch.rand(4, 1, 1, 8)
        self.refuses("freqs has 4 positions; a sequence has 5", lambda: tex.fused_rope_forward(x, freqs, None, BSHD, False, None, 1, 0))
        self.refuses("freqs has 4 positions; a sequence has 6", lambda: tex.fused_rope_backward(x[:, :3], freqs, None, BSHD, False, None, 2, 0))
        self.refuses("freqs is torch.float64", lambda: tex.fused_rope_forward(x, freqs.double(), None, BSHD, False, None, 1, 0))
        self.refuses("cp_rank", lambda: tex.fused_rope_forward(x, torch.rand(9, 1, 1, 8), None, BSHD, False, None, 1, 1), Error)
        self.refuses("NVTE_BHSD; it is one of sbhd, bshd, thd",
                     lambda: tex.fused_rope_forward(x, freqs, None, tex.NVTE_QKV_Format.NVTE_BHSD, False, None, 1, 0))
        self.refuses("a multiple of the key", lambda: tex.fused_qkv_rope_forward(x, torch.rand(9, 1, 1, 2), torch.rand(9, 1, 1, 2), None, [3, 2, 3],
                                                                                 BSHD, False, 1, 0))
        self.assertEqual(tex.fused_rope_forward(x[:0], torch.rand(9, 1, 1, 8), None, BSHD, False, None, 1, 0).shape, (0, 5, 3, 8))


class Softmax(Case):
    def check(self, kind, x, hidden, *arguments):
        got = getattr(tex, f"{kind}_softmax_forward")(x, *arguments, 0.7)
        z = x.detach().double().requires_grad_()
        blind = hidden.all(-1, keepdim=True)
        want = torch.softmax((z * 0.7).masked_fill(hidden, -math.inf).masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        tolerance = 1e-5 if x.dtype == torch.float32 else 1e-2
        self.near(got, want, tolerance)
        grad = torch.randn(x.shape).to(x.dtype)
        before = grad.clone()
        back = getattr(tex, f"{kind}_softmax_backward")(grad, got, 0.7)
        self.assertTrue(torch.equal(grad, before), "the gradient that was turned has changed")
        self.near(back, torch.autograd.grad(want, z, grad.double())[0], tolerance)

    def test_kinds(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.randn(2, 3, 5, 9).to(dtype)
            self.check("scaled", x, torch.zeros(5, 9, dtype=torch.bool))
            for shape in ((2, 1, 5, 9), (1, 1, 5, 9)):
                mask = torch.rand(shape) > 0.5
                mask[..., 1, :] = True  # a row with all keys masked
                self.check("scaled_masked", x, mask, mask)
                self.check("scaled_masked", x, mask, mask.byte())
            square = torch.randn(4, 7, 7).to(dtype)
            self.check("scaled_upper_triang_masked", square, torch.ones(7, 7, dtype=torch.bool).triu(1))
            self.check("scaled_aligned_causal_masked", x, torch.ones(5, 9, dtype=torch.bool).triu(5))
            self.check("scaled_aligned_causal_masked", x[:, :, :1], torch.zeros(1, 9, dtype=torch.bool))
        self.check("scaled", torch.randn(2, 5, 9, 3).transpose(1, 3), torch.zeros(9, 5, dtype=torch.bool))

    def test_errors(self):
        self.refuses("input", lambda: tex.scaled_softmax_forward(torch.zeros(2, 2, 2, 2, dtype=torch.int32), 1.0), Error)
        self.refuses("mask", lambda: tex.scaled_masked_softmax_forward(torch.zeros(2, 3, 4, 5), torch.zeros(2, 1, 4, 4, dtype=torch.bool), 1.0), Error)
        self.refuses("input", lambda: tex.scaled_upper_triang_masked_softmax_forward(torch.zeros(2, 3, 4), 1.0), Error)


class Dropout(Case):
    def test_mask_and_gradient(self):
        for shape, dtype in (((64, 48), torch.bfloat16), ((7, 3), torch.float32), ((0, 8), torch.float16)):
            x = torch.randn(shape).abs().add(0.5).to(dtype)
            out, mask = tex.dropout_fwd(x, 0.25)
            self.assertEqual((mask.dtype, mask.numel()), (torch.uint8, -(-x.numel() // 8)))
            bits = torch.tensor([(mask[i // 8].item() >> (i % 8)) & 1 for i in range(x.numel())], dtype=torch.bool).view(shape)
            self.near(out, torch.where(bits, x.double() / 0.75, 0.0), 1e-2)
            grad = torch.randn(shape).to(dtype)
            self.near(tex.dropout_bwd(grad, mask, 0.25), torch.where(bits, grad.double() / 0.75, 0.0), 1e-2)
        kept = torch.count_nonzero(tex.dropout_fwd(torch.ones(100, 100), 0.25)[0]).item()
        self.assertAlmostEqual(kept / 1e4, 0.75, delta=0.02)

    def test_seeds(self):
        x = torch.ones(64, 64)
        torch.manual_seed(1)
        first, second = tex.dropout_fwd(x, 0.5)[0], tex.dropout_fwd(x, 0.5)[0]
        torch.manual_seed(1)
        out = torch.empty_like(x)
        again = tex.dropout_fwd(x, 0.5, out)[0]
        self.assertIs(again, out)
        self.assertTrue(torch.equal(first, again))
        self.assertFalse(torch.equal(first, second))


class Sequences(Case):
    def test_between_thd_and_bshd(self):
        x = torch.arange(1, 7.0).view(6, 1, 1)
        square = tex.convert_thd_to_bshd(x, boundaries(2, 0, 3), 3, 4)
        self.assertEqual(square.view(3, 4).tolist(), [[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 0]])
        self.assertEqual(tex.convert_bshd_to_thd(square, boundaries(2, 0, 3), 6).view(-1).tolist(), [1, 2, 3, 4, 5, 0])
        self.assertEqual(tex.convert_thd_to_bshd(x[:0], boundaries(0), 1, 4).tolist(), torch.zeros(1, 4, 1, 1).tolist())
        self.refuses("cu_seqlens has 2 elements; 3 sequences have 4", lambda: tex.convert_thd_to_bshd(x, boundaries(2), 3, 4))
        self.refuses(r"it is \[B, S, H, D\]", lambda: tex.convert_bshd_to_thd(x, boundaries(2), 3))

    def test_flash_attention_forms(self):
        packed = torch.randn(5, 2, 3, 24)
        out = tex.fa_prepare_fwd(packed[..., :8])
        self.near(out, torch.stack([part.transpose(0, 1) for part in packed.split(8, -1)]))
        q, k, v = (torch.randn(5, 2, 3, 8) for _ in range(3))
        self.near(tex.fa_prepare_bwd(q, k, v), torch.cat((q, k, v), -1).transpose(0, 1))
        self.refuses("a contiguous", lambda: tex.fa_prepare_fwd(packed[..., 0::3]))

    def test_transposes_and_padding(self):
        a, b = torch.randn(2, 3, 4, 5), torch.randint(0, 255, (2, 3, 4, 6), dtype=torch.uint8)
        out = torch.full((2, 4, 3, 8), 7, dtype=torch.uint8)
        got = tex.multi_tensor_transpose_to_bhsd([a, None, b], "bshd", [None, None, out])
        self.near(got[0], a.transpose(1, 2))
        self.assertIsNone(got[1])
        self.assertIs(got[2], out)
        self.assertTrue(torch.equal(out, torch.nn.functional.pad(b.transpose(1, 2), (0, 2))))
        self.near(tex.multi_tensor_transpose_to_bhsd([a], "sbhd")[0], a.permute(1, 2, 0, 3))
        one, two = tex.multi_tensor_pad_last_dim([torch.ones(2, 3), torch.ones(3, 8)], 4)
        self.assertEqual(one.tolist(), [[1, 1, 1, 0]] * 2)
        self.assertEqual(two.tolist(), torch.ones(3, 8).tolist())
        self.refuses("alignment 0", lambda: tex.multi_tensor_pad_last_dim([one], 0))
        self.refuses("output 0 is torch.int32", lambda: tex.multi_tensor_transpose_to_bhsd([a], "sbhd", [torch.empty(3, 4, 2, 5, dtype=torch.int32)]))
        self.refuses("'thd'", lambda: tex.multi_tensor_transpose_to_bhsd([a], "thd"))


    def test_a_result_of_another_dtype_is_refused(self):
        x, codes = torch.randn(4, 3, 2), torch.randint(0, 255, (16, 8), dtype=torch.uint8)
        self.refuses("out is torch.bfloat16", lambda: tex.swap_first_dims(x, out=torch.empty(3, 4, 2, dtype=torch.bfloat16)))
        self.refuses("out is torch.float32", lambda: tex.nvfp4_data_transpose(codes, out=torch.empty(16, 8)))
        self.refuses("torch.uint8 and torch.float32", lambda: tex.nvfp4_2d_scale_transpose(codes, torch.empty(16, 8), 1, 1))

    def test_results_in_the_memory_of_their_inputs(self):
        x = torch.randn(4, 4, 3)
        want = x.transpose(0, 1).clone()
        self.near(tex.swap_first_dims(x, out=x), want)
        wide = torch.randn(3, 3, 3, 8)
        want = torch.nn.functional.pad(wide[..., :5].transpose(1, 2), (0, 3))
        self.near(tex.multi_tensor_transpose_to_bhsd([wide[..., :5]], "bshd", [wide])[0], want)
        factors = torch.randint(0, 255, (2, 2), dtype=torch.uint8)  # one factor per block of 16 x 16 elements, 2 x 2 blocks
        rows = torch.nn.functional.pad(factors.repeat_interleave(16, 0), (0, 2))
        tex.nvfp4_2d_scale_transpose(rows, rows, 2, 2)
        self.assertTrue(torch.equal(rows, torch.nn.functional.pad(factors.t().repeat_interleave(16, 0), (0, 2))))


class Cache(Case):
    def loop(self, caches, news, table, new, cached, form, is_non_paged, page_size):
        """Computes the caches after the same call with a loop over tokens."""
        caches, start = [c.clone() for c in caches], 0
        for b, (n, c) in enumerate(zip(new, cached)):
            for i in range(n):
                position = c - n + i
                page = b if is_non_paged else table[b][position // page_size]
                token = {"bshd": (b, i), "sbhd": (i, b), "thd": (start + i,)}[form]
                for cache, values in zip(caches, news):
                    cache[page, position % page_size] = values[token]
            start += n
        return caches

    def check(self, new, cached, form, table, page_size, pages, is_non_paged=False):
        ctx = max(max(new), 1)
        extents = {"bshd": (len(new), ctx), "sbhd": (ctx, len(new)), "thd": (sum(new) + 2,)}[form]
        news = [torch.randn(*extents, 2, dim) for dim in (4, 6)]
        caches = [torch.randn(pages, page_size, 2, dim) for dim in (4, 6)]
        moved = [c.clone() for c in caches]
        if is_non_paged:
            for c, of in zip(moved, caches):
                c[:len(new)] = of[torch.tensor(table[:len(new)])]
        want = self.loop(moved, news, table, new, cached, form, is_non_paged, page_size)
        per_sequence = 1 if is_non_paged else len(table[0])
        tex.copy_to_kv_cache(*news, *caches, torch.tensor(table, dtype=torch.int32), boundaries(*new), boundaries(*cached),
                             {"bshd": BSHD, "sbhd": SBHD, "thd": THD}[form], len(new), ctx, page_size * per_sequence, per_sequence, is_non_paged)
        for got, expected in zip(caches, want):
            self.assertTrue(torch.equal(got, expected), (new, cached, form, is_non_paged))

    def test_pages_and_rows(self):
        for form in ("bshd", "sbhd", "thd"):
            self.check([3, 1, 2], [5, 4, 2], form, [[4, 1], [0, 3], [2, 5]], 4, 6)
            # sequence 0 has no new tokens, and its row of the table is that of another sequence
            self.check([0, 4, 1], [3, 4, 1], form, [[0, 1], [0, 3], [2, 5]], 4, 6)
            self.check([0, 4, 0], [3, 4, 2], form, [[0, 1], [0, 3], [2, 5]], 4, 6)
            self.check([0, 0], [3, 2], form, [[4, 1], [0, 3]], 4, 6)
            self.check([3, 1], [5, 4], form, [1, 2, 0], 8, 3, is_non_paged=True)
            self.check([1, 1, 1], [5, 4, 1], form, [[0], [1], [2]], 8, 3)

    def test_errors(self):
        k = torch.zeros(2, 4, 1, 2)
        call = lambda new, cache, form: tex.copy_to_kv_cache(new, new, cache, cache, boundaries(1), boundaries(1), boundaries(1), form, 1, 1, 4, 1,  # noqa: E731
                                                             False)
        self.refuses("they have one dtype", lambda: call(k[:1, :1].half(), k, BSHD))
        self.refuses("NVTE_BHSD", lambda: call(k[:1, :1], k, tex.NVTE_QKV_Format.NVTE_BHSD))
        self.refuses("tokens of a page", lambda: call(k[:1, :1], k[:, :3], BSHD))


class ContextParallel(Case):
    LENGTHS = (8, 0, 4, 16)  # padded lengths; 28 tokens in all

    def halves(self, lengths):
        """Returns (tokens of the first halves of the sequences, tokens of the second halves)."""
        first, second, begin = [], [], 0
        for n in lengths:
            first += range(begin, begin + n // 2)
            second += range(begin + n // 2, begin + n)
            begin += n
        return torch.tensor(first), torch.tensor(second)

    def test_halves_of_tensors(self):
        cu = boundaries(*self.LENGTHS)
        for shape, dim in (((28, 2, 3), 0), ((2, 28, 2, 3), 1)):
            x = torch.randn(shape)
            for i, tokens in enumerate(self.halves(self.LENGTHS)):
                self.near(tex.thd_read_half_tensor(x, cu, i), x.index_select(dim, tokens))
        self.refuses("half_idx is 2", lambda: tex.thd_read_half_tensor(x, cu, 2))
        self.refuses("cu_seqlens is torch.int64", lambda: tex.thd_read_half_tensor(x, cu.long(), 1))

    def test_log_sum_exps(self):
        cu, (_, second) = boundaries(*self.LENGTHS), self.halves(self.LENGTHS)
        lse, step = torch.randn(3, 28), torch.randn(3, 15)
        step[0, 2] = lse[0, second[2]] = lse[1, second[3]] = -math.inf
        want = lse.clone()
        want[:, second] = (lse[:, second].double().exp() + step[:, :14].double().exp()).log().float()
        self.near(tex.thd_read_second_half_lse(lse, cu, True, 15), torch.nn.functional.pad(lse[:, second], (0, 1)))
        tex.thd_second_half_lse_correction(lse, step, cu, True)
        self.assertEqual(lse[0, second[2]].item(), -math.inf)
        self.assertTrue(torch.allclose(lse, want))
        square, step = torch.randn(4, 3, 16), torch.randn(4, 3, 8)
        want, read = square.double(), torch.zeros(4, 3, 8)
        for b, n in enumerate(self.LENGTHS):
            read[b, :, :n // 2] = square[b, :, n // 2:n]
            want[b, :, n // 2:n] = (want[b, :, n // 2:n].exp() + step[b, :, :n // 2].double().exp()).log()
        self.near(tex.thd_read_second_half_lse(square, cu, False, 8), read)
        tex.thd_second_half_lse_correction(square, step, cu, False)
        self.near(square, want)
        self.refuses("second halves of lse have 8", lambda: tex.thd_second_half_lse_correction(square, step[..., :7], cu, False))
        self.refuses(r"float32 \[H, T\]", lambda: tex.thd_read_second_half_lse(square, cu, True, 8))

    def test_outputs(self):
        cu, (_, second) = boundaries(*self.LENGTHS), self.halves(self.LENGTHS)
        old, new, total = torch.randn(3, 28), torch.randn(3, 28), torch.randn(3, 28)
        old[1, 5] = new[1, 5] = total[1, 5] = -math.inf  # a row without keys
        for dtype in (torch.float32, torch.bfloat16):
            out, step = torch.randn(29, 3, 4).to(dtype), torch.randn(29, 3, 4).to(dtype)
            out[5, 1] = step[5, 1] = 0
            weights = [(x - total).double().exp().nan_to_num(0).t().unsqueeze(-1) for x in (old, new)]
            want = out.double()
            want[:28] = want[:28] * weights[0] + step[:28].double() * weights[1]
            got = out.clone()
            tex.thd_out_correction(got, step, old, total, new, cu, False, True)
            self.near(got, want, 1e-5 if dtype == torch.float32 else 1e-2)
            half_new = new[:, second]
            want = out[:28].double()
            want[second] = (want * weights[0])[second] + step[:14].double() * weights[1][second]
            got = out[:28].clone()
            tex.thd_out_correction(got, step[:14], old, total, half_new, cu, True, True)
            self.near(got, want, 1e-5 if dtype == torch.float32 else 1e-2)
        square_old, square_new, square_total = (torch.zeros(4, 3, 16) for _ in range(3))
        begin = 0
        for b, n in enumerate(self.LENGTHS):
            for square, flat in ((square_old, old), (square_new, new), (square_total, total)):
                square[b, :, :n] = flat[:, begin:begin + n]
            begin += n
        flat, square = out[:28].clone(), out[:28].clone()
        tex.thd_out_correction(flat, step[:28], old, total, new, cu, False, True)
        tex.thd_out_correction(square, step[:28], square_old, square_total, square_new, cu, False, False)
        self.assertTrue(torch.equal(flat, square))
        self.refuses("all extents but the number of tokens must be equal", lambda: tex.thd_out_correction(flat, step[:28, :1], old, total, new, cu, False, True))

    def test_gradients(self):
        cu, halves = boundaries(*self.LENGTHS), self.halves(self.LENGTHS)
        for shape, dim in (((28, 2, 3), 0), ((2, 28, 2, 3), 1)):
            for actions in (("add", "none"), ("none", "add"), ("copy", "none"), ("none", "copy"), ("copy", "zero"), ("zero", "copy"), ("add", "copy"),
                            ("copy", "add")):
                grad, both = torch.randn(shape), all(a in ("add", "copy") for a in actions)
                step = torch.randn([n if i != dim or both else n // 2 for i, n in enumerate(shape)])
                want = grad.clone()
                for tokens, action in zip(halves, actions):
                    source = step.index_select(dim, tokens) if both else step
                    at = (slice(None),) * dim + (tokens,)
                    want[at] = {"none": lambda: want[at], "add": lambda: want[at] + source, "copy": lambda: source, "zero": lambda: 0.0}[action]()
                tex.thd_grad_correction(grad, step, cu, *actions)
                self.near(grad, want)
        codes = torch.zeros(28, 2, 3, dtype=torch.uint8)
        self.refuses("not added as bytes", lambda: tex.thd_grad_correction(codes, codes[:14], cu, "add", "none"))
        self.refuses("second_half is 'mul'", lambda: tex.thd_grad_correction(codes, codes, cu, "copy", "mul"))
        self.refuses(r"\(copy, none\) takes 14 of 28", lambda: tex.thd_grad_correction(codes, codes, cu, "copy", "none"))
        self.refuses("grad is torch.uint8 and grad_per_step torch.float32", lambda: tex.thd_grad_correction(codes, codes[:14].float(), cu, "copy", "none"))
        self.refuses("all extents but the number of tokens must be equal", lambda: tex.thd_grad_correction(codes, codes[:14, :1], cu, "copy", "none"))

    def test_orders_of_ranks(self):
        lengths, ranks = (8, 16, 0, 24), 4
        order = []
        for r in range(ranks):
            begin = 0
            for n in lengths:
                chunk = n // (2 * ranks)
                order += [*range(begin + r * chunk, begin + (r + 1) * chunk), *range(begin + n - (r + 1) * chunk, begin + n - r * chunk)]
                begin += n
        cu, x = boundaries(*lengths), torch.randn(48, 3)
        got = torch.cat([tex.thd_get_partitioned_indices(cu, 48, ranks, r) for r in range(ranks)])
        self.assertEqual((got.tolist(), got.dtype), (order, torch.int32))
        shuffled = tex.thd_sequence_order_to_cp_rank_order(x, cu, ranks, 48)
        self.near(shuffled, x[order])
        self.near(tex.thd_cp_rank_order_to_sequence_order(shuffled, cu, ranks, 48), x)
        self.refuses("48 tokens do not divide into 2 chunks for each of 5 ranks", lambda: tex.thd_get_partitioned_indices(cu, 48, 5, 0))
        self.refuses("rank is 4", lambda: tex.thd_get_partitioned_indices(cu, 48, 4, 4))
        self.refuses("total_tokens says 40", lambda: tex.thd_sequence_order_to_cp_rank_order(x, cu, ranks, 40))

    def test_valid_tokens(self):
        out, inp = torch.zeros(10, 2), torch.arange(20.0).view(10, 2) + 1
        tex.thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, boundaries(4, 2, 3), boundaries(3, 0, 3))
        valid = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
        self.near(out, torch.where(valid.view(-1, 1), inp, 0.0))
        self.refuses("each pair must be equal", lambda: tex.thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp[:3], boundaries(4), boundaries(3)))


if __name__ == "__main__":
    unittest.main()
