"""te.onnx_export: modules in ONNX models, which ONNX's reference runtime computes as te-fl does."""

import importlib.util
import itertools
import logging
import unittest
import warnings

import torch

import te_fl.pytorch as te
from te_fl.common.recipe import Float8CurrentScaling
from te_fl.pytorch.export import is_in_onnx_export_mode, te_translation_table
from torch_oracle import randn, randomise


def exported(module, *inputs, **options):
    """The results of ONNX's reference runtime."""
    from onnx.reference import ReferenceEvaluator
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with te.onnx_export(enabled=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), inputs, dynamo=True, verbose=False, optimize=False, kwargs=options or None,
                                    custom_translation_table=te_translation_table)
    model = program.model_proto
    names = [i.name for i in model.graph.input]
    tensors = [t for t in (*inputs, *options.values()) if isinstance(t, torch.Tensor)]
    return [torch.from_numpy(r) for r in ReferenceEvaluator(model).run(None, {n: t.numpy() for n, t in zip(names, tensors)})]


@unittest.skipUnless(all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript")), "needs ONNX")
class Export(unittest.TestCase):
    def check(self, module, *inputs, **options):
        module = randomise(module).eval()
        want = module(*inputs, **options)
        want = want if isinstance(want, tuple) else (want,)
        got = exported(module, *inputs, **options)
        self.assertEqual(len(got), len(want))
        for a, b in zip(got, want):
            self.assertLess((a - b).abs().max().item(), 1e-5 * max(1.0, b.abs().max().item()))

    def test_products_and_norms(self):
        x = randn(6, 2, 16)
        for make in (lambda **k: te.Linear(16, 24, **k), lambda **k: te.Linear(16, 24, bias=False, **k),
                     lambda **k: te.Linear(16, 24, parameters_split=("a", "b"), return_bias=True, **k), lambda **k: te.LayerNorm(16, **k),
                     lambda **k: te.RMSNorm(16, zero_centered_gamma=True, **k),
                     lambda **k: te.LayerNormLinear(16, 24, return_layernorm_output=True, zero_centered_gamma=True, **k),
                     lambda **k: te.LayerNormLinear(16, 24, normalization="RMSNorm", **k)):
            self.check(make(device="cpu"), x)

    def test_mlps(self):
        for activation in ("gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu", "clamped_swiglu"):
            with self.subTest(activation=activation):
                self.check(te.LayerNormMLP(16, 32, activation=activation, normalization="RMSNorm", bias=activation != "silu", device="cpu"), randn(4, 16))

    def test_attention(self):
        q, k, v = (randn(2, 6, n, 8, seed=s) for s, n in ((1, 4), (2, 2), (3, 2)))
        padding = torch.arange(6)[None, None, None] >= torch.tensor([4, 6])[:, None, None, None]
        for mask, kind in itertools.product(("no_mask", "causal", "padding", "padding_causal", "arbitrary"), ("vanilla", "off-by-one")):
            with self.subTest(mask=mask, kind=kind):
                module = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd", attn_mask_type=mask, softmax_type=kind,
                                                window_size=(3, 0) if mask == "causal" else None)
                masks = {"attention_mask": randn(2, 1, 6, 6, seed=9) > 0.5 if mask == "arbitrary" else padding} if mask not in ("no_mask", "causal") else {}
                self.check(module, q, k, v, **masks)

    def test_layers(self):
        x, angles = randn(6, 2, 32), te.RotaryPositionEmbedding(8)(6).cpu()
        for options in (dict(), dict(fuse_qkv_params=True, activation="swiglu", normalization="RMSNorm", num_gqa_groups=2),
                        dict(qk_norm_type="L2Normalization"), dict(parallel_attention_mlp=True)):
            with self.subTest(options=options):
                self.check(te.TransformerLayer(32, 64, 4, device="cpu", **options), x, rotary_pos_emb=angles)

    def test_refusals_and_the_scope(self):
        layer, x = te.Linear(16, 16, device="cpu"), randn(4, 16)
        with te.autocast(recipe=Float8CurrentScaling()), self.assertRaisesRegex(Exception, "onnx_export: recipe"):
            exported(layer, x)
        self.assertFalse(is_in_onnx_export_mode())
        with te.onnx_export(enabled=True):
            self.assertTrue(is_in_onnx_export_mode())
            self.assertTrue(torch.equal(layer(x), layer(x)))


if __name__ == "__main__":
    unittest.main()
