"""Tests NVIDIA's permutation, router, auxiliary loss and padding on te-fl, forward and backward, against PyTorch in FP64, and a mixture of experts
that learns. Also tests the PyTorch replacements that a host uses for the package's Triton kernels: permutation by a routing map, cross-entropy."""

import itertools
import types
import unittest
from unittest import mock
import warnings

import inside_package  # noqa: F401
import torch
from torch.utils import _triton

import te_fl
import transformer_engine.pytorch as te
import transformer_engine_torch as tex  # registered by inside_package
from te_fl.errors import Error
from te_fl.inside import host_kernels
from transformer_engine.common import recipe
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.permutation import (moe_permute, moe_permute_and_pad_with_probs, moe_permute_with_probs, moe_sort_chunks_by_index,
                                                    moe_sort_chunks_by_index_with_probs, moe_unpermute)
from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss, fused_topk_with_score_function

if not hasattr(te_fl.ops, "moe_permute_fwd"):
    raise unittest.SkipTest("this te-fl has no ops of experts")


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen(tokens, experts, top_k, seed=0):
    """Returns INT32 [tokens, top_k]: distinct experts for each token; no token selects the last expert."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    scores[:, -1] = -1
    return scores.topk(top_k).indices.to(torch.int32)


class Compared(unittest.TestCase):
    def near(self, got, want, tolerance):
        """Asserts that the error's norm is at most `tolerance` times the norm of the whole tensor."""
        got, want = got.detach().double(), want.detach().double()
        self.assertEqual(got.shape, want.shape)
        self.assertLessEqual((got - want).norm().item(), tolerance * max(want.norm().item(), 1e-30))

    def refused(self, words, call, *arguments, **options):
        with self.assertRaises(Error) as caught:
            call(*arguments, **options)
        self.assertIn(words, str(caught.exception))


