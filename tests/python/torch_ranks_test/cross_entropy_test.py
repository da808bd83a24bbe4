"""Tests parallel_cross_entropy() of a vocabulary sharded over two ranks against PyTorch's cross-entropy of the unsharded vocabulary in FP64."""

import unittest

import torch

import cross_entropy_cases as cases
from ranks import on_ranks
from te_fl.pytorch.functions.cross_entropy import parallel_cross_entropy

ROUNDING = {"torch.float32": 1e-5, "torch.bfloat16": 2.0 ** -8, "torch.float16": 2.0 ** -10}  # rounding of the gradient, which has the logits' dtype


class CrossEntropy(unittest.TestCase):
    def test_the_whole_vocabularys(self):
        for results in on_ranks(cases.losses):
            self.assertEqual(len(results), 24)
            for name, (loss, grad, want_loss, want_grad, calls) in results.items():
                self.assertEqual((loss.dtype, str(grad.dtype), calls), (torch.float32, name[0], 1), name)
                self.assertLess((loss - want_loss).abs().max(), 1e-5 * want_loss.abs().max(), name)
                self.assertLess((grad - want_grad).abs().max(), ROUNDING[name[0]] * want_grad.abs().max(), name)

    def test_extreme_logits_of_ignored_rows(self):
        for results in on_ranks(cases.extreme_logits):
            self.assertEqual(len(results), 120)
            for name, (loss, grad, want_loss, want_grad) in results.items():
                with self.subTest(name):
                    ignored = want_grad.abs().amax(-1) == 0
                    self.assertEqual((int(ignored.sum()), grad[ignored].abs().max().item(), loss[ignored].abs().max().item()), (3, 0, 0))
                    self.assertLess((loss - want_loss).abs().max(), 1e-5 * want_loss.abs().max())
                    self.assertLess((grad - want_grad).abs().max(), ROUNDING[name[0]] * want_grad.abs().max())

    def test_no_target(self):
        for loss, grad in on_ranks(cases.all_ignored):
            self.assertEqual((loss.item(), grad.abs().max().item()), (0, 0))
        self.assertEqual(parallel_cross_entropy(torch.ones(1, 2, 4), torch.full((1, 2), -100), reduce_loss=True).item(), 0)

    def test_targets_that_are_refused(self):
        for errors, loss in on_ranks(cases.refused_targets):
            self.assertEqual(len(errors), 4, errors)
            for error, words in zip(errors, (r"number 1 is 16; it must lie in \[0, 16\)", r"number 2 is -1", "dtype torch.float32", "dtype torch.int16")):
                self.assertRegex(error, words)
            self.assertTrue(torch.allclose(loss, torch.tensor(16.0).log()))


if __name__ == "__main__":
    unittest.main()
