"""Makes the calls that Nanotron's nanotron.fp8 makes of transformer_engine_extensions, with te-fl under that name (docs/frameworks.md)."""

import unittest

import te_fl

te_fl.as_transformer_engine()

import torch  # noqa: E402
import transformer_engine_extensions as tex  # noqa: E402


class Extension(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.x, self.w = torch.randn(32, 64), torch.randn(48, 64)

    def cast(self, x, scale=8.0, dtype=tex.DType.kFloat8E4M3):
        amax, scale_inv = torch.zeros(()), torch.tensor(1.0)
        codes = tex.cast_to_fp8(x, torch.tensor(scale), amax, scale_inv, dtype)
        self.assertEqual((codes.dtype, amax.item(), scale_inv.item()), (torch.uint8, x.abs().max().item(), 1 / scale))
        return codes, scale_inv

    def test_casts(self):
        for dtype, theirs in ((tex.DType.kFloat8E4M3, torch.float8_e4m3fn), (tex.DType.kFloat8E5M2, torch.float8_e5m2)):
            codes, scale_inv = self.cast(self.x, 8.0, dtype)
            wanted = (self.x * 8.0).to(theirs)
            self.assertTrue(torch.equal(codes, wanted.view(torch.uint8)))
            for out, kind in ((tex.DType.kFloat32, torch.float32), (tex.DType.kBFloat16, torch.bfloat16)):
                self.assertTrue(torch.equal(tex.cast_from_fp8(codes, scale_inv, dtype, out), (wanted.float() / 8.0).to(kind)))

    def test_products(self):
        e4m3, none = tex.DType.kFloat8E4M3, torch.Tensor()
        x, x_inv = self.cast(self.x)
        w, w_inv = self.cast(self.w, 16.0)
        values = [(codes.view(torch.float8_e4m3fn).double() * inv).float() for codes, inv in ((x, x_inv), (w, w_inv))]
        for accumulate in (False, True):
            out = torch.ones(32, 48)
            tex.te_gemm(w, w_inv, e4m3, True, x, x_inv, e4m3, False, out, none, tex.DType.kFloat32, none, none, tex.DType.kFloat32, none, False,
                        torch.empty(1024, dtype=torch.int8), 1024, accumulate, True, 0)
            torch.testing.assert_close(out, values[0] @ values[1].t() + float(accumulate), atol=1e-3, rtol=1e-4)
        turned = tex.fp8_transpose(w, e4m3)
        self.assertTrue(turned.is_contiguous() and torch.equal(turned, w.t()))

    def test_what_is_refused(self):
        e4m3, none, x = tex.DType.kFloat8E4M3, torch.Tensor(), torch.zeros(16, 16, dtype=torch.uint8)
        for grad, count, text in ((True, 0, "grad and pre_gelu_out"), (False, 4, r"math_sm_count=4")):
            with self.assertRaisesRegex(NotImplementedError, text):
                tex.te_gemm(x, torch.ones(1), e4m3, True, x, torch.ones(1), e4m3, False, torch.empty(16, 16), none, tex.DType.kFloat32, none, none,
                            tex.DType.kFloat32, none, grad, none, 0, False, False, count)
        with self.assertRaisesRegex(NotImplementedError, "transformer_engine_extensions.layernorm_fwd is not supported"):
            tex.layernorm_fwd


if __name__ == "__main__":
    unittest.main()
