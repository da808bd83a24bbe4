"""Tests NVIDIA's own modules on te-fl, on the host: values and gradients equal those of te_fl.pytorch's modules with the same state_dict, which loads
in both directions. Also tests te.ops, checkpoint, quantised weights, offload, delayed and accumulated weight gradients, and errors."""

import functools
import math
import os
import sys
import threading
import types
import unittest

import inside_package  # noqa: F401  (first: it brings the package in)
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes

import te_fl
import te_fl.pytorch as ours
from te_fl.common import recipe as our_recipes
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.inside import package
from te_fl.pytorch.fp8 import extra_state

BF16 = torch.bfloat16
RECIPES = {"none": (None, None), "delayed": (recipes.DelayedScaling(amax_history_len=4), our_recipes.DelayedScaling(amax_history_len=4)),
           "current": (recipes.Float8CurrentScaling(), our_recipes.Float8CurrentScaling()),
           "block": (recipes.Float8BlockScaling(), our_recipes.Float8BlockScaling())}
# The package rounds to BF16 between two ops where te_fl.pytorch keeps FP32: the result of a normalisation before its quantisation under current and
# block scaling, and in an MLP the activation and the summands of the activation bias's gradient. One such rounding is 2^-9 of a value; under FP8 it
# may change a code, by 2^-4 of a value.
EXACT = dict.fromkeys(RECIPES, 0.0)
NORMS = {"none": 0.0, "delayed": 0.0, "current": 0.03, "block": 0.03}
MLPS = {"none": 0.006, "delayed": 0.06, "current": 0.06, "block": 0.06}


def step(te, module, x, recipe, weight, **arguments):
    x.grad = None
    module.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **arguments)
    (y.float() * weight).mean().backward()
    return y.detach()


