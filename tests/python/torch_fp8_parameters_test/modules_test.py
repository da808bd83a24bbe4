"""Tests modules whose weights exist only as FP8 codes."""

import copy
import os
import subprocess
import sys
import unittest

import torch

from common import BF16, BLOCK, CURRENT, DELAYED, F32, MODULES, POW2, RECIPES, codes, decoded, make_input, made, step
import torch_oracle as oracle
from torch_oracle import DEVICES, PerBlock, PerTensor, allowed, compare, near, near_by_norm, randn
from torch_oracle import with_bias
import te_fl
import te_fl.pytorch as te


class Held(PerTensor):
    """The oracle's linear layers with weights that are already quantised."""

    def __init__(self, other):
        self.__dict__.update(other.__dict__)
        self.weight = lambda t: t


class Modules(unittest.TestCase):
    def compared(self, name, of, tolerance):
        """of(product) returns the oracle function for a module; `product` computes a linear layer with quantised operands."""
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
                        compare(self, served, module, of(product), [make_input(device)], close, close=near_by_norm)
                        with torch.no_grad():
                            served(make_input(device, seed=4))  # inference reads the same codes

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
        """In the first step of delayed scaling the scales of inputs and gradients are 1; the FP8 weights keep the scales that they were quantised
        with."""
        for device in DEVICES:
            module = made("Linear", DELAYED, device)
            x = make_input(device)
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
        """FP8 weights give the same results bit for bit as quantising their dequantised values in the forward, if scales are powers of two:
        requantising then gives the same codes."""
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
                    each(make_input(seed=5), is_first_microbatch=first).square().sum().backward()
        for n, p in codes(module).items():
            self.assertTrue(torch.equal(p.main_grad, getattr(plain, n).grad))
            self.assertIsNone(p.grad)

    def test_recomputation(self):
        for recipe in RECIPES:
            results = []
            for again in (False, True):
                module, x = made("TransformerLayer", recipe), make_input()
                with te.autocast(recipe=recipe):
                    y = te.checkpoint(module, x) if again else module(x)
                y.square().sum().backward()
                results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
            for a, b in zip(*results):
                self.assertTrue(torch.equal(a, b))

    def test_compiled(self):
        """torch.compile breaks the graph before such a module, which runs eagerly."""
        for name in ("Linear", "TransformerLayer"):
            for recipe in (CURRENT, None):
                module = made(name)
                plain = step(copy.deepcopy(module), recipe)
                torch._dynamo.reset()
                compiled = torch.compile(module, backend="eager")
                x = make_input()
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    y = compiled(x)
                y.square().sum().backward()
                for a, b in zip([y.detach(), x.grad, *(p.grad for p in module.parameters())], plain):
                    self.assertTrue(torch.equal(a, b))
            torch._dynamo.reset()
            with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "quantized_model_init|Observed exception"):
                torch.compile(module, backend="eager", fullgraph=True)(x)

    def test_a_weight_written_before_its_backward_is_detected(self):
        module, x = made("Linear"), make_input()
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
    x = make_input()
    with te.autocast(recipe=recipe):
        module(x).square().sum().backward()
    return x.grad


# Measures a process's memory beyond the imports: weights with 64 Mi elements in some dtype or as codes, before and after inference.
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
            # Makes the C allocator return freed blocks to the system at once.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
            run = subprocess.run([sys.executable, "-c", ACCOUNT, kind], capture_output=True, text=True, check=True, env=environment)
            return [int(n) for n in run.stdout.split()]

        (made_codes, served_codes), (made_bf16, served_bf16) = account("codes"), account("bf16")
        self.assertLess(abs(made_bf16 - 128), 10)
        self.assertLess(abs(made_codes - 64), 10)
        self.assertLess(served_codes, made_bf16)  # a GEMM on a CPU uses scratch memory of the size of one weight
        # with BF16 weights there are FP8 copies in addition, as te.cache_quantized_weights() keeps them
        self.assertLess(served_codes, 0.5 * served_bf16)

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
                module(make_input())
            self.assertLess(held(), 144 * 160 + 64)
            step(module, recipe)
            self.assertLess(held(), 2 * 144 * 160 + 128)
