"""Tests te_fl.pytorch's modules over their arguments against plain PyTorch in FP64; in FP8 against operands quantised by NumPy."""

import unittest

import torch

from torch_oracle import DEVICES, compare, randn, randomise

F32, BF16 = torch.float32, torch.bfloat16
EVERYWHERE = [(device, dtype) for device in DEVICES for dtype in (F32, BF16)]


def grown(*shape, device, dtype, seed=1):
    return randn(*shape, seed=seed, dtype=dtype, device=device).requires_grad_()


class Modules(unittest.TestCase):
    def check(self, make, wanted, *shapes, call=None, where=EVERYWHERE, tolerance=None, **arguments):
        """Compares the module that make(device, params_dtype) returns with the function wanted(parameters, *inputs), for inputs of these shapes."""
        for device, dtype in where:
            with self.subTest(device=device, dtype=dtype, **arguments):
                module = randomise(make(device=device, params_dtype=dtype, **arguments))
                inputs = [grown(*s, device=device, dtype=dtype, seed=i + 1) for i, s in enumerate(shapes)]
                served = module if call is None else (lambda *x: call(module, *x))
                for got in compare(self, served, module, wanted, inputs, tolerance):
                    self.assertEqual((got.dtype, got.device.type), (dtype, device))
