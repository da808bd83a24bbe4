"""Tests the modules' names and arguments of Transformer Engine: which arguments are refused and which have no effect."""

import copy
import tempfile
import unittest
from unittest import mock

import numpy
import torch

from common import BF16, F32, grown
import torch_oracle as oracle
from torch_oracle import DEVICES, compare, near, randn, randomise
import te_fl
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

    def test_an_unsupported_module_names_the_way_out(self):
        with self.assertRaisesRegex(AttributeError, "'newton_schulz_tp', which Transformer Engine has; iterate with torch.matmul"):
            te.newton_schulz_tp
        with self.assertRaisesRegex(AttributeError, "did you mean 'Linear'"):
            te.Linaer


class Switches(unittest.TestCase):
    """A boolean argument accepts only True and False: a recipe passed by mistake in a boolean's place would count as True, and the default recipe
    would be used."""

    SCOPES = {"autocast": (te.autocast, ("enabled", "calibrating")), "fp8_autocast": (te.fp8_autocast, ("enabled", "calibrating")),
              "quantized_model_init": (te.quantized_model_init, ("enabled", "preserve_high_precision_init_val")),
              "fp8_model_init": (te.fp8_model_init, ("enabled", "preserve_high_precision_init_val"))}

    def test_a_recipe_goes_by_its_name(self):
        for name, (make, arguments) in self.SCOPES.items():
            way_out = "fp8_recipe" if name == "fp8_autocast" else "recipe"
            for recipe in (Float8BlockScaling(), DelayedScaling(), Float8CurrentScaling()):
                for wrong in (lambda: make(recipe), *(lambda a=a: make(**{a: recipe}) for a in arguments)):
                    with self.assertRaisesRegex(TypeError, rf"is {type(recipe).__name__}; it is True or False, and a recipe is given by name: \w+\({way_out}="):
                        with wrong():
                            pass
            with self.assertRaisesRegex(TypeError, "enabled is .*DelayedScaling.*a recipe is given by name"):
                make(DelayedScaling)

    def test_what_is_no_bool(self):
        for make, arguments in self.SCOPES.values():
            for argument in arguments:
                for wrong in (None, 1, 0.0, "no", [], torch.tensor(True)):
                    with self.subTest(make=make.__name__, argument=argument, value=wrong), self.assertRaisesRegex(TypeError, f"{argument} is .*; it is True or False"):
                        make(**{argument: wrong})
                for right in (True, False, numpy.bool_(True), numpy.bool_(False)):
                    with make(**{argument: right}):
                        pass

    def test_in_a_compiled_function(self):
        module = te.Linear(8, 8, device="cpu")

        def step(x):
            with te.autocast(DelayedScaling()):
                return module(x)
        with self.assertRaisesRegex(Exception, "recipe is given by name"):
            torch.compile(step, backend="eager")(torch.randn(8, 8))


