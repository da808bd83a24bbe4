"""Tests torch.distributed.fsdp.fully_shard() around te-fl's modules on two ranks: results against one rank, and memory use."""

import unittest

import torch

import fsdp_cases as cases
from ranks import on_ranks

from te_fl import frameworks

averages = unittest.skipIf(frameworks.numbers(torch.__version__) < (2, 9), "fully_shard() adds the gradients of Gloo's ranks up, of PyTorch's own layers too")

class Fsdp(unittest.TestCase):
    @averages
    def test_gradients_are_those_of_one_rank(self):
        for results in on_ranks(cases.gradients):
            for name, ((loss, got), (want_loss, want)) in results.items():
                self.assertLess(abs(loss / want_loss - 1), 1e-5, name)
                self.assertEqual(list(got), list(want))
                for n in want:
                    error = (got[n] - want[n]).norm() / want[n].norm().clamp_min(1e-12)
                    self.assertLess(error, 1e-5, (name, n))

    def test_fp8_losses_are_those_of_one_rank(self):
        first, second = on_ranks(cases.losses)
        for name in first:
            alone, several, scales = first[name]
            self.assertLess(alone[-1], 0.7 * alone[0], name)
            for step, (a, b) in enumerate(zip(alone, several)):
                self.assertLess(abs(b / a - 1), 5e-3, (name, step))
            self.assertEqual(scales, second[name][2])
        self.assertTrue(first["delayed", True][2] and first["current", True][2])

    def test_a_step_of_shards_is_a_step_of_the_whole(self):
        for results in on_ranks(cases.steps):
            for name, got in results.items():
                self.assertEqual(got, (True, True, True), name)

    def test_nothing_of_the_whole_stays(self):
        for (forward, backward), inner, resident, bf16 in on_ranks(cases.memory):
            self.assertEqual(inner, 4, "the transposes of four weights are among what FSDP frees")
            self.assertEqual((set(forward), set(backward)), ({0}, {0}))
            self.assertLessEqual(resident, 0.6 * bf16)

    @averages
    def test_rows_that_do_not_divide(self):
        for results in on_ranks(cases.uneven):
            self.assertEqual(results, [True] * 8)

    def test_ranks_that_drew_other_weights(self):
        (a, want, one), (b, _, other) = on_ranks(cases.own_weights)
        self.assertTrue(torch.equal(a, b))
        self.assertEqual(one, other)
        self.assertLess((a - want).abs().max(), want.abs().max() * 2.0 ** -4)
        self.assertLess((a - want).norm(), want.norm() * 0.04)

    def test_values_loaded_into_shards(self):
        self.assertEqual(on_ranks(cases.loaded_before_the_first_forward), [(True, True)] * 2)

    def test_modules_made_without_memory(self):
        for results in on_ranks(cases.made_without_memory):
            for kinds, same, losses in results:
                self.assertEqual((kinds, same), (["Float8Tensor"] * 2, True))
                self.assertLess(losses[-1], 0.9 * losses[0])

    def test_blocks_that_ranks_would_divide(self):
        for seen, kind, got, want in on_ranks(cases.divided_blocks):
            self.assertEqual(len(seen), 1, seen)
            self.assertIn("(144, 128)", seen[0])
            self.assertEqual(kind, "Tensor")
            self.assertLess((got - want).abs().max(), 1e-5)

    def test_checkpoints_at_other_numbers_of_ranks(self):
        for results in on_ranks(cases.checkpoints):
            for name, got in results.items():
                self.assertEqual(got, (4, True, True, True, True), name)

    def test_values_of_a_checkpoint_after_the_first_forward(self):
        for error in on_ranks(cases.late_values):
            self.assertIn("before the first forward", error)


if __name__ == "__main__":
    unittest.main()
