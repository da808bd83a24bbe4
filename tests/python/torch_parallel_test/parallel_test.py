"""Tests modules over several ranks; ranks.py starts the ranks, *_cases.py contain the cases."""

import unittest

import ranks


class OverRanks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.wrong = ranks.launched()


def _make_test(name):
    def test(self):
        if name in self.wrong:
            self.fail(self.wrong[name])
    return test


for name in ranks.cases():
    setattr(OverRanks, f"test_{name}", _make_test(name))
