"""Tests NVIDIA's GroupedLinear, grouped tensors and activations of experts on te-fl, forward and backward, against PyTorch in FP64."""

import contextlib
import itertools
import unittest
from unittest import mock

import inside_package  # noqa: F401
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex  # registered by inside_package
from te_fl.errors import Error, InvalidArgument, Unsupported
from te_fl.transformer_engine_torch import sizes
from transformer_engine.common import recipe
from transformer_engine.pytorch import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from transformer_engine.pytorch import ops as te_ops
from transformer_engine.pytorch.constants import DType, TE_DType
from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm, general_grouped_gemm_for_grouped_tensor
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

E4M3 = DType.kFloat8E4M3


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Compared(unittest.TestCase):
    def near(self, got, want, tolerance):
        """Asserts that the error's norm is at most `tolerance` times the norm of the whole tensor."""
        got, want = got.detach().double(), want.detach().double()
        self.assertEqual(got.shape, want.shape)
        self.assertLessEqual((got - want).norm().item(), tolerance * max(want.norm().item(), 1e-30))

    def refused(self, words, call, *arguments, **options):
        with self.assertRaises(Error) as caught:
            call(*arguments, **options)
        self.assertIn(words, str(caught.exception))


class Linear(Compared):
    def check(self, dtype, how, splits, tolerance, bias=True, features=(128, 256)):
        layer = te.GroupedLinear(len(splits), *features, bias=bias, params_dtype=dtype, device="cuda")
        weights = [getattr(layer, f"weight{i}") for i in range(len(splits))]
        biases = [getattr(layer, f"bias{i}") for i in range(len(splits))] if bias else []
        for i, b in enumerate(biases):
            b.data.copy_(drawn(features[1], seed=100 + i))
        x = drawn(sum(splits), features[0], dtype=dtype).requires_grad_()
        with te.autocast(enabled=True, recipe=how) if how is not None else contextlib.nullcontext():
            y = layer(x, torch.tensor(splits))
        dy = drawn(*y.shape, dtype=dtype, seed=1)
        y.backward(dy)
        xs, dys = x.detach().double().split(splits), dy.double().split(splits)
        self.near(y, torch.cat([a @ w.double().t() + (biases[i].double() if bias else 0) for i, (a, w) in enumerate(zip(xs, weights))]), tolerance)
        self.near(x.grad, torch.cat([d @ w.double() for d, w in zip(dys, weights)]), tolerance)
        for i, (w, d, a) in enumerate(zip(weights, dys, xs)):
            self.near(w.grad, d.t() @ a, tolerance)
            if bias:
                self.near(biases[i].grad, d.sum(0), tolerance)

    def test_plain(self):
        for (dtype, tolerance), splits, bias in itertools.product(((torch.float32, 1e-6), (torch.bfloat16, 5e-3)), ([3, 0, 5], [0, 0], [7]),
                                                                  (True, False)):
            self.check(dtype, None, splits, tolerance, bias, (24, 40))

    def test_fp8(self):
        for how in (recipe.DelayedScaling(), recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()):
            self.check(torch.bfloat16, how, [16, 0, 32], 0.08)

    def test_lists(self):
        a, b = [drawn(6, 8, seed=i) for i in range(3)], [drawn(n, 8, seed=9 + n) for n in (2, 0, 3)]
        out, bias = torch.empty(5, 6), [drawn(6, seed=20 + i) for i in range(3)]
        general_grouped_gemm(a, b, [out], [None] * 3, torch.float32, single_output=True, m_splits=[2, 0, 3], bias=bias, use_bias=True)
        want = [y @ x.t() + c for x, y, c in zip(a, b, bias)]
        self.near(out, torch.cat(want), 1e-6)
        outs = [torch.empty(len(y), 6) for y in b]
        before = [torch.empty_like(o) for o in outs]
        kind = TE_DType[torch.float32]
        tex.te_general_grouped_gemm(a, True, b, False, outs, kind, [2, 0, 3], bias, kind, False, before, False, [out], 0, False, False, 0)
        for got, pre, w in zip(outs, before, want):
            self.near(pre, w, 1e-6)
            self.near(got, torch.nn.functional.gelu(w, approximate="tanh"), 1e-6)
        dx = [torch.empty(len(y), 8) for y in b]
        through = [drawn(len(y), 8, seed=50 + len(y)) for y in b]
        dy, none = [drawn(len(y), 6, seed=40 + len(y)) for y in b], [out.new_empty(0)] * 3
        tex.te_general_grouped_gemm(a, False, dy, False, dx, kind, [2, 0, 3], none, kind, False, through, True, [out], 0, False, False, 0)
        for got, x, d, pre in zip(dx, a, dy, through):
            self.near(got, (d @ x) * torch.func.grad(lambda t: torch.nn.functional.gelu(t, approximate="tanh").sum())(pre), 1e-6)
        dw, dy = [torch.ones(6, 8) for _ in b], [drawn(len(y), 6, seed=30 + len(y)) for y in b]
        _, grads, _ = general_grouped_gemm(b, dy, dw, [None] * 3, torch.float32, layout="NT", m_splits=[2, 0, 3], grad=True, accumulate=True,
                                           bias=bias, use_bias=True)
        for got, grad, d, y in zip(dw, grads, dy, b):
            self.near(got, 1 + d.t() @ y, 1e-6)
            self.near(grad, d.sum(0), 1e-6)

    def test_bad_input_writes_nothing(self):
        a, b, out = [drawn(6, 8)] * 2, [drawn(2, 8), drawn(3, 8)], torch.zeros(4, 6)
        rest = ([out.new_empty(0)] * 2, E4M3, True, [out.new_empty(0)] * 2, False, [out], 0, False, False, 0)

        def call(a, b, d, kind, single=True):
            return tex.te_general_grouped_gemm(a, True, b, False, d, kind, [2, 3], rest[0], TE_DType[torch.bfloat16], single, *rest[3:])

        self.refused("the products have 30", call, a, b, [out], TE_DType[torch.float32])
        self.refused("B has 1 tensors, A 2", call, a, b[:1], [out], TE_DType[torch.float32])
        self.refused("D_type says torch.bfloat16", call, a, b, [out], TE_DType[torch.bfloat16])
        self.refused("D is None", call, a, b, None, TE_DType[torch.float32])
        self.refused("argument 'd'[0] has shape [4, 6], must be [2, 6]", call, a, b, [out, out], TE_DType[torch.float32], False)
        self.refused("argument 'b'[0] has shape [6, 7], must be [6, 8]", call, [drawn(6, 7)] * 2, b, [out.new_zeros(5, 6)], TE_DType[torch.float32])
        self.assertEqual(out.count_nonzero().item(), 0)


