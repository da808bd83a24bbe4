"""Weights that are FP8 codes alone (te.quantized_model_init): against plain PyTorch on codes that NumPy reads, in training, and as tensors."""

import copy
import enum
import io
import os
import pickle
import subprocess
import sys
import types
import unittest
import warnings
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch_oracle as oracle  # noqa: E402
from torch_oracle import DEVICES, PerBlock, PerTensor, allowed, compare, near, near_by_norm, per_block, per_tensor, randn  # noqa: E402
from torch_oracle import with_bias  # noqa: E402

import te_fl  # noqa: E402
import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling  # noqa: E402
from te_fl.errors import FailedPrecondition, Unsupported  # noqa: E402
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DELAYED, CURRENT, BLOCK = DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()
POW2 = Float8CurrentScaling(use_power_2_scales=True)
RECIPES = (DELAYED, CURRENT, BLOCK)
MODULES = {
    "Linear": lambda **k: te.Linear(160, 144, **k),
    "Linear named": lambda **k: te.Linear(160, 144, parameters_split=("query",), **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(160, 144, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(160, 192, **k),
    "TransformerLayer": lambda **k: te.TransformerLayer(160, 192, 4, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, **k),
}
WEIGHTS = {"Linear": ["weight"], "Linear named": ["query_weight"], "LayerNormLinear": ["weight"], "LayerNormMLP": ["fc1_weight", "fc2_weight"],
           "TransformerLayer": ["self_attention.layernorm_qkv.weight", "self_attention.proj.weight", "layernorm_mlp.fc1_weight",
                                "layernorm_mlp.fc2_weight"]}


def made(name, recipe=CURRENT, device="cpu", preserve=False, **arguments):
    """A module of codes. Its weights are larger than Transformer Engine's, so that all parts of a layer count."""
    torch.manual_seed(3)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        module = MODULES[name](device=device, **arguments)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, device=device) / p.shape[-1] ** 0.5)
    return module


def codes(module):
    return {n: p for n, p in module.named_parameters() if isinstance(p, Float8Tensor)}


def table():
    """The values of E4M3's 256 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where((code & 127) == 127, np.nan, values)
    return np.where(code >= 128, -values, values)


def decoded(parameter):
    """A parameter's values in FP64 by NumPy, of its bytes and scales."""
    values = table()[parameter._data.cpu().numpy()]
    factors = parameter._scale_inv.cpu().numpy().astype(np.float64)
    if factors.ndim == 2:
        rows, columns = values.shape
        factors = np.repeat(np.repeat(factors, 128, 0)[:rows], 128, 1)[:, :columns]
    return torch.from_numpy(values * factors)


def expected(values, recipe):
    """The values as which a recipe's codes of these values are read."""
    values = values.float()
    if isinstance(recipe, Float8BlockScaling):
        return per_block(values, 128, 128)
    pow2 = isinstance(recipe, Float8CurrentScaling) and recipe.fp8_quant_fwd_weight.power_2_scale
    return per_tensor(values, "e4m3", getattr(recipe, "margin", 0), pow2)


def input_of(device="cpu", seed=1, dtype=F32):
    return randn(16, 2, 160, seed=seed, dtype=dtype, device=device).requires_grad_()


def step(module, recipe=CURRENT, device="cpu", seed=1, dtype=F32):
    """Output, gradients of the input and of the parameters."""
    module.zero_grad()
    x = input_of(device, seed, dtype)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


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


class Held(PerTensor):
    """Products whose weights are codes already."""

    def __init__(self, other):
        self.__dict__.update(other.__dict__)
        self.weight = lambda t: t


