"""Tests quantizers under Transformer Engine's names against hand-computed scales and casts."""

import copy
import unittest

import torch
from torch_oracle import DEVICES, randn

import te_fl.pytorch as te
from te_fl.common.recipe import Float8CurrentScaling
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.runtime.constants import DType
from te_fl.pytorch.fp8.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer

E4M3, BF16 = DType.kFloat8E4M3, torch.bfloat16


def cast(values, scale):
    """Computes the codes of values times a scale in FP64: round to nearest, ties to even, saturating."""
    return (values.double() * scale.double()).float().clamp(-448, 448).to(torch.float8_e4m3fn)


def power_of_two(scale):
    return 2.0 ** torch.floor(torch.log2(scale.double())).float()


def by_blocks(values, epsilon=0.0, pow2=True):
    """Returns (codes, the inverse scale of each element) for blocks of 128 x 128."""
    codes, inverse = torch.empty_like(values, dtype=torch.float8_e4m3fn), torch.empty_like(values, dtype=torch.float32)
    for r in range(0, values.shape[0], 128):
        for c in range(0, values.shape[1], 128):
            part = values[r:r + 128, c:c + 128].float()
            amax = part.abs().max().clamp_min(epsilon)
            scale = 448 / amax if amax > 0 else torch.ones(())
            scale = power_of_two(scale) if pow2 else scale
            codes[r:r + 128, c:c + 128] = cast(part, scale)
            inverse[r:r + 128, c:c + 128] = 1 / scale
    return codes, inverse