def plain_group(values, splits=None):
    rows = None if splits is None else torch.tensor(splits)
    return GroupedTensorStorage(shape=tuple(values.shape), dtype=values.dtype, num_tensors=len(splits), quantizer=None, data=values.view(-1),
                                first_dims=rows, tensor_offsets=tex.splits_to_offsets(rows, values.shape[1]))


class Groups(Compared):
    SPLITS = [128, 0, 256]
    QUANTIZERS = {"current": lambda: Float8CurrentScalingQuantizer(E4M3, device="cuda"), "mxfp8": lambda: MXFP8Quantizer(E4M3),
                  "blocks": lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)}

    def setUp(self):
        self.x = drawn(sum(self.SPLITS) + 128, 256, dtype=torch.bfloat16)  # with extra rows at the end that belong to no member
        self.rows = torch.tensor(self.SPLITS)
        self.parts = self.x[:sum(self.SPLITS)].split(self.SPLITS)

    def test_members_are_quantised_as_tensors_are(self):
        for make in self.QUANTIZERS.values():
            # group_quantize must not create the package's tensor object of each member, because that costs more host time than the quantisation.
            with mock.patch.object(GroupedTensorStorage, "split_into_quantized_tensors", side_effect=AssertionError):
                group = tex.group_quantize(self.x, make(), 3, self.rows, tensor_offsets=tex.splits_to_offsets(self.rows, 256))
            for member, part in zip(group.split_into_quantized_tensors(), self.parts):
                if part.numel():
                    self.assertTrue(torch.equal(member.dequantize(dtype=torch.float32), make()(part).dequantize(dtype=torch.float32)))
            plain = tex.group_dequantize(group, TE_DType[torch.float32]).split_into_quantized_tensors()
            self.assertEqual([tuple(t.shape) for t in plain], [tuple(p.shape) for p in self.parts])
            self.near(torch.cat(plain), torch.cat(self.parts), 0.04)

    def test_products(self):
        w, dy = [drawn(384, 256, dtype=torch.bfloat16, seed=i) for i in range(3)], drawn(len(self.x), 384, dtype=torch.bfloat16, seed=9)
        bias = drawn(3, 384, dtype=torch.bfloat16, seed=7)
        biases = GroupedTensorStorage(shape=(3, 384), dtype=bias.dtype, num_tensors=3, shapes=[(1, 384)] * 3, quantizer=None, data=bias.view(-1))
        want = torch.cat([a.double() @ v.double().t() + c.double() for a, v, c in zip(self.parts, w, bias)])
        grads = [d.double().t() @ a.double() for d, a in zip(dy[:len(want)].split(self.SPLITS), self.parts)]
        for name, make in ((None, None), *self.QUANTIZERS.items()):
            for for_gemm in (False, True):
                def group(values):
                    if make is None:
                        return plain_group(values, self.SPLITS)
                    quantizer = make()
                    quantizer.optimize_for_gemm = for_gemm
                    return tex.group_quantize(values, quantizer, 3, self.rows)

                weights = w
                if make is not None:
                    quantizer = make() if name != "blocks" else Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2)
                    weights = [quantizer(t) for t in w]
                out = torch.full((len(self.x), 384), 7.0, dtype=torch.bfloat16)
                x, tolerance = group(self.x), 0.06 if make else 5e-3
                general_grouped_gemm_for_grouped_tensor(weights, x, plain_group(out, self.SPLITS), layout="TN", bias=biases)
                self.near(out[:len(want)], want, tolerance)
                self.assertTrue(bool((out[len(want):] == 7).all()))
                outs = [torch.ones(384, 256) for _ in w]
                general_grouped_gemm_for_grouped_tensor(x, group(dy), outs, layout="NT", accumulate=True)
                for got, grad in zip(outs, grads):
                    self.near(got, 1 + grad, tolerance)

    def test_sizes_on_the_device_are_read_once(self):
        """In a forward and backward as the package's GroupedLinear calls them, the host reads the sizes from the device once."""
        for name, make in ((None, None), *self.QUANTIZERS.items()):
            with self.subTest(name):
                self.assertEqual(self.reads(make), 1)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            self.refused("first_dims: a tensor on the device", tex.group_quantize, self.x, self.QUANTIZERS["current"](), 3, self.rows)

    def reads(self, make):
        total, dy = sum(self.SPLITS), drawn(len(self.x), 384, dtype=torch.bfloat16, seed=9)
        w, quantizer = [drawn(384, 256, dtype=torch.bfloat16, seed=i) for i in range(3)], make and make()
        if make:
            square = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2)
            w = [(square if isinstance(quantizer, Float8BlockQuantizer) else quantizer)(t) for t in w]
        read, on_device, count = torch.Tensor.tolist, set(), [0]

        def tolist(tensor):
            count[0] += any(tensor.data_ptr() == other.data_ptr() for other in on_device)
            with torch._C.DisableTorchFunction():  # otherwise the TorchFunctionMode that makes the host act as CUDA would call this function again
                return read(tensor)

        with mock.patch.object(torch.Tensor, "tolist", tolist):
            rows, (ins, outs) = tex.splits_to_offsets_multi(self.rows, "cuda", strides=[256, 384], include_leading_zero=[True, True],
                                                            dtypes=[torch.int64, torch.int64], bulk_allocate=True)
            on_device |= {self.rows, rows, ins, outs}

            def group(values, columns, offsets):
                if make is None:
                    return GroupedTensorStorage(shape=(len(values), columns), dtype=values.dtype, num_tensors=3, quantizer=None, data=values.view(-1),
                                                first_dims=rows, tensor_offsets=offsets)
                return tex.group_quantize(values, quantizer, 3, rows, tensor_offsets=offsets)

            def plain(columns, offsets):
                return GroupedTensorStorage(shape=(len(self.x), columns), dtype=torch.bfloat16, num_tensors=3, quantizer=None, first_dims=rows,
                                            data=torch.empty(len(self.x) * columns, dtype=torch.bfloat16), tensor_offsets=offsets)

            x, y, dx = group(self.x, 256, ins), plain(384, outs), plain(256, ins)
            general_grouped_gemm_for_grouped_tensor(w, x, y, layout="TN")
            grads = group(dy, 384, outs)
            general_grouped_gemm_for_grouped_tensor(w, grads, dx, layout="NN")
            general_grouped_gemm_for_grouped_tensor(x, grads, [torch.empty(384, 256) for _ in w], layout="NT")
        want = torch.cat([a.double() @ (t.dequantize(dtype=torch.float32) if make else t).double().t() for a, t in zip(self.parts, w)])
        self.near(y.rowwise_data.view(-1, 384)[:total], want, 0.06)
        rows.fill_(0)  # PyTorch's version counter sees this write, so the sizes are read again
        self.assertEqual(sizes.read(rows, "rows"), [0, 0, 0])
        return count[0]

    def test_scaled_bias(self):
        a, b, out = [drawn(4, 8, seed=i) for i in range(2)], drawn(5, 8, seed=3), torch.empty(5, 4)
        bias, scale = drawn(2, 4, seed=4), drawn(5, seed=5)
        biases = GroupedTensorStorage(shape=(2, 4), dtype=bias.dtype, num_tensors=2, shapes=[(1, 4)] * 2, quantizer=None, data=bias.view(-1))
        general_grouped_gemm_for_grouped_tensor(a, plain_group(b, [2, 3]), plain_group(out, [2, 3]), layout="TN", bias=biases, bias_scale=scale)
        want = torch.cat([y @ x.t() + s[:, None] * c for x, y, s, c in zip(a, b.split([2, 3]), scale.split([2, 3]), bias)])
        self.near(out, want, 1e-6)

    def test_gradients_of_biases(self):
        group, grads = tex.bgrad_group_quantize(self.x, MXFP8Quantizer(E4M3), 3, self.rows)
        self.near(grads, torch.stack([p.double().sum(0) for p in self.parts]), 5e-3)
        self.assertEqual(group.num_tensors, 3)
        self.refused("is not supported", tex.bgrad_group_quantize, self.x, Float8CurrentScalingQuantizer(E4M3, device="cuda"), 3, self.rows)

    def test_a_set_flag_keeps_an_output(self):
        x = self.x[:512]
        for name, for_gemm in itertools.product(self.QUANTIZERS, (False, True)):
            quantizer = self.QUANTIZERS[name]()
            quantizer.optimize_for_gemm = for_gemm
            group = tex.group_quantize(x, quantizer, 2, None)
            kept = [None if t is None else t.clone() for t in (group.rowwise_data, group.columnwise_data, group.scale_inv, group.columnwise_scale_inv)]
            again = tex.group_quantize(x * 3, quantizer, 2, None, noop_flag=torch.ones(1), output=group)
            self.assertIs(again, group)
            for before, after in zip(kept, (group.rowwise_data, group.columnwise_data, group.scale_inv, group.columnwise_scale_inv)):
                if before is not None:
                    self.assertTrue(torch.equal(before, after), name)
            tex.group_quantize(x * 3, quantizer, 2, None, noop_flag=torch.zeros(1), output=group)
            self.assertFalse(torch.equal(kept[2], group.scale_inv), name)

    def test_row_wise_groups_get_their_other_copy(self):
        x = self.x[:384]
        group = tex.group_quantize(x, MXFP8Quantizer(E4M3, columnwise=False), 3, torch.tensor([128, 0, 256]))
        quantizer = MXFP8Quantizer(E4M3)
        quantizer.optimize_for_gemm = True
        plain = tex.group_requantize_inplace(group, quantizer, 3, torch.tensor([128, 0, 256]), TE_DType[torch.bfloat16], return_dequantized=True)
        self.near(plain, x, 0.04)
        self.assertTrue(group._with_gemm_swizzled_scales)
        self.assertEqual(group.columnwise_data.numel(), x.numel())
        self.refused("in the order of the tensor cores already", tex.group_requantize_inplace, group, quantizer, 3, None, TE_DType[torch.bfloat16],
                     return_dequantized=True)

    def test_bad_input(self):
        for words, arguments in (("has a negative number", (torch.tensor([-1, 1, 2]),)), ("the input has 131072", (torch.tensor([512, 1, 2]),)),
                                 ("has 2 elements for 3 tensors", (torch.tensor([1, 1]),)), ("give first_dims", (None,)),
                                 ("are not those of tensors that follow", (self.rows, None, torch.tensor([0, 1, 2, 3])))):
            self.refused(words, tex.group_quantize, self.x, self.QUANTIZERS["current"](), 3, *arguments)
        self.refused("multiples of 32", tex.group_quantize, self.x, MXFP8Quantizer(E4M3), 3, torch.tensor([1, 1, 2]))
        self.refused("is not supported", tex.group_quantize, self.x, NVFP4Quantizer(), 3, self.rows)

    def test_offsets(self):
        self.assertEqual(tex.splits_to_offsets(self.rows, 10).tolist(), [0, 1280, 1280, 3840])
        self.refused("it is int64 of one", tex.splits_to_offsets, self.rows.int(), 10)
        splits, sums = tex.splits_to_offsets_multi(self.rows.int(), torch.device("cpu"), strides=[1, 4], include_leading_zero=[True, False],
                                                   dtypes=[torch.int32, torch.int64], bulk_allocate=True)
        self.assertEqual((splits.dtype, splits.tolist()), (torch.int64, self.SPLITS))
        self.assertEqual([s.tolist() for s in sums], [[0, 128, 128, 384], [512, 512, 1536]])
        self.assertEqual([s.dtype for s in sums], [torch.int32, torch.int64])
        splits.zero_()  # The cumulative sums of the earlier splits must keep their values.
        self.assertEqual([sizes.read(s, "sums") for s in sums], [[0, 128, 128, 384], [512, 512, 1536]])
        self.refused("give one of each", tex.splits_to_offsets_multi, self.rows, torch.device("cpu"), strides=[1], include_leading_zero=[], dtypes=[])
        self.assertEqual(tex.copy_data_ptrs_to_device([self.x, self.rows], "cpu").tolist(), [self.x.data_ptr(), self.rows.data_ptr()])