class Arguments(unittest.TestCase):
    """Wrong arguments are refused by the function that gets them; arguments without a meaning on one rank are accepted."""

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
        for module in (te.Linear(8, 8, device="cpu"), te.LayerNormMLP(8, 8, device="cpu"), te.TransformerLayer(8, 8, 1, device="cpu")):
            with self.assertRaisesRegex(Unsupported, type(module).__name__ + ".*torch.float64"):
                module(torch.zeros(2, 1, 8, dtype=torch.float64))
        for dtype in (torch.int64, torch.complex64):
            with self.assertRaisesRegex(Unsupported, f"LayerNorm.*{dtype}"), torch.autocast("cpu", torch.bfloat16):
                te.LayerNorm(8, device="cpu")(torch.zeros(2, 8, dtype=dtype))

    def test_inputs_in_fp64(self):
        """Norms and operations cast FP64 inputs to their weights' dtype, and under torch.autocast all modules cast them to the autocast's dtype, as
        in Transformer Engine."""
        grouped = te.GroupedLinear(2, 8, 8, device="cpu")
        own = [te.LayerNorm(8, device="cpu"), te.RMSNorm(8, params_dtype=BF16, device="cpu"), te.ops.BasicLinear(8, 8, device="cpu"),
               te.ops.RMSNorm(8, device="cpu")]
        others = [te.Linear(8, 8, device="cpu"), te.LayerNormLinear(8, 8, device="cpu"), te.LayerNormMLP(8, 8, device="cpu"),
                  lambda x: grouped(x, [1, 3]), te.TransformerLayer(8, 8, 1, hidden_dropout=0, attention_dropout=0, device="cpu")]
        for autocasts in (False, True):
            for module in own + others * autocasts:
                found = []
                for dtype in (torch.float64, F32):
                    x = randn(4, 1, 8).to(dtype).requires_grad_()
                    with torch.autocast("cpu", BF16, enabled=autocasts):
                        y = module(x)
                    y.float().square().sum().backward()
                    self.assertEqual(x.grad.dtype, dtype)
                    found.append((y, x.grad.float()))
                (y, dx), (want, dwant) = found
                self.assertEqual(y.dtype, want.dtype)
                self.assertTrue(torch.equal(y, want) and torch.equal(dx, dwant.to(dx.dtype)), (module, autocasts))

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

    def test_numbers_without_a_meaning(self):
        """The constructor, and not only the first forward, refuses meaningless numbers; none is accepted silently."""
        def layer(**options):
            return te.TransformerLayer(**{**dict(hidden_size=8, ffn_hidden_size=8, num_attention_heads=2, device="cpu"), **options})
        nan, queries = float("nan"), lambda **options: te.DotProductAttention(**{**dict(num_attention_heads=2, kv_channels=4), **options})
        for message, make in (("hidden_dropout is 2.0; it is a probability, 0 or more and less than 1", lambda: layer(hidden_dropout=2.0)),
                              ("hidden_dropout is nan", lambda: layer(hidden_dropout=nan)), ("drop_path_rate is -0.5", lambda: layer(drop_path_rate=-0.5)),
                              ("drop_path_rate is 1.0", lambda: layer(drop_path_rate=1.0)), ("attention_dropout is 1.5", lambda: layer(attention_dropout=1.5)),
                              ("DotProductAttention: attention_dropout is -1.0", lambda: queries(attention_dropout=-1.0)),
                              ("softmax_scale is inf; it is finite", lambda: queries(softmax_scale=float("inf"))),
                              ("kv_channels is 0; it is 1 or more", lambda: queries(kv_channels=(4, 0))),
                              ("kv_channels is -8", lambda: layer(kv_channels=-8)), ("num_gqa_groups is 0; it is 1 or more", lambda: layer(num_gqa_groups=0)),
                              ("num_attention_heads is -2", lambda: layer(num_attention_heads=-2)), ("layernorm_epsilon is nan", lambda: layer(layernorm_epsilon=nan)),
                              ("ffn_hidden_size is 0", lambda: te.LayerNormMLP(8, 0)), ("Linear: in_features is 0; it is 1 or more", lambda: te.Linear(0, 64)),
                              ("Linear: out_features is -1", lambda: te.ops.Linear(4, -1)), ("in_features is 0", lambda: te.GroupedLinear(2, 0, 4)),
                              ("LayerNorm: normalized_shape is 0", lambda: te.LayerNorm((4, 0))), ("RMSNorm: eps is -1.0", lambda: te.RMSNorm(4, eps=-1.0)),
                              ("L2Normalization: eps is -1.0", lambda: te.ops.L2Normalization(eps=-1.0)), ("limit is nan", lambda: te.ops.ClampedSwiGLU(limit=nan)),
                              ("glu_interleave_size is -1", lambda: te.ops.SwiGLU(glu_interleave_size=-1)), ("size is -1", lambda: te.ops.Bias(-1)),
                              ("align_size is 0", lambda: te.Fp8Padding(2, 0)), ("num_gemms is 0", lambda: te.Fp8Unpadding(0)),
                              ("rotary_base is 0", lambda: te.RotaryPositionEmbedding(16, rotary_base=0)),
                              ("margin is nan; it is a whole number", lambda: DelayedScaling(margin=nan)), ("margin is 1.5", lambda: DelayedScaling(margin=1.5))):
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                make()
        for message, make in (("hidden_dropout is '0.1'; it is a number", lambda: layer(hidden_dropout="0.1")), ("attention_dropout is None", lambda: layer(attention_dropout=None)),
                              ("kv_channels is '16'; it is an integer", lambda: layer(kv_channels="16")), ("kv_channels is 8.5", lambda: queries(kv_channels=8.5)),
                              ("layer_number is 1.5", lambda: layer(layer_number=1.5)), ("softmax_scale is '1'", lambda: queries(softmax_scale="1")),
                              (r"window_size is \(1.5, 0\); its numbers are integers", lambda: layer(window_size=(1.5, 0))), ("normalized_shape is '64'", lambda: te.LayerNorm("64")),
                              ("normalized_shape is 2.5", lambda: te.RMSNorm(2.5)), ("init_method is 'normal'; it is a function", lambda: te.Linear(8, 8, init_method="normal")),
                              ("p is '0.1'", lambda: te.ops.Dropout("0.1")), ("dim is 16.5", lambda: te.RotaryPositionEmbedding(16.5))):
            with self.subTest(message), self.assertRaisesRegex(TypeError, message):
                make()
        self.assertEqual(layer(kv_channels=0).self_attention.kv_channels, 4)  # 0 counts as unset, as in Transformer Engine

    def test_dtypes_of_outputs(self):
        """A returned bias has the output's dtype; a normalisation's bias has the weight's dtype."""
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
        for make in (lambda: te.Linear(32, 32, device="cpu"), lambda: te.LayerNormLinear(32, 32, device="cpu"), lambda: te.LayerNormMLP(32, 32, device="cpu"),
                     lambda: te.GroupedLinear(1, 32, 32, device="cpu")):
            # With apply_bias the module adds the bias; with return_bias it returns the bias, as in Transformer Engine.
            for runs_before in (False, True):
                module = randomise(make())
                call = (lambda: module(x, [4])) if isinstance(module, te.GroupedLinear) else (lambda: module(x))  # noqa: B023
                bias = [p for n, p in module.named_parameters() if n in ("bias", "fc2_bias", "bias0")][0]
                want = randomise(make())(*(x, [4])[:2 if isinstance(module, te.GroupedLinear) else 1])
                if runs_before:
                    call()
                module.return_bias = True
                y, returned = call()
                self.assertTrue(torch.equal(y, want) and torch.equal(returned[0] if isinstance(returned, list) else returned, bias))
                module.apply_bias = False
                near(self, call()[0] + bias, want, 1e-6, "output")
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
                q = torch.randn(8, 2, 4, 8)
                self.assertTrue(torch.equal(attention(q, q, q), te.DotProductAttention(4, 8)(q, q, q)))
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
    """te-fl's modules work while PyTorch's own kernels are patched to raise."""

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