class Quantizers(unittest.TestCase):
    def same(self, made, codes, inverse, dtype):
        self.assertIsInstance(made, te.Float8Tensor)
        self.assertEqual((made.dtype, made.shape, made._fp8_dtype), (dtype, codes.shape, E4M3))
        self.assertTrue(torch.equal(made._data, codes.view(torch.uint8)))
        want = codes.float() * inverse
        self.assertTrue(torch.equal(made.dequantize(dtype=torch.float32), want))
        self.assertTrue(torch.equal(made.dequantize(), want.to(dtype)))
        if made._transpose is not None:
            self.assertTrue(torch.equal(made._transpose, codes.view(torch.uint8).t()))

    def test_by_a_scale_that_is_given(self):
        for device in DEVICES:
            for dtype in (torch.float32, BF16):
                scale, amax = torch.tensor([37.0], device=device), torch.tensor([0.5], device=device)
                quantizer = Float8Quantizer(scale, amax, E4M3)
                x = randn(48, 32, dtype=dtype, device=device) * 5  # some values saturate
                made = quantizer(x)
                self.same(made, cast(x, scale), 1 / scale, dtype)
                self.assertIsNotNone(made._transpose)
                self.assertEqual(float(amax), float(x.abs().max()))
                scale.fill_(2.0)
                again = x / 64
                self.assertIs(quantizer.quantize(again, out=made), made)
                self.same(made, cast(again, scale), 1 / scale, dtype)
                self.assertEqual(float(amax), float(x.abs().max()))  # the largest value so far
                quantizer.calibrate(again)
                self.assertEqual(float(amax), float(again.abs().max()))

    def test_by_the_values_own_amax(self):
        for device in DEVICES:
            for pow2 in (False, True):
                x = randn(3, 16, 32, dtype=BF16, device=device)
                quantizer = Float8CurrentScalingQuantizer(E4M3, device, columnwise=False, force_pow_2_scales=pow2)
                scale = 448 / x.abs().max().float()
                scale = power_of_two(scale) if pow2 else scale
                made = quantizer.copy()(x)
                self.same(made, cast(x, scale), 1 / scale, BF16)
                self.assertIsNone(made._transpose)

    def test_by_blocks(self):
        for device in DEVICES:
            for pow2, epsilon in ((True, 0.0), (False, 0.0), (True, 8.0)):
                x = randn(160, 300, device=device)
                x[128:, 256:] = 0.0
                quantizer = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, force_pow_2_scales=pow2, amax_epsilon=epsilon)
                self.same(quantizer(x), *by_blocks(x, epsilon, pow2), torch.float32)

    def test_gradients_pass(self):
        x = randn(16, 32).requires_grad_()
        made = Float8CurrentScalingQuantizer(E4M3)(x)
        self.assertTrue(made.requires_grad)
        (made.dequantize() * 3).sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.full_like(x, 3)))

    def test_inputs_of_modules(self):
        """A module treats a quantised input like its dequantised values; gradients pass through the quantisation."""
        quantizer = Float8CurrentScalingQuantizer(E4M3, columnwise=False)
        x = randn(16, 32, dtype=BF16)
        for make in (te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.LayerNorm, te.RMSNorm, te.TransformerLayer):
            shape = ((32,), (32, 48), (32, 48, 4))[{te.LayerNorm: 0, te.RMSNorm: 0, te.TransformerLayer: 2}.get(make, 1)]
            layer = make(*shape, params_dtype=BF16, device="cpu").eval()
            rows = x.view(8, 2, 32) if make is te.TransformerLayer else x
            for recipe in (None, Float8CurrentScaling()):
                outputs, gradients = [], []
                for view in (lambda t: t, lambda t: t.dequantize()):
                    leaf = rows.clone().requires_grad_()
                    with te.autocast(enabled=recipe is not None, recipe=recipe):
                        outputs.append(layer(view(quantizer(leaf))))
                    gradients.append(torch.autograd.grad(outputs[-1].sum(), leaf)[0])
                with self.subTest(make.__name__, fp8=recipe is not None):
                    self.assertTrue(torch.equal(*outputs))
                    self.assertTrue(torch.equal(*gradients))
        experts = te.GroupedLinear(2, 32, 48, params_dtype=BF16, device="cpu")
        self.assertTrue(torch.equal(experts(quantizer(x), [4, 12]), experts(quantizer(x).dequantize(), [4, 12])))

    def test_a_weight_of_its_own(self):
        """A layer accepts a weight that a quantizer made and computes with it as with a weight of quantized_model_init."""
        with te.quantized_model_init():
            layer, other = (te.Linear(32, 48, params_dtype=BF16, device="cpu") for _ in range(2))
        values = randn(48, 32, dtype=BF16)
        layer.weight = torch.nn.Parameter(Float8CurrentScalingQuantizer(E4M3)(values))
        other.weight.data.copy_(values)
        other.bias.data.copy_(layer.bias)
        x = randn(16, 32, dtype=BF16, seed=3)
        with te.autocast(recipe=Float8CurrentScaling()):
            a, b = layer(x), other(x)
        self.assertTrue(torch.equal(a, b))
        a.sum().backward()
        self.assertEqual(layer.weight.grad.shape, (48, 32))

    def test_empty_ones_and_copies(self):
        quantizer = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False)
        made = quantizer.make_empty((130, 200), dtype=BF16, device="cpu", requires_grad=True)
        self.assertEqual((made.dtype, made.shape, made.requires_grad, float(made.detach().dequantize().abs().max())), (BF16, (130, 200), True, 0.0))
        x = randn(130, 200, dtype=BF16)
        made = made.detach()
        before = made._version
        quantizer.update_quantized(x, made)
        self.assertGreater(made._version, before)
        self.assertTrue(torch.equal(copy.deepcopy(made).dequantize(), quantizer(x).dequantize()))
        self.assertEqual([t.shape for t in quantizer.multi_quantize([x, x[:1]])], [(130, 200), (1, 200)])
        self.assertEqual(Float8CurrentScalingQuantizer(E4M3).quantize(x, dtype=torch.float32).dtype, torch.float32)
        self.assertEqual((quantizer.get_usages(), quantizer.is_quantizable(x), quantizer.is_quantizable(x.double())),
                         ({"rowwise": True, "columnwise": False}, True, False))
        quantizer.set_usage(columnwise=True)
        self.assertEqual(quantizer(torch.zeros(0, 128)).shape, (0, 128))

    def test_what_is_refused(self):
        x, scale = randn(16, 32), torch.ones(1)
        for words, error, call in (
                ("fp8_dtype = 'kFloat8E5M2'", Unsupported, lambda: Float8CurrentScalingQuantizer(DType.kFloat8E5M2)(x)),
                ("scale is 1.0", InvalidArgument, lambda: Float8Quantizer(1.0, scale, E4M3)),
                ("two dimensions", InvalidArgument, lambda: Float8CurrentScalingQuantizer(E4M3)(randn(2, 3, 4))),
                ("noop_flag", Unsupported, lambda: Float8CurrentScalingQuantizer(E4M3).update_quantized(x, x, noop_flag=scale)),
                ("scaled by block_128x128", InvalidArgument,
                 lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True).quantize(x, out=Float8CurrentScalingQuantizer(E4M3)(x))),
                ("pin_memory", Unsupported, lambda: Float8CurrentScalingQuantizer(E4M3).make_empty((2, 2), pin_memory=True)),
                ("torch.float64", Unsupported, lambda: Float8CurrentScalingQuantizer(E4M3)(x.double())),
                ("no rule for scales", NotImplementedError, lambda: Quantizer(rowwise=True, columnwise=True)(x))):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                call()
        with self.assertWarnsRegex(DeprecationWarning, "no effect"):
            Float8CurrentScalingQuantizer(E4M3, amax=scale)


if __name__ == "__main__":
    unittest.main()
