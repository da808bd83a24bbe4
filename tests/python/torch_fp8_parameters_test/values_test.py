"""Tests the values of weights that exist only as FP8 codes, and the scopes that make such weights."""

import copy
import unittest
import warnings

import numpy as np
import torch

from common import BF16, BLOCK, CURRENT, DELAYED, F16, F32, MODULES, POW2, RECIPES, WEIGHTS, codes, decoded, expected, make_input, made, step
from torch_oracle import DEVICES, near, randn
import te_fl
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Format, MXFP8BlockScaling
from te_fl.errors import FailedPrecondition, Unsupported
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor


class Values(unittest.TestCase):
    def test_codes_are_numpys(self):
        recipes = (*RECIPES, DelayedScaling(margin=2), DelayedScaling(fp8_format=Format.E4M3), POW2)
        for device in DEVICES:
            for recipe in recipes:
                for dtype in (F32, BF16, F16):
                    with self.subTest(device=device, recipe=recipe, dtype=dtype):
                        with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
                            weight = te.Linear(160, 300, params_dtype=dtype, device=device).weight
                        before = weight.get_high_precision_init_val()
                        self.assertEqual((before.dtype, before.device.type), (dtype, "cpu"))
                        want = expected(before, recipe)
                        near(self, decoded(weight), want, 1e-6, "codes")
                        self.assertTrue(torch.equal(weight.dequantize().double().cpu(), decoded(weight).to(dtype).double()))
                        values = randn(300, 160, seed=5, device=device)
                        with torch.no_grad():
                            weight.copy_(values)
                        near(self, decoded(weight), expected(values, recipe).cpu(), 1e-6, "codes after copy_")

    def test_a_tensor_of_zeros(self):
        for recipe in (*RECIPES, DelayedScaling(margin=1)):
            weight = made("Linear", recipe).weight
            with torch.no_grad():
                weight.zero_()
            self.assertTrue(torch.equal(decoded(weight), torch.zeros(144, 160, dtype=torch.float64)))

    def test_initial_values_are_those_outside_the_scope(self):
        for name, weights in WEIGHTS.items():
            torch.manual_seed(5)
            plain = dict(MODULES[name](device="cpu").named_parameters())
            torch.manual_seed(5)
            with te.quantized_model_init(preserve_high_precision_init_val=True):
                module = MODULES[name](device="cpu")
            self.assertEqual(list(codes(module)), weights)
            for n, p in module.named_parameters():
                own = p.get_high_precision_init_val() if n in weights else p
                self.assertTrue(torch.equal(own, plain[n]), n)

    def test_reset_parameters(self):
        with te.quantized_model_init(recipe=CURRENT, preserve_high_precision_init_val=True):
            module = te.LayerNormMLP(160, 192, device="cpu")
            late = te.LayerNormMLP(160, 192, device="meta")
        before, weight = decoded(module.fc1_weight), module.fc1_weight
        module.reset_parameters()
        self.assertIs(module.fc1_weight, weight)
        self.assertFalse(torch.equal(decoded(weight), before))
        near(self, decoded(weight), expected(weight.get_high_precision_init_val(), CURRENT), 1e-6, "reset")
        late.fc2_weight.requires_grad_(False)
        late.reset_parameters()
        self.assertEqual(list(codes(late)), ["fc1_weight", "fc2_weight"])
        self.assertEqual([p.requires_grad for p in codes(late).values()], [True, False])
        near(self, decoded(late.fc2_weight), expected(late.fc2_weight.get_high_precision_init_val(), CURRENT), 1e-6, "meta")