class Modules(unittest.TestCase):
    def compared(self, name, of, tolerance):
        """of(product): the oracle of a module."""
        for device in DEVICES:
            for recipe, product in ((None, oracle.linear), (CURRENT, Held(PerTensor())), (BLOCK, Held(PerBlock()))):
                for training in (True, False):
                    with self.subTest(device=device, recipe=recipe, training=training):
                        module = made(name, recipe or CURRENT, device).train(training)
                        for p in codes(module).values():
                            self.assertTrue(torch.equal(p.detach().dequantize().double().cpu(), decoded(p).float().double()))

                        def served(*x):
                            with te.autocast(enabled=recipe is not None, recipe=recipe or CURRENT):
                                return module(*x)
                        close = 1e-5 if recipe is None and device == "cpu" else tolerance
                        compare(self, served, module, of(product), [input_of(device)], close, close=near_by_norm)
                        with torch.no_grad():
                            served(input_of(device, seed=4))  # serving reads the same codes

    def test_linear(self):
        self.compared("Linear", lambda product: lambda p, x: product(x, p["weight"], p["bias"]), 1e-5 if DEVICES == ["cpu"] else 2e-3)

    def test_layernorm_linear(self):
        self.compared("LayerNormLinear", lambda product: lambda p, x: product(oracle.norm(x, p, "layer_norm_"), p["weight"], p["bias"]), 0.02)

    def test_layernorm_mlp(self):
        self.compared("LayerNormMLP", lambda product: lambda p, x: with_bias(*oracle.mlp(p, x, product=product)[:2]), 0.02)

    def test_transformer_layer(self):
        self.compared("TransformerLayer", lambda product: lambda p, x: oracle.transformer(p, x, product=product, interleaved=True,
                                                                                          seen=allowed(16, 16, True)), 0.04)

    def test_delayed_scaling(self):
        """Its first step has scale 1 for inputs and gradients, and codes keep their own."""
        for device in DEVICES:
            module = made("Linear", DELAYED, device)
            x = input_of(device)
            with te.autocast(recipe=DELAYED):
                y = module(x)
            g = randn(*y.shape, seed=3, device=device)
            y.backward(g)
            weight = decoded(module.weight)
            exact = torch.from_numpy(oracle.round_to(x.detach().cpu().numpy().reshape(32, 160), "e4m3"))
            dy = torch.from_numpy(oracle.round_to(g.cpu().numpy().reshape(32, 144), "e5m2"))
            tolerance = 2e-2 if device == "cuda" else 1e-5
            near(self, y.detach().cpu().reshape(32, 144), exact @ weight.T + module.bias.detach().double().cpu(), tolerance, "output")
            near(self, x.grad.cpu().reshape(32, 160), dy @ weight, tolerance, "gradient of the input")
            near(self, module.weight.grad.cpu(), dy.T @ exact, tolerance, "gradient of the weight")
            history = next(t for n, t in module._fp8_state() if n.endswith("fwd.amax_history"))
            near(self, history.amax(0)[1].cpu(), weight.abs().amax(), 1e-6, "the weight's amax")

    def test_codes_give_what_quantising_the_same_values_gives(self):
        """Bit for bit where scales are powers of two, since dequantised codes are then quantised back to the same."""
        for name in MODULES:
            for recipe in (POW2, BLOCK, None):
                for dtype in (F32, BF16):
                    with self.subTest(name=name, recipe=recipe, dtype=dtype):
                        module = made(name, recipe or CURRENT)
                        plain = MODULES[name](device="cpu")
                        plain.load_state_dict(module.state_dict())
                        for a, b in zip(step(module, recipe, dtype=dtype), step(plain, recipe, dtype=dtype)):
                            self.assertEqual((a.dtype, type(a)), (b.dtype, torch.Tensor))
                            self.assertTrue(torch.equal(a, b))

    def test_weights_are_not_quantised_again(self):
        def count(op):
            return sum(row["calls"] for row in te_fl.usage() if row["op"] == op)

        for recipe in RECIPES:
            module, plain = made("Linear", recipe), MODULES["Linear"](device="cpu")
            step(module, recipe)
            calls = []
            for each in (module, plain):
                before = {op: count(op) for op in ("quantize", "dequantize", "fp8_transpose")}
                step(each, recipe)
                calls.append({op: count(op) - n for op, n in before.items()})
            self.assertEqual(calls[0]["quantize"], calls[1]["quantize"] - 1)
            self.assertEqual((calls[0]["dequantize"], calls[0]["fp8_transpose"]), (0, calls[1]["fp8_transpose"]))

    def test_frozen_weights(self):
        for recipe in (CURRENT, BLOCK):
            module, all_of_it = made("LayerNormMLP", recipe), made("LayerNormMLP", recipe)
            for p in codes(module).values():
                p.requires_grad_(False)
            got, want = step_inputs(module, recipe), step_inputs(all_of_it, recipe)
            self.assertTrue(torch.equal(got, want))
            self.assertTrue(all(p.grad is None for p in codes(module).values()))

    def test_microbatches_and_main_grad(self):
        module = made("LayerNormMLP", fuse_wgrad_accumulation=True)
        for p in codes(module).values():
            p.main_grad = torch.zeros(p.shape)
        plain = made("LayerNormMLP")
        for first in (True, False):
            for each in (module, plain):
                with te.autocast(recipe=CURRENT):
                    each(input_of(seed=5), is_first_microbatch=first).square().sum().backward()
        for n, p in codes(module).items():
            self.assertTrue(torch.equal(p.main_grad, getattr(plain, n).grad))
            self.assertIsNone(p.grad)

    def test_recomputation(self):
        for recipe in RECIPES:
            results = []
            for again in (False, True):
                module, x = made("TransformerLayer", recipe), input_of()
                with te.autocast(recipe=recipe):
                    y = te.checkpoint(module, x) if again else module(x)
                y.square().sum().backward()
                results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
            for a, b in zip(*results):
                self.assertTrue(torch.equal(a, b))

    def test_compiled(self):
        """A graph of torch.compile ends before such a module, which runs as without it."""
        for name in ("Linear", "TransformerLayer"):
            for recipe in (CURRENT, None):
                module = made(name)
                plain = step(copy.deepcopy(module), recipe)
                torch._dynamo.reset()
                compiled = torch.compile(module, backend="eager")
                x = input_of()
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    y = compiled(x)
                y.square().sum().backward()
                for a, b in zip([y.detach(), x.grad, *(p.grad for p in module.parameters())], plain):
                    self.assertTrue(torch.equal(a, b))
            torch._dynamo.reset()
            with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "quantized_model_init"):
                torch.compile(module, backend="eager", fullgraph=True)(x)

    def test_a_weight_written_before_its_backward_is_noticed(self):
        module, x = made("Linear"), input_of()
        with te.autocast(recipe=CURRENT):
            y = module(x)
        with torch.no_grad():
            module.weight.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()

    def test_a_weight_in_high_precision_in_its_place(self):
        module, plain = made("Linear"), MODULES["Linear"](device="cpu")
        step(module)
        module.weight = torch.nn.Parameter(randn(144, 160, seed=8))
        plain.load_state_dict({**module.state_dict(), "_extra_state": plain.state_dict()["_extra_state"]})
        for a, b in zip(step(module), step(plain)):
            self.assertTrue(torch.equal(a, b))