def difference(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


class Modules(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(7)

    def compare(self, make, name, shape, bounds, **arguments):
        theirs = make(te)
        mine = make(ours)
        mine.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(mine.state_dict())
        x = torch.randn(*shape, dtype=BF16).requires_grad_()
        z = x.detach().clone().requires_grad_()
        weight = torch.linspace(-1, 1, make(te)(x.detach(), **arguments).shape[-1])
        for _ in range(3):
            y = step(te, theirs, x, RECIPES[name][0], weight, **arguments)
            want = step(ours, mine, z, RECIPES[name][1], weight, **arguments)
        pairs = {"y": (y, want), "x": (x.grad, z.grad)}
        gradients = dict(mine.named_parameters())
        pairs.update((n, (p.grad, gradients[n].grad)) for n, p in theirs.named_parameters())
        for what, (got, wanted) in pairs.items():
            self.assertTrue(got.isfinite().all(), what)
            self.assertLessEqual(difference(got, wanted), bounds[name], f"{name} {what}")
        return theirs, mine

    def test_linear(self):
        for name in RECIPES:
            with self.subTest(name):
                self.compare(lambda t: t.Linear(256, 384, params_dtype=BF16, device="cpu"), name, (4, 32, 256), EXACT)
                self.compare(lambda t: t.Linear(256, 128, bias=False, params_dtype=BF16, device="cpu"), name, (128, 256), EXACT)

    def test_grouped_linear(self):
        for name in RECIPES:
            for bias in (True, False):
                with self.subTest(name=name, bias=bias):
                    theirs, mine = self.compare(lambda t: t.GroupedLinear(3, 128, 256, bias=bias, params_dtype=BF16, device="cpu"), name, (96, 128),
                                                EXACT, m_splits=[32, 0, 64])
                    if name == "delayed":  # compares each expert's scales and histories, including those of the expert without rows
                        kept = extra_state.read(mine.get_extra_state(), "test")
                        for way, products in (("fwd", 3), ("bwd", 2)):  # the package also has a slot for the output of each linear layer, which is
                                                                        # never used
                            used = [products * expert + at for expert in range(3) for at in range(products - 1)]
                            meta = theirs.fp8_meta[f"scaling_{way}"]
                            for words, own in (("scale", meta.scale), ("amax_history", meta.amax_history)):
                                self.assertTrue(torch.equal(kept[f"{words}_{way}"][..., used], own[..., used]), f"{words}_{way}")
                        self.assertEqual(float(kept["amax_history_fwd"][:, 3].abs().max()), 0.0)

    def test_layernorm_linear(self):
        for name in RECIPES:
            for norm in ("LayerNorm", "RMSNorm"):
                with self.subTest(name=name, norm=norm):
                    self.compare(lambda t: t.LayerNormLinear(256, 384, normalization=norm, params_dtype=BF16, device="cpu"), name, (4, 32, 256), NORMS)

    def test_layernorm_mlp(self):
        for name in RECIPES:
            for activation in ("gelu", "swiglu", "srelu"):
                with self.subTest(name=name, activation=activation):
                    self.compare(lambda t: t.LayerNormMLP(256, 512, activation=activation, params_dtype=BF16, device="cpu"), name, (4, 32, 256), MLPS)

    def test_norms(self):
        for kind in ("LayerNorm", "RMSNorm"):
            for centred in (False, True):
                self.compare(lambda t: getattr(t, kind)(96, zero_centered_gamma=centred, params_dtype=BF16, device="cpu"), "none", (5, 3, 96), EXACT)

    def test_against_double_precision(self):
        """Bounds the errors of a linear layer against FP64. Rounding a value has a uniform error within 2^-4 of it in E4M3 (2^-3 in E5M2, used for
        gradients); the relative error of a long sum is at most the root mean square 2^-4 / sqrt(3) = 0.036 for each operand (0.072 for E5M2)."""
        for name, bound in (("none", 0.005), ("delayed", 0.085), ("current", 0.085), ("block", 0.052)):
            module = te.Linear(512, 256, params_dtype=BF16)
            x = torch.randn(256, 512, dtype=BF16).requires_grad_()
            weight = torch.randn(256)
            for _ in range(3):
                y = step(te, module, x, RECIPES[name][0], weight)
            want = x.detach().double() @ module.weight.detach().double().t() + module.bias.detach().double()
            dy = weight.double().expand(256, 256) / want.numel()
            self.assertLess(difference(y, want), bound, name)
            self.assertLess(difference(x.grad, dy @ module.weight.detach().double()), bound, name)
            self.assertLess(difference(module.weight.grad, dy.t() @ x.detach().double()), bound, name)


# Chains for te.ops.Sequential of both packages: (a function that makes the operations from a package's ops, input shape, shapes of extra inputs).
CHAINS = {
    "linears": (lambda o, d: (o.LayerNorm(128, dtype=d), o.Linear(128, 256, dtype=d), o.GELU(), o.Linear(256, 64, bias=False, dtype=d)), (32, 4, 128), ()),
    "gated": (lambda o, d: (o.RMSNorm(64, dtype=d, zero_centered_gamma=True), o.BasicLinear(64, 256, dtype=d), o.Bias(256, dtype=d), o.SwiGLU(),
                            o.Linear(128, 64, dtype=d)), (64, 64), ()),
    "extras": (lambda o, d: (o.MakeExtraOutput(), o.LayerNorm((4, 16), dtype=d), o.Reshape((-1, 64)), o.Linear(64, 64, dtype=d), o.MakeExtraOutput(in_place=True),
                             o.Identity(), o.AddExtraInput(), o.ConstantScale(0.5), o.Linear(64, 32, dtype=d), o.AddExtraInput(in_place=True)),
               (32, 4, 16), ((32, 64), (32, 32))),
    "channels": (lambda o, d: (o.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False), o.Linear(64, 64, dtype=d),
                               o.MakeExtraOutput().set_extra_output_channel(0, "shown"), o.SiLU(), o.AddExtraInput().set_extra_input_channel(0, "residual"),
                               o.AddExtraInput(), o.AddExtraInput().set_extra_input_channel(0, "shown")), (32, 64), ((32, 64),)),
    "modules": (lambda o, d: (o.Linear(64, 64, dtype=d), o.MakeExtraOutput(), torch.nn.Tanh(), o.AddExtraInput(), o.L2Normalization(eps=1e-3),
                              o.Dropout(0.0), o.Quantize(False)), (32, 64), ((32, 64),)),
    **{name: (lambda o, d, name=name: (getattr(o, name)(),), (12, 8, 64), ()) for name in
       "GELU GEGLU GLU QGELU QGEGLU ReLU ReGLU SReLU SReGLU SiLU SwiGLU SiTUGLU ClampedSwiGLU".split()},
    "turns": (lambda o, d: (o.SwiGLU(glu_interleave_size=8), o.ClampedSwiGLU(limit=0.5, alpha=1.2, glu_linear_offset=0.25, glu_interleave_size=4),
                            o.SiTUGLU(beta1=1.0, beta2=2.0, glu_interleave_size=4)), (12, 64), ()),
    "cached": (lambda o, d: (o.SwiGLU(cache_quantized_input=True, glu_interleave_size=4), o.ClampedSwiGLU(cache_quantized_input=True, limit=0.5),
                             o.GELU(cache_quantized_input=True), o.SiTUGLU(cache_quantized_input=True)), (12, 64), ()),
    "scaled": (lambda o, d: (o.ScaledSReLU(), o.ScaledTanhSReLU(tanh_clamp_scale=0.75), o.ScaledSwiGLU(), o.ScaledSiTUGLU(4, beta1=1.0, beta2=2.0),
                             o.ScaledClampedQGeGLU(glu_interleave_size=4, limit=0.5, alpha=1.2, glu_linear_offset=0.25)), (12, 64), ((12,),) * 5),
}


class Operations(unittest.TestCase):
    """te.ops of NVIDIA's package and of te_fl.pytorch have the same state_dict, load each other's, and compute the same values."""

    def setUp(self):
        torch.manual_seed(5)

    def results(self, package, chain, x, extras, recipe, steps):
        inputs = [t.detach().clone().requires_grad_() for t in (x, *extras)]
        for _ in range(steps):
            for t in (*inputs, *chain.parameters()):
                t.grad = None
            with package.autocast(enabled=recipe is not None, recipe=recipe):
                # Operations that write into an extra input require a non-leaf tensor.
                found = chain(inputs[0], *[t * 1 for t in inputs[1:]])
            found = found if isinstance(found, tuple) else (found,)
            sum(((i + 1) * y.float() * torch.linspace(-1, 1, y.shape[-1])).mean() for i, y in enumerate(found)).backward()
        return [*found, *(t.grad for t in inputs), *(p.grad for p in chain.parameters())]

    def compare(self, name, dtype, recipe, bound):
        make, shape, extras = CHAINS[name]
        theirs, mine = (package.ops.Sequential(*make(package.ops, dtype)) for package in (te, ours))
        with torch.no_grad():
            for p in theirs.parameters():
                p.add_(torch.randn(p.shape).to(dtype) * 0.1)
        self.assertEqual(list(mine.state_dict()), list(theirs.state_dict()))
        mine.load_state_dict(theirs.state_dict())
        # The package's Linear without a bias cannot load its own state_dict either.
        theirs.load_state_dict(mine.state_dict(), strict=name != "linears")
        self.assertEqual([n for n, _ in mine.named_parameters()], [n for n, _ in theirs.named_parameters()])
        x, extras = torch.randn(shape).to(dtype), [torch.randn(s).to(dtype) for s in extras]
        got, want = (self.results(package, chain, x, extras, recipe and recipe[i], 1 if recipe is None else 3)
                     for i, (package, chain) in enumerate(((te, theirs), (ours, mine))))
        self.assertEqual(len(got), len(want))
        for i, (a, b) in enumerate(zip(got, want)):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
            self.assertLessEqual(difference(b, a), bound, f"result {i}")
        return theirs, mine

    def test_values(self):
        for name in CHAINS:
            for dtype, bound in ((torch.float32, 2e-6), (BF16, 0.012)):
                with self.subTest(name=name, dtype=dtype):
                    self.compare(name, dtype, None, bound)

    def test_in_fp8(self):
        for recipe in ("delayed", "current", "block"):
            for name in ("linears", "gated", "extras"):
                with self.subTest(recipe=recipe, name=name):
                    self.compare(name, BF16, RECIPES[recipe], 0.08)

    def test_state_of_delayed_scaling(self):
        theirs, mine = self.compare("linears", BF16, RECIPES["delayed"], 0.08)
        read = [extra_state.read(module.state_dict()["1.basic_ops.0._extra_state"], "test") for module in (theirs, mine)]
        for mode in ("forward", "backward"):
            for name, tensor in read[0][mode].items():
                if isinstance(tensor, torch.Tensor):
                    self.assertEqual(tensor.shape, read[1][mode][name].shape)
                    if "scale" in name:  # scales are powers of two, and the amaxes are equal up to rounding
                        self.assertLessEqual((tensor / read[1][mode][name]).log2().abs().max().item(), 0.1)
        os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
        self.addCleanup(os.environ.pop, "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE")
        for module, other, package, recipe in ((mine, theirs, ours, 1), (theirs, mine, te, 0)):
            fresh = package.ops.Sequential(*CHAINS["linears"][0](package.ops, BF16))
            fresh.load_state_dict(other.state_dict(), strict=package is ours)
            state = extra_state.read(fresh.state_dict()["1.basic_ops.0._extra_state"], "test")
            wanted = extra_state.read(other.state_dict()["1.basic_ops.0._extra_state"], "test")
            for mode in ("forward", "backward"):
                for name, tensor in wanted[mode].items():
                    if isinstance(tensor, torch.Tensor):
                        self.assertTrue(torch.equal(tensor, state[mode][name]), name)

    def test_grouped_linear(self):
        for recipe in (None, "delayed", "current"):
            for scaled in (False, True):
                with self.subTest(recipe=recipe, scaled=scaled):
                    theirs, mine = (package.ops.GroupedLinear(3, 64, 32, bias=scaled, scale_bias=scaled, dtype=BF16) for package in (te, ours))
                    mine.load_state_dict(theirs.state_dict())
                    self.assertEqual(sorted(mine.state_dict()), sorted(theirs.state_dict()))
                    rows, x, scales = torch.tensor([32, 0, 16]), torch.randn(48, 64).to(BF16), torch.rand(48)
                    found = []
                    for i, (package, module) in enumerate(((te, theirs), (ours, mine))):
                        used = RECIPES[recipe][i] if recipe else None
                        with torch.no_grad(), package.autocast(enabled=used is not None, recipe=used):
                            found.append(module(x, rows, *((scales,) if scaled else ())))
                    self.assertLessEqual(difference(found[1], found[0]), 0.006)


class Around(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)

    def trained(self, module, x, recipe, steps=2, **arguments):
        for _ in range(steps):
            x = x.detach().requires_grad_()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x, **arguments)
            y.float().square().mean().backward()
        self.assertTrue(x.grad.isfinite().all())
        return y.detach(), x.grad

    def test_sequential_ops(self):
        """te.ops, which the package fuses by its own rules, compute the values of its modules."""
        for name, (recipe, _) in RECIPES.items():
            for activation, op in (("gelu", te.ops.GELU), ("swiglu", te.ops.SwiGLU)):
                wide = 2 if activation == "swiglu" else 1
                chain = te.ops.Sequential(te.ops.LayerNorm(128, dtype=BF16), te.ops.Linear(128, 256 * wide, dtype=BF16), op(),
                                          te.ops.Linear(256, 128, dtype=BF16))
                module = te.LayerNormMLP(128, 256, activation=activation, params_dtype=BF16)
                with torch.no_grad():
                    for mine, theirs in zip(chain.parameters(), module.parameters()):
                        mine.copy_(theirs)
                x = torch.randn(128, 128, dtype=BF16)
                got, want = self.trained(chain, x, recipe), self.trained(module, x, recipe)
                for g, w in zip(got, want):
                    self.assertLess(difference(g, w), 0.01 if recipe is None else 0.12, f"{name} {activation}")

    def test_checkpoint(self):
        for name, (recipe, _) in RECIPES.items():
            x = torch.randn(32, 2, 128, dtype=BF16)
            results = []
            for run in (lambda m, x: m(x), te.checkpoint, functools.partial(te.checkpoint, use_reentrant=False)):
                torch.manual_seed(1)  # All runs get the same weights and dropout masks, and start with no scales.
                module = te.TransformerLayer(128, 256, 4, hidden_dropout=0.1, attention_dropout=0.0, params_dtype=BF16)
                z = x.detach().requires_grad_()
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    y = run(module, z)
                y.float().square().mean().backward()
                results.append((y.detach(), z.grad))
            for plain, again, kept in zip(*results):
                self.assertTrue(torch.equal(plain, again), name)
                self.assertLess(difference(kept, plain), 0.02, name)  # with recomputed activations the package does not fuse GELU with the bias

    def test_quantised_weights_and_adam(self):
        for name in ("delayed", "current", "block"):
            recipe = RECIPES[name][0]
            with te.quantized_model_init(enabled=True, recipe=recipe):
                module = te.Linear(128, 128, params_dtype=BF16)
            before = module.weight.dequantize().clone()
            optimizer = te.optimizers.FusedAdam(module.parameters(), lr=0.01, master_weights=True)
            losses, x = [], torch.randn(64, 128, dtype=BF16)
            for _ in range(10):
                losses.append(float(self.trained(module, x, recipe, 1)[0].float().square().mean()))
                optimizer.step()
                optimizer.zero_grad()
            self.assertLess(losses[-1], 0.8 * losses[0], name)
            self.assertGreater(difference(module.weight.dequantize(), before), 0.01, name)
            self.assertIn("Float8", type(module.weight).__name__)

    def test_offload(self):
        for name, (recipe, _) in RECIPES.items():
            modules = [te.Linear(128, 128, params_dtype=BF16) for _ in range(3)]
            x, results = torch.randn(64, 128, dtype=BF16), []
            for enabled in (False, True):
                context, synchronize = te.get_cpu_offload_context(enabled=enabled, num_layers=2, model_layers=3)
                copies = [clone_module(m) for m in modules]
                z = y = x.detach().requires_grad_()
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    for module in copies:
                        with context:
                            y = module(y)
                        y = synchronize(y)
                y.float().square().mean().backward()
                results.append([z.grad] + [m.weight.grad for m in copies])
            for plain, offloaded in zip(*results):
                self.assertTrue(torch.equal(plain, offloaded), name)

    def test_weight_gradients_later_and_accumulated(self):
        for name, (recipe, _) in RECIPES.items():
            plain = te.Linear(128, 64, params_dtype=BF16)
            later, added = (clone_module(plain, te.Linear(128, 64, params_dtype=BF16, **o)) for o in
                            ({"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}))
            added.weight.main_grad, added.weight.grad_added_to_main_grad = torch.zeros(64, 128), False
            x = torch.randn(64, 128, dtype=BF16)
            for module in (plain, later, added):
                self.trained(module, x, recipe, 1)
            later.backward_dw()
            self.assertTrue(torch.equal(plain.weight.grad, later.weight.grad), name)
            self.assertLess(difference(added.weight.main_grad, plain.weight.grad), 0.004, name)  # the difference is the rounding of BF16

    def test_usage_and_policy(self):
        te_fl.reset_usage()
        self.trained(te.Linear(64, 64, params_dtype=BF16), torch.randn(32, 64, dtype=BF16), None, 1)
        self.assertEqual({(u["op"], u["impl_id"]) for u in te_fl.usage()} & {("generic_gemm", "default.cpu")}, {("generic_gemm", "default.cpu")})
        module = te.Linear(64, 64, params_dtype=BF16)
        te_fl.reset_usage()
        with te_fl.policy(prefer="reference"):
            module(torch.randn(32, 64, dtype=BF16))
        self.assertEqual([u["impl_id"] for u in te_fl.usage() if u["op"] == "generic_gemm"], ["reference.host"])


def clone_module(module, into=None):
    """Makes another module with the same parameters and without FP8 state."""
    import copy
    into = into if into is not None else copy.deepcopy(module)
    with torch.no_grad():
        for mine, theirs in zip(into.parameters(), module.parameters()):
            mine.copy_(theirs)
            mine.grad = None
    return into


class Trouble(unittest.TestCase):
    def product(self, a, b, **changes):
        arguments = dict(A=a, transA=True, B=b, transB=False, D=None, quantizer=None, output_dtype=tex.DType.kBFloat16, bias=None,
                         bias_type=tex.DType.kBFloat16, gelu=False, gelu_in=None, grad=False, workspace=torch.empty(8, dtype=torch.uint8),
                         workspace_size=8, accumulate=False, use_split_accumulator=False)
        return tex.generic_gemm(**{**arguments, **changes})

    def test_products(self):
        a, b = torch.randn(8, 16, dtype=BF16), torch.randn(4, 16, dtype=BF16)
        with self.assertRaisesRegex(InvalidArgument, "16 and 12 differ"):
            self.product(a, torch.randn(4, 12, dtype=BF16))
        with self.assertRaisesRegex(InvalidArgument, r"D has shape \(4, 9\).*the product has \(4, 8\)"):
            self.product(a, b, D=torch.empty(4, 9, dtype=BF16))
        with self.assertRaisesRegex(InvalidArgument, "beta is 0.5 without accumulate"):
            self.product(a, b, beta=0.5)
        with self.assertRaisesRegex(Unsupported, "comm_overlap.*ub_ arguments"):
            self.product(a, b, comm_overlap=object())
        sums = torch.zeros(4, 8, dtype=BF16)
        quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
        codes = tex.quantize(torch.ones(4, 8, dtype=BF16), quantizer)
        before = codes._data.clone()
        with self.assertRaisesRegex(InvalidArgument, "accumulate is set without D"):
            self.product(a, b, accumulate=True)
        with self.assertRaisesRegex(InvalidArgument, "accumulate is set with a quantizer"):
            self.product(a, b, D=codes, quantizer=quantizer, accumulate=True)
        with self.assertRaisesRegex(InvalidArgument, "D is quantised and there is no quantizer"):
            self.product(a, b, D=codes)
        with self.assertRaisesRegex(InvalidArgument, "gelu with grad needs gelu_in"):
            self.product(a, b, D=sums, gelu=True, grad=True)
        self.assertTrue(torch.equal(codes._data, before) and not sums.any())
        with self.assertRaisesRegex(InvalidArgument, "A is None"):
            self.product(None, b)
        self.assertTrue(torch.equal(self.product(a[:, :0], b[:, :0])[0], torch.zeros(4, 8, dtype=BF16)))

    def test_blocks(self):
        def blocks(rows, columns, dim, dtype=tex.DType.kFloat8E4M3):
            return te.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, block_scaling_dim=dim)(torch.randn(rows, columns, dtype=BF16))

        square, rows, e5m2 = blocks(48, 64, 2), blocks(32, 64, 1), blocks(32, 64, 1, tex.DType.kFloat8E5M2)
        bias, before = torch.randn(1, 48, dtype=BF16), torch.randn(32, 48, dtype=BF16)
        want = rows.dequantize(dtype=torch.float64) @ square.dequantize(dtype=torch.float64).t()
        split = dict(use_split_accumulator=True)
        got = self.product(square, rows, bias=bias, **split)[0]  # a bias with one row
        self.assertLess(difference(got, want + bias), 4e-3)
        # With accumulation, GELU and its gradient apply to the sum of the GEMM's result and D's previous contents.
        x = torch.randn(32, 48, dtype=BF16)
        z = x.double().requires_grad_()
        torch.nn.functional.gelu(z, approximate="tanh").backward(want + before)
        got = self.product(square, rows, D=before.clone(), accumulate=True, gelu=True, gelu_in=x, grad=True, **split)[0]
        self.assertLess(difference(got, z.grad), 8e-3)
        plain = [t.dequantize(dtype=BF16) for t in (square, rows)]
        got, _, pre, _ = self.product(*plain, D=before.clone(), accumulate=True, gelu=True)
        self.assertLess(difference(pre, want + before), 8e-3)
        self.assertLess(difference(got, torch.nn.functional.gelu(pre.double(), approximate="tanh")), 4e-3)
        for words, a, b, options in (
                ("CUBLAS_STATUS_NOT_SUPPORTED", square, rows, dict(use_split_accumulator=False)),
                ("CUBLAS_STATUS_NOT_SUPPORTED", e5m2, e5m2, split),
                ("Epilogue requested outside of the available", square, rows, dict(bias=bias, grad=True, **split)),
                ("Epilogue requested outside of the available", square, rows, dict(gelu=True, **split)),
                ("an unsupported value or parameter was passed", square, rows, dict(gelu=True, gelu_in=x.float(), grad=True, output_dtype=tex.DType.kFloat32, **split)),
                ("Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling GEMM is supported", square, square, split),
                ("leading dimension requirement", blocks(48, 56, 2), blocks(32, 56, 1), split),
                ("outer dimension requirement", blocks(44, 64, 2), rows, split),
                ("outer dimension requirement", square, blocks(31, 64, 1), split)):
            with self.assertRaisesRegex(Unsupported, words):
                self.product(a, b, **options)

    def test_quantizers(self):
        class Unknown(te.Quantizer):
            def __init__(self):
                pass
        with self.assertRaisesRegex(Unsupported, "class Unknown is not supported.*Float8Quantizer"):
            tex.quantize(torch.randn(4, 4), Unknown())
        with self.assertRaisesRegex(InvalidArgument, "do not sum to the tensor's 8 rows"):
            tex.split_quantize(torch.randn(8, 16), [4, 5], [te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, "cpu")] * 2)
        quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
        empty = tex.quantize(torch.empty(0, 16), quantizer)
        self.assertEqual(tuple(empty.shape), (0, 16))
        # An empty tensor stands for the absent amax of a quantizer.
        x, codes = torch.randn(16, 16), quantizer(torch.zeros(16, 16))
        for write in (lambda q: tex.quantize(x, q, codes), lambda q: q(x), lambda q: tex.split_quantize(x, [16], [q])[0], lambda q: tex.bgrad_quantize(x, q)[1],
                      lambda q: tex.layernorm_fwd(x, torch.ones(16), torch.zeros(16), 1e-5, None, q, tex.DType.kFloat32, 0, False)[0]):
            got, want = (write(te.Float8Quantizer(torch.full((1,), 2.0), amax, tex.DType.kFloat8E4M3))._data.clone() for amax in (torch.Tensor(), torch.zeros(1)))
            self.assertTrue(torch.equal(got, want))
            # A quantizer whose scale is an empty tensor has the scale 1; the same empty tensor may stand for its amax.
            none, found = torch.Tensor(), []
            for scale, amax in ((torch.ones(1), torch.zeros(1)), (none, torch.zeros(1)), (none, none)):
                got = write(te.Float8Quantizer(scale, amax, tex.DType.kFloat8E4M3))
                found.append((got._data.tolist(), float(got._scale_inv)))
            self.assertEqual(found, found[:1] * 3)

    def test_what_is_quantised_already_is_quantised_by_its_values(self):
        """The package passes gradients that are already quantised, for example in attention that it emulates in FP8; such an input is dequantised and
        quantised again."""
        torch.manual_seed(2)
        held = te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, "cpu")(torch.randn(32, 32).to(BF16))
        for quantizer in (te.Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1), tex.DType.kFloat8E5M2), te.MXFP8Quantizer(tex.DType.kFloat8E4M3)):
            want = quantizer(held.dequantize())
            sums, again = tex.bgrad_quantize(held, quantizer)
            for got in (quantizer(held), again):
                self.assertTrue(torch.equal(got.dequantize(), want.dequantize()))
            self.assertTrue(torch.equal(sums, tex.bgrad_quantize(held.dequantize(), quantizer)[0]))

    def test_inputs_of_autograd(self):
        """The extension's functions record nothing for autograd, even if an input requires a gradient."""
        x, ones = torch.nn.Parameter(torch.randn(32, 32).to(BF16)), torch.ones(32, dtype=BF16)
        sums = x.detach().sum(0)
        for quantizer in (None, te.NVFP4Quantizer(with_2d_quantization=True), te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, "cpu")):
            self.assertTrue(torch.equal(tex.bgrad_quantize(x, quantizer)[0], sums))
        got = self.product(torch.eye(32, dtype=BF16), x, bias=ones, grad=True)[1]
        self.assertTrue(torch.equal(got, sums))

    def test_noop_keeps_the_codes(self):
        quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
        held = tex.quantize(torch.ones(16, 16), quantizer)
        before = held._data.clone()
        tex.quantize(torch.full((16, 16), 2.0), quantizer, held, torch.ones(1))
        self.assertTrue(torch.equal(held._data, before))
        tex.quantize(torch.full((16, 16), 2.0), quantizer, held, torch.zeros(1))
        self.assertFalse(torch.equal(held._data, before))
        self.assertTrue(math.isclose(float(held.dequantize()[0, 0]), 2.0))