class Tensors(unittest.TestCase):
    def test_what_it_looks_like(self):
        for dtype in (F32, BF16, F16):
            weight = made("Linear", params_dtype=dtype).weight
            self.assertIsInstance(weight, torch.nn.Parameter)
            self.assertIsInstance(weight, Float8Tensor)
            self.assertEqual((weight.dtype, weight.shape, weight.stride(), weight.is_leaf, weight.requires_grad, weight.is_contiguous()),
                             (dtype, (144, 160), (160, 1), True, True, True))
            self.assertIn("Float8Tensor", repr(weight))

    def test_reads(self):
        weight = made("Linear").weight
        plain = decoded(weight).float().requires_grad_()
        x = randn(8, 160)
        for f in (lambda w: torch.nn.functional.linear(x, w), lambda w: w.norm(), lambda w: w.t() @ w, lambda w: w[3:5], lambda w: w.view(-1),
                  lambda w: torch.cat([w, w]), lambda w: torch.stack([w.sum(), w.max()]), lambda w: w * 2 + 1, lambda w: w.double(),
                  lambda w: w.bfloat16(), lambda w: w.to(F16), lambda w: w.dequantize() if isinstance(w, Float8Tensor) else w.clone()):
            weight.grad = plain.grad = None
            got, want = f(weight), f(plain)
            self.assertIs(type(got), torch.Tensor)
            self.assertEqual(got.dtype, want.dtype)
            self.assertTrue(torch.equal(got, want))
            got.float().square().sum().backward()
            want.float().square().sum().backward()
            self.assertIs(type(weight.grad), torch.Tensor)
            self.assertTrue(torch.equal(weight.grad, plain.grad))
        self.assertEqual(weight.tolist(), plain.tolist())
        self.assertTrue(np.array_equal(weight.detach().numpy(), plain.detach().numpy()))
        for make in (torch.zeros_like, torch.empty_like, torch.rand_like, lambda w: w.new_zeros(3), lambda w: torch.zeros_like(w, dtype=BF16)):
            self.assertEqual((type(make(weight)), make(weight).dtype), (torch.Tensor, make(plain).dtype))

    def test_writes(self):
        values = randn(144, 160, seed=9)
        for f in (lambda w: w.copy_(values), lambda w: w.mul_(3), lambda w: w.add_(values, alpha=0.5), lambda w: w.data.copy_(values),
                  lambda w: torch.add(w, values, out=w), lambda w: torch._foreach_mul_([w], 0.25), lambda w: w.copy_(values[0]),
                  lambda w: w.copy_(values.double()), lambda w: w.addcmul_(values, values), lambda w: w.clamp_(-0.01, 0.01),
                  lambda w: w.__setitem__(slice(3, 9), 2.0), lambda w: w.data.__setitem__((..., 0), values[:, 0])):
            for recipe in RECIPES:
                weight = made("Linear", recipe).weight
                plain = decoded(weight).float()
                with torch.no_grad():
                    f(weight)
                    f(plain)
                near(self, decoded(weight), expected(plain, recipe), 1e-6, "written")
                self.assertIsInstance(weight, Float8Tensor)

    def test_writes_after_a_training_forward_reach_the_transposed_codes(self):
        for recipe in RECIPES:
            for write in (lambda w: w.mul_(-2), lambda w: w.copy_(made("Linear", recipe).weight * 1.5),
                          lambda w: w.copy_(Float8Tensor.quantised(randn(144, 160, seed=6), w._codes.rules))):
                module = made("Linear", recipe)
                step(module, recipe)
                with torch.no_grad():
                    write(module.weight)
                self.assertTrue(torch.equal(module.weight._codes.columns.view(torch.uint8), module.weight._data.t()))
                if recipe is BLOCK:
                    fresh = copy.deepcopy(module.weight)._codes
                    fresh.add_columns()
                    self.assertTrue(torch.equal(fresh.columns_scale_inv, module.weight._codes.columns_scale_inv))

    def test_assigned_data(self):
        weight = made("Linear").weight
        values = randn(144, 160, seed=9)
        weight.data = values
        near(self, decoded(weight), expected(values, CURRENT), 1e-6, "values")
        other = made("Linear", BLOCK).weight
        weight.data = other.data
        self.assertTrue(torch.equal(decoded(weight), decoded(other)))

    def test_memory_is_not_lent(self):
        weight = made("Linear").weight.detach()
        with self.assertRaisesRegex(BufferError, "dequantize"):
            torch.utils.dlpack.from_dlpack(weight)
        with self.assertRaisesRegex(BufferError, "dequantize"):
            te_fl.ops.compute_amax(input=weight, amax=torch.empty(1))

    def test_shared_memory(self):
        for recipe in RECIPES:
            weight = made("Linear", recipe).weight
            before = decoded(weight)
            self.assertFalse(weight.is_shared())
            self.assertIs(weight.share_memory_(), weight)
            self.assertTrue(weight.is_shared() and weight._data.is_shared() and weight._scale_inv.is_shared())
            self.assertTrue(torch.equal(decoded(weight), before))

    def test_shapes_stay(self):
        weight = made("Linear").weight
        with torch.no_grad(), self.assertRaisesRegex(Unsupported, "cannot take the shape"):
            weight.t_()


