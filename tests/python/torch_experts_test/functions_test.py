"""Tests te_fl.pytorch's functions for mixtures of experts against PyTorch in FP64: values and gradients, eager and compiled; refusals; a mixture that
learns."""

import itertools
import os
import unittest
from unittest import mock

import torch

import te_fl
import te_fl.pytorch as te
from te_fl.errors import Error, InvalidArgument, Unsupported
from te_fl.pytorch.functions.general_gemm import general_gemm
from te_fl.pytorch.functions.permutation import (moe_permute, moe_permute_and_pad_with_probs, moe_permute_with_probs, moe_sort_chunks_by_index,
                                       moe_sort_chunks_by_index_with_probs, moe_unpermute)
from te_fl.pytorch.functions.router import RoutingMapFormat, fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss, fused_topk_with_score_function

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}  # relative to the norm of the whole tensor


def drawn(*shape, seed=1, dtype=torch.float32, least=None):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape[0] if isinstance(shape[0], tuple) else shape, generator=generator) if least is None else least + torch.rand(*shape, generator=generator)
    return values.to(DEVICE, dtype)


def make_mask(tokens=13, experts=6, top_k=2, seed=2):
    """Makes a mask [tokens, experts]; the last expert has no token, the first token no expert."""
    scores = drawn(tokens, experts, seed=seed)
    scores[:, -1] = -100
    mask = torch.zeros(tokens, experts, dtype=torch.bool, device=DEVICE).scatter_(1, scores.topk(top_k).indices, True)
    mask[0] = False
    return mask


class Compared(unittest.TestCase):
    def compare(self, served, oracle, *inputs, compiled=True):
        """Compares floating-point outputs of served(*inputs) and their gradients with oracle's in FP64; other outputs must be equal."""
        wide = [x.detach().double().requires_grad_() for x in inputs]
        wanted = oracle(*wide)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        floating = [w for w in wanted if w.is_floating_point()]
        grads = [drawn(w.shape, seed=9 + i) for i, w in enumerate(floating)]
        torch.autograd.backward(floating, [g.double() for g in grads])
        ways = [served] + [torch.compile(served, backend="aot_eager", fullgraph=True)] * compiled
        torch.compiler.reset()  # the graphs of all settings count towards one function's recompile limit
        for function in ways:
            own = [x.detach().clone().requires_grad_() for x in inputs]
            got = function(*own)
            got = got if isinstance(got, tuple) else (got,)
            self.assertEqual(len(got), len(wanted))
            for a, b in zip(got, wanted):
                self.near(a, b, inputs[0].dtype)
            torch.autograd.backward([a for a in got if a.is_floating_point()],
                                    [g.to(a.dtype) for g, a in zip(grads, (a for a in got if a.is_floating_point()))])
            for a, b in zip(own, wide):
                self.assertEqual(a.grad.dtype, a.dtype)
                self.near(a.grad, b.grad, inputs[0].dtype)

    def near(self, got, want, dtype):
        self.assertEqual(got.shape, want.shape)
        if not want.is_floating_point():
            self.assertTrue(torch.equal(got, want.to(got.dtype)))
        else:
            self.assertLessEqual((got.double() - want).norm().item(), TOLERANCE[dtype] * max(want.norm().item(), 1e-30))