class Attributes(unittest.TestCase):
    """Attributes that are plain in Transformer Engine's modules can be set, even before the constructor; attributes that a forward sets have the
    values of that forward afterwards."""

    MADE = {"Linear": (16, 16), "LayerNormLinear": (16, 16), "LayerNormMLP": (16, 32), "GroupedLinear": (2, 16, 16), "LayerNorm": (16,),
            "DotProductAttention": (2, 8), "MultiheadAttention": (16, 2)}
    NAMES = ("fp8", "fp8_initialized", "fp8_calibration", "fp8_meta", "fp8_meta_tensors_initialized", "primary_weights_in_fp8",
             "preserve_high_precision_init_val", "tp_group", "fsdp_group", "ub_name", "name")

    def test_they_can_be_set(self):
        for kind, sizes in self.MADE.items():
            base = getattr(te, kind)
            for attribute in self.NAMES:
                with self.subTest(kind=kind, attribute=attribute):
                    value = {"mine": 1} if attribute == "fp8_meta" else None if attribute == "tp_group" else True

                    class Mine(base):
                        def __init__(self, *arguments):
                            setattr(self, attribute, value)
                            super().__init__(*arguments)
                            self.first = getattr(self, attribute, None)

                    plain, module = base(*sizes), Mine(*sizes)
                    if hasattr(plain, attribute) and attribute not in ("fsdp_group", "ub_name", "fp8_meta"):
                        self.assertEqual(module.first, getattr(plain, attribute))  # the constructor's value
                    setattr(plain, attribute, value)
                    self.assertEqual(getattr(plain, attribute)["mine"] if attribute == "fp8_meta" else getattr(plain, attribute), value and 1)
                    self.assertIsNone(copy.deepcopy(plain).fsdp_group if attribute == "fsdp_group" and kind != "MultiheadAttention" else None)

    def test_forwards_write_them(self):
        layer, x = te.Linear(16, 16, device="cpu"), torch.ones(16, 16)
        self.assertEqual((layer.fp8, layer.fp8_initialized, layer.fp8_meta["fp8_checkpoint"]), (False, False, False))
        with te.autocast(recipe=DelayedScaling()):
            layer(x)
        self.assertEqual((layer.fp8, layer.fp8_meta_tensors_initialized, layer.fp8_meta["fp8_checkpoint"]), (True, True, True))
        self.assertIsInstance(layer.fp8_meta["recipe"], DelayedScaling)
        layer.fp8 = False
        self.assertFalse(layer.fp8)
        layer(x)
        self.assertFalse(layer.fp8)
        with te.autocast(recipe=DelayedScaling()):
            layer(x)
        self.assertTrue(layer.fp8)
        with te.quantized_model_init():
            self.assertEqual((te.Linear(16, 16).primary_weights_in_fp8, te.Linear(16, 16).preserve_high_precision_init_val), (True, False))

    def test_misspelt_keywords_of_forwards(self):
        x = torch.ones(4, 16)
        for kind, call in (("Linear", dict(is_first_microbach=True)), ("LayerNormLinear", dict(fp8_outptu=True)), ("LayerNormMLP", dict(is_first_microbach=True)),
                           ("GroupedLinear", dict(m_splits=[2, 2], is_first_microbach=True)), ("DotProductAttention", dict(attention_maks=None)),
                           ("MultiheadAttention", dict(encoder_ouput=None))):
            module = getattr(te, kind)(*self.MADE[kind])
            inputs = [torch.ones(3, 1, 2, 8)] * 3 if kind == "DotProductAttention" else [x[:, None] if kind == "MultiheadAttention" else x]
            with self.subTest(kind=kind), self.assertRaisesRegex(TypeError, rf"{kind}\.forward\(\) has no argument '{list(call)[-1]}'; did you mean"):
                module(*inputs, **call)
        with self.assertRaisesRegex(TypeError, r"TransformerLayer\.forward\(\) has no argument 'attention_maks'; did you mean 'attention_mask'"):
            te.TransformerLayer(16, 32, 2)(x[:, None], attention_maks=None)
        with self.assertRaisesRegex(TypeError, r"policy\(\) has no setting 'stritc'; did you mean 'strict'"):
            te_fl.policy(stritc=True)