class Activations(Compared):
    def halves(self, x, interleave):
        if not interleave:
            return x.chunk(2, -1)
        turns = x.view(x.shape[0], -1, 2, interleave)
        return turns[:, :, 0].reshape(x.shape[0], -1), turns[:, :, 1].reshape(x.shape[0], -1)

    def oracle(self, kind, x, interleave):
        if kind == "srelu":
            return torch.relu(x) ** 2
        a, b = self.halves(x, interleave)
        if kind == "swiglu":
            return torch.nn.functional.silu(a) * b
        if kind == "situglu":
            return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)
        a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
        return a * torch.sigmoid(1.702 * a) * (b + 1)

    def test_scaled(self):
        kinds = {"swiglu": te_ops.ScaledSwiGLU, "situglu": te_ops.ScaledSiTUGLU, "clamped": te_ops.ScaledClampedQGeGLU, "srelu": te_ops.ScaledSReLU}
        for (kind, make), interleave, (dtype, tolerance) in itertools.product(kinds.items(), (None, 32),
                                                                              ((torch.float32, 1e-6), (torch.bfloat16, 5e-3))):
            if kind == "srelu" and interleave:
                continue
            x, s = (drawn(5, 128) * 4).to(dtype).requires_grad_(), drawn(5, seed=1).to(dtype).requires_grad_()
            y = (make() if kind == "srelu" else make(glu_interleave_size=interleave))(x, s)
            dy = drawn(*y.shape, dtype=dtype, seed=2)
            y.backward(dy)
            wide, scales = x.detach().double().requires_grad_(), s.detach().double().requires_grad_()
            want = self.oracle(kind, wide, interleave) * scales[:, None]
            want.backward(dy.double())
            for got, expected in ((y, want), (x.grad, wide.grad), (s.grad, scales.grad)):
                self.near(got, expected, tolerance)
            self.assertEqual(s.grad.dtype, dtype)

    def test_between_grouped_products(self):
        splits, rows = [16, 0, 32], torch.tensor([16, 0, 32])
        for dtype, how, tolerance in ((torch.float32, None, 1e-6), (torch.bfloat16, None, 6e-3), (torch.bfloat16, recipe.Float8CurrentScaling(), 0.12),
                                      (torch.bfloat16, recipe.Float8BlockScaling(), 0.12)):
            up, down = (te_ops.GroupedLinear(3, 64, n, bias=False, dtype=dtype, device="cuda") for n in (128, 64))
            x, s = drawn(48, 64, dtype=dtype).requires_grad_(), drawn(48, dtype=dtype, seed=1).requires_grad_()
            with te.autocast(enabled=how is not None, recipe=how):
                y = te_ops.Sequential(up, te_ops.ScaledSwiGLU(), down)(x, rows, s, rows)
            dy = drawn(48, 64, dtype=dtype, seed=2)
            y.backward(dy)
            wide, scales = x.detach().double().requires_grad_(), s.detach().double().requires_grad_()
            weights = [[getattr(layer, f"weight{i}").detach().double() for i in range(3)] for layer in (up, down)]
            want = torch.cat([self.oracle("swiglu", a @ u.t(), None) * f[:, None] @ d.t() for a, f, u, d in
                              zip(wide.split(splits), scales.split(splits), *weights)])
            want.backward(dy.double())
            for got, expected in ((y, want), (x.grad, wide.grad), (s.grad, scales.grad)):
                self.near(got, expected, tolerance)

    def test_biases_of_groups(self):
        """Tests te.ops.GroupedLinear's biases, with and without a scale per row. Their gradients are computed by PyTorch on a host, and by the
        package's Triton kernels on a GPU."""
        rows = torch.tensor([16, 0, 32])
        for scaled, (dtype, tolerance) in itertools.product((False, True), ((torch.float32, 1e-6), (torch.bfloat16, 6e-3))):
            layer = te_ops.GroupedLinear(3, 64, 32, bias=True, dtype=dtype, device="cuda", **({"scale_bias": True} if scaled else {}))
            for i in range(3):
                getattr(layer, f"bias{i}").data.normal_()
            x, s = drawn(48, 64, dtype=dtype).requires_grad_(), drawn(48, seed=1).abs().requires_grad_()
            y, dy = layer(x, rows, *([s] if scaled else [])), drawn(48, 32, dtype=dtype, seed=2)
            y.backward(dy)
            wide, scales = x.detach().double(), s.detach().double().requires_grad_()
            biases = [getattr(layer, f"bias{i}").detach().double().requires_grad_() for i in range(3)]
            want = torch.cat([a @ getattr(layer, f"weight{i}").detach().double().t() + b * (f[:, None] if scaled else 1) for i, (a, b, f) in
                              enumerate(zip(wide.split(rows.tolist()), biases, scales.split(rows.tolist())))])
            want.backward(dy.double())
            pairs = [(y, want), *((getattr(layer, f"bias{i}").grad, b.grad) for i, b in enumerate(biases)), *([(s.grad, scales.grad)] if scaled else [])]
            for got, expected in pairs:
                self.near(got, expected, tolerance)

    def test_situglu_alone_and_quantised(self):
        x = drawn(32, 64, dtype=torch.bfloat16).requires_grad_()
        y = te_ops.SiTUGLU()(x)
        y.backward(torch.ones_like(y))
        wide = x.detach().double().requires_grad_()
        want = self.oracle("situglu", wide, None)
        want.sum().backward()
        self.near(y, want, 5e-3)
        self.near(x.grad, wide.grad, 5e-3)
        self.near(tex.situglu(x.detach(), MXFP8Quantizer(E4M3)).dequantize(dtype=torch.float32), want, 0.05)
        self.refused("beta1 is 0", tex.situglu, x, None, 0.0)

    def test_by_groups(self):
        x, p, rows = drawn(256, 128, dtype=torch.bfloat16), drawn(256, dtype=torch.bfloat16, seed=1), torch.tensor([128, 128])
        quantizer = MXFP8Quantizer(E4M3, rowwise=False)
        group = tex.group_scaled_swiglu(x, p, quantizer, 2, rows)
        want = self.oracle("swiglu", x.double(), None) * p.double()[:, None]
        self.near(tex.group_dequantize(group, TE_DType[torch.float32]).rowwise_data.view(256, 64), want, 0.05)
        group = tex.group_scaled_clamped_swiglu(x, p, quantizer, 2, 7.0, first_dims=rows)
        want = self.oracle("clamped", x.double(), None) * p.double()[:, None]
        self.near(tex.group_dequantize(group, TE_DType[torch.float32]).rowwise_data.view(256, 64), want, 0.05)
        with self.assertRaises(Unsupported):
            tex.group_scaled_swiglu(x, p, NVFP4Quantizer(), 2, rows)

    def test_bad_input(self):
        x, s = drawn(4, 64), drawn(4)
        self.refused("act_scales has 3 elements", tex.scaled_swiglu, x, s[:3], None)
        self.refused("is 24; it is 0, or divides the 32", tex.scaled_swiglu, x, s, None, 24)
        self.refused("is two halves", tex.scaled_swiglu, x[:, :63], s, None)
        with self.assertRaises(InvalidArgument):
            tex.scaled_dswiglu(x, x, s, None)
