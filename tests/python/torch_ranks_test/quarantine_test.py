"""Tests that all ranks bar an implementation at the same step, which gives a wrong result on one of them alone."""

import unittest

import quarantine_cases as cases
from ranks import on_ranks


class Quarantine(unittest.TestCase):
    def check_steps(self, function, wrong_steps):
        """`wrong_steps`: in how many steps the implementation is wrong until it is barred."""
        last = cases.WRONG_FROM + wrong_steps
        for seen in on_ranks(function):
            self.assertEqual(seen[:last], ["vendor.ranks"] * last)
            self.assertNotIn("vendor.ranks", seen[last:])

    def test_from_the_step_after_an_optimizer_of_te_fl(self):
        self.check_steps(cases.with_an_optimizer_of_te_fl, 1)

    def test_from_step_boundary_on(self):
        self.check_steps(cases.with_step_boundary, 1)

    def test_without_either_some_backward_passes_later(self):
        self.check_steps(cases.with_an_optimizer_of_pytorch, 3)  # two ranks: two passes later


if __name__ == "__main__":
    unittest.main()