def step_inputs(module, recipe):
    x = input_of()
    with te.autocast(recipe=recipe):
        module(x).square().sum().backward()
    return x.grad


class Training(unittest.TestCase):
    """Without FP8 products, so that only the weights' rounding is to be reproduced."""

    def trained(self, optimizer, exact_step, recipe, steps=6, device="cpu", dtype=F32):
        module = made("Linear", recipe, device, preserve=True, params_dtype=dtype)
        stepper = optimizer(module.parameters())
        weight, bias = decoded(module.weight), module.bias.detach().double().cpu()
        exact = exact_step(weight, bias)
        x, wanted = randn(32, 160, seed=1), randn(32, 144, seed=2)
        for _ in range(steps):
            stepper.zero_grad()
            loss = (module(x.to(device, dtype)) - wanted.to(device)).square().mean()
            loss.backward()
            stepper.step()
            held = expected(exact.weight.float(), recipe).requires_grad_()
            own = exact.bias.clone().requires_grad_()
            want = (x.double() @ held.T + own - wanted.double()).square().mean()
            want.backward()
            near(self, loss.detach().cpu(), want.detach(), 1e-4, "loss")
            exact.step(held.grad, own.grad)
        self.assertIsInstance(module.weight, Float8Tensor)
        near_by_norm(self, decoded(module.weight), expected(exact.weight.float(), recipe), 2e-3, "codes")
        near(self, module.bias.detach().cpu(), exact.bias, 1e-4, "bias")
        return stepper, module, exact

    def test_fused_adam_with_master_weights(self):
        for device in DEVICES:
            for recipe in RECIPES:
                with self.subTest(device=device, recipe=recipe):
                    def adam(parameters):
                        return te.optimizers.FusedAdam(parameters, lr=3e-3, weight_decay=0.01, master_weights=True)
                    stepper, module, exact = self.trained(adam, ExactAdam, recipe, device=device)
                    near_by_norm(self, stepper.state[module.weight]["master_param"].cpu(), exact.weight, 1e-3, "master weight")
                    self.assertNotIn("master_param", stepper.state[module.bias])

    def test_torch_sgd(self):
        for device in DEVICES:
            for recipe in RECIPES:
                with self.subTest(device=device, recipe=recipe):
                    class Exact(ExactSGD):
                        def step(self, weight_grad, bias_grad):
                            super().step(weight_grad, bias_grad)
                            self.weight = expected(self.weight.float(), recipe)
                    self.trained(lambda parameters: torch.optim.SGD(parameters, lr=20.0), Exact, recipe, device=device)

    def test_torch_optimizers_train(self):
        """Every way that PyTorch has of stepping: tensor by tensor, lists of tensors, and in one kernel."""
        for options in (dict(foreach=False), dict(foreach=True), dict(fused=True)):
            with self.subTest(options):
                module = made("LayerNormMLP")
                optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **options)
                losses = []
                for _ in range(20):
                    optimizer.zero_grad()
                    with te.autocast(recipe=CURRENT):
                        loss = (module(input_of()) - 1).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                self.assertLess(losses[-1], 0.2 * losses[0])
                self.assertEqual(list(codes(module)), WEIGHTS["LayerNormMLP"])
                self.assertTrue(all(type(s) is torch.Tensor for p in codes(module).values() for s in optimizer.state[p].values()))

    def test_fp8_training_is_as_good_as_from_high_precision_weights(self):
        for recipe in RECIPES:
            final = []
            for quantised in (True, False):
                torch.manual_seed(0)
                with te.quantized_model_init(quantised, recipe):
                    module = te.TransformerLayer(64, 128, 4, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, device="cpu")
                optimizer = te.optimizers.FusedAdam(module.parameters(), lr=3e-3, master_weights=True)
                x, wanted = randn(16, 4, 64, seed=1), randn(16, 4, 64, seed=2)
                for _ in range(30):
                    optimizer.zero_grad()
                    with te.autocast(recipe=recipe):
                        loss = (module(x) - wanted).square().mean()
                    loss.backward()
                    optimizer.step()
                final.append(loss.item())
            self.assertLess(final[1], 1.5)  # from 2
            self.assertLess(abs(final[0] / final[1] - 1), 0.05, recipe)

    def test_master_weights_from_the_initial_values(self):
        module = made("Linear", preserve=True)
        high = module.weight.get_high_precision_init_val()
        optimizer = te.optimizers.FusedAdam([module.weight], lr=1e-3, master_weights=True)
        optimizer.initialize_state(module.weight)
        self.assertTrue(torch.equal(optimizer.state[module.weight]["master_param"], module.weight.detach().dequantize()))
        optimizer.set_scaled_state(module.weight, "master_param", high)
        self.assertTrue(torch.equal(optimizer.state[module.weight]["master_param"], high))
        module.weight.clear_high_precision_init_val()
        self.assertIsNone(module.weight.get_high_precision_init_val())

    def test_state_of_the_optimizers(self):
        def make():
            module = made("Linear")
            return module, te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
        (one, first), (other, second) = make(), make()
        for _ in range(2):
            step(one)
            first.step()
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for module, optimizer in ((one, first), (other, second)):
            step(module)
            optimizer.step()
        self.assertTrue(torch.equal(one.weight._data, other.weight._data))

    def test_capturable(self):
        """An optimizer that a CUDA graph may hold takes the same steps; one that a scaler skips leaves the codes as they are."""
        both = [made("Linear"), made("Linear")]
        steppers = [te.optimizers.FusedAdam(m.parameters(), lr=1e-2, master_weights=True, capturable=c) for m, c in zip(both, (True, False))]
        for _ in range(3):
            for module, stepper in zip(both, steppers):
                step(module)
                stepper.step()
        self.assertTrue(torch.equal(both[0].weight._data, both[1].weight._data))
        before, scaler = both[0].weight._data.clone(), torch.amp.GradScaler("cpu", init_scale=1.0)
        step(both[0])
        both[0].weight.grad[0, 0] = float("inf")
        scaler.scale(torch.zeros(1))
        steppers[0].step(grad_scaler=scaler)
        self.assertTrue(torch.equal(both[0].weight._data, before))

    def test_steps_without_master_weights(self):
        for make in (lambda p: te.optimizers.FusedAdam(p, lr=1e-2), lambda p: te.optimizers.FusedSGD(p, lr=1.0, momentum=0.5)):
            module = made("Linear", params_dtype=BF16)
            optimizer = make(module.parameters())
            before = decoded(module.weight)
            step(module, dtype=BF16)
            optimizer.step()
            self.assertFalse(torch.equal(decoded(module.weight), before))
            self.assertEqual({s.dtype for s in optimizer.state[module.weight].values()}, {F32})