class Host(unittest.TestCase):
    """The host stands in for CUDA: PyTorch's CUDA functions work, also for calls that the package itself does not make."""

    def test_a_tensor_brought_to_the_host_is_a_copy(self):
        x = torch.nn.Parameter(torch.ones(3, device="cuda"))
        copies = (x.cpu(), x.to("cpu"), x.to(device="cpu"), x.pin_memory())
        with torch.no_grad():
            x.add_(1)
        for copy in copies:
            self.assertEqual(copy.tolist(), [1.0] * 3)
        self.assertIs(x.to(x.device), x)
        copies[0].sum().backward()
        self.assertEqual(x.grad.tolist(), [1.0] * 3)
        self.assertEqual(x.to(0, torch.float64).dtype, torch.float64)
        self.assertIsNone(x.record_stream(torch.cuda.current_stream()))

    def test_random_numbers(self):
        generator = torch.Generator(device="cuda")
        for known in (generator, torch.default_generator):
            self.assertIsInstance(known, torch.Generator)
        numbers = torch.rand(3, device="cuda", generator=generator.manual_seed(5))
        torch.manual_seed(5)
        for options in ({}, {"devices": ["cuda"]}, {"devices": [0]}):
            with torch.random.fork_rng(**options):
                self.assertEqual(torch.rand(3, device="cuda").tolist(), numbers.tolist())
        self.assertEqual(torch.cuda.initial_seed(), 5)

    def test_compiled(self):
        def branch(x):
            return x * torch.cuda.get_device_properties(x.device).major if x.is_cuda else x

        self.assertEqual(torch.compile(branch, fullgraph=True, backend="aot_eager")(torch.ones(2, device="cuda")).tolist(), [9.0] * 2)

        def moves(x):
            y = x.to(x.device).to("cpu").to("cuda").cpu().to(x)
            return y.pin_memory() + x.get_device() if x.is_cuda and not x.is_cpu else x * 0

        x = torch.randn(2, 3, device="cuda")
        self.assertEqual(torch.compile(moves, fullgraph=True, backend="aot_eager")(x).tolist(), moves(x).tolist())

    def test_compiled_behind_a_graph_break(self):
        """After a graph break the program runs in Python, and PyTorch compiles each function that is called; Dynamo's guards must not depend on the
        replaced getters of tensors."""
        def reads(x):
            for _ in range(2):
                torch._dynamo.graph_break()
            return x.shape, x.device, x.dtype, x.is_cuda, torch.arange(x.shape[0], device=x.device).tolist()

        x = torch.ones(2, 3, device="cuda")
        compiled = torch.compile(reads, backend="eager")
        for _ in range(2):
            self.assertEqual(compiled(x), ((2, 3), torch.device("cpu"), torch.float32, True, [0, 1]))

    def test_patterns_of_the_compiler(self):
        """Inductor traces its patterns with GPU tensors, outside of any TorchFunctionMode because the tracing runs in a thread of its own; te-fl's
        mode is therefore entered when inductor's module is imported."""
        class Loader:
            @staticmethod
            def exec_module(module):
                module.lazy_init = lambda input_device=None: torch.empty(1, device="cuda").device.type

        module, found = types.ModuleType("torch._inductor.fx_passes.joint_graph"), []
        package._ON_DEVICE[module.__name__](Loader, module)
        thread = threading.Thread(target=lambda: found.append(module.lazy_init(None)))
        thread.start()
        thread.join()
        self.assertEqual(found, ["cpu"])

    def test_shared_states_of_random_numbers(self):
        """torch.cuda's default generator can share its state and take over another's, as Megatron's checkpoints require; drawing numbers advances the
        shared state."""
        default = torch.cuda.default_generators[0]
        self.assertIsInstance(default, torch.Generator)
        torch.cuda.manual_seed(7)
        first, other = default.graphsafe_get_state(), default.clone_state().manual_seed(9)
        want = [torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (7, 9)]
        again = torch.rand(4, generator=torch.Generator().manual_seed(9)).tolist()
        default.graphsafe_set_state(other)
        self.assertEqual(torch.rand(2, device="cuda").tolist(), want[1])
        default.graphsafe_set_state(first)
        self.assertEqual(torch.rand(2, device="cuda", generator=default).tolist(), want[0])
        self.assertEqual((want[1] + torch.rand(2, generator=other).tolist()), again)
        self.assertTrue(torch.equal(default.get_state(), torch.cuda.get_rng_state()))

    def test_modules_of_several_ranks(self):
        """DistributedDataParallel accepts device_ids with the number of a device."""
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        self.addCleanup(torch.distributed.destroy_process_group)
        self.assertEqual(torch.distributed.get_backend(), "gloo")
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2, device="cuda"), device_ids=[0], output_device=0)
        net(torch.ones(1, 2, device="cuda")).sum().backward()
        self.assertEqual(net.module.weight.grad.tolist(), [[1.0] * 2] * 2)
        with self.assertRaisesRegex(ValueError, "device_ids can only be None or contain a single element"):
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0, 1])

    def test_autocast_is_of_all_tensors(self):
        """torch.autocast("cuda") casts the inputs of PyTorch's own ops by CUDA's list of ops; the test has some ops for each rule of that list."""
        x, wide, linear = torch.randn(4, 4, device="cuda"), torch.randn(4, 4, device="cuda"), torch.nn.Linear(4, 4, device="cuda")
        index, f = torch.zeros(4, 4, dtype=torch.int64), torch.nn.functional
        for dtype in (BF16, torch.float16):
            y = x.to(dtype)
            results = {
                "lower": lambda: (linear(x), torch.einsum("ij,jk->ik", x, x), x @ x, torch.mv(x, x[0]), torch.addr(x, x[0], x[0]),
                                  torch.chain_matmul(x, x), f.scaled_dot_product_attention(*[x.view(1, 1, 4, 4)] * 3)),
                "wide": lambda: (y.exp(), y.log(), y ** 2, 2 ** y, y ** y, y.softmax(-1), torch.log_softmax(y, -1), y.sum(), y.sum(0), y.cumsum(0),
                                 y.prod(), y.norm(), y.norm(dim=1), y.norm(p=3, dim=1), f.layer_norm(y, (4,)), f.group_norm(y, 2), y.rsqrt(), f.softplus(y),
                                 torch.linalg.vector_norm(y), torch.logsumexp(y, 0), f.mse_loss(y, y), f.cosine_similarity(y, y),
                                 f.interpolate(y.view(1, 1, 4, 4), scale_factor=2), f.cross_entropy(y, index[0]), torch.renorm(y, 2, 0, 1.0)),
                "widest": lambda: (torch.addcmul(y, wide, y), torch.atan2(y, wide), torch.dot(y[0], wide[0]), torch.scatter_add(y, 0, index, wide),
                                   torch.tensordot(y, wide, 1), torch.cross(y[:, :3], wide[:, :3], dim=1), y.index_put((index[0],), wide)),
                "as it is": lambda: (y + y, y.relu(), torch.addcmul(y, y, y), y.softmax(-1, dtype=dtype), y.sum(dtype=dtype), y.tanh(), f.gelu(y))}
            wanted = {"lower": dtype, "wide": torch.float32, "widest": torch.float32, "as it is": dtype}
            for device in ("cuda", "cpu"):
                with torch.autocast(device, dtype=dtype):
                    self.assertTrue(torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled("cpu"))
                    for rule, compute in results.items():
                        for place, result in enumerate(compute()):
                            self.assertEqual(result.dtype, wanted[rule], (device, rule, place))
                    self.assertEqual(y.double().exp().dtype, torch.float64)
                    self.assertEqual(torch.arange(3).sum().dtype, torch.int64)
                    with torch.autocast("cuda", enabled=False):
                        self.assertEqual((linear(x).dtype, y.exp().dtype), (torch.float32, dtype))
                    self.assertEqual(linear(x).dtype, dtype)
            self.assertEqual((linear(x).dtype, y.exp().dtype), (torch.float32, dtype))
        self.assertEqual((torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")), (torch.float16, BF16))
        self.assertEqual([torch.is_autocast_enabled(device) for device in ("cuda", "cpu")], [False] * 2)
        with torch.autocast("cuda", dtype=BF16):
            loss = linear(x).exp().sum()
        loss.backward()
        self.assertEqual(linear.weight.grad.dtype, torch.float32)

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
            def forward(ctx, x):
                return x * x

        with torch.autocast("cuda"):
            self.assertEqual(Square.apply(x).dtype, torch.float16)

    def test_names_of_cuda(self):
        """The functions of torch.cuda's submodules are replaced under all of their names; classes stay classes."""
        modules = {m for name, m in sys.modules.items() if name.startswith("torch.cuda.") and not name.startswith("torch.cuda._")}
        self.assertIn(torch.cuda.memory, modules)
        for module in modules:
            for name in set(getattr(module, "__all__", ())) & set(torch.cuda.__all__):
                self.assertIs(getattr(module, name), getattr(torch.cuda, name), (module, name))
        for name in "CUDAGraph Event ExternalStream MemPool Stream StreamContext device device_of graph FloatTensor".split():
            self.assertIsInstance(getattr(torch.cuda, name), type, name)
        self.assertIsInstance(None, torch.cuda.CUDAGraph | None)
        self.assertIsInstance(torch.cuda.device(0), torch.cuda.device)
        self.assertIsInstance(torch.cuda.stream(torch.cuda.Stream()), torch.cuda.StreamContext)
        for refused in (torch.cuda.CUDAGraph, lambda: torch.cuda.graph(None), torch.cuda.graph_pool_handle):
            with self.assertRaisesRegex(RuntimeError, "the host has no CUDA graphs"):
                refused()
        with torch.cuda.device(1), torch.cuda.device_of(torch.ones(1)), torch.cuda.stream(None), torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            self.assertEqual(torch.cuda.FloatTensor([1, 2]).type(), "torch.cuda.FloatTensor")

    def test_a_tensor_is_of_cuda_in_each_of_its_words(self):
        x = torch.ones(2, device="cuda", dtype=BF16)
        self.assertEqual((x.is_cuda, x.is_cpu, x.get_device(), x.type()), (True, False, 0, "torch.cuda.BFloat16Tensor"))
        self.assertEqual(x.type("torch.cuda.HalfTensor").dtype, torch.float16)
        self.assertEqual(x.type(torch.float32).type(dtype="torch.cuda.DoubleTensor").dtype, torch.float64)
        self.assertEqual(torch.device(0), x.device)
        # Tensors that a program moves to the CPU explicitly report themselves as CPU tensors; Megatron's checkpoint writer asserts that.
        words = lambda t: (t.is_cuda, t.is_cpu, t.get_device(), t.type())  # noqa: E731
        for there in (x.cpu(), x.to("cpu"), x.to(device="cpu"), x.pin_memory(), x.float().to("cpu", BF16), torch.nn.Parameter(x).detach().cpu()):
            self.assertEqual(words(there), (False, True, -1, "torch.BFloat16Tensor"))
            for again in (there.cuda(), there.to("cuda"), there.to(x.device), there.to(0), there.to(device="cuda"), there + 1):
                self.assertEqual(words(again), (True, False, 0, "torch.cuda.BFloat16Tensor"))
                self.assertNotEqual(again.data_ptr(), there.data_ptr())
            self.assertIs(there.to(BF16), there)

    def test_seeds_of_cuda(self):
        numbers = []
        for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.cuda.random.manual_seed, torch.manual_seed):
            seed(7)
            numbers.append(torch.rand(3, device="cuda").tolist())
        self.assertEqual(numbers, numbers[:1] * 4)
        states = torch.cuda.get_rng_state_all()
        first = torch.rand(3).tolist()
        for restore in (lambda: torch.cuda.set_rng_state_all(states), lambda: torch.cuda.random.set_rng_state(new_state=states[0], device="cuda:0")):
            restore()
            self.assertEqual(torch.rand(3).tolist(), first)

    def test_memory(self):
        stats = torch.cuda.memory_stats()
        for kind in "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes".split():
            for pool in ("all", "small_pool", "large_pool"):
                for count in ("current", "peak", "allocated", "freed"):
                    self.assertEqual(stats[f"{kind}.{pool}.{count}"], 0)
        self.assertEqual((stats["num_alloc_retries"], stats["num_ooms"], stats["oversize_segments.peak"]), (0, 0, 0))
        for count in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
            for home in (torch.cuda, torch.cuda.memory):
                self.assertEqual([getattr(home, count)(*device) for device in ((), (0,), (torch.device("cuda"),))], [0] * 3)
        self.assertIn("Allocated memory", torch.cuda.memory_summary())
        for reset in (torch.cuda.reset_peak_memory_stats, torch.cuda.memory.reset_accumulated_memory_stats, torch.cuda.empty_cache, torch.cuda.ipc_collect):
            reset()
        self.assertEqual(torch.cuda.memory.mem_get_info(0)[1], torch.cuda.get_device_properties(0).total_memory)
        with self.assertRaisesRegex(RuntimeError, "caching_allocator_alloc: the host has neither"):
            torch.cuda.caching_allocator_alloc(16)

    def test_events_and_memory(self):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self.assertRaises(RuntimeError) as caught:
            begin.elapsed_time(end)
        self.assertIn("call record()", str(caught.exception))
        begin.record()
        end.record()
        self.assertGreaterEqual(begin.elapsed_time(end), 0)
        free, total = torch.cuda.mem_get_info()
        self.assertTrue(0 < free <= total)


if __name__ == "__main__":
    unittest.main()
