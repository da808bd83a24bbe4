"""Tests moe_dispatch() and moe_combine() over ranks: a mixture of experts against the same on one rank, the order of rows, capacities, FP8, overlap, and
wrong arguments."""

import unittest

import torch

import expert_parallel_cases as cases
from ranks import Ranks, on_ranks


class ExpertParallel(unittest.TestCase):
    def check_equal(self, name, got, want):
        self.assertEqual((got.shape, got.dtype), (want.shape, want.dtype), name)
        self.assertTrue(torch.equal(got, want), (name, (got.double() - want.double()).abs().amax() if got.numel() else 0, want.shape))

    def test_mixture_equals_that_of_one_rank(self):
        whole = cases.one_rank()
        for degree in (1, 2, 4):
            ranks = on_ranks(cases.mixtures, degree)
            self.assertEqual([len(results) for _, results in ranks], [4] * degree)
            for rank, (tokens, results) in enumerate(ranks):
                for chosen, (y, dx, dprobs, dweights) in results.items():
                    want = whole["random" if chosen == "capacity" else chosen]
                    name = degree, rank, chosen
                    each = len(dweights)
                    pairs = [*zip((y, dx, dprobs), (t[tokens] for t in want)), *zip(dweights, want[3][rank * each:])]
                    self.assertEqual(len(pairs), 3 + each)
                    for got, expected in pairs:
                        if chosen == "capacity":  # rows of zeros between the others, with which products sum in another order
                            self.assertTrue(torch.allclose(got, expected, rtol=1e-5, atol=1e-5), name)
                        else:
                            self.check_equal(name, got, expected)

    def test_order_of_rows(self):
        for degree in (1, 2, 4):
            for results in on_ranks(cases.order, degree):
                self.assertEqual(len(results), 9)
                for name, (got, probs, splits, tokens, want, back, rows) in results.items():
                    self.check_equal(name, got, want)
                    self.check_equal(name, probs, want[:, 2])
                    self.check_equal(name, back, rows)
                    self.assertEqual((splits, sum(splits)), (tokens, len(want)))

    def test_rows_beyond_the_capacity(self):
        for degree in (2, 4):
            dropped = 0
            for results in on_ranks(cases.capacities, degree):
                for name, (*values, grad, want_grad) in results.items():
                    for got, want in zip(values[::2], values[1::2]):
                        if isinstance(got, torch.Tensor):
                            self.check_equal(name, got, want)
                        else:
                            self.assertEqual(got, want, name)
                    self.check_equal(name, grad, want_grad)
                    dropped += values[6]
            self.assertGreater(dropped, 0)

    def test_codes(self):
        for results in on_ranks(cases.codes):
            self.assertEqual(len(results), 8)
            for (dtype, kind, capacity), (got, want, probs, want_probs, grad, want_grad) in results.items():
                if kind == "exact":
                    self.check_equal((dtype, capacity), got, want)
                else:
                    blocks = torch.nn.functional.pad(want.double(), (0, 56)).view(len(want), 2, 128)
                    # E4M3 has four significant bits, and below 2^-6 of the scaled range equal steps of 2^-9; the largest of a block is at least 224.
                    step = (blocks.abs() / 16).maximum(blocks.abs().amax(2, keepdim=True) / 224 * 2.0 ** -10).view(len(want), -1)[:, :200]
                    error = (got.double() - want.double()).abs()
                    self.assertTrue((error <= step).all(), (error / step).max())
                    self.assertGreater(error.max() if len(want) else 1, 0)
                self.check_equal((dtype, kind), probs, want_probs)
                self.check_equal((dtype, kind), grad, want_grad)

    def test_wrong_arguments_are_refused_on_all_ranks(self):
        every = on_ranks(cases.wrong_calls)
        texts = ("tokens_per_expert of rank 1 sums to 5; its inp has 4 rows", "tokens_per_expert of rank 1 has -2; no expert has fewer than 0",
                 "rank 0 has 4 and rank 1 has 6 experts in tokens_per_expert; they must be equal", "rank 0 has 8 and rank 1 has 16 columns of inp",
                 "rank 0 has 1 and rank 1 has 3 as dtype of inp", "rank 0 has 0 and rank 1 has 1 as dtype of probs", "rank 0 has 0 and rank 1 has 1 as fp8",
                 "rank 0 has 0 and rank 1 has 3 as capacity", "rank 0 has 2 and rank 1 has 3 as capacity",
                 ("rank 1 refused its arguments, with an error", r"inp is float32\[4, 8, 1\]"), ("rank 1 refused", "tokens_per_expert has 3 elements"),
                 ("rank 1 refused", "list or tensor of integers"), ("rank 1 refused", r"probs is float32\[3\] on cpu; inp has 4 rows"),
                 "capacity is 0; it is None or", r"inp is int32\[4, 8\]; it is .* in FP32", "tokens_per_expert of rank 1 sums to 4; its inp has 3 rows")
        for rank, (errors, local, right, ranks) in enumerate(every):
            self.assertEqual((len(errors), right, ranks), (len(texts), True, 2))
            for error, text in zip(errors, texts):
                self.assertRegex(error or "no error", "InvalidArgument: .*moe_dispatch: .*" + (text if isinstance(text, str) else text[rank]))
            self.assertRegex(local[0], r"moe_combine: inp is float32\[5, 8\]; it has the 4 rows")
            self.assertRegex(local[1], "handle is a NoneType")

    def test_collectives_of_a_step(self):
        every = on_ranks(cases.counted)
        for forward, backward, larger in every:
            self.assertEqual(forward, {"all_to_all": (1, 2 * 64 * 8), "moe_dispatch": (1, larger), "moe_combine": (1, larger)})
            self.assertEqual(backward, {"moe_dispatch": (1, larger), "moe_combine": (1, larger)})

    def test_overlap(self):
        for order, backward, ((y, dx, dtoken), want), twice in on_ranks(cases.overlapped):
            self.assertEqual(order, ["rows begin", "shared expert", "end", "rows begin", "second part", "end"])
            self.assertEqual(backward, ["gradients begin", "backward of second part", "end", "gradients begin", "backward of shared expert", "end"])
            for got, expected in zip((y, dx, dtoken), want):
                self.check_equal("overlap", got, expected)
            self.assertRegex(twice, "InvalidArgument: .*MoETransfer: wait.. was called before")

    def test_recomputed(self):
        for first, second in on_ranks(cases.recomputed):
            self.check_equal("recomputed", second, first)

    def test_equal_losses_at_each_degree(self):
        first = on_ranks(cases.learning, 1)[0]
        for losses in first.values():
            self.assertLess(losses[-1], 0.9 * losses[0])
        for degree in (2, 4):
            for losses in on_ranks(cases.learning, degree):
                for name, tolerance in (("float32", 1e-5), ("block", 2e-3)):
                    for got, want in zip(losses[name], first[name]):
                        self.assertLess(abs(got - want), tolerance * want, (degree, name))

    def test_module_learns_the_same_at_each_degree(self):
        whole = cases.module_losses(divided=False)
        for losses in whole.values():
            self.assertLess(losses[-1], 0.98 * losses[0])
        for degree in (2, 4):
            for losses in on_ranks(cases.module_losses, degree):
                for name, tolerance in (("plain", 1e-5), ("biases and shared experts", 1e-5), ("in FP8", 5e-3)):
                    for got, want in zip(losses[name], whole[name]):
                        self.assertLess(abs(got - want), tolerance * want, (degree, name))

    def test_module_refuses(self):
        for errors, equal, experts in on_ranks(cases.module_mistakes):
            for error, text in zip(errors, ("num_experts is 5; the 2 ranks of ep_group have equally many experts", "ep_group has 1 ranks, and .* divided over 2",
                                            "FailedPrecondition.*divided over 2 ranks, and it has no group; call set_expert_parallel_group")):
                self.assertRegex(error, text)
            self.assertEqual((equal, experts), (True, 4))

    def test_killed_rank(self):
        ranks = Ranks(2)
        try:
            error, result = ranks.call("expert_parallel_cases", "killed", killed=(1,))[0]
        finally:
            ranks.close()
        self.assertIsNone(error)
        text, notes, seconds = result
        self.assertRegex(notes[-1], "moe_combine of float32.*over gloo, as rank 0 of 2.*; rank 1 has ended")
        self.assertLess(seconds, 10)


if __name__ == "__main__":
    unittest.main()