class Permutation(Compared):
    def pairs(self, mask):
        """Returns the (expert, token) pair of each permuted row."""
        return mask.t().nonzero().unbind(1)

    def test_by_mask_there_and_back(self):
        for dtype, more, kind in ((torch.float32, 0, torch.bool), (torch.bfloat16, 0, torch.int32), (torch.float32, 5, torch.int32)):
            mask = make_mask()
            experts, tokens = self.pairs(mask)
            count = len(tokens) + more
            factors = drawn(*mask.shape, seed=4, least=0.1)

            def served(x, probs, merging):
                y, permuted_probs, rows = moe_permute_with_probs(x, probs, mask.to(kind), count)  # noqa: B023
                z, rows_alone = moe_permute(x, mask.to(kind), count)  # noqa: B023
                return y, permuted_probs, moe_unpermute(y * 2, rows, merging, x.shape), moe_unpermute(z, rows_alone)

            def oracle(x, probs, merging):
                empty = x.new_zeros(more, x.shape[1])  # noqa: B023
                y = torch.cat([x[tokens], empty])  # noqa: B023
                back = torch.zeros_like(x).index_add(0, tokens, 2 * x[tokens] * merging[tokens, experts].unsqueeze(1))  # noqa: B023
                return y, torch.cat([probs[tokens, experts], empty[:, 0]]), back, x * mask.sum(1, keepdim=True)  # noqa: B023

            with self.subTest(dtype=dtype, more=more):
                self.compare(served, oracle, drawn(13, 8, dtype=dtype), drawn(13, 6, seed=3, least=0.1), factors)

    def test_by_index_there_and_back(self):
        for dtype, rows in ((torch.float32, 0), (torch.bfloat16, 0), (torch.float32, 20), (torch.float32, 30)):
            indices = drawn(13, 6, seed=2).topk(2).indices.to(torch.int64 if rows else torch.int32)
            count = rows or 26
            order = torch.argsort(indices.view(-1), stable=True)[:count]

            def served(x, merging):
                y, row_id_map = moe_permute(x, indices, rows, map_type="index")  # noqa: B023
                return y, moe_unpermute(y * 2, row_id_map, merging, map_type="index")

            def oracle(x, merging):
                y = torch.cat([x[order // 2], x.new_zeros(max(count - 26, 0), 8)])  # noqa: B023
                part = 2 * x[order // 2] * merging.view(-1)[order].unsqueeze(1)  # noqa: B023
                return y, torch.zeros_like(x).index_add(0, order // 2, part)  # noqa: B023

            with self.subTest(dtype=dtype, rows=rows):
                self.compare(served, oracle, drawn(13, 8, dtype=dtype), drawn(13, 2, seed=3, least=0.1))

    def test_the_map_by_index_is_in_the_order_of_places(self):
        y, rows = moe_permute(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1, 0], [0, 2], [2, 1]]), 0, map_type="index")
        self.assertEqual((y.view(-1).tolist(), rows.tolist()), ([1, 2, 1, 3, 2, 3], [2, 1, 5, 0, 4, 3]))
        y, rows = moe_permute(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0, 1], [1, 1], [0, 0]]), 3)
        self.assertEqual((y.view(-1).tolist(), rows.tolist()), ([2, 1, 2], [[-1, 0, -1], [1, 2, -1]]))

    def test_padded(self):
        mask = make_mask()
        counts = mask.sum(0)
        experts, tokens = self.pairs(mask)
        for align in (4, 1):
            padded = [-(-int(c) // align) * align for c in counts]
            where = torch.cat([sum(padded[:e]) + torch.arange(int(c), device=DEVICE) for e, c in enumerate(counts)])

            def served(x, probs):
                y, permuted_probs, rows, offsets, sizes = moe_permute_and_pad_with_probs(x, probs, mask, counts, align)  # noqa: B023
                self.assertEqual(sizes.tolist(), padded)  # noqa: B023
                self.assertEqual(offsets is None, align == 1)  # noqa: B023
                return y, permuted_probs, moe_unpermute(y * permuted_probs.unsqueeze(1), rows, restore_shape=x.shape, pad_offsets=offsets)

            def oracle(x, probs):
                p = probs[tokens, experts]
                y, q = x.new_zeros(sum(padded), 8).index_copy(0, where, x[tokens]), x.new_zeros(sum(padded)).index_copy(0, where, p)  # noqa: B023
                return y, q, torch.zeros_like(x).index_add(0, tokens, x[tokens] * p.unsqueeze(1))

            self.compare(served, oracle, drawn(13, 8), drawn(13, 6, seed=3, least=0.1), compiled=False)

    def test_chunks(self):
        sizes, order = torch.tensor([3, 0, 5, 4], device=DEVICE), torch.tensor([2, 0, 3, 1], device=DEVICE, dtype=torch.int32)

        def oracle(x, *probs):
            return tuple(torch.cat([t.split(sizes.tolist())[i] for i in order]) for t in (x, *probs))

        self.compare(lambda x, p: moe_sort_chunks_by_index_with_probs(x, p, sizes, order), oracle, drawn(12, 8), drawn(12, seed=3))
        self.compare(lambda x: moe_sort_chunks_by_index(x, sizes, order), oracle, drawn(12, 8, dtype=torch.bfloat16))
        for dtype in (torch.float64, torch.int32, torch.bool, torch.uint8):
            x, p = (drawn(*shape, seed=4).mul(5).to(dtype) for shape in ((12, 8), (12,)))
            self.assertTrue(torch.equal(moe_sort_chunks_by_index(x, sizes, order), oracle(x)[0]))
            for got, want in zip(moe_sort_chunks_by_index_with_probs(x, p, sizes, order), oracle(x, p)):
                self.assertTrue(torch.equal(got, want))
        x = drawn(12, 8).double().requires_grad_()
        weights = torch.arange(96.0, dtype=torch.float64, device=DEVICE).view(12, 8)
        got, want = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (moe_sort_chunks_by_index(x, sizes, order), oracle(x)[0]))
        self.assertTrue(torch.equal(got, want))

    def test_no_tokens_and_no_experts(self):
        x = torch.empty(0, 8, device=DEVICE, requires_grad=True)
        y, p, rows = moe_permute_with_probs(x, torch.empty(0, 4, device=DEVICE), torch.empty(0, 4, device=DEVICE, dtype=torch.int32), 0)
        z = moe_unpermute(y, rows, restore_shape=x.shape)
        z.sum().backward()
        self.assertEqual((tuple(y.shape), tuple(p.shape), tuple(z.shape), tuple(x.grad.shape)), ((0, 8), (0,), (0, 8), (0, 8)))
        probs = torch.empty(0, 4, device=DEVICE, requires_grad=True)
        moe_unpermute(y.detach(), rows, probs).sum().backward()  # the gradient of sum() is expanded, with strides of 0
        self.assertEqual(tuple(probs.grad.shape), (0, 4))
        y, rows = moe_permute(x, torch.empty(0, 2, device=DEVICE, dtype=torch.int32), 0, map_type="index")
        self.assertEqual((tuple(y.shape), rows.numel()), ((0, 8), 0))
        x = drawn(3, 8).requires_grad_()
        y, rows = moe_permute(x, torch.zeros(3, 4, device=DEVICE), 2)
        moe_unpermute(y, rows).sum().backward()
        self.assertEqual((y.count_nonzero().item(), x.grad.count_nonzero().item()), (0, 0))

    def test_what_is_refused(self):
        x, mask = drawn(3, 8), torch.ones(3, 4, device=DEVICE)
        rows = moe_permute(x, mask, 12)[1]
        for words, call in (
                ("map_type is 'both'", lambda: moe_permute(x, mask, 3, map_type="both")),
                ("num_out_tokens is 0", lambda: moe_permute(x, mask, 0)),
                ("num_out_tokens is -1", lambda: moe_permute(x, mask.int(), -1, map_type="index")),
                ("for 3 tokens", lambda: moe_permute(x, mask[:2], 3)),
                ("hidden size", lambda: moe_permute(x[0], mask, 3)),
                ("probs has shape", lambda: moe_permute_with_probs(x, mask[:, :2], mask, 12)),
                ("align_size is 0", lambda: moe_permute_and_pad_with_probs(x, mask, mask, mask.sum(0), 0)),
                ("tokens_per_expert is None", lambda: moe_permute_and_pad_with_probs(x, mask, mask, None, 2)),
                ("merging_probs has shape", lambda: moe_unpermute(x, rows, mask.t())),
                ("restore_shape is", lambda: moe_unpermute(x, rows, restore_shape=(4, 8))),
                ("row_id_map has", lambda: moe_unpermute(x, rows.view(-1), mask[:2], map_type="index")),
                ("both", lambda: moe_unpermute(x, rows, mask, probs=mask)),
                ("each chunk", lambda: moe_sort_chunks_by_index(x, torch.tensor([1, 2]), torch.tensor([0])))):
            with self.subTest(words), self.assertRaisesRegex((Error, ValueError), words):
                call()
        with self.assertRaisesRegex(InvalidArgument, "sum to 4; inp has 3"):
            moe_sort_chunks_by_index(x, torch.tensor([1, 3]), torch.tensor([0, 1]))
        for order in ([0, 0], [0, 2], [-1, 0]):
            with self.subTest(order), self.assertRaisesRegex(InvalidArgument, "each of the 2 chunks once"):
                moe_sort_chunks_by_index(x, torch.tensor([1, 2]), torch.tensor(order))
        with self.assertRaisesRegex(InvalidArgument, "no chunk has fewer than 0"):
            moe_sort_chunks_by_index(x, torch.tensor([4, -1]), torch.tensor([0, 1]))
        with te.quantized_model_init(recipe=te.recipe.Float8CurrentScaling()):
            weight = te.Linear(16, 16, device=DEVICE).weight
        with self.assertRaisesRegex(Unsupported, "dequantize"):
            moe_permute(weight, torch.ones(16, 4), 3)

    def test_a_pair_of_probability_0_carries_no_token(self):
        """Transformer Engine's kernels treat a (token, expert) pair with probability 0 as padding of the expert's rows; the pair's row nevertheless
        contributes to the gradient."""
        x, mask = drawn(3, 8).requires_grad_(), torch.ones(3, 2, dtype=torch.bool, device=DEVICE)
        probs = torch.tensor([[0.5, 0.0], [-0.0, 1.0], [0.25, 0.75]], device=DEVICE)
        y, moved, rows = moe_permute_with_probs(x, probs, mask, 6)
        want = torch.cat([x, x]) * (probs.t().reshape(-1, 1) != 0)
        self.assertTrue(torch.equal(y, want))
        self.assertTrue(torch.equal(moved, probs.t().reshape(-1)))
        self.assertTrue(torch.equal(rows, torch.arange(6, dtype=torch.int32, device=DEVICE).view(2, 3)))
        y.sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.full_like(x, 2)))

    def test_a_row_out_of_range_is_refused_and_not_written(self):
        x, mask = drawn(3, 8), torch.ones(3, 4, device=DEVICE)
        self.addCleanup(te_fl.reload)
        with mock.patch.dict(os.environ, TE_FL_VALIDATE="1"):
            te_fl.reload()
            with self.assertRaisesRegex(Error, r"routing_map\[\d+\] has row \d+, but the output has 5 rows"):
                moe_permute(x, mask, 5)  # the mask has 12 pairs
            with self.assertRaisesRegex(Error, "row_id_map"):
                moe_unpermute(x, torch.full((4, 3), 3, dtype=torch.int32, device=DEVICE), mask)