class Scopes(unittest.TestCase):
    def test_what_the_global_state_says(self):
        state = te.FP8GlobalStateManager
        self.assertFalse(state.with_fp8_parameters())
        with te.quantized_model_init(recipe=BLOCK, preserve_high_precision_init_val=True):
            self.assertTrue(state.with_fp8_parameters() and state.with_high_precision_init_val())
            self.assertIs(state.get_fp8_recipe(), BLOCK)
            with te.quantized_model_init(enabled=False):
                self.assertFalse(state.with_fp8_parameters() or state.with_high_precision_init_val())
                self.assertIs(type(te.Linear(16, 16, device="cpu").weight), torch.nn.Parameter)
            with te.quantized_model_init():
                self.assertFalse(state.with_high_precision_init_val())
        self.assertFalse(state.with_fp8_parameters())
        with self.assertRaises(ZeroDivisionError), te.quantized_model_init():
            1 / 0
        self.assertFalse(state.with_fp8_parameters())

    def test_what_is_made_of_codes(self):
        with te.quantized_model_init():
            modules = [te.LayerNorm(16, device="cpu"), te.RMSNorm(16, device="cpu"), te.DotProductAttention(2, 16, softmax_type="learnable"),
                       te.LayerNormLinear(16, 32, device="cpu")]
            attention = te.MultiheadAttention(32, 2, fuse_qkv_params=True, attention_type="cross", input_layernorm=True, device="cpu")
        self.assertEqual([n for m in modules for n in codes(m)], ["weight"])
        self.assertEqual(list(codes(attention)), ["layernorm_query.weight", "key_value.weight", "proj.weight"])
        self.assertTrue(modules[3].primary_weights_in_fp8)

    def test_the_older_name(self):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with te.fp8_model_init(enabled=True):
                self.assertIsInstance(te.Linear(16, 16, device="cpu").weight, Float8Tensor)
        self.assertEqual([w.category for w in seen], [DeprecationWarning])

    def test_refusals(self):
        with self.assertRaisesRegex(Unsupported, "MXFP8BlockScaling"), te.quantized_model_init(recipe=MXFP8BlockScaling(fp8_dpa=True)):
            pass
        with te.quantized_model_init():
            with self.assertRaisesRegex(Unsupported, "parameters_split.*fuse_qkv_params=True"):
                te.TransformerLayer(32, 64, 2, device="cpu")
            with self.assertRaisesRegex(Unsupported, "parameters_split"):
                te.Linear(32, 64, parameters_split=("a", "b"), device="cpu")
        for scope, other in ((CURRENT, BLOCK), (BLOCK, CURRENT), (BLOCK, DELAYED)):
            module = made("Linear", scope)
            with te.autocast(recipe=other), self.assertRaisesRegex(FailedPrecondition, "quantized_model_init"):
                module(make_input())
        with self.assertRaisesRegex(Unsupported, "float64"):
            made("Linear").double()