class ExactSGD:
    lr = 20.0

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def step(self, weight_grad, bias_grad):
        self.weight, self.bias = self.weight - self.lr * weight_grad, self.bias - self.lr * bias_grad


class ExactAdam:
    """AdamW in FP64, of its paper's formulas."""

    lr, decay, betas, eps = 3e-3, 0.01, (0.9, 0.999), 1e-8

    def __init__(self, weight, bias):
        self.weight, self.bias, self.steps = weight, bias, 0
        self.moments = {name: [torch.zeros_like(t), torch.zeros_like(t)] for name, t in (("weight", weight), ("bias", bias))}

    def step(self, weight_grad, bias_grad):
        self.steps += 1
        for name, grad in (("weight", weight_grad), ("bias", bias_grad)):
            first, second = self.moments[name]
            first.mul_(self.betas[0]).add_((1 - self.betas[0]) * grad)
            second.mul_(self.betas[1]).add_((1 - self.betas[1]) * grad * grad)
            mean, variance = first / (1 - self.betas[0] ** self.steps), second / (1 - self.betas[1] ** self.steps)
            old = getattr(self, name)
            setattr(self, name, old - self.lr * (mean / (variance.sqrt() + self.eps) + self.decay * old))


class State(unittest.TestCase):
    def same_codes(self, a, b):
        self.assertEqual(a._codes.rules, b._codes.rules)
        for part in ("data", "scale_inv", "amax"):
            x, y = getattr(a._codes, part), getattr(b._codes, part)
            self.assertTrue(x is y is None or torch.equal(x.float(), y.float()), part)

    def test_state_dict(self):
        for name in MODULES:
            for recipe in RECIPES:
                with self.subTest(name=name, recipe=recipe):
                    module, stream = made(name, recipe), io.BytesIO()
                    step(module, recipe)
                    state = module.state_dict()
                    plain = MODULES[name](device="cpu")
                    self.assertEqual(list(state), list(plain.state_dict()))
                    torch.save(state, stream)
                    stream.seek(0)
                    read = torch.load(stream, weights_only=True)
                    other = made(name, recipe)
                    with torch.no_grad():
                        for p in other.parameters():
                            p.zero_()
                    other.load_state_dict(read)
                    for n, p in codes(other).items():
                        self.same_codes(p, module.get_parameter(n))
                    self.assertTrue(all(torch.equal(a, b) for a, b in zip(step(other, recipe), step(module, recipe))))

    def test_into_high_precision_and_back(self):
        for recipe in RECIPES:
            module, back = made("LayerNormMLP", recipe), made("LayerNormMLP", recipe)
            plain = MODULES["LayerNormMLP"](device="cpu")
            plain.load_state_dict(module.state_dict())
            for n, p in plain.named_parameters():
                self.assertIs(type(p), torch.nn.Parameter)
                if n in WEIGHTS["LayerNormMLP"]:
                    self.assertTrue(torch.equal(p.detach(), decoded(module.get_parameter(n)).float()))
            with torch.no_grad():
                for p in back.parameters():
                    p.zero_()
            back.load_state_dict(plain.state_dict())
            for n, p in codes(back).items():
                near(self, decoded(p), decoded(module.get_parameter(n)), 1e-6, n)
                self.assertGreater(torch.count_nonzero(decoded(p)), 0)

    def test_transformer_engines_checkpoints(self):
        """Its Float8Tensor is saved as a call of a function with codes, dtypes, the scale's inverse, and, where it holds no others, the
        transposed codes."""
        names = [f"transformer_engine{part}" for part in (".pytorch.tensor.float8_tensor", ".pytorch.constants", ".pytorch.tensor", ".pytorch", "")]
        where = {name: types.ModuleType(name) for name in names}

        def _make_float8_tensor_in_reduce_ex():
            raise AssertionError("called while writing")

        class DType(enum.IntEnum):
            kFloat8E4M3, kFloat8E5M2 = 7, 8

            def __reduce_ex__(self, protocol):
                return DType, (int(self),)  # Python 3.11.0 to 3.11.3 write a getattr(), which PyTorch reads in no file
        for (name, module), own in zip(where.items(), (_make_float8_tensor_in_reduce_ex, DType)):
            own.__module__, own.__qualname__ = name, own.__name__
            setattr(module, own.__name__, own)

        class Theirs:
            def __init__(self, *parts):
                self.parts = parts

            def __reduce_ex__(self, protocol):
                return _make_float8_tensor_in_reduce_ex, self.parts

        weight = made("Linear").weight.detach()
        data, scale_inv, shape = weight._data, weight._scale_inv, weight.shape
        for parts in ((data, DType.kFloat8E4M3, scale_inv, BF16, shape), (data, DType.kFloat8E4M3, scale_inv, BF16, shape, None),
                      (None, DType.kFloat8E4M3, scale_inv, BF16, shape, data.t().contiguous())):
            stream = io.BytesIO()
            with mock.patch.dict(sys.modules, where):
                torch.save({"weight": Theirs(*parts)}, stream)
            stream.seek(0)
            read = torch.load(stream, weights_only=True)["weight"]
            self.assertEqual((type(read), read.dtype), (Float8Tensor, BF16))
            module = MODULES["Linear"](device="cpu")
            for other in (made("Linear"), module):
                with torch.no_grad():
                    other.weight.zero_()
                other.load_state_dict({"weight": read}, strict=False)
                self.assertTrue(torch.equal(other.weight.detach().float(), decoded(weight).float()))
            near(self, read._codes.amax, weight._codes.amax, 1e-6, "amax")
        stream = io.BytesIO()
        with mock.patch.dict(sys.modules, where):
            torch.save(Theirs(data, DType.kFloat8E5M2, scale_inv, BF16, shape), stream)
        stream.seek(0)
        with self.assertRaisesRegex(Exception, "te-fl's parameters hold E4M3"):
            torch.load(stream, weights_only=True)

    def test_between_ways_of_scaling(self):
        module, other = made("Linear", CURRENT), made("Linear", BLOCK)
        with torch.no_grad():
            other.weight.zero_()
        other.load_state_dict(module.state_dict())
        near(self, decoded(other.weight), per_block(decoded(module.weight).float(), 128, 128), 1e-6, "blocks")

    def test_copies(self):
        for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
            for name in MODULES:
                module = made(name)
                step(module)
                want = step(module)
                other = copied(module)
                for n, p in codes(other).items():
                    self.assertIsInstance(p, torch.nn.Parameter)
                    self.same_codes(p, module.get_parameter(n))
                    self.assertIsNot(p._codes, module.get_parameter(n)._codes)
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(step(other), want)))
                with torch.no_grad():
                    for p in other.parameters():
                        p.zero_()
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(step(module), want)))

    def test_deepcopy_keeps_initial_values(self):
        module = made("Linear", preserve=True)
        other = copy.deepcopy(module)
        other.weight.clear_high_precision_init_val()
        self.assertIsNone(other.weight.get_high_precision_init_val())
        self.assertEqual(module.weight.get_high_precision_init_val().shape, (144, 160))
        self.assertFalse(hasattr(made("Linear").weight, "get_high_precision_init_val"))

    def test_dtypes_and_devices(self):
        for change in (lambda m: m.bfloat16(), lambda m: m.to(BF16), lambda m: m.half().bfloat16()):
            module, want = made("LayerNormMLP"), made("LayerNormMLP")
            weight = module.fc1_weight
            self.assertIs(change(module), module)
            self.assertIs(module.fc1_weight, weight)
            self.assertEqual((weight.dtype, module.fc1_bias.dtype, weight.requires_grad), (BF16, BF16, True))
            self.same_codes(weight, want.fc1_weight)
            self.assertEqual([g.dtype for g in step(module, dtype=BF16)], [BF16] * 8)
        for device in DEVICES:
            module = made("LayerNormMLP").to(device)
            self.assertEqual(module.fc1_weight.device.type, device)
            self.assertEqual(module.fc1_weight._data.device.type, device)
            self.same_codes(copy.deepcopy(module).cpu().fc1_weight, made("LayerNormMLP").fc1_weight)
            step(module, device=device)


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


