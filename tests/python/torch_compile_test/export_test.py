"""Tests te.onnx_export: ONNX's reference runtime computes exported modules as te-fl does."""

import importlib.util
import itertools
import logging
import unittest
import warnings

import torch

import te_fl.pytorch as te
from te_fl.common.recipe import Float8CurrentScaling
from te_fl.pytorch.runtime.export import is_in_onnx_export_mode, te_translation_table
from torch_oracle import randn, randomise


def exported(module, *inputs):
    """Exports the module and returns the results of ONNX's reference runtime."""
    from onnx.reference import ReferenceEvaluator
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with te.onnx_export(enabled=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), inputs, dynamo=True, verbose=False, optimize=False,
                                    custom_translation_table=te_translation_table)
    model = program.model_proto
    names = [i.name for i in model.graph.input]
    return [torch.from_numpy(r) for r in ReferenceEvaluator(model).run(None, {n: t.numpy() for n, t in zip(names, inputs)})]


class All(torch.nn.Module):
    """Calls several modules in one model, because an export takes seconds; entries: (module, how to call it)."""

    def __init__(self, *calls):
        super().__init__()
        self.parts = torch.nn.ModuleList(randomise(module) for module, _ in calls)
        self.calls = [call for _, call in calls]

    def forward(self, *inputs):
        results = [call(part, *inputs) for part, call in zip(self.parts, self.calls)]
        return tuple(t for result in results for t in (result if isinstance(result, tuple) else (result,)))


@unittest.skipUnless(all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript")), "needs ONNX")
class Export(unittest.TestCase):
    def check(self, calls, *inputs):
        model = All(*calls).eval()
        want, got = model(*inputs), exported(model, *inputs)
        self.assertEqual(len(got), len(want))
        for i, (a, b) in enumerate(zip(got, want)):
            self.assertLess((a - b).abs().max().item(), 1e-5 * max(1.0, b.abs().max().item()), i)

    def test_attention(self):
        q, k, v = (randn(2, 6, n, 8, seed=s) for s, n in ((1, 4), (2, 2), (3, 2)))
        padding = torch.arange(6)[None, None, None] >= torch.tensor([4, 6])[:, None, None, None]
        calls = []
        for mask, kind in itertools.product(("no_mask", "causal", "padding", "padding_causal", "arbitrary"), ("vanilla", "off-by-one")):
            module = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd", attn_mask_type=mask, softmax_type=kind,
                                            window_size=(3, 0) if mask == "causal" else None)
            which = None if mask in ("no_mask", "causal") else 4 if mask == "arbitrary" else 3
            calls.append((module, lambda part, *x, which=which: part(*x[:3], **({} if which is None else {"attention_mask": x[which]}))))
        self.check(calls, q, k, v, padding, randn(2, 1, 6, 6, seed=9) > 0.5)

    def test_layers(self):
        made = [te.TransformerLayer(32, 64, 4, device="cpu", **options) for options in
                (dict(), dict(fuse_qkv_params=True, activation="swiglu", normalization="RMSNorm", num_gqa_groups=2), dict(qk_norm_type="L2Normalization"))]
        self.check([(module, lambda part, x, angles: part(x, rotary_pos_emb=angles)) for module in made], randn(6, 2, 32), te.RotaryPositionEmbedding(8)(6).cpu())

    def test_single_modules(self):
        for module in (te.Linear(16, 24, device="cpu"), te.LayerNormMLP(16, 32, activation="swiglu", device="cpu"), te.RMSNorm(16, device="cpu")):
            with self.subTest(type(module).__name__):
                self.check([(module, lambda part, x: part(x))], randn(6, 16))

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
