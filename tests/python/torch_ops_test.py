"""Tests te_fl.ops on PyTorch tensors: shared memory written in place, views, FP8, and release of memory."""

import unittest
import unittest.mock

import torch

import te_fl


def padded(n, multiple):
    return -(-n // multiple) * multiple


class Torch(unittest.TestCase):
    def test_an_op_writes_a_tensor_in_place(self):
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
        y = torch.empty_like(x)
        te_fl.ops.gelu(input=x, output=y)
        torch.testing.assert_close(y.double(), torch.nn.functional.gelu(x.double(), approximate="tanh"), atol=1e-6, rtol=0)

    def test_views_and_offsets(self):
        x = torch.randn(8, 10)
        y = torch.zeros(8, 20)
        te_fl.ops.strided_copy(input=x.t(), output=y[:, 3:13].t())
        self.assertTrue(torch.equal(y[:, 3:13], x))
        self.assertEqual(float(y[:, :3].abs().sum() + y[:, 13:].abs().sum()), 0.0)

    def test_a_view_that_is_negated_where_it_is_read_is_refused(self):
        x = torch.randn(4, 8, dtype=torch.complex64).conj().imag
        output = torch.empty(4, 8)
        self.assertRaisesRegex(ValueError, "argument 'input' has PyTorch's negative bit.*resolve_neg", te_fl.ops.relu, input=x, output=output)
        te_fl.ops.relu(input=x.resolve_neg(), output=output)
        torch.testing.assert_close(output, torch.relu(x))

    def test_parameters_lend_their_memory(self):
        # A leaf that requires grad: te-fl reads and writes its memory without autograd's knowledge.
        weight = torch.nn.Parameter(torch.ones(3, 4))
        te_fl.ops.fill(output=weight, value=2.0)
        self.assertTrue(bool((weight == 2).all()))

    def test_rows_of_one_tensor_are_a_list(self):
        torch.manual_seed(4)
        weights, bias, sizes = [torch.randn(6, 8) for _ in range(3)], [torch.randn(6) for _ in range(3)], [2, 0, 3]
        x = torch.randn(5, 16)[:, ::2]  # rows are not contiguous
        y = torch.full((7, 6), 9.0)
        want = torch.cat([a.double() @ w.double().t() + c for a, w, c in zip(x.split(sizes), weights, bias)])
        for numbers in (sizes, tuple(sizes), torch.tensor(sizes), torch.tensor(sizes, dtype=torch.int32)):
            y[1:6] = 0
            te_fl.ops.grouped_gemm(a=te_fl.Rows(x.contiguous(), numbers), b=weights, d=te_fl.Rows(y[1:6], numbers), bias=bias, trans_b=True)
            torch.testing.assert_close(y[1:6].double(), want, atol=1e-5, rtol=0)
        self.assertTrue(bool((y[[0, 6]] == 9).all()))
        doubled = torch.empty(5, 8)
        te_fl.ops.multi_tensor_scale(inputs=te_fl.Rows(x, sizes), outputs=te_fl.Rows(doubled, sizes), noop_flag=torch.zeros(1, dtype=torch.int32),
                                     scale=2.0)
        self.assertTrue(torch.equal(doubled, 2 * x))
        self.assertEqual((len(te_fl.Rows(x, sizes)), repr(te_fl.Rows(x, sizes))), (3, "te_fl.Rows([2, 0, 3])"))

    FACTORS = {"tensor": lambda m, k: (1, 1), "block_1x128": lambda m, k: (-(-k // 128) * padded(m, 4), -(-m // 128) * padded(k, 4)),
               "block_128x128": lambda m, k: (-(-m // 128) * padded(-(-k // 128), 4), -(-k // 128) * padded(-(-m // 128), 4)),
               "mxfp8": lambda m, k: (padded(m, 128) * padded(-(-k // 32), 4), padded(-(-m // 32), 4) * padded(k, 128))}

    def quantised(self, scaling, sizes, columns):
        """Allocates one buffer for consecutive tensors of these sizes; returns the buffer and its parts."""
        rows, codes = sum(sizes), torch.float8_e4m3fn
        counts = [sum(n) for n in zip(*(self.FACTORS[scaling](m, columns) for m in sizes))]
        factors = [torch.full((n,), 7, dtype=torch.uint8).view(torch.float8_e8m0fnu) if scaling == "mxfp8" else torch.full((n,), 7.0) for n in counts]
        parts = dict(data=torch.zeros(rows, columns, dtype=codes), columnwise_data=torch.zeros(rows * columns, dtype=codes), scale_inv=factors[0])
        if scaling == "tensor":
            parts.update(scale=torch.zeros(len(sizes)), amax=torch.zeros(len(sizes)), compute_scale=True)
        else:
            parts.update(columnwise_scale_inv=factors[1], scaling=scaling)
        return te_fl.Quantized(**parts), [p.view(torch.uint8) for p in parts.values() if isinstance(p, torch.Tensor)]

    def test_rows_of_a_quantised_matrix_are_quantised_tensors(self):
        sizes, columns = [40, 0, 7, 130], 160
        x = torch.randn(sum(sizes), columns, generator=torch.Generator().manual_seed(5))
        for scaling in self.FACTORS:
            whole, got = self.quantised(scaling, sizes, columns)
            te_fl.ops.multi_tensor_quantize(inputs=te_fl.Rows(x, sizes), outputs=te_fl.Rows(whole, sizes))
            alone = [self.quantised(scaling, [n], columns) for n in sizes]
            for part, (one, _) in zip(x.split(sizes), alone):
                te_fl.ops.quantize(input=part, output=one)
            for g, *parts in zip(got, *(p for _, p in alone)):
                self.assertTrue(torch.equal(g.view(-1), torch.cat([p.view(-1) for p in parts])), scaling)
            back = [torch.empty(n, columns) for n in sizes]
            for (one, _), out in zip(alone, back):
                te_fl.ops.dequantize(input=one, output=out)
            torch.testing.assert_close(torch.cat(back), x, atol=0.01, rtol=0.1)

    def test_wrong_rows_of_a_quantised_matrix(self):
        x = torch.ones(8, 32)
        whole, parts = self.quantised("mxfp8", [8], 32)
        for sizes, words in (([8, 1], "has a size 1 behind 8 of 8 rows"), ([7], "sizes whose sum is 7; the tensor has 8 rows"),
                             ([3, 5], "scale_inv is 1024 bytes or more; that of the te_fl.Quantized is 512")):
            with self.assertRaisesRegex(te_fl.errors.InvalidArgument, words):
                te_fl.ops.multi_tensor_quantize(inputs=te_fl.Rows(x, [3, 5]), outputs=te_fl.Rows(whole, sizes))
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "a contiguous matrix of FP8 codes"):
            te_fl.ops.multi_tensor_quantize(inputs=te_fl.Rows(x, [8]), outputs=te_fl.Rows(te_fl.Quantized(whole.data[0], scale_inv=torch.ones(1)), [32]))
        self.assertEqual(parts[0].count_nonzero().item(), 0)

    def test_a_scale_of_nothing_is_not_read(self):
        def codes(rows, columns, scale):
            return te_fl.Quantized(torch.ones(rows, columns).to(torch.float8_e4m3fn), scale_inv=torch.tensor([scale]),
                                   columnwise_data=torch.ones(columns, rows).to(torch.float8_e4m3fn))
        nan = float("nan")
        d, sums = [torch.full((32, 48), 7.0) for _ in range(2)], [torch.full((32,), 7.0) for _ in range(2)]
        te_fl.ops.grouped_gemm(a=[codes(0, 32, nan), codes(16, 32, 2.0)], b=[codes(0, 48, nan), codes(16, 48, 1.0)], d=d, bias_grad=sums, trans_a=True)
        self.assertEqual([t.unique().tolist() for t in (*d, *sums)], [[0.0], [32.0], [0.0], [32.0]])

    def test_wrong_rows(self):
        x, y, weights = torch.randn(5, 8), torch.zeros(5, 6), [torch.randn(6, 8)] * 2
        for whole, sizes, words in ((x, [2, 4], "has a size 4 behind 2 of 5 rows"), (x, [-1, 6], "has a size -1 behind 0 of 5 rows"),
                                    (x, [2, 2], "sizes whose sum is 4; the tensor has 5 rows"), (torch.tensor(1.0), [1, 0], "one dimension or more")):
            with self.assertRaisesRegex(te_fl.errors.InvalidArgument, words):
                te_fl.ops.grouped_gemm(a=te_fl.Rows(whole, sizes), b=weights, d=te_fl.Rows(y, [2, 3]), trans_b=True)
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "argument 'd'.0. has shape .3, 6., must be .2, 6."):
            te_fl.ops.grouped_gemm(a=te_fl.Rows(x, [2, 3]), b=weights, d=te_fl.Rows(y, [3, 2]), trans_b=True)
        self.assertEqual(y.count_nonzero().item(), 0)

    def test_sizes_on_a_device_are_not_read_in_a_capture(self):
        class OnDevice(torch.Tensor):
            is_cuda = True
        sizes = torch.tensor([2, 3]).as_subclass(OnDevice)
        with unittest.mock.patch("torch.cuda.is_current_stream_capturing", lambda: True):
            with self.assertRaisesRegex(te_fl.errors.Unsupported, "sizes: a tensor on the device, .* is being captured"):
                te_fl.Rows(torch.zeros(5, 2), sizes)
        with unittest.mock.patch("torch.cuda.is_current_stream_capturing", lambda: False):
            self.assertEqual(te_fl.Rows(torch.zeros(5, 2), sizes).sizes, [2, 3])

    def test_fp8_by_given_scale(self):
        x = torch.randn(32, 48, generator=torch.Generator().manual_seed(2))
        scale = torch.tensor([16.0])
        q = te_fl.Quantized(torch.empty(32, 48, dtype=torch.float8_e4m3fn), columnwise_data=torch.empty(48, 32, dtype=torch.float8_e4m3fn),
                            scale=scale, scale_inv=torch.zeros(1), amax=torch.zeros(1))
        te_fl.ops.quantize(input=x, output=q)
        expected = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.assertTrue(torch.equal(q.data.view(torch.uint8), expected.view(torch.uint8)))
        self.assertTrue(torch.equal(q.columnwise_data.view(torch.uint8), expected.t().contiguous().view(torch.uint8)))
        self.assertEqual(float(q.amax), float(x.abs().max()))
        self.assertEqual(float(q.scale_inv), 1 / 16)

    def test_fp8_product_of_column_wise_copies_alone(self):
        torch.manual_seed(3)
        a, b = torch.randn(16, 32), torch.randn(24, 32)
        quantised = []
        for t in (a, b):
            q = te_fl.Quantized(torch.empty(t.shape, dtype=torch.float8_e4m3fn), scale=torch.zeros(1), scale_inv=torch.zeros(1),
                                amax=torch.zeros(1), compute_scale=True)
            te_fl.ops.quantize(input=t, output=q)
            quantised.append(q)
        d = torch.empty(16, 24)
        te_fl.ops.generic_gemm(a=quantised[0], b=quantised[1], d=d, trans_b=True)
        values = [q.data.float().double() * float(q.scale_inv) for q in quantised]
        torch.testing.assert_close(d.double(), values[0] @ values[1].t(), atol=1e-5, rtol=1e-5)
        # Multiplies by `a`, of which only the column-wise data exists.
        columns = te_fl.Quantized(columnwise_data=quantised[0].data.t().contiguous(), shape=(16, 32), scale_inv=quantised[0].scale_inv)
        back = torch.empty(24, 32)
        grad = torch.randn(16, 24)
        g = te_fl.Quantized(torch.empty(16, 24, dtype=torch.float8_e5m2), columnwise_data=torch.empty(24, 16, dtype=torch.float8_e5m2),
                            scale=torch.zeros(1), scale_inv=torch.zeros(1), amax=torch.zeros(1), compute_scale=True)
        te_fl.ops.quantize(input=grad, output=g)
        te_fl.ops.generic_gemm(a=g, b=columns, d=back, trans_a=True)
        expected = (g.data.float().double() * float(g.scale_inv)).t() @ values[0]
        torch.testing.assert_close(back.double(), expected, atol=1e-4, rtol=1e-4)

    def test_a_tensor_of_another_device_is_refused(self):
        with self.assertRaises((te_fl.Error, BufferError, RuntimeError, TypeError)):
            te_fl.ops.gelu(input=torch.empty(3, device="meta"), output=torch.empty(3))

    def test_no_reference_is_kept(self):
        import gc
        import weakref
        x, y = torch.randn(3), torch.empty(3)
        seen = weakref.ref(x)
        te_fl.ops.gelu(input=x, output=y)
        del x
        gc.collect()
        self.assertIsNone(seen())


if __name__ == "__main__":
    unittest.main()