# Memory of a process beyond what importing takes: weights of 64 Mi elements in some dtype or as codes, before and after serving.
ACCOUNT = """
import sys, torch
import te_fl.pytorch as te
from te_fl.common.recipe import Float8CurrentScaling

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

recipe = Float8CurrentScaling()
def serve(model, x):
    with torch.no_grad(), te.cache_quantized_weights(), te.autocast(recipe=recipe):
        for _ in range(2):
            model(x)

with te.quantized_model_init(recipe=recipe):  # what the first tensor of such a class makes PyTorch import
    small = torch.nn.Sequential(te.Linear(64, 64, device="cpu")).eval()
serve(small, torch.zeros(16, 64))
before = resident()
with te.quantized_model_init(sys.argv[1] == "codes", recipe):
    model = torch.nn.Sequential(*(te.Linear(4096, 4096, bias=False, params_dtype=torch.bfloat16, init_method=torch.nn.init.ones_, device="cpu")
                                  for _ in range(4))).eval()
made = resident() - before
serve(model, torch.zeros(16, 4096, dtype=torch.bfloat16))
print(made >> 20, (resident() - before) >> 20)
"""


class Memory(unittest.TestCase):
    @unittest.skipUnless(os.path.exists("/proc/self/statm"), "the kernel does not tell")
    def test_half_of_bf16(self):
        def account(kind):
            # Freed blocks of the allocator go back at once.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
            run = subprocess.run([sys.executable, "-c", ACCOUNT, kind], capture_output=True, text=True, check=True, env=environment)
            return [int(n) for n in run.stdout.split()]

        (made_codes, served_codes), (made_bf16, served_bf16) = account("codes"), account("bf16")
        self.assertLess(abs(made_bf16 - 128), 10)
        self.assertLess(abs(made_codes - 64), 10)
        self.assertLess(served_codes, made_bf16)  # products on a CPU keep scratch memory of the size of one weight
        self.assertLess(served_codes, 0.5 * served_bf16)  # it has FP8 copies besides, as te.cache_quantized_weights() keeps them

    @unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
    def test_half_of_bf16_on_a_gpu(self):
        def account(enabled, recipe):
            before = torch.cuda.memory_allocated()
            with te.quantized_model_init(enabled, recipe):
                module = te.LayerNormMLP(1024, 4096, bias=False, params_dtype=BF16, device="cuda")
            taken = torch.cuda.memory_allocated() - before
            return taken, module
        for recipe in RECIPES:
            (codes_taken, _), (bf16_taken, _) = account(True, recipe), account(False, recipe)
            self.assertLess(codes_taken, 0.51 * bf16_taken)

    def test_tensors(self):
        for recipe in RECIPES:
            module = made("Linear", recipe)

            def held():
                codes = module.weight._codes
                parts = (codes.data, codes.scale_inv, codes.amax, codes.columns, codes.columns_scale_inv)
                return sum(p.nbytes for p in parts if p is not None)
            with torch.no_grad(), te.autocast(recipe=recipe, enabled=recipe is not DELAYED):
                module(input_of())
            self.assertLess(held(), 144 * 160 + 64)
            step(module, recipe)
            self.assertLess(held(), 2 * 144 * 160 + 128)


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
        with self.assertRaisesRegex(Unsupported, "MXFP8BlockScaling"), te.quantized_model_init(recipe=MXFP8BlockScaling()):
            pass
        with te.quantized_model_init():
            with self.assertRaisesRegex(Unsupported, "parameters_split.*fuse_qkv_params=True"):
                te.TransformerLayer(32, 64, 2, device="cpu")
            with self.assertRaisesRegex(Unsupported, "parameters_split"):
                te.Linear(32, 64, parameters_split=("a", "b"), device="cpu")
        for scope, other in ((CURRENT, BLOCK), (BLOCK, CURRENT), (BLOCK, DELAYED)):
            module = made("Linear", scope)
            with te.autocast(recipe=other), self.assertRaisesRegex(FailedPrecondition, "quantized_model_init"):
                module(input_of())
        with self.assertRaisesRegex(Unsupported, "float64"):
            made("Linear").double()


if __name__ == "__main__":
    unittest.main()
