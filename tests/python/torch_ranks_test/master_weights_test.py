"""Tests master weights that are sharded over ranks and cast to FP8 weights of which every rank holds all elements: equal bit for bit to a cast of the
unsharded weight."""

import unittest

import torch

import master_weights_cases as cases
from ranks import on_ranks
import te_fl.pytorch as te
from te_fl.errors import InvalidArgument
from te_fl.pytorch.fp8 import master_weights


class MasterWeights(unittest.TestCase):
    def test_parts_are_cast_as_the_whole(self):
        for results in on_ranks(cases.casts):
            self.assertEqual(len(results), 10)
            for name, (same, collectives) in results.items():
                self.assertEqual((same, collectives), ([True] * 16, 1), name)

    def test_bad_parts(self):
        with te.quantized_model_init():
            weight = te.Linear(16, 32, device="cpu").weight
        plain = te.Linear(16, 32, device="cpu").weight
        part = torch.zeros(100)
        for arguments, error, text in ((([plain], [part], [0], None), TypeError, "quantized_model_init"),
                                       (([weight], [part], [500], None), InvalidArgument, "512 elements.*100 from start_offset 500"),
                                       (([weight], [part], [None], None), InvalidArgument, "start_offset None"),
                                       (([weight], [part, part], [0], None), InvalidArgument, "one by one"),
                                       (([weight], [part], [0], None, [torch.zeros(99, dtype=torch.uint8)]), InvalidArgument, "99 codes.*100")):
            with self.subTest(text), self.assertRaisesRegex(error, text):
                master_weights.quantize_master_weights(*arguments)
        with self.assertRaisesRegex(InvalidArgument, r"\(32, 16\) of torch.uint8"):
            master_weights.replace_raw_data(weight, torch.zeros(511, dtype=torch.uint8))
        with self.assertRaisesRegex(TypeError, "Parameter"):
            master_weights.replace_raw_data(plain, torch.zeros(512, dtype=torch.uint8))


if __name__ == "__main__":
    unittest.main()
