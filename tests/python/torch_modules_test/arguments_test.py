"""Names of modules in Transformer Engine, and arguments that are refused or have no effect."""

import tempfile
import unittest
from unittest import mock

import numpy
import torch

from common import BF16, F32, grown
import torch_oracle as oracle
from torch_oracle import DEVICES, compare, near, randn, randomise
import te_fl.pytorch as te
from te_fl.errors import Unsupported
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling


class Names(unittest.TestCase):
    def test_a_misspelt_keyword_names_the_nearest(self):
        one = [torch.nn.Parameter(torch.zeros(2))]
        for make, near in ((lambda: te.Linear(8, 8, biass=False), "bias"), (lambda: te.LayerNormLinear(8, 8, epss=1), "eps"),
                           (lambda: te.LayerNorm(8, sm_margn=0), "sm_margin"), (lambda: te.RMSNorm(8, zero_centred_gamma=True), "zero_centered_gamma"),
                           (lambda: te.LayerNormMLP(8, 8, activatoin="gelu"), "activation"),
                           (lambda: te.DotProductAttention(2, 8, atention_dropout=0.0), "attention_dropout"),
                           (lambda: te.MultiheadAttention(8, 2, atention_dropout=0.0), "attention_dropout"),
                           (lambda: te.TransformerLayer(8, 8, 2, hiden_dropout=0.0), "hidden_dropout"),
                           (lambda: te.optimizers.FusedAdam(one, weigth_decay=1), "weight_decay"),
                           (lambda: te.autocast(enabeld=True), "enabled"), (lambda: te.fp8_autocast(fp8_recpie=None), "fp8_recipe"),
                           (lambda: te.quantized_model_init(recpie=None).__enter__(), "recipe"), (lambda: te.fp8_model_init(enable=True), "enabled")):
            with self.assertRaisesRegex(TypeError, rf"\(\) has no argument '\w+'; did you mean '{near}'\?"):
                make()

        class Derived(te.Linear):
            def __init__(self, **options):
                super().__init__(8, 8, device="cpu", **options)
        self.assertFalse(Derived(bias=False).use_bias)
        with self.assertRaisesRegex(TypeError, r"Derived\(\) has no argument 'biass'"):
            Derived(biass=False)

    def test_a_profiler_shows_layers_under_their_modules_names(self):
        layers = {"te_fl.pytorch.Linear qkv": te.Linear(8, 8, name="qkv", device="cpu"), "te_fl.pytorch.RMSNorm": te.RMSNorm(8, device="cpu"),
                  "te_fl.pytorch.LayerNormMLP": te.LayerNormMLP(8, 8, device="cpu"),
                  "te_fl.pytorch.TransformerLayer": te.TransformerLayer(8, 8, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")}
        x = torch.randn(3, 1, 8, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for layer in layers.values():
                layer(x).sum().backward()
        seen = {event.key: event.count for event in profile.key_averages()}
        self.assertEqual({name: seen.get(name) for name in layers}, dict.fromkeys(layers, 1))

    def test_a_module_that_is_not_served_tells_the_way_out(self):
        with self.assertRaisesRegex(AttributeError, "'newton_schulz_tp', which Transformer Engine has; iterate with torch.matmul"):
            te.newton_schulz_tp
        with self.assertRaisesRegex(AttributeError, "did you mean 'Linear'"):
            te.Linaer


class Arguments(unittest.TestCase):
    """Wrong arguments are refused where they are given, and those that mean nothing on one rank are taken."""

    def test_wrong_values(self):
        for message, make in (("num_attention_heads 3, which does not divide it", lambda: te.MultiheadAttention(100, 3)),
                              ("attn_mask_type is 'casual'", lambda: te.MultiheadAttention(32, 4, attn_mask_type="casual")),
                              ("TransformerLayer: attn_mask_type is 'casual'", lambda: te.TransformerLayer(32, 32, 4, self_attn_mask_type="casual"))):
            with self.assertRaisesRegex(ValueError, message):
                make()
        layer, x = te.TransformerLayer(8, 8, 1, self_attn_mask_type="padding", device="cpu"), torch.zeros(3, 2, 8)
        for length in (2, 4):
            with self.assertRaisesRegex(ValueError, rf"padding mask is \(2, 1, 1, {length}\).*the queries have length 3"):
                layer(x, attention_mask=torch.zeros(2, 1, 1, length, dtype=torch.bool))
        with self.assertRaisesRegex(ValueError, "window_size is 5; it is a pair"):
            te.DotProductAttention(1, 8, window_size=5)
        with self.assertRaisesRegex(TypeError, "the recipe is <class .*DelayedScaling'>; it is an object"):
            te.autocast(recipe=DelayedScaling)
        for module in (te.Linear(8, 8, device="cpu"), te.LayerNorm(8, device="cpu"), te.TransformerLayer(8, 8, 1, device="cpu")):
            with self.assertRaisesRegex(Unsupported, type(module).__name__ + ".*torch.float64"):
                module(torch.zeros(2, 1, 8, dtype=torch.float64))

    def test_integers_of_numpy(self):
        four, eight = numpy.int64(4), numpy.int64(8)
        for make in (lambda: te.LayerNorm(eight, device="cpu"), lambda: te.RMSNorm(eight, device="cpu"), lambda: te.Linear(eight, four, device="cpu")):
            self.assertEqual(make()(torch.ones(2, 8)).shape[0], 2)
        grouped = te.GroupedLinear(numpy.int64(2), eight, four, device="cpu")
        self.assertEqual(grouped(torch.ones(4, 8), [numpy.int64(1), numpy.int64(3)]).shape, (4, 4))
        self.assertEqual(te.DotProductAttention(four, eight)(*torch.ones(3, 5, 2, 4, 8)).shape, (5, 2, 32))

    def test_sizes_that_are_no_integers(self):
        for message, make in (("Linear: in_features is 32.5; it is an integer", lambda: te.Linear(32.5, 32)),
                              ("LayerNormLinear: out_features is '32'", lambda: te.LayerNormLinear(32, "32")),
                              ("LayerNormMLP: ffn_hidden_size is 64.0", lambda: te.LayerNormMLP(32, 64.0)),
                              ("DotProductAttention: num_attention_heads is 4.5", lambda: te.DotProductAttention(4.5, 8)),
                              ("MultiheadAttention: num_attention_heads is 4.0", lambda: te.MultiheadAttention(32, 4.0)),
                              ("TransformerLayer: hidden_size is 32.5", lambda: te.TransformerLayer(32.5, 32, 4))):
            with self.assertRaisesRegex(TypeError, message):
                make()

    def test_dtypes_of_outputs(self):
        """A bias has the output's, and a normalisation's is the weight's."""
        for device in DEVICES:
            x = randn(4, 32, dtype=BF16, device=device).requires_grad_()
            for make in (te.LayerNorm, te.RMSNorm):
                module = randomise(make(32, device=device))
                compare(self, module, module, lambda p, x: oracle.norm(x, p, "", make.__name__), [x])
                self.assertEqual(module(x).dtype, F32)
                with torch.autocast(device, dtype=BF16):
                    self.assertEqual(module(x.float()).dtype, BF16)
            for module in (te.Linear(32, 32, return_bias=True, device=device), te.LayerNormMLP(32, 32, return_bias=True, device=device)):
                with torch.autocast(device, dtype=BF16):
                    self.assertEqual([t.dtype for t in module(x.float())], [BF16, BF16])

    def test_attributes_set_after_a_forward(self):
        x = randn(4, 32)
        for make, name, value in ((lambda **k: te.LayerNorm(32, device="cpu", **k), "eps", 1.0),
                                  (lambda **k: te.LayerNormLinear(32, 32, device="cpu", **k), "eps", 1.0),
                                  (lambda **k: te.LayerNormMLP(32, 32, device="cpu", **k), "activation", "relu")):
            module, other = randomise(make()), randomise(make(**{name: value}))
            before = module(x)
            setattr(module, name, value)
            self.assertTrue(torch.equal(module(x), other(x)))
            self.assertFalse(torch.equal(module(x), before))
        layers = [randomise(te.TransformerLayer(32, 32, 4, device="cpu", hidden_dropout=0, attention_dropout=0, activation=a)) for a in ("gelu", "relu")]
        layers[0](x[:, None])
        layers[0].layernorm_mlp.activation = "relu"
        self.assertTrue(torch.equal(layers[0](x[:, None]), layers[1](x[:, None])))

    def test_a_group_of_one_rank(self):
        import torch.distributed as dist
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                group = dist.group.WORLD
                for make in (lambda **k: te.Linear(32, 32, **k), lambda **k: te.LayerNormMLP(32, 32, **k), lambda **k: te.DotProductAttention(4, 8, **k),
                             lambda **k: te.TransformerLayer(32, 32, 4, **k)):
                    make(tp_group=group, tp_size=1, sequence_parallel=True).set_tensor_parallel_group(group)
                attention = te.DotProductAttention(4, 8, cp_group=group, cp_global_ranks=[0])
                attention.set_context_parallel_group(group, [0], None, "p2p")
                attention.set_context_parallel_group([group, group], [0], None, "a2a+p2p")
            finally:
                dist.destroy_process_group()
        with self.assertRaisesRegex(Unsupported, "tp_group"):
            te.Linear(32, 32, tp_group="a group")
        norm = te.LayerNorm(32, sequence_parallel=True)
        self.assertTrue(norm.weight.sequence_parallel and norm.bias.sequence_parallel)

    def test_no_offload(self):
        context, same = te.get_cpu_offload_context()
        with context:
            self.assertEqual(same(3), 3)
        self.assertIsNone(te.get_cpu_offload_context(manual_synchronization=True)[2])
        with self.assertRaisesRegex(ValueError, "num_layers is 1 and model_layers 1"):
            te.get_cpu_offload_context(enabled=True)


class NothingOfTorchs(unittest.TestCase):
    """With torch's own kernels patched to raise, everything works."""

    NAMES = ([(torch.nn.functional, n) for n in ("linear", "layer_norm", "rms_norm", "scaled_dot_product_attention", "gelu", "silu", "relu",
                                                 "softmax")]
             + [(torch, n) for n in ("matmul", "bmm", "addmm", "mm", "baddbmm", "einsum", "softmax", "layer_norm", "rms_norm")]
             + [(torch.Tensor, n) for n in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "softmax")])

    def test_forward_and_backward(self):
        def raiser(name):
            def called(*a, **k):
                raise AssertionError(f"torch's {name} was called")
            return called

        modules = {
            "Linear": lambda **k: te.Linear(32, 32, **k), "LayerNorm": lambda **k: te.LayerNorm(32, **k),
            "RMSNorm": lambda **k: te.RMSNorm(32, **k),
            "LayerNormLinear": lambda **k: te.LayerNormLinear(32, 32, **k), "LayerNormMLP": lambda **k: te.LayerNormMLP(32, 64, **k),
            "MultiheadAttention": lambda **k: te.MultiheadAttention(32, 4, **k),
            "qk norms": lambda **k: te.MultiheadAttention(32, 4, qk_norm_type="L2Normalization", input_layernorm=True, **k),
            "TransformerLayer": lambda **k: te.TransformerLayer(32, 64, 4, **k),
            "decoder": lambda **k: te.TransformerLayer(32, 64, 4, layer_type="decoder", **k),
            "drop path": lambda **k: te.TransformerLayer(32, 64, 4, drop_path_rate=0.1, **k),
        }
        for device in DEVICES:
            for name, make in modules.items():
                for recipe in (None, Float8CurrentScaling(), DelayedScaling(), Float8BlockScaling()):
                    with self.subTest(device=device, module=name, recipe=type(recipe).__name__):
                        module = make(device=device)
                        x, encoder = grown(8, 2, 32, device=device, dtype=F32), randn(8, 2, 32, device=device)
                        more = {"encoder_output": encoder} if name == "decoder" else {}
                        patches = [mock.patch.object(owner, n, raiser(n)) for owner, n in self.NAMES if hasattr(owner, n)]
                        for patch in patches:
                            patch.start()
                        try:
                            with te.autocast(enabled=recipe is not None, recipe=recipe):
                                y = module(x, **more)
                            y.sum().backward()
                        finally:
                            for patch in patches:
                                patch.stop()
                        self.assertTrue(torch.isfinite(x.grad).all())
