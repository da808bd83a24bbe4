"""Tests NVIDIA's FusedAdam and FusedSGD, and the functions on lists of tensors beneath them, on te-fl, against PyTorch's optimizers in FP64 and
hand-computed values."""

import unittest
from unittest import mock

import inside_package  # noqa: F401
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex  # registered by inside_package
from te_fl.errors import InvalidArgument, Unsupported
from transformer_engine.common import recipe
from transformer_engine.pytorch import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD, multi_tensor_applier
from transformer_engine.pytorch.tensor.utils import post_all_gather_processing, quantize_master_weights

SHAPES = ((5, 7), (3,), (0, 4), (33, 2), (1,))


def tensors(seed, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def params(dtype=torch.float32):
    return [torch.nn.Parameter(t) for t in tensors(1, dtype)]


def flag(value=0):
    return torch.tensor([value], dtype=torch.int32)


def wide(weights):
    return [torch.nn.Parameter(p.detach().double()) for p in weights]


def steps(optimizer, weights, count=4):
    for step in range(count):
        for p, grad in zip(weights, tensors(step + 10, torch.bfloat16)):  # these gradients are exact in every dtype of the test
            p.grad = grad.to(p.dtype)
        optimizer.step()
    return weights


class Compared(unittest.TestCase):
    def near(self, got, want, tolerance):
        for a, b in zip(got, want):
            torch.testing.assert_close(a.detach().double(), b.detach().double(), atol=tolerance, rtol=tolerance)

    def refused(self, words, call, *arguments, **options):
        with self.assertRaises(InvalidArgument) as caught:
            call(*arguments, **options)
        self.assertIn(words, str(caught.exception))


class Adam(Compared):
    OPTIONS = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)

    def oracle(self, weights, decoupled=True, count=4):
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        weights = wide(weights)
        return steps(kind(weights, **self.OPTIONS), weights, count)

    def test_against_pytorch(self):
        for decoupled in (True, False):
            weights = params()
            want = self.oracle(weights, decoupled)
            self.near(steps(FusedAdam(weights, adam_w_mode=decoupled, **self.OPTIONS), weights), want, 2e-6)

    def test_master_weights(self):
        for dtype, remainders in ((torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            weights = params(dtype)
            want = self.oracle(weights)
            optimizer = FusedAdam(weights, master_weights=True, store_param_remainders=remainders, **self.OPTIONS)
            steps(optimizer, weights)
            self.near(weights, want, 2e-3 if dtype == torch.float16 else 1e-2)
            for p, b in zip(weights, want):
                master = optimizer.state[p]["master_param"]
                if remainders:  # the BF16 weight, rounded to nearest, and the 16-bit remainder together hold the bits of the FP32 weight
                    bits = master.to(torch.int32)
                    master = (((p.detach().view(torch.int16).to(torch.int32) - (bits < 0).int()) << 16) | (bits & 0xFFFF)).view(torch.float32)
                torch.testing.assert_close(master.double(), b.detach(), atol=2e-6, rtol=2e-6)

    def test_remainders_compute_what_master_weights_do(self):
        one, other = params(torch.bfloat16), params(torch.bfloat16)
        steps(FusedAdam(one, master_weights=True, **self.OPTIONS), one)
        steps(FusedAdam(other, master_weights=True, store_param_remainders=True, **self.OPTIONS), other)
        for a, b in zip(one, other):
            # A tie rounds to even with master weights, and up with remainders.
            self.assertLessEqual((a.detach().view(torch.int16).int() - b.detach().view(torch.int16).int()).abs().max().item() if a.numel() else 0, 1)

    def test_low_precision_states(self):
        for first, second in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.uint8, torch.float32)):
            weights = params()[:2]  # leaves out empty tensors, which NVIDIA's scaling of states does not support
            want = self.oracle(weights, count=2)
            steps(FusedAdam(weights, exp_avg_dtype=first, exp_avg_sq_dtype=second, **self.OPTIONS), weights, 2)
            self.near(weights, want, 5e-3)

    def test_capturable(self):
        for dtype, master in ((torch.float32, False), (torch.bfloat16, True)):
            weights = params(dtype)
            want = self.oracle(weights)
            optimizer = FusedAdam(weights, capturable=True, master_weights=master, **self.OPTIONS)
            self.near(steps(optimizer, weights), want, 2e-6 if dtype == torch.float32 else 1e-2)
            self.assertEqual(optimizer.param_groups[0]["step"].item(), 4)

    def test_fp8_parameters(self):
        with te.quantized_model_init(enabled=True, recipe=recipe.DelayedScaling(), preserve_high_precision_init_val=True):
            layer = te.Linear(32, 16, params_dtype=torch.bfloat16, device="cuda")
        start = layer.weight.get_high_precision_init_val().float()
        optimizer = FusedAdam(layer.parameters(), master_weights=True, **self.OPTIONS)
        for p in layer.parameters():
            optimizer.initialize_state(p, False)
        optimizer.set_scaled_state(layer.weight, "master_param", start)
        want = torch.nn.Parameter(start.double())
        oracle = torch.optim.AdamW([want], **self.OPTIONS)
        grad = tensors(3, torch.bfloat16, ((16, 32), (16,)))
        layer.weight.grad, layer.bias.grad, want.grad = grad[0], grad[1], grad[0].double()
        layer.weight._quantizer.scale.fill_(16)
        optimizer.step()
        oracle.step()
        master = optimizer.state[layer.weight]["master_param"]
        torch.testing.assert_close(master.double(), want.detach(), atol=2e-6, rtol=2e-6)
        scale = layer.weight._quantizer.scale
        codes = (master * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.assertTrue(torch.equal(layer.weight._data, codes.view(torch.uint8)))
        self.assertEqual(layer.weight._scale_inv.tolist(), [0.0625])

    def test_a_set_flag_keeps_everything(self):
        lists = [tensors(seed, shapes=((4,), (3,))) for seed in range(4)]
        kept = [[t.clone() for t in each] for each in lists]
        tex.multi_tensor_adam(65536, flag(1), lists, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
        step, one = torch.tensor([0], dtype=torch.int32), torch.ones(1)
        tex.multi_tensor_adam_capturable(65536, flag(1), lists, torch.tensor(0.1), 0.9, 0.99, 1e-8, step, 1, 1, 0.0, one * 3)
        for a, b in zip(sum(lists, []), sum(kept, [])):
            self.assertTrue(torch.equal(a, b))

    def test_capturable_unscales_the_gradients(self):
        grads = tensors(2, torch.bfloat16, ((6,),))
        want = (grads[0].float() * 0.5).bfloat16()
        lists = [grads, tensors(3, torch.bfloat16, ((6,),)), [torch.zeros(6)], [torch.zeros(6)]]
        tex.multi_tensor_adam_capturable(65536, flag(), lists, torch.tensor(0.1), 0.9, 0.99, 1e-8, torch.tensor([1], dtype=torch.int32), 1, 1,
                                         0.0, torch.tensor([0.5]))
        self.assertTrue(torch.equal(grads[0], want))

    def test_bad_input_writes_nothing(self):
        p = torch.ones(4)
        rest = (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
        self.refused("has 3 lists", tex.multi_tensor_adam, 65536, flag(), [[p], [p], [p]], *rest)
        self.refused("of exp_avgs has 2 tensors", tex.multi_tensor_adam, 65536, flag(), [[p], [p], [p, p], [p]], *rest)
        self.refused("tensor 0 of parameters has 3 elements", tex.multi_tensor_adam, 65536, flag(), [[p], [torch.ones(3)], [p], [p]], *rest)
        self.refused("all float32 or all bfloat16", tex.multi_tensor_adam, 65536, flag(), [[p], [p], [p], [p.bfloat16()]], *rest)
        self.refused("bfloat16 and int16", tex.multi_tensor_adam_param_remainder, 65536, flag(), [[p], [p], [p], [p], [p]], *rest)
        self.refused("has no tensor", tex.multi_tensor_adam, 65536, flag(), [[], [], [], []], *rest)
        self.assertTrue(torch.equal(p, torch.ones(4)))


class SGD(Compared):
    def test_against_pytorch(self):
        for options in (dict(momentum=0.9, weight_decay=0.1), dict(momentum=0.9, nesterov=True), dict(), dict(momentum=0.5, dampening=0.25)):
            for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 5e-3)):
                weights = params(dtype)
                oracle = wide(weights)
                steps(torch.optim.SGD(oracle, lr=0.1, **options), oracle)
                self.near(steps(FusedSGD(weights, lr=0.1, **options), weights), oracle, tolerance)

    def test_fp16_is_rounded_where_pytorch_rounds(self):
        """With powers of two for momentum and learning rate, multiplying by them is exact, so the numbers must equal PyTorch's bit for bit."""
        weights = [torch.nn.Parameter(torch.rand(4001, dtype=torch.float16))]
        oracle = [torch.nn.Parameter(weights[0].detach().clone())]
        ours, theirs = (kind(of, lr=0.25, momentum=0.125) for kind, of in ((FusedSGD, weights), (torch.optim.SGD, oracle)))
        for _ in range(5):
            weights[0].grad = torch.rand(4001, dtype=torch.float16)
            oracle[0].grad = weights[0].grad.clone()
            ours.step()
            theirs.step()
        self.assertTrue(torch.equal(weights[0], oracle[0]))

    def test_a_flag_leaves_all_as_it_is(self):
        for dtype in (torch.float16, torch.float32):
            lists = [[torch.full((3,), value, dtype=dtype)] for value in (1.0, 2.0, 3.0, 4.0)]
            tex.multi_tensor_sgd(65536, torch.ones(1, dtype=torch.int32), lists, 0.1, 0.5, 0.0, 0.5, False, False, False, 1.0)
            self.assertEqual([each[0].tolist() for each in lists], [[value] * 3 for value in (1.0, 2.0, 3.0, 4.0)])
            tex.multi_tensor_sgd(65536, flag(), lists, 0.25, 0.5, 0.5, 0.5, True, False, True, 2.0)
            # New momentum: 3 / 2 + (1 - 0.5) 2 = 2.5; the step is 2 + 2.5 / 2 + 2 / 4 = 3.75.
            self.assertEqual([each[0].tolist() for each in lists], [[1.0] * 3, [0.125] * 3, [2.5] * 3, [0.125] * 3])

    def test_copies_of_the_weights(self):
        p, copy = torch.tensor([1.0, -2.0]), torch.zeros(2, dtype=torch.float16)
        tex.multi_tensor_sgd(65536, flag(), [[torch.tensor([2.0, 4.0])], [p], [torch.zeros(2)], [copy]], 0.0, 0.0, 0.0, 0.5, False, True, False, 0.25)
        self.assertEqual(p.tolist(), [0.75, -2.5])
        self.assertEqual(copy.tolist(), [0.75, -2.5])


class Lists(Compared):
    def test_parameters_are_written(self):
        """The functions write to parameters outside of autograd, even if their caller runs under autograd."""
        for call, factor in ((tex.multi_tensor_scale, 2.0), (tex.multi_tensor_scale_tensor, torch.tensor(2.0))):
            p = torch.nn.Parameter(torch.ones(3))
            call(65536, flag(), [[torch.ones(3)], [p]], factor)
            self.assertEqual(p.tolist(), [2.0] * 3)
        p, moments = torch.nn.Parameter(torch.ones(3).bfloat16()), [[torch.zeros(3)], [torch.zeros(3)]]
        tex.multi_tensor_adam_param_remainder(65536, flag(), [[torch.ones(3)], [p], *moments, [torch.zeros(3, dtype=torch.int16)]], 0.5, 0.9, 0.99,
                                              1e-8, 1, 1, 1, 0.0)
        self.assertEqual(p.tolist(), [0.5] * 3)

    def test_scale(self):
        for scale in (0.5, torch.tensor([0.5])):
            call = tex.multi_tensor_scale_tensor if isinstance(scale, torch.Tensor) else tex.multi_tensor_scale
            x, out, bad = tensors(1), [torch.empty(s, dtype=torch.bfloat16) for s in SHAPES], flag()
            multi_tensor_applier(call, bad, [x, out], scale)
            for a, b in zip(x, out):
                self.assertTrue(torch.equal((a * 0.5).bfloat16(), b) or not a.numel())
            self.assertEqual(bad.item(), 0)
            for value in (float("inf"), float("nan")):
                bad = flag()
                call(65536, bad, [[torch.tensor([1.0, value])], [torch.empty(2)]], scale)
                self.assertEqual(bad.item(), 1)

    def test_norms(self):
        x = tensors(1)
        want = torch.cat([t.double().view(-1) for t in x]).norm()
        norm, each = tex.multi_tensor_l2norm(65536, flag(), [x], True)
        torch.testing.assert_close(norm.double().squeeze(), want, rtol=1e-6, atol=0)
        self.near([each], [torch.stack([t.double().norm() for t in x])], 1e-6)
        norm, each = tex.multi_tensor_unscale_l2norm(65536, flag(), [x], torch.tensor([0.25]))
        torch.testing.assert_close(norm.double().squeeze(), want / 4, rtol=1e-6, atol=0)
        self.assertEqual(each.numel(), 0)
        bad = flag()
        tex.multi_tensor_l2norm(65536, bad, [[torch.tensor([float("nan")])]])
        self.assertEqual(bad.item(), 1)

    def test_scales_of_amaxes(self):
        amaxes = [torch.tensor([[0.0, 1.0, float("inf")], [float("nan"), 1e-40, 3.0]]), torch.tensor([448.0])]
        scales, inverses = [torch.empty(2, 3), torch.empty(1)], [torch.empty(2, 3), torch.empty(1)]
        tex.multi_tensor_compute_scale_and_scale_inv(65536, flag(), [amaxes, scales, inverses], 448.0, True, 0.0)
        self.assertEqual(scales[0].tolist(), [[1.0, 256.0, 1.0], [1.0, 2.0 ** 127, 128.0]])
        self.assertEqual(scales[1].tolist(), [1.0])
        self.assertEqual(inverses[0].tolist(), [[1.0, 2.0 ** -8, 1.0], [1.0, 2.0 ** -127, 2.0 ** -7]])
        tex.multi_tensor_compute_scale_and_scale_inv(65536, flag(), [amaxes[1:], scales[1:], inverses[1:]], 57344.0, False, 1000.0)
        self.assertEqual(scales[1].tolist(), [torch.tensor(57344.0).div(torch.tensor(1000.0)).item()])

    def test_bits_of_powers_of_two(self):
        amax = torch.tensor([0.0, 448.0, 449.0, 896.0, 1.0, float("inf"), float("nan")]).bfloat16()
        bits = torch.empty(7, dtype=torch.uint8)
        tex.multi_tensor_compute_scale_inv_e8m0(65536, None, [[amax], [bits]])
        self.assertEqual(bits.tolist(), [0, 127, 127, 128, 119, 254, 255])  # 449 rounds to 448 in BF16
        self.refused("it takes None", tex.multi_tensor_compute_scale_inv_e8m0, 65536, flag(), [[amax], [bits]])

    def test_an_fp8_dtype_that_is_none(self):
        p = torch.ones(4)
        self.refused("is not an FP8 one", tex.multi_tensor_adam_fp8, 65536, flag(),
                     [[p], [p.byte()], [p], [p], [p], [p[:1]], [p[:1]], [p[:1]]], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0, DType.kBFloat16)


def parts(length, *cuts):
    cuts = (0, *cuts, length)
    return list(zip(cuts, cuts[1:]))


class PartsOfMasterWeights(Compared):
    """Casting all ranks' shards of a master weight to FP8 gives the same bits as quantising the whole weight."""

    def test_blocks_of_128(self):
        h, w = 300, 200
        for dtype, kind in ((torch.float32, DType.kFloat8E4M3), (torch.bfloat16, DType.kFloat8E5M2)):
            x = torch.randn(h, w, generator=torch.Generator().manual_seed(1)).to(dtype)
            whole = Float8BlockQuantizer(kind, rowwise=True, columnwise=False, block_scaling_dim=2)(x)
            amax, ranks = torch.zeros(3, 4), parts(h * w, 1, 12345, 40000)
            for begin, end in ranks:
                own = torch.full((3, 4), 9.0)
                tex.fp8_block_scaling_compute_partial_amax(x.view(-1)[begin:end], own, h, w, begin, 128)
                amax[:, :2] = torch.maximum(amax, own)[:, :2]
            scale, inverse, codes = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(h * w, dtype=torch.uint8)
            tex.multi_tensor_compute_scale_and_scale_inv(65536, flag(), [[amax], [scale], [inverse]],
                                                         448.0 if kind == DType.kFloat8E4M3 else 57344.0, True, 0.0)
            for begin, end in ranks:
                tex.fp8_block_scaling_partial_cast(x.view(-1)[begin:end], codes[begin:end], scale, h, w, begin, 128, kind)
            self.assertTrue(torch.equal(inverse[:, :2], whole._rowwise_scale_inv[:, :2]))
            self.assertTrue(torch.equal(codes.view(h, w), whole._rowwise_data))

    def test_mxfp8(self):
        h, w = 96, 160
        x = torch.randn(h, w, generator=torch.Generator().manual_seed(1)).bfloat16()
        x[0] = 0
        whole = MXFP8Quantizer(DType.kFloat8E4M3)(x)
        sides = [torch.zeros(whole._rowwise_scale_inv.shape).bfloat16(), torch.zeros(whole._columnwise_scale_inv.shape).bfloat16()]
        ranks = parts(h * w, 1, 5000)
        for begin, end in ranks:
            own = [torch.ones_like(side) for side in sides]
            tex.mxfp8_scaling_compute_partial_amax(x.view(-1)[begin:end], *own, h, w, begin)
            sides = [torch.maximum(a, b) for a, b in zip(sides, own)]
        bits = [torch.zeros(side.shape, dtype=torch.uint8) for side in sides]
        tex.multi_tensor_compute_scale_inv_e8m0(65536, None, [sides, bits])
        codes = torch.zeros(2, h * w, dtype=torch.uint8)
        for begin, end in ranks:
            tex.mxfp8_scaling_partial_cast(x.view(-1)[begin:end], codes[0, begin:end], codes[1, begin:end], *bits, h, w, begin)
        for got, want in ((bits[0], whole._rowwise_scale_inv), (bits[1], whole._columnwise_scale_inv), (codes[0].view(h, w), whole._rowwise_data),
                          (codes[1].view(h, w), whole._columnwise_data)):
            self.assertTrue(torch.equal(got, want))

    def test_bad_input_writes_nothing(self):
        x, scale, out = torch.ones(256), torch.ones(2, 2), torch.zeros(256, dtype=torch.uint8)
        for words, call, arguments in (
                ("do not lie within", tex.fp8_block_scaling_partial_cast, (x, out, scale, 16, 16, 1, 128, DType.kFloat8E4M3)),
                ("out has 5 elements", tex.fp8_block_scaling_partial_cast, (x, out[:5], scale, 16, 16, 0, 128, DType.kFloat8E4M3)),
                ("has float32", tex.fp8_block_scaling_partial_cast, (x, out, scale.double(), 16, 16, 0, 128, DType.kFloat8E4M3)),
                ("multiples of 32", tex.mxfp8_scaling_compute_partial_amax, (x, scale, scale, 16, 16, 0)),
                ("are torch.uint8 (32, 1)", tex.mxfp8_scaling_compute_partial_amax, (x, *(out[:32].view(s) for s in ((32, 1), (1, 32))), 32, 32, 0)),
                ("has torch.uint8 (32, 1) or more", tex.mxfp8_scaling_partial_cast, (x, out, out, torch.ones(32, 1), torch.ones(1, 32), 32, 32, 0)),
                ("are torch.float32 (2, 2)", tex.mxfp8_scaling_partial_cast, (x, out, out, scale, scale, 32, 32, 0))):
            self.refused(words, call, *arguments)
        self.assertEqual((out.count_nonzero().item(), scale.sum().item()), (0, 4.0))

    def test_nvfp4_of_square_blocks(self):
        """Casts two parts of a weight that do not end at a block or byte boundary: compares scale factors and codes with hand-computed ones, and with
        those of the whole weight."""
        h, w = 48, 80
        for seed, cut in ((0, 1000), (1, 16 * w), (2, 2001), (3, 0)):
            whole = torch.randn(h * w, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 2, h).repeat_interleave(w)
            whole[:16 * w].view(16, w)[:, :16] = 0
            target = NVFP4Quantizer(with_2d_quantization=True, columnwise=False)(torch.zeros(h, w))
            data, parts = torch.full((h * w // 2,), 0x5A, dtype=torch.uint8), [(whole[:cut], 0), (whole[cut:].clone(), cut)]
            amaxes, tops = zip(*((torch.full((3, 5), 9.0), torch.empty(1)) for _ in parts))
            values, starts = zip(*parts)
            tex.nvfp4_multi_tensor_compute_partial_amax(values, amaxes, tops, [h] * 2, [w] * 2, starts, 16)
            amax, top, scale, factors = torch.maximum(*amaxes), torch.maximum(*tops), torch.empty(1), torch.empty(3, 5)
            blocks = whole.view(3, 16, 5, 16).abs().amax((1, 3))
            self.assertTrue(torch.equal(amax, blocks) and top.item() == blocks.max().item())
            tex.nvfp4_compute_global_scale(top, scale)
            tex.nvfp4_multi_tensor_fused_scale([amax], [top], [factors], [target._rowwise_scale_inv], [target._amax_rowwise], [3], [5], [128], 16)
            for part, start in parts:
                end = start + part.numel()
                tex.nvfp4_multi_tensor_2d_partial_cast([part], [data[start // 2:(end + 1) // 2]], [factors], [scale], [h], [w], [start], 16)
            multiplier = torch.tensor(2688.0) / blocks.max()
            by_hand = (blocks / torch.tensor(6.0) * multiplier).to(torch.float8_e4m3fn)
            self.assertTrue(torch.equal(target._rowwise_scale_inv[:h, :5], by_hand.view(torch.uint8).repeat_interleave(16, 0)))
            each = (by_hand.float() * (1 / multiplier)).reciprocal().clamp(max=torch.finfo(torch.float32).max)
            scaled = (whole.view(h, w) * each.repeat_interleave(16, 0).repeat_interleave(16, 1)).clamp(-6, 6)
            codes = torch.stack((data & 15, data >> 4), -1).view(h, w).long()
            numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            got = numbers[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
            self.assertTrue(torch.equal((scaled - got).abs(), (scaled.unsqueeze(-1) - torch.cat((numbers, -numbers))).abs().amin(-1)))
            target._rowwise_data.copy_(data.view(h, w // 2))
            alone = NVFP4Quantizer(with_2d_quantization=True)(whole.view(h, w))
            self.assertLess((target.dequantize() - alone.dequantize()).norm(), 0.02 * whole.norm())
            other = torch.empty_like(alone._columnwise_data), torch.empty_like(alone._columnwise_scale_inv)
            tex.nvfp4_2d_multi_tensor_transpose([alone._rowwise_data], other[:1], [alone._rowwise_scale_inv], other[1:], [h], [w])
            self.assertTrue(torch.equal(other[0], alone._columnwise_data) and torch.equal(other[1], alone._columnwise_scale_inv))

    def test_master_weights_of_tensors_with_one_scale(self):
        """A quantizer for delayed scaling keeps its scale; for current scaling the package makes a quantizer without an amax."""
        torch.manual_seed(0)
        master = torch.randn(32, 48).bfloat16().float()  # the package rounds master weights to BF16 for delayed scaling
        scale = torch.full((1,), 16.0)
        for quantizer in (te.Float8Quantizer(scale, torch.zeros(1), DType.kFloat8E4M3), te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cuda")):
            weight = quantizer(torch.zeros(32, 48, dtype=torch.bfloat16))
            with mock.patch.object(torch.distributed, "all_reduce"):
                quantize_master_weights([weight], [master.view(-1)], [0], None)
            post_all_gather_processing([weight])
            alone = quantizer(master)
            self.assertTrue(torch.equal(weight.dequantize(), alone.dequantize().bfloat16()), type(quantizer))

    def test_master_weights_of_nvfp4(self):
        torch.manual_seed(0)
        quantizer, master = NVFP4Quantizer(with_2d_quantization=True), torch.randn(64, 96)
        weight = quantizer(torch.zeros(64, 96))
        with mock.patch.object(torch.distributed, "all_reduce"):
            quantize_master_weights([weight], [master.view(-1)], [0], None)
        post_all_gather_processing([weight])
        self.assertEqual(weight._amax_rowwise.item(), master.abs().max().item())
        alone = quantizer(master)
        self.assertLess((weight.dequantize() - alone.dequantize()).norm(), 0.02 * master.norm())
        ours, theirs = (general_gemm(w, torch.eye(96), torch.float32, layout="TN")[0] for w in (weight, alone))
        self.assertLess((ours - theirs).norm(), 0.02 * theirs.norm())

    def test_nvfp4_parts_that_do_not_fit(self):
        x, scale, out = torch.ones(8), torch.ones(1, 1), torch.zeros(4, dtype=torch.uint8)
        for words, call, arguments in (
                ("do not lie within", tex.nvfp4_2d_compute_partial_amax, (x, scale, 16, 16, 250)),
                ("lie in 5 bytes", tex.nvfp4_2d_partial_cast, (x, out, scale, torch.ones(1), 16, 16, 3)),
                ("it is torch.float32 (1, 1)", tex.nvfp4_2d_partial_cast, (x, out, scale.double(), torch.ones(1), 16, 16, 0)),
                ("one for each weight", tex.nvfp4_multi_tensor_2d_partial_cast, ([x], [out], [scale], [], [16], [16], [0]))):
            self.refused(words, call, *arguments)
        with self.assertRaisesRegex(Unsupported, "block_len is 128; it is 16"):
            tex.nvfp4_2d_compute_partial_amax(x, scale, 16, 16, 0, 128)
        self.assertEqual((out.count_nonzero().item(), scale.item()), (0, 1.0))