class Permutation(Compared):
    def order(self, indices, rows):
        """Returns the (token, choice) pairs in the order of the output's rows; there are tokens * top_k pairs."""
        return torch.argsort(indices.reshape(-1).long(), stable=True)[:rows]

    def test_by_hand(self):
        x = torch.tensor([[1.0], [2.0], [3.0]])
        y, rows = moe_permute(x, torch.tensor([[1, 0], [0, 2], [2, 1]], dtype=torch.int32), 0, map_type="index")
        self.assertEqual(y.view(-1).tolist(), [1, 2, 1, 3, 2, 3])
        self.assertEqual(rows.tolist(), [2, 1, 5, 0, 4, 3])  # pairs of the tokens' first experts come before those of their second experts

    def test_compiled(self):
        x, indices = drawn(6, 4).requires_grad_(), chosen(6, 5, 2)
        permute = torch.compile(lambda x: moe_permute(x, indices, 12, map_type="index"), fullgraph=True, backend="aot_eager")
        for got, want in zip(permute(x), moe_permute(x, indices, 12, map_type="index")):
            self.assertTrue(torch.equal(got, want))
        # If Triton were reported as available, inductor would look for CUDA's driver.
        self.assertFalse(_triton.has_triton())

    def test_there_and_back(self):
        for dtype, tolerance, rows in ((torch.float32, 1e-6, 0), (torch.bfloat16, 5e-3, 0), (torch.float32, 1e-6, 10), (torch.float32, 1e-6, 17)):
            tokens, top_k = 7, 2
            x, indices = drawn(tokens, 9, dtype=dtype).requires_grad_(), chosen(tokens, 4, top_k)
            probs = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(3)).requires_grad_()
            count = rows or tokens * top_k
            pairs = self.order(indices, count)
            y, row_id_map = moe_permute(x, indices, rows, map_type="index")
            self.assertEqual(tuple(y.shape), (count, 9))
            self.assertTrue(torch.equal(y[:len(pairs)].detach(), x.detach()[pairs // top_k]))
            self.assertEqual(y[len(pairs):].count_nonzero().item(), 0)
            where = torch.full((tokens * top_k,), -1, dtype=torch.int32)
            where[pairs] = torch.arange(len(pairs), dtype=torch.int32)
            self.assertTrue(torch.equal(row_id_map.view(top_k, tokens), where.view(tokens, top_k).t()))
            z = moe_unpermute(y * 2, row_id_map, probs, map_type="index")
            dz = drawn(tokens, 9, dtype=dtype, seed=4)
            z.backward(dz)
            wide, factors = x.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
            held = (where >= 0).view(tokens, top_k, 1)
            want = (2 * wide.unsqueeze(1) * factors.unsqueeze(-1) * held).sum(1)
            want.backward(dz.double())
            for got, expected in ((z, want), (x.grad, wide.grad), (probs.grad, factors.grad)):
                self.near(got, expected, tolerance)

    def test_one_expert_each_needs_no_probabilities(self):
        x, indices = drawn(6, 4).requires_grad_(), torch.tensor([[2], [0], [1], [0], [2], [2]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning about the dtype of the indices
            y, rows = moe_permute(x, indices, 0, map_type="index")
        z = moe_unpermute(y, rows, map_type="index")
        self.assertTrue(torch.equal(z, x))
        z.sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.ones_like(x)))

    def test_bad_input(self):
        x, kind = drawn(3, 4), TE_DType[torch.float32]
        self.refused("dtype says torch.bfloat16", tex.moe_permute_fwd, x, TE_DType[torch.bfloat16], chosen(3, 4, 2), 0, [], 6)
        self.refused("have 6", tex.moe_unpermute_fwd, x, kind, torch.zeros(5, dtype=torch.int32), torch.empty(0), 3, 2)
        with self.assertRaises(Error):  # a row index outside of the input
            tex.moe_unpermute_fwd(x, kind, torch.tensor([0, 1, 3], dtype=torch.int32), torch.empty(0), 3, 1)


def compute_scores(logits, function):
    return {"softmax": lambda: torch.softmax(logits, -1), "sigmoid": lambda: torch.sigmoid(logits),
            "sqrtsoftplus": lambda: torch.nn.functional.softplus(logits).sqrt()}[function]()


def routed(logits, top_k, before, groups, group_top_k, factor, function, bias):
    """Returns (probabilities, indices) in FP64, for autograd."""
    scores = compute_scores(logits, function) if function != "softmax" or before else logits
    choice = scores.detach() + (0 if bias is None else bias.double())
    if groups:
        by_group = choice.view(*choice.shape[:-1], groups, -1)
        best = by_group.topk(top_k // group_top_k).values.sum(-1).topk(group_top_k).indices
        outside = torch.ones(by_group.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
        choice = by_group.masked_fill(outside.unsqueeze(-1), float("-inf")).view(choice.shape)
    indices = choice.topk(top_k).indices
    values = scores.gather(-1, indices)
    if function == "softmax" and not before:
        values = torch.softmax(values, -1)
    elif function != "softmax" and top_k > 1:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(logits).scatter(-1, indices, values * (1.0 if factor is None else factor)), indices


class Router(Compared):
    def bits(self, routing):
        return torch.stack([(routing >> i) & 1 for i in range(8)], -1).flatten(-2)

    def test_choice_and_probabilities(self):
        experts, bias = 12, drawn(12, seed=5) * 0.1
        cases = [(function, before, groups, b, top_k) for function, before, groups, b, top_k in itertools.product(
            ("softmax", "sigmoid", "sqrtsoftplus"), (False, True), ((None, None), (4, 2)), (None, bias), (1, 4))
            if not (function == "softmax" and b is not None) and not (before and function != "softmax") and not (groups[0] and top_k == 1)]
        for (function, before, (groups, group_top_k), b, top_k), (dtype, tolerance) in itertools.product(
                cases, ((torch.float32, 1e-6), (torch.bfloat16, 6e-3))):
            logits = drawn(5, 3, experts, dtype=dtype, seed=7).requires_grad_()
            probs, routing = fused_topk_with_score_function(logits, top_k, before, groups, group_top_k, 1.5, function, b)
            wide = logits.detach().double().requires_grad_()
            want, indices = routed(wide, top_k, before, groups, group_top_k, 1.5, function, b)
            self.assertTrue(torch.equal(routing, torch.zeros(want.shape, dtype=torch.bool).scatter(-1, indices, True)))
            self.near(probs, want, tolerance)
            grad = drawn(*probs.shape, dtype=dtype, seed=8)
            probs.backward(grad)
            want.backward(grad.double())
            self.near(logits.grad, wide.grad, max(tolerance, 2e-6))

    def test_forms_of_the_choice(self):
        logits = drawn(6, 11)
        want, indices = routed(logits.double(), 3, False, None, None, None, "sigmoid", None)
        gradients = []
        for options in (dict(routing_map_format="bytemap"), dict(routing_map_format="bitmap_u8"),
                        *(dict(topk_indices=torch.empty(6, 3, dtype=kind)) for kind in (torch.int16, torch.int32, torch.int64))):
            x = logits.clone().requires_grad_()
            probs, routing = fused_topk_with_score_function(x, 3, False, None, None, None, "sigmoid", None, **options)
            self.near(probs, want, 1e-6)
            if "topk_indices" in options:
                self.assertTrue(torch.equal(routing.long(), indices))
            else:
                as_bytes = routing if routing.dtype == torch.bool else self.bits(routing)[:, :11]
                self.assertTrue(torch.equal(as_bytes.bool(), want != 0))
            probs.backward(drawn(6, 11, seed=1))
            gradients.append(x.grad)
        for other in gradients[1:]:
            self.assertTrue(torch.equal(other, gradients[0]))

    def test_auxiliary_loss(self):
        for function, top_k, (dtype, tolerance) in itertools.product(("softmax", "sigmoid", "sqrtsoftplus"), (1, 3),
                                                                     ((torch.float32, 2e-6), (torch.bfloat16, 6e-3))):
            logits = drawn(9, 8, dtype=dtype).requires_grad_()
            routing, scores = fused_compute_score_for_moe_aux_loss(logits, top_k, function)
            wide = logits.detach().double().requires_grad_()
            want = compute_scores(wide, function)
            self.assertTrue(torch.equal(routing, torch.zeros(9, 8, dtype=torch.bool).scatter(-1, want.topk(top_k).indices, True)))
            if function != "softmax":
                want = want / (want.sum(-1, keepdim=True) + 1e-20)
            self.assertEqual(scores.dtype, torch.float32)
            self.near(scores, want, 2e-6)
            tokens = routing.sum(0)
            for total in (9, torch.tensor(9)):
                loss = fused_moe_aux_loss(scores, tokens, total, 8, top_k, 0.5)
                self.assertEqual(tuple(loss.shape), ())
                oracle = (want.sum(0) * tokens).sum() * 8 * 0.5 / (top_k * 9 * 9)
                self.near(loss, oracle, 2e-6)
            loss.backward()
            oracle.backward()
            self.near(logits.grad, wide.grad, tolerance)

    def test_bad_input_writes_nothing(self):
        logits, indices = drawn(4, 8), torch.full((4, 2), 7, dtype=torch.int32)
        for options in (dict(topk=9), dict(topk=0), dict(num_groups=3, group_topk=1), dict(score_function="none"),
                        dict(score_function="softmax", expert_bias=drawn(8))):
            sound = dict(topk=2, use_pre_softmax=False, num_groups=None, group_topk=None, scaling_factor=None, score_function="sigmoid",
                         expert_bias=None, topk_indices=indices)
            with self.assertRaises((Error, ValueError)):
                tex.fused_topk_with_score_function_fwd(logits, **{**sound, **options})
        self.assertTrue(bool((indices == 7).all()))
        self.refused("num_rows and num_cols say (4, 7)", tex.fused_moe_aux_loss_fwd, logits, torch.zeros(8), 4, 8, 4, 7, 2, 1.0)

    def test_the_histogram_of_quantile_balancing(self):
        logits, bias, bounds = drawn(33, 40), torch.linspace(-0.2, 0.2, 40), torch.tensor([-1.0, 1.0])
        scores = torch.sigmoid(logits.double())
        order = (scores + bias).sort(-1, descending=True)
        cutoff, want = order.values[:, 4], torch.zeros(40, 10, dtype=torch.int32)
        places = ((cutoff.unsqueeze(1) - scores + 1) * 5).floor().clamp(0, 9).long()
        for token in places:
            want[torch.arange(40), token] += 1
        histogram = torch.zeros_like(want)
        for mode, dense in (("two_kernel", None), ("fused_atomic", torch.empty(33, 4, dtype=torch.int16))):
            x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
            got, routing = fused_topk_with_score_function(x, 4, False, None, None, 1.5, "sigmoid", bias, topk_indices=dense, qb_histogram=histogram,
                                                          qb_bin_bounds=bounds, qb_histogram_mode=mode)
            plain, chosen_plain = fused_topk_with_score_function(y, 4, False, None, None, 1.5, "sigmoid", bias)
            self.assertTrue(torch.equal(got, plain))
            self.assertTrue(torch.equal(routing if dense is None else torch.zeros(33, 40).scatter(1, routing.long(), 1).bool(), chosen_plain))
            for loss in (got, plain):
                (loss * logits).sum().backward()
            self.assertTrue(torch.equal(x.grad, y.grad))
        self.assertTrue(torch.equal(histogram, 2 * want))
        raw = (logits, 4, None, bias, 0, None, histogram)
        self.near(tex.fused_topk_with_score_function_qb_fwd(*raw, bounds, 0)[3], cutoff, 1e-6)
        for wrong in ([1.0, 1.0], [1.0, -1.0], [float("nan"), 1.0]):
            self.refused("finite with lower < upper", tex.fused_topk_with_score_function_qb_fwd, *raw, torch.tensor(wrong), 0)


class ByRoutingMap(Compared):
    def order(self, chosen):
        """Returns the (token, expert) pair of each permuted row."""
        return [(t, e) for e in range(chosen.shape[1]) for t in range(chosen.shape[0]) if chosen[t, e]]

    def test_there_and_back(self):
        for dtype, padded in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            routes = torch.rand(9, 5, generator=torch.Generator().manual_seed(3)) > 0.6
            routes[:, 3] = False  # an expert without tokens
            routes[4] = False  # a token without experts
            tolerance = 1e-6 if dtype == torch.float32 else 1e-2
            pairs = self.order(routes)
            token, expert = torch.tensor(pairs).t()
            x, probs, weights = (t.requires_grad_() for t in (drawn(9, 6, dtype=dtype), torch.rand(9, 5), torch.rand(9, 5)))
            if padded:
                counts = routes.sum(0)
                y, of_rows, rows, offsets, aligned = moe_permute_and_pad_with_probs(x, probs, routes.int(), counts, 4)
                self.assertEqual(aligned.tolist(), [-(-n // 4) * 4 for n in counts.tolist()])
                begins = aligned.cumsum(0) - aligned
                place = torch.cat([begins[e] + torch.arange(n) for e, n in enumerate(counts.tolist())])
                self.assertEqual(y.detach().double().sum(1).ne(0).sum().item(), len(pairs))  # the other tokens' rows are zeros
            else:
                y, of_rows, rows = moe_permute_with_probs(x, probs, routes.int(), num_out_tokens=len(pairs))
                offsets, place = None, torch.arange(len(pairs))
            self.assertTrue(torch.equal(y[place], x[token]) and torch.equal(of_rows[place], probs[token, expert]))
            z = moe_unpermute(y * of_rows.unsqueeze(1).to(dtype), rows, merging_probs=weights, restore_shape=x.shape, map_type="mask",
                              pad_offsets=offsets)
            copies = [t.detach().double().requires_grad_() for t in (x, probs, weights)]
            want = torch.zeros(9, 6, dtype=torch.float64).index_add(
                0, token, copies[0][token] * (copies[1] * copies[2])[token, expert].unsqueeze(1))
            self.near(z, want, tolerance)
            grad = drawn(9, 6, dtype=dtype, seed=1)
            z.backward(grad)
            want.backward(grad.double())
            for ours, theirs in zip((x, probs, weights), copies):
                self.near(ours.grad, theirs.grad, 2 * tolerance)

    def test_sums_and_rows_of_no_probability(self):
        routes = torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.int32)
        x, probs = drawn(2, 4).requires_grad_(), torch.tensor([[0.5, 0.0, 9.0], [9.0, 0.25, 1.0]])
        y, rows = moe_permute(x, routes, num_out_tokens=4, map_type="mask")
        z = moe_unpermute(y, rows, restore_shape=x.shape, map_type="mask")
        self.assertTrue(torch.equal(z, 2 * x))
        z.backward(torch.ones(2, 4))
        self.assertTrue(torch.equal(x.grad, torch.full((2, 4), 2.0)))
        y, of_rows, _ = moe_permute_with_probs(x, probs, routes, num_out_tokens=4)
        self.assertEqual(of_rows.tolist(), [0.5, 0.0, 0.25, 1.0])
        self.assertEqual(y[1].count_nonzero().item(), 0)

    def test_chunks(self):
        sizes, order = torch.tensor([2, 0, 3, 1]), torch.tensor([2, 0, 3, 1])
        x, probs = drawn(6, 4).requires_grad_(), torch.rand(6).requires_grad_()
        parts = [x.split(sizes.tolist())[i] for i in order], [probs.split(sizes.tolist())[i] for i in order]
        y, of_rows = moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
        self.assertTrue(torch.equal(y, torch.cat(parts[0])) and torch.equal(of_rows, torch.cat(parts[1])))
        grads = drawn(6, 4, seed=1), torch.rand(6)
        want = torch.autograd.grad((torch.cat(parts[0]), torch.cat(parts[1])), (x, probs), grads)
        for ours, theirs in zip(torch.autograd.grad((y, of_rows), (x, probs), grads), want):
            self.assertTrue(torch.equal(ours, theirs))
        self.assertTrue(torch.equal(moe_sort_chunks_by_index(x, sizes, order), y))


class CrossEntropy(Compared):
    def test_against_pytorch(self):
        for dtype, smoothing, reduce, overwrite in itertools.product((torch.float32, torch.bfloat16), (0.0, 0.2), (False, True), (False, True)):
            x, target = (drawn(3, 5, 11, dtype=dtype) * 4).requires_grad_(), torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1))
            target[1, 2] = target[2, 4] = 7
            z = x.detach().double().requires_grad_()
            loss = te.parallel_cross_entropy(x if not overwrite else x * 1, target, smoothing, reduce, None, 7, overwrite_input=overwrite)
            want = torch.nn.functional.cross_entropy(z.view(15, 11), target.view(-1), label_smoothing=smoothing, ignore_index=7,
                                                     reduction="mean" if reduce else "none")
            self.near(loss.view(want.shape), want, 1e-5)
            grad = torch.rand(loss.shape, generator=torch.Generator().manual_seed(2))
            loss.backward(grad)
            want.backward(grad.view(want.shape).double())
            self.near(x.grad, z.grad, 1e-5 if dtype == torch.float32 else 1e-2)

    def test_forms_of_versions_before(self):
        """Until version 2.19 the forward returns the gradient as well, in FP32 since 2.18, and autograd saves nothing else."""
        backwards = {"_input": lambda _input, grad_output, is_cg_capturable=False: None,
                     "grad_input": lambda grad_input, grad_output, is_cg_capturable=False: None}
        for name, dtype, smoothing, reduce in itertools.product(backwards, (torch.float32, torch.bfloat16), (0.0, 0.2), (False, True)):
            module = types.ModuleType("former")
            module.cross_entropy_forward = lambda _input, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx: None
            module.cross_entropy_backward = backwards[name]
            host_kernels.adopt(module)
            x, target = drawn(3, 5, 11, dtype=dtype) * 4, torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1))
            target[1, 2] = 7
            z, before = x.double().requires_grad_(), x.clone()
            want = torch.nn.functional.cross_entropy(z.view(15, 11), target.view(-1), label_smoothing=smoothing, ignore_index=7,
                                                     reduction="mean" if reduce else "none")
            loss, grad = module.cross_entropy_forward(x, target, smoothing, reduce, None, 7)
            outer = torch.rand(loss.shape, generator=torch.Generator().manual_seed(2))
            want.backward(outer.view(want.shape).double())
            self.near(loss.view(want.shape), want, 1e-5)
            self.assertEqual(grad.dtype, torch.float32 if name == "grad_input" else dtype)
            self.near(module.cross_entropy_backward(grad, outer, True), z.grad, 1e-5 if grad.dtype == torch.float32 else 1e-2)
            self.assertTrue(torch.equal(x, before))

    def test_parts_of_the_vocabulary(self):
        whole, target, parts = drawn(2, 3, 12) * 4, torch.tensor([[0, 5, 6], [11, 7, 2]]), []
        z = whole.double().requires_grad_()
        want = torch.nn.functional.cross_entropy(z.view(6, 12), target.view(-1), label_smoothing=0.1, ignore_index=2, reduction="none")
        want.sum().backward()

        def collect(gathered, part, group):
            parts.append(part.clone())
            gathered.copy_(torch.cat([part, part]))

        for gather, rank in itertools.product((collect, lambda gathered, part, group: gathered.copy_(torch.cat(parts))), range(2)):
            x = whole[..., 6 * rank:6 * rank + 6].clone().requires_grad_()
            with mock.patch.multiple(torch.distributed, get_rank=lambda group: rank, get_world_size=lambda group: 2, all_gather_into_tensor=gather):
                loss = te.parallel_cross_entropy(x, target, 0.1, False, "a group", 2)
            if gather is not collect:
                loss.sum().backward()
                self.near(loss.view(-1), want, 1e-5)
                self.near(x.grad, z.grad[..., 6 * rank:6 * rank + 6], 1e-5)


class Padding(Compared):
    def test_there_and_back(self):
        for dtype in (torch.float32, torch.bfloat16):
            splits, padded = [3, 0, 17, 16], [16, 0, 32, 16]
            x = drawn(36, 10, dtype=dtype).requires_grad_()
            y, new = te.Fp8Padding(4, align_size=16)(x, splits)
            self.assertEqual(list(new), padded)
            want = torch.cat([torch.nn.functional.pad(p, (0, 0, 0, n - len(p))) for p, n in zip(x.detach().split(splits), padded)])
            self.assertTrue(torch.equal(y.detach(), want))
            z = te.Fp8Unpadding(4, align_size=16)(y, splits)
            self.assertTrue(torch.equal(z, x))
            dz = drawn(36, 10, dtype=dtype, seed=1)
            z.backward(dz)
            self.assertTrue(torch.equal(x.grad, dz))

    def test_bad_input_writes_nothing(self):
        x, out = drawn(5, 4), torch.zeros(8, 4)
        for rows, padded in (([2, 2], [4, 4]), ([2, 3], [4, 5]), ([2, 3], [4]), ([3, 2], [2, 6]), ([-1, 6], [2, 6])):
            with self.assertRaises((Error, ValueError)):
                tex.fused_multi_row_padding(x, out, rows, padded)
        self.assertEqual(out.count_nonzero().item(), 0)


class Experts(torch.nn.Module):
    """A mixture of experts: router, permutation, two grouped GEMMs with an activation between them, and unpermutation."""

    def __init__(self, hidden, experts, top_k, dtype):
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = torch.nn.Linear(hidden, experts, bias=False)
        self.up = te.GroupedLinear(experts, hidden, 2 * hidden, params_dtype=dtype, device="cuda")
        self.down = te.GroupedLinear(experts, hidden, hidden, params_dtype=dtype, device="cuda")
        self.pad, self.unpad = te.Fp8Padding(experts, align_size=16), te.Fp8Unpadding(experts, align_size=16)

    def forward(self, x):
        indices = torch.empty(len(x), self.top_k, dtype=torch.int32)
        probs, indices = fused_topk_with_score_function(self.router(x.float()), self.top_k, False, None, None, None, "softmax", None,
                                                        topk_indices=indices)
        splits = torch.bincount(indices.view(-1), minlength=self.experts).tolist()
        rows, row_id_map = moe_permute(x, indices, 0, map_type="index")
        rows, padded = self.pad(rows, splits)
        a, b = self.up(rows, torch.tensor(padded)).chunk(2, -1)
        out = self.unpad(self.down(torch.nn.functional.silu(a) * b, torch.tensor(padded)), splits)
        return moe_unpermute(out, row_id_map, probs.gather(-1, indices.long()), map_type="index")

    def loop(self, x):
        probs, indices = routed(self.router(x.float()).double(), self.top_k, False, None, None, None, "softmax", None)
        out = torch.zeros_like(x.double())
        for e in range(self.experts):
            w = [getattr(layer, f"{name}{e}").double() for layer in (self.up, self.down) for name in ("weight", "bias")]
            a, b = torch.nn.functional.linear(x.double(), w[0], w[1]).chunk(2, -1)
            out = out + probs[:, e:e + 1] * torch.nn.functional.linear(torch.nn.functional.silu(a) * b, w[2], w[3])
        return out


class Mixture(Compared):
    def test_equals_a_loop_over_experts(self):
        layer, x = Experts(32, 6, 2, torch.float32), drawn(11, 32)
        layer.router.weight.data[5] = 0  # ties the last expert's scores
        layer.router.weight.data[5, 0] = -9
        x[:, 0] = 5
        grad, names = drawn(11, 32, seed=2), [n for n, _ in layer.named_parameters()]
        y = layer(x)
        got = torch.autograd.grad(y, list(layer.parameters()), grad, allow_unused=True)
        want = torch.autograd.grad(layer.loop(x), list(layer.parameters()), grad.double(), allow_unused=True)
        self.near(y, layer.loop(x), 1e-5)
        for name, a, b in zip(names, got, want):
            self.near(a, torch.zeros_like(a) if b is None else b, 1e-5)
            if name.endswith("weight5"):
                self.assertEqual(a.count_nonzero().item(), 0, name)

    def test_learns(self):
        for how in (None, recipe.Float8CurrentScaling()):
            torch.manual_seed(0)
            layer = Experts(64, 4, 2, torch.bfloat16)
            x = drawn(64, 64, dtype=torch.bfloat16)
            want = torch.tanh(x.float() @ drawn(64, 64, seed=3) / 8)
            optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=3e-3, master_weights=True)
            losses = []
            for _ in range(30):
                with te.autocast(enabled=how is not None, recipe=how):
                    loss = torch.nn.functional.mse_loss(layer(x).float(), want)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            self.assertLess(losses[-1], losses[0] / 3)