def compute_scores(logits, function):
    return {"softmax": lambda: torch.softmax(logits, -1), "sigmoid": lambda: torch.sigmoid(logits),
            "sqrtsoftplus": lambda: torch.nn.functional.softplus(logits).sqrt()}[function]()


def routed(logits, top_k, before, groups, group_top_k, factor, function, bias):
    """Computes (probabilities, mask, indices) by the definition in docs/numerics.md."""
    scores = compute_scores(logits, function) if function != "softmax" or before else logits
    ranked = scores.detach() + (0 if bias is None else bias.double())
    if groups:
        parts = ranked.unflatten(-1, (groups, -1))
        best = parts.topk(top_k // group_top_k).values.sum(-1).topk(group_top_k).indices
        inside = torch.zeros(parts.shape[:-1], dtype=torch.bool, device=logits.device).scatter(-1, best, True)
        ranked = parts.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)
    indices = ranked.topk(top_k).indices
    chosen = scores.gather(-1, indices)
    if function == "softmax" and not before:
        chosen = torch.softmax(chosen, -1)
    elif function != "softmax" and top_k > 1:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    probs = torch.zeros_like(logits).scatter(-1, indices, chosen * (1.0 if factor is None else factor))
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, True), indices


class Router(Compared):
    def test_the_choice(self):
        bias = drawn(8, seed=5)
        for function, before, grouped, factor, biased in itertools.product(("softmax", "sigmoid", "sqrtsoftplus"), (True, False), (False, True), (None, 2.5),
                                                                           (False, True)):
            if function == "softmax" and biased or function != "softmax" and before:
                continue
            settings = (2, before, 4 if grouped else None, 2 if grouped else None, factor, function, bias if biased else None)
            with self.subTest(function=function, before=before, grouped=grouped, factor=factor, biased=biased):
                self.compare(lambda logits: fused_topk_with_score_function(logits, *settings),  # noqa: B023
                             lambda logits: routed(logits, *settings)[:2], drawn(3, 5, 8), compiled=factor is None)  # noqa: B023

    def test_forms_of_the_choice(self):
        logits, settings = drawn(6, 11), (3, False, None, None, None, "sigmoid", None)
        _, mask, indices = routed(logits.double(), *settings)
        bits = fused_topk_with_score_function(logits, *settings, routing_map_format="bitmap_u8")[1]
        self.assertTrue(torch.equal((bits.unsqueeze(-1) >> torch.arange(8, device=DEVICE) & 1).flatten(1)[:, :11].bool(), mask))
        self.assertTrue(torch.equal(fused_compute_score_for_moe_aux_loss(logits, 3, "sigmoid", RoutingMapFormat.BITMAP_U8)[0], bits))
        for dtype in (torch.int16, torch.int32, torch.int64):
            indices_out = torch.empty(6, 3, dtype=dtype, device=DEVICE)

            def served(logits):
                probs, routing = fused_topk_with_score_function(logits, *settings, topk_indices=indices_out)  # noqa: B023
                self.assertIs(routing, indices_out)  # noqa: B023
                return probs

            self.compare(served, lambda logits: routed(logits, *settings)[0], logits, compiled=False)
            self.assertTrue(torch.equal(indices_out.long(), indices))

    def test_scores_and_the_loss(self):
        for function, top_k in itertools.product(("softmax", "sigmoid", "sqrtsoftplus"), (1, 2)):
            def oracle(logits):
                scores = compute_scores(logits, function)  # noqa: B023
                if function != "softmax":  # noqa: B023
                    scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
                mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(top_k).indices, True)  # noqa: B023
                return mask, scores, (2e-2 * 8 / (top_k * 13 ** 2)) * (mask.sum(0) * scores.sum(0)).sum()  # noqa: B023

            def served(logits, total=13):
                mask, scores = fused_compute_score_for_moe_aux_loss(logits, top_k, function)  # noqa: B023
                return mask, scores, fused_moe_aux_loss(scores, mask.sum(0), total, 8, top_k, 2e-2)  # noqa: B023

            with self.subTest(function=function, top_k=top_k):
                self.compare(served, oracle, drawn(13, 8))
                total = torch.tensor(13, device=DEVICE)
                self.compare(lambda logits: served(logits, total), oracle, drawn(13, 8), compiled=False)  # noqa: B023

    def test_scores_that_are_nan_or_equal(self):
        logits = drawn(4, 8)
        logits[1, 3] = float("nan")
        logits[2] = 0.5
        for function in ("softmax", "sigmoid", "sqrtsoftplus"):
            probs, mask = fused_topk_with_score_function(logits, 2, False, None, None, None, function, None)
            self.assertEqual(mask.sum(1).tolist(), [2] * 4)
            self.assertTrue(probs[[0, 2, 3]].isfinite().all())
            self.assertTrue(torch.equal(mask[2], torch.arange(8, device=DEVICE) < 2))  # among equal scores the experts with the lowest indices are
                                                                                       # selected
            y, rows = moe_permute(drawn(4, 8, seed=3), mask, 8)
            self.assertTrue(moe_unpermute(y, rows, probs)[[0, 2, 3]].isfinite().all())

    def test_what_is_refused(self):
        logits, settings = drawn(4, 8), (2, False, None, None, None)
        for words, call in (
                ("score_function is 'relu'", lambda: fused_topk_with_score_function(logits, *settings, "relu", None)),
                ("qb_histogram", lambda: fused_topk_with_score_function(logits, *settings, "sigmoid", None, qb_histogram=logits)),
                ("routing_map_format is 7", lambda: fused_topk_with_score_function(logits, *settings, "sigmoid", None, 7)),
                ("leave routing_map_format out", lambda: fused_topk_with_score_function(logits, *settings, "sigmoid", None, 1, logits.int())),
                ("topk_indices is torch.float32", lambda: fused_topk_with_score_function(logits, *settings, "sigmoid", None, topk_indices=logits)),
                ("topk", lambda: fused_topk_with_score_function(logits, 9, False, None, None, None, "sigmoid", None)),
                ("f64", lambda: fused_topk_with_score_function(logits.double(), *settings, "sigmoid", None)),
                ("probs has shape", lambda: fused_moe_aux_loss(logits[0], torch.ones(8), 4, 8, 2, 0.1))):
            with self.subTest(words), self.assertRaisesRegex((Error, ValueError), words):
                call()


