"""Tests MXFP8 and NVFP4 tensors of NVIDIA's package on te-fl: bit for bit against the definitions of the formats (docs/numerics.md), and NVFP4 as its
recipe configures it against the package's own reference."""

import functools
import itertools
import pathlib
import subprocess
import tempfile
import unittest
from unittest import mock

import inside_package  # noqa: F401
from forkserver import PYTHON
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import te_fl
from te_fl.errors import InvalidArgument, Unsupported
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.pytorch import MXFP8Quantizer, NVFP4Quantizer
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
import transformer_engine_torch as tex  # registered by inside_package

TRANSFORM = dict(with_rht=True, with_post_rht_amax=True)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def values(rows, columns, dtype=torch.bfloat16, seed=0):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 3, rows).view(-1, 1)
    x[0, :columns // 2] = 0
    return x.to(dtype)


def to_blocks(x, size):
    """Reshapes to [rows, blocks, size]; zeros fill up the last block."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % size)).view(x.shape[0], -1, size)


def mxfp8(x, codes_dtype, largest):
    """Returns (codes, bits of the E8M0 scale factors) for blocks of 32 along the rows."""
    blocks = to_blocks(x.float(), 32)
    amax = blocks.abs().amax(-1).double()
    exponent = torch.where(amax == 0, torch.tensor(-127.0, dtype=torch.double), torch.ceil(torch.log2(amax / largest)).clamp(-127, 127))
    codes = (blocks.double() * torch.exp2(-exponent).unsqueeze(-1)).float().clamp(-largest, largest).to(codes_dtype)
    return codes.reshape(x.shape[0], -1)[:, :x.shape[1]], (exponent + 127).to(torch.uint8)


def nearest_e2m1(x):
    """Returns the codes of the nearest numbers; a tie goes to the even code."""
    distance = (x.abs().unsqueeze(-1) - E2M1).abs()
    best = distance.amin(-1, keepdim=True)
    tied = distance == best
    even = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # even codes first, so that argmin resolves ties to even
    code = even[tied[..., even].int().argmax(-1)]
    return torch.where(torch.signbit(x), code + 8, code)


def nvfp4(x):
    """Returns (codes, E4M3 scale factors, amax) for blocks of 16 along the rows, multiplying the factors in the order that Transformer Engine's
    documentation states."""
    x = x.float()
    amax = x.abs().max()
    scale = torch.tensor(6.0 * 448.0) / amax
    blocks = to_blocks(x, 16)
    factor = (blocks.abs().amax(-1) * (scale * torch.tensor(6.0).reciprocal())).clamp(max=448.0).to(torch.float8_e4m3fn)
    encode = torch.where(factor.float() == 0, torch.zeros(()), (factor.float() * scale.reciprocal()).reciprocal())
    return nearest_e2m1((blocks * encode.unsqueeze(-1)).clamp(-6, 6)).reshape(x.shape[0], -1)[:, :x.shape[1]], factor, amax


def unpacked(data):
    return torch.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1).int()


class MX(unittest.TestCase):
    def check_side(self, codes, factors, want, transpose):
        codes_want, bits = want
        if transpose:
            codes_want, bits = codes_want.t(), bits.t()
        self.assertTrue(torch.equal(codes, codes_want.contiguous().view(torch.uint8)))
        self.assertTrue(torch.equal(factors[:bits.shape[0], :bits.shape[1]], bits))
        padding = factors.clone()
        padding[:bits.shape[0], :bits.shape[1]] = 0
        self.assertEqual(padding.count_nonzero().item(), 0)

    def test_both_copies_are_the_definition(self):
        for dtype, (fp8, kind, largest), (rows, columns) in itertools.product(
                (torch.float32, torch.bfloat16), ((DType.kFloat8E4M3, torch.float8_e4m3fn, 448.0), (DType.kFloat8E5M2, torch.float8_e5m2, 57344.0)),
                ((64, 96), (32, 32), (160, 128))):
            x = values(rows, columns, dtype)
            got = MXFP8Quantizer(fp8)(x)
            self.check_side(got._rowwise_data, got._rowwise_scale_inv, mxfp8(x, kind, largest), False)
            self.check_side(got._columnwise_data, got._columnwise_scale_inv, mxfp8(x.t().contiguous(), kind, largest), True)

    def test_values_come_back(self):
        x = values(64, 64)
        codes, bits = mxfp8(x, torch.float8_e4m3fn, 448.0)
        want = codes.double() * torch.exp2(bits.double() - 127).repeat_interleave(32, 1)
        self.assertTrue(torch.equal(MXFP8Quantizer(DType.kFloat8E4M3)(x).dequantize(dtype=torch.float32).double(), want))

    def test_infinity_and_nan_mark_their_block_alone(self):
        x = torch.ones(32, 64)
        x[3, 5], x[4, 40] = float("inf"), float("nan")
        got = MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)(x)
        self.assertEqual(got._rowwise_scale_inv[3, :2].tolist(), [254, 119])
        self.assertEqual(torch.isnan(got.dequantize(dtype=torch.float32)).sum().item(), 1)

    def test_square_blocks(self):
        """The factor of a 32x32 block is that of a row block of 32 with the same amax."""
        for (rows, columns), (fp8, kind, largest) in itertools.product(((64, 96), (32, 32), (160, 64)), (
                (DType.kFloat8E4M3, torch.float8_e4m3fn, 448.0), (DType.kFloat8E5M2, torch.float8_e5m2, 57344.0))):
            x = values(rows, columns)
            maxima = x.float().abs().view(rows // 32, 32, columns // 32, 32).amax((1, 3))
            _, bits = mxfp8(maxima.repeat_interleave(32, 1), kind, largest)
            each = torch.exp2(127.0 - bits.double()).repeat_interleave(32, 0).repeat_interleave(32, 1)
            codes = (x.double() * each).float().clamp(-largest, largest).to(kind)
            quantizer = MXFP8Quantizer(fp8, with_2d_quantization=True)
            for got in (quantizer(x), tex.split_quantize(x, [rows], [quantizer])[0], tex.bgrad_quantize(x, quantizer)[1]):
                self.check_side(got._rowwise_data, got._rowwise_scale_inv, (codes, bits.repeat_interleave(32, 0)), False)
                self.check_side(got._columnwise_data, got._columnwise_scale_inv, (codes.t(), bits.t().repeat_interleave(32, 0)), True)
            for got, plain in ((tex.gelu(x, quantizer), tex.gelu(x, None)), (tex.swiglu(x.repeat(1, 2), quantizer), tex.swiglu(x.repeat(1, 2), None))):
                self.assertTrue(torch.equal(got._rowwise_data, quantizer(plain)._rowwise_data))

    def test_functions_round_before_they_quantise(self):
        """A function with a quantizer rounds its result to the output dtype and then quantises it, as the package's kernels do."""
        quantizer, x, grad, gamma = MXFP8Quantizer(DType.kFloat8E4M3), values(64, 64), values(64, 64, seed=5), torch.ones(64).bfloat16()
        pairs = [[call(each) for each in (quantizer, None)] for call in (
            lambda q: tex.gelu(x, q), lambda q: tex.dgelu(grad, x, q), lambda q: tex.swiglu(x, q), lambda q: tex.dbias_dgelu(grad, x, q)[1],
            lambda q: tex.situglu(x, q), lambda q: tex.rmsnorm_fwd(x, gamma, 1e-5, None, q, DType.kBFloat16, 0, False)[0],
            lambda q: tex.layernorm_fwd(x, gamma, gamma, 1e-5, None, q, DType.kBFloat16, 0, False)[0])]
        for got, plain in pairs:
            want = quantizer(plain)
            for name in ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv"):
                self.assertTrue(torch.equal(getattr(got, name), getattr(want, name)), name)

    def test_a_noop_flag_keeps_factors_in_the_order_of_tensor_cores(self):
        for quantizer in (MXFP8Quantizer(DType.kFloat8E4M3), NVFP4Quantizer(), MXFP8Quantizer(DType.kFloat8E4M3, with_2d_quantization=True)):
            out = quantizer(values(128, 128))
            want, held = out.dequantize(dtype=torch.float32), out._rowwise_data
            tex.swizzle_scales_for_gemm_(out)
            tex.quantize(values(128, 128, seed=1), quantizer, out, torch.ones(1))
            self.assertTrue(torch.equal(out.dequantize(dtype=torch.float32), want))
            self.assertIs(out._rowwise_data, held)


class NV(unittest.TestCase):
    def check_side(self, data, factors, amax, x):
        codes, factor, largest = nvfp4(x)
        got = unpacked(data)
        self.assertTrue(torch.equal(got, codes.int()), (got != codes).nonzero()[:4].tolist())
        self.assertTrue(torch.equal(factors[:factor.shape[0], :factor.shape[1]], factor.view(torch.uint8)))
        self.assertEqual(amax.tolist(), [largest.item()])

    def test_both_copies_are_the_definition(self):
        for dtype, (rows, columns) in itertools.product((torch.float32, torch.bfloat16), ((32, 64), (16, 16), (144, 48))):
            x = values(rows, columns, dtype)
            got = NVFP4Quantizer()(x)
            self.check_side(got._rowwise_data, got._rowwise_scale_inv, got._amax_rowwise, x)
            self.check_side(got._columnwise_data, got._columnwise_scale_inv, got._amax_columnwise, x.t().contiguous())

    def test_values_come_back(self):
        x = values(32, 64)
        codes, factor, amax = nvfp4(x)
        want = E2M1[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0) * factor.float().repeat_interleave(16, 1) * (amax / (6 * 448))
        torch.testing.assert_close(NVFP4Quantizer()(x).dequantize(dtype=torch.float32), want, rtol=1e-6, atol=0)

    def test_parts_without_rows(self):
        parts = tex.split_quantize(values(48, 32), [16, 0, 32], [NVFP4Quantizer() for _ in range(3)])
        self.assertEqual([tuple(part.dequantize().shape) for part in parts], [(16, 32), (0, 32), (32, 32)])
        out = tex.layernorm_fwd(torch.empty(0, 32), torch.ones(32), torch.zeros(32), 1e-5, None, NVFP4Quantizer(), DType.kFloat32, 0, False)[0]
        self.assertEqual(tuple(out.shape), (0, 32))

    def test_products_are_of_the_copies_that_are_contracted(self):
        x, w, dy = values(32, 64, seed=1), values(48, 64, seed=2), values(32, 48, seed=3)
        quantised = [NVFP4Quantizer()(t) for t in (x, w, dy)]
        rows = [NVFP4Quantizer(columnwise=False)(t).dequantize(dtype=torch.float32) for t in (x, w, dy)]
        columns = [NVFP4Quantizer(columnwise=False)(t.t().contiguous()).dequantize(dtype=torch.float32).t() for t in (x, w, dy)]
        for layout, (a, b), want in (("TN", (1, 0), rows[0] @ rows[1].t()), ("NN", (1, 2), rows[2] @ columns[1]),
                                     ("NT", (0, 2), columns[2].t() @ columns[0])):
            out = general_gemm(quantised[a], quantised[b], torch.float32, layout=layout)[0]
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())

    def test_factors_in_the_order_of_tensor_cores(self):
        for quantizer in (NVFP4Quantizer(), MXFP8Quantizer(DType.kFloat8E4M3)):
            tensor = quantizer(values(128, 128))
            before, plain = tensor.dequantize(dtype=torch.float32), tensor._rowwise_scale_inv.clone()
            tex.swizzle_scales_for_gemm_(tensor)
            self.assertFalse(torch.equal(tensor._rowwise_scale_inv, plain))
            row, factor = 37, 2  # inside a tile of 128 x 4 factors: factor c of row r lies at (r % 32) * 16 + (r // 32) * 4 + c
            self.assertEqual(tensor._rowwise_scale_inv.view(-1)[(row % 32) * 16 + (row // 32) * 4 + factor], plain[row, factor])
            self.assertTrue(torch.equal(tensor.dequantize(dtype=torch.float32), before))

    def test_what_is_refused(self):
        x = values(32, 32)
        for options in (dict(with_rht=True), dict(TRANSFORM, with_2d_quantization=True)):
            with self.assertRaisesRegex(Unsupported, f"NVFP4Quantizer.{next(iter(options))} "):
                NVFP4Quantizer(**options)(x)
        for options in (dict(row_scaled_nvfp4=True, with_2d_quantization=True), dict(row_scaled_nvfp4=True, rowwise=False),
                        dict(nvfp4_use_4over6=True, **TRANSFORM), dict(nvfp4_use_4over6=True, stochastic_rounding=True)):
            with self.assertRaisesRegex(InvalidArgument, f"NVFP4Quantizer.{next(iter(options))} "):
                NVFP4Quantizer(**options)(x)
        with self.assertRaisesRegex(InvalidArgument, "is torch.float32; the random Hadamard transform is defined of bfloat16"):
            NVFP4Quantizer(**TRANSFORM)(x.float())
        with self.assertRaisesRegex(InvalidArgument, "multiples of 16"):
            NVFP4Quantizer()(x[:8])

    def test_packed_codes_are_an_argument_of_ops(self):
        x = values(16, 32, torch.float32)
        data, factors = torch.zeros(16, 16, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)
        output = te_fl.Quantized(data.view(torch.float4_e2m1fn_x2), scaling="nvfp4", scale_inv=factors.view(torch.float8_e4m3fn),
                                 amax=torch.zeros(1))
        self.assertEqual(output.shape, (16, 32))
        te_fl.ops.quantize(input=x, output=output)
        self.assertTrue(torch.equal(unpacked(data), nvfp4(x)[0].int()))
        with self.assertRaisesRegex(ValueError, "shape is"):
            te_fl.Quantized(data.view(torch.float4_e2m1fn_x2), scaling="nvfp4", shape=(16, 31))


class AsTensors(unittest.TestCase):
    def test_pytorchs_operations_take_their_values(self):
        """PyTorch's operations on MXFP8 and NVFP4 tensors use their dequantised values, also with autograd off and when the tensor is moved to a
        device."""
        x = values(64, 64)
        for quantizer in (MXFP8Quantizer(DType.kFloat8E4M3), NVFP4Quantizer()):
            tensor = quantizer(x)
            held = tensor.dequantize()
            for operation in (lambda t: t + 1, lambda t: torch.cat([t, t]), lambda t: t.transpose(0, 1), lambda t: t == t, lambda t: t.unsqueeze(0),
                              lambda t: torch.split(t, [16, 48])[1], lambda t: t.to(torch.float32), lambda t: t.to(device="cuda")):
                got = operation(tensor)
                self.assertTrue(torch.equal(got.dequantize() if got is tensor else got, operation(held)))
            quantizer.internal = True
            self.assertTrue(torch.equal(quantizer(x).dequantize(dtype=x.dtype), held))


class Recipe(unittest.TestCase):
    """Tests NVFP4 as NVFP4BlockScaling configures it: square blocks for weights, column-wise data after a random Hadamard transform (RHT), stochastic
    rounding."""

    PARTS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")

    def check(self, got, x, **options):
        """Compares with the package's own Python reference."""
        want = NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, **options)._quantize(x)
        for name, part in zip(self.PARTS, want):
            held = getattr(got, name)
            held = held[:part.shape[0], :part.shape[1]] if part.dim() == 2 else held
            self.assertTrue(torch.equal(held, part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part), name)

    def test_both_copies_are_the_definition(self):
        for (rows, columns), seed in itertools.product(((32, 64), (16, 16), (144, 48)), range(2)):
            x = values(rows, columns, seed=seed)
            self.check(NVFP4Quantizer(with_2d_quantization=True)(x), x, quant_tile_shape=(16, 16))
            self.check(NVFP4Quantizer(**TRANSFORM)(x), x, with_rht=True)
            self.check(NVFP4Quantizer(with_random_sign_mask=False, **TRANSFORM)(x), x, with_rht=True, with_random_sign_mask=False)
            self.check(NVFP4Quantizer(with_2d_quantization=True)(x.float()), x.float(), quant_tile_shape=(16, 16))
        x = torch.zeros(32, 32, dtype=torch.bfloat16)
        self.check(NVFP4Quantizer(with_2d_quantization=True)(x), x, quant_tile_shape=(16, 16))

    def test_an_amax_for_each_row_and_4over6(self):
        better = [dict(nvfp4_use_4over6=True, nvfp4_e4m3_max=most, nvfp4_4over6_err_mode=mode) for most in (256, 448) for mode in ("MAE", "MSE")]
        zeros = values(32, 32)
        zeros[3:21] = 0
        for x in (values(32, 64), values(144, 48, torch.float32, seed=1), zeros, torch.zeros(16, 16)):
            for options in (dict(row_scaled_nvfp4=True), *better, *(dict(each, row_scaled_nvfp4=True) for each in better)):
                self.check(NVFP4Quantizer(**options)(x), x, **options)
            for options in better:
                self.check(NVFP4Quantizer(with_2d_quantization=True, **options)(x), x, quant_tile_shape=(16, 16), **options)

    def test_they_take_no_numbers_of_the_host(self):
        """Quantisation must not copy numbers from the host, for example by torch.tensor() of a list: on a device such a copy makes the host wait, and
        stream capture refuses it."""
        taken, x = set(), values(32, 64)

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                taken.add(str(function))
                return function(*args, **kwargs or {})

        for options in (dict(row_scaled_nvfp4=True), dict(nvfp4_use_4over6=True), dict(nvfp4_use_4over6=True, nvfp4_e4m3_max=256)):
            with self.subTest(options), Operations():
                NVFP4Quantizer(**options)(x).dequantize()
        self.assertIn("aten.where.self", taken)
        self.assertFalse({"aten.lift_fresh.default", "aten._local_scalar_dense.default"} & taken)

    def test_their_values_and_products(self):
        x, w = values(32, 64), values(48, 64, seed=1)
        for options in (dict(row_scaled_nvfp4=True), dict(nvfp4_use_4over6=True, nvfp4_e4m3_max=256), dict(nvfp4_use_4over6=True),
                        dict(row_scaled_nvfp4=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256)):
            got = []
            for each in (x, w):
                t = NVFP4Quantizer(**options)(each)
                codes, rows = unpacked(t._rowwise_data), each.shape[0]
                factors = t._rowwise_scale_inv[:rows, :4].view(torch.float8_e4m3fn).double() * t._amax_rowwise.double().view(-1, 1)
                exact = E2M1[codes & 7].double() * torch.where(codes > 7, -1.0, 1.0) * factors.repeat_interleave(16, 1)
                got.append((t, exact / (6 * options.get("nvfp4_e4m3_max", 448))))
                torch.testing.assert_close(t.dequantize(dtype=torch.float32).double(), got[-1][1], rtol=1e-6, atol=0)
                self.assertLess((t.dequantize(dtype=torch.float32) - each.float()).norm(), 0.15 * each.float().norm())
            (qx, x_exact), (qw, w_exact) = got
            want = x_exact @ w_exact.t()
            product = general_gemm(qw, qx, torch.float32)[0].double()
            self.assertLess((product - want).norm(), 1e-5 * want.norm())
            again = NVFP4Quantizer()(torch.zeros(32, 64, dtype=torch.bfloat16))
            NVFP4Quantizer(**options).update_quantized(x, again)  # The tensor's options become those of its last quantizer.
            self.assertTrue(torch.equal(again.dequantize(), qx.dequantize()))

    def test_values_beside_the_finite(self):
        """An infinity makes the amax infinite, and a NaN becomes the largest code of its block; neither changes other values."""
        x = torch.randn(32, 64).bfloat16()
        x[0, 0], x[0, 16:32], x[0, 32:48], x[17, 3] = float("inf"), 0, 1e-30, float("nan")
        wide = torch.cat((torch.full((32, 16), 3e38), torch.full((32, 16), 1e-38), torch.zeros(32, 32)), 1)
        formats = [{}, dict(row_scaled_nvfp4=True), dict(nvfp4_use_4over6=True), dict(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
                   dict(with_2d_quantization=True), dict(stochastic_rounding=True)]
        for options in formats:
            got = NVFP4Quantizer(columnwise=False, **options)(x).dequantize(dtype=torch.float32)
            self.assertTrue(got.isfinite().all(), options)
            self.assertEqual(got[0, 16:32].count_nonzero(), 0)
            got = NVFP4Quantizer(columnwise=False, **options)(wide).dequantize(dtype=torch.float32)
            self.assertLess((got[:, :16] / 3e38 - 1).abs().max(), 0.2, options)
            self.assertEqual(got[:, 16:].count_nonzero(), 0)

    def test_gradients_of_nothing_are_zeros(self):
        """For inputs without rows the package multiplies the result of an empty GEMM by the inputs' amaxes, which no kernel has written; gradients
        must nevertheless be zeros."""
        plain = dict(disable_rht=True, disable_stochastic_rounding=True)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # makes PyTorch fill new memory with NaN
        self.addCleanup(torch.use_deterministic_algorithms, before)
        for recipe in (NVFP4BlockScaling(), NVFP4BlockScaling(**plain), NVFP4BlockScaling(row_scaled_activation=True, **plain),
                       NVFP4BlockScaling(row_scaled_activation=True, disable_2d_quantization=True, **plain)):
            for make, sections in ((te.Linear, ()), (te.LayerNormLinear, ()), (te.LayerNormMLP, ()), (functools.partial(te.GroupedLinear, 3), ([32, 0, 16],))):
                module = make(64, 64, params_dtype=torch.bfloat16)
                x = torch.randn(sum(*sections) if sections else 0, 64, dtype=torch.bfloat16, requires_grad=True)
                with te.autocast(recipe=recipe):
                    out = module(x, *sections)
                out.float().sum().backward()
                for name, parameter in module.named_parameters():
                    self.assertTrue(parameter.grad.isfinite().all(), name)
                    self.assertTrue(parameter.grad.count_nonzero() == 0 or name[-1] in "02", name)

    def test_recipes_of_them_train(self):
        torch.manual_seed(0)
        x, grad = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
        layer = te.Linear(64, 64, params_dtype=torch.bfloat16)
        results = []
        plain = dict(disable_rht=True, disable_stochastic_rounding=True)
        for made in (None, NVFP4BlockScaling(row_scaled_activation=True, backward_override="high_precision", **plain),
                     NVFP4BlockScaling(nvfp4_4over6="all", **plain), NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE", **plain)):
            z = x.clone().requires_grad_()
            layer.zero_grad()
            with te.autocast(enabled=made is not None, recipe=made):
                out = layer(z)
            out.backward(grad)
            results.append([t.float() for t in (out.detach(), z.grad, layer.weight.grad)])
        for got in results[1:]:
            for ours, want in zip(got, results[0]):
                self.assertLess((ours - want).norm(), 0.2 * want.norm())

    def test_stochastic_rounding_is_unbiased(self):
        torch.manual_seed(3)
        x, count = torch.randn(16, 32).bfloat16(), 4096
        one = NVFP4Quantizer()(x)
        factors = one._rowwise_scale_inv[:16, :2].view(torch.float8_e4m3fn).float().repeat_interleave(16, 1) * one._amax_rowwise / (6 * 448)
        exact = (x.float() / factors).clamp(-6, 6)
        draws = []
        for _ in range(count // 64):  # draws 64 samples per call by repeating the same rows
            got = NVFP4Quantizer(stochastic_rounding=True, columnwise=False)(x.repeat(64, 1))
            codes = unpacked(got._rowwise_data).view(64, 16, 32).long()
            draws.append(E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0))
        drawn = torch.cat(draws)
        lower = E2M1[(torch.searchsorted(E2M1, exact.abs().contiguous(), right=True) - 1).clamp(0, 7)]
        upper = E2M1[torch.searchsorted(E2M1, exact.abs().contiguous()).clamp(0, 7)]
        near = (drawn.abs() - lower).abs().minimum((drawn.abs() - upper).abs())
        self.assertLess(near.max().item(), 1e-6)  # each draw is one of the two neighbouring values
        spread = ((upper - lower) / 2).clamp_min(1e-9) / count ** 0.5
        deviation = (drawn.mean(0) - exact).abs() / spread
        self.assertLess(deviation.max().item(), 5.5)
        self.assertLess((drawn.mean() - exact.mean()).abs().item(), 5 * spread.norm().item() / exact.numel())
        self.assertGreater(drawn.std(0)[upper > lower].min().item(), 0)

    def test_copies_are_rounded_apart(self):
        torch.manual_seed(3)
        x = values(32, 32)
        x = (x + x.t()) / 2  # symmetric, so that the row-wise and the column-wise data have the same values
        got = NVFP4Quantizer(stochastic_rounding=True)(x)
        self.assertFalse(torch.equal(got._rowwise_data, got._columnwise_data))
        self.assertTrue(torch.equal(got._rowwise_scale_inv, got._columnwise_scale_inv))

    def test_outputs_that_are_there(self):
        torch.manual_seed(3)
        quantizer = NVFP4Quantizer(stochastic_rounding=True, **TRANSFORM)
        x, other = values(32, 64, seed=1), values(32, 64, seed=2)
        out = quantizer(x)
        held = {name: getattr(out, name) for name in self.PARTS}
        before = {name: part.clone() for name, part in held.items()}
        tex.quantize(other, quantizer, out, torch.ones(1))
        for name, part in held.items():
            self.assertIs(getattr(out, name), part)
            self.assertTrue(torch.equal(part, before[name]), name)
        tex.quantize(other, quantizer, out, torch.zeros(1))
        self.assertTrue(all(getattr(out, name) is part for name, part in held.items()))
        self.assertFalse(torch.equal(out._rowwise_data, before["_rowwise_data"]))
        torch.testing.assert_close(out._amax_rowwise, other.float().abs().max().view(1))

    def test_functions_with_a_quantizer(self):
        """A function with a quantizer gives the quantised result of the same function without one."""
        quantizer, x, grad = NVFP4Quantizer(with_2d_quantization=True), values(32, 64), values(32, 64, seed=5)
        pairs = [(tex.gelu(x, quantizer), tex.gelu(x, None)),
                 (tex.rmsnorm_fwd(x, torch.ones(64).bfloat16(), 1e-5, None, quantizer, DType.kBFloat16, 0, False)[0],
                  tex.rmsnorm_fwd(x, torch.ones(64).bfloat16(), 1e-5, None, None, DType.kBFloat16, 0, False)[0]),
                 (tex.bgrad_quantize(grad, quantizer)[1], grad), (tex.dbias_dgelu(grad, x, quantizer)[1], tex.dbias_dgelu(grad, x, None)[1]),
                 *zip(tex.split_quantize(x, [16, 0, 16], [quantizer] * 3), x.split([16, 0, 16]))]
        for got, plain in pairs:
            want = quantizer(plain)
            for name in self.PARTS:
                self.assertTrue(torch.equal(getattr(got, name), getattr(want, name)) or not plain.numel(), name)

    def test_column_wise_copy_of_a_row_wise_one(self):
        x = values(32, 64)
        got, want = NVFP4Quantizer(with_2d_quantization=True, columnwise=False)(x), NVFP4Quantizer(with_2d_quantization=True)(x)
        got.update_usage(columnwise_usage=True)
        for name in self.PARTS[2:4]:
            rows = 64
            self.assertTrue(torch.equal(getattr(got, name)[:rows, :2], getattr(want, name)[:rows, :2]), name)
        self.assertTrue(torch.equal(got._columnwise_data, want._columnwise_data))

    def test_ranks_have_one_amax(self):
        def reduce(amax, op, group):
            self.assertEqual(group, "the group")
            amax.fill_(1e4)

        quantizer = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group="the group", **TRANSFORM)
        with mock.patch.object(torch.distributed, "all_reduce", reduce), \
                mock.patch.object(NVFP4Quantizer, "_canonicalized_amax_reduction_group", lambda self: self.amax_reduction_group):
            got = quantizer(values(32, 32))
        self.assertEqual((got._amax_rowwise.item(), got._amax_columnwise.item()), (1e4, 1e4))
        error = (got.dequantize(dtype=torch.float32) - values(32, 32).float()).abs().max()
        self.assertLess(error, 0.1 * values(32, 32).float().abs().max())

    def test_the_default_recipe_trains(self):
        torch.manual_seed(0)
        layer = te.LayerNormMLP(64, 128, params_dtype=torch.bfloat16)
        optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-2)
        x, target = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64)
        losses = []
        for _ in range(30):
            with te.autocast(recipe=NVFP4BlockScaling()):
                loss = (layer(x).float() - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        self.assertLess(losses[-1], 0.6 * losses[0], losses)

    def test_gradients_are_near(self):
        """The random Hadamard transforms of the two operands of the weight gradient cancel, so that only rounding errors of the format's size
        remain."""
        torch.manual_seed(0)
        layer, x, dy = te.Linear(128, 64, bias=False, params_dtype=torch.bfloat16), torch.randn(256, 128, dtype=torch.bfloat16), torch.randn(256, 64).bfloat16()
        found = {}
        for name, recipe in (("plain", None), ("fp4", NVFP4BlockScaling())):
            z = x.clone().requires_grad_()
            layer.zero_grad()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(z)
            y.backward(dy)
            found[name] = [t.float() for t in (y, z.grad, layer.weight.grad)]
        for got, want in zip(found["fp4"], found["plain"]):
            error = ((got - want).norm() / want.norm()).item()
            self.assertTrue(0.02 < error < 0.25, error)


class Ranks(unittest.TestCase):
    def test_both_have_one_amax(self):
        with tempfile.TemporaryDirectory() as folder:
            script = str(pathlib.Path(__file__).with_name("inside_rank.py"))
            ranks = [subprocess.Popen([*PYTHON, script, folder, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                     for rank in range(2)]
            reports = [rank.communicate(timeout=120)[0] for rank in ranks]
            self.assertEqual([rank.returncode for rank in ranks], [0, 0], "\n".join(reports))
            self.assertEqual(*(torch.load(f"{folder}/{rank}") for rank in range(2)))