class Product(Compared):
    def test_layouts(self):
        x, w, dy, bias = drawn(2, 5, 8), drawn(6, 8, seed=3), drawn(10, 6, seed=4), drawn(6, seed=5)
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
            a, b, g = x.to(dtype), w.to(dtype), dy.to(dtype)
            wide, flat = (t.double() for t in (b, a.view(10, 8)))
            y, none, *rest = general_gemm(b, a, torch.float32, layout="TN", bias=bias)
            self.assertEqual((y.dtype, none, rest), (torch.float32, None, [None, None]))
            self.near(y, (flat @ wide.t() + bias.double()).view(2, 5, 6), torch.float32)
            dw, db = general_gemm(a.view(10, 8), g, layout="NT", grad=True, bias=bias.to(dtype))[:2]
            for got, want in ((general_gemm(b, g, layout="NN", grad=True)[0], g.double() @ wide), (dw, g.double().t() @ flat), (db, g.double().sum(0))):
                self.assertEqual(got.dtype, dtype)
                torch.testing.assert_close(got.double(), want, atol=tolerance * 16, rtol=tolerance)
            out = torch.ones_like(dw)
            self.assertIs(general_gemm(a.view(10, 8), g, layout="NT", out=out, accumulate=True, alpha=2.0, beta=3.0)[0], out)
            torch.testing.assert_close(out.double(), 2 * g.double().t() @ flat + 3, atol=tolerance * 64, rtol=tolerance)

    def test_matrices_without_elements(self):
        for layout, a, b, shape in (("TN", (6, 0), (2, 5, 0), (2, 5, 6)), ("NN", (0, 6), (5, 0), (5, 6)), ("NT", (0, 6), (0, 5), (5, 6)),
                                    ("TN", (0, 8), (5, 8), (5, 0)), ("NT", (8, 0), (8, 5), (5, 0))):
            with self.subTest(layout=layout, a=a, b=b):
                y = general_gemm(drawn(*a), drawn(*b), layout=layout)[0]
                self.assertEqual((tuple(y.shape), y.count_nonzero().item()), (shape, 0))

    def test_what_is_refused(self):
        a, b = drawn(6, 8), drawn(4, 8)
        for words, options in (("gelu", {"gelu": True}), ("quantization_params", {"quantization_params": 1}), ("ub_type", {"ub_type": 1}),
                               ("sums over 8 values, A over 6", {"layout": "NN"}), ("layout is 'TT'", {"layout": "TT"}),
                               ("accumulate=True", {"accumulate": True}), ("beta is 2.0", {"beta": 2.0}), ("bias gradient", {"grad": True, "bias": drawn(6)})):
            with self.subTest(words), self.assertRaisesRegex((Error, ValueError), words):
                general_gemm(a, b, **options)
        with self.assertRaisesRegex(Unsupported, "torch.float64"):
            general_gemm(a.double(), b.double())


class Padding(Compared):
    def test_rows_are_padded_and_taken_away(self):
        splits = [3, 0, 4, 7]
        pad, unpad = te.Fp8Padding(4, 4), te.Fp8Unpadding(4, 4)

        def served(x):
            y, padded = pad(x, splits)
            self.assertEqual(padded, [4, 0, 4, 8])
            return y, unpad(y * 2, splits)

        def oracle(x):
            parts = x.view(-1, 8).split(splits)
            return torch.cat([torch.nn.functional.pad(p, (0, 0, 0, -len(p) % 4)) for p in parts]), 2 * x.view(-1, 8)

        for dtype in (torch.float32, torch.bfloat16):
            self.compare(served, oracle, drawn(2, 7, 8, dtype=dtype), compiled=False)

    def test_sizes_that_the_program_writes(self):
        x, splits = drawn(7, 8).requires_grad_(), [3, 4]
        y, padded = te.Fp8Padding(2, 4)(x, splits)
        splits[:], padded[:] = (4, 3), (8, 0)
        y.sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.ones(7, 8, device=DEVICE)))

    def test_the_size_is_the_recipes(self):
        x, pad = drawn(32, 8), te.Fp8Padding(2)
        self.assertEqual(pad(x[:20], [4, 16])[1], [16, 16])
        self.assertEqual(pad.align_size, 16)
        y, splits = pad(x, [16, 16])
        self.assertIs(y, x)
        self.assertIs(te.Fp8Unpadding(2)(x, splits), x)
        with self.assertRaisesRegex(InvalidArgument, "m_splits has 1"):
            pad(x, [32])


if __name__ == "__main__":
    unittest.main()
