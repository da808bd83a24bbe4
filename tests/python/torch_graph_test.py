"""Tests CUDA graphs: torch.cuda.graph around te_fl.pytorch's modules, and make_graphed_callables(). The tests that need no GPU run without one."""

import os
import sys
import unittest

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_oracle import randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402
from te_fl.errors import FailedPrecondition, InvalidArgument, Unsupported  # noqa: E402
from te_fl.pytorch.fp8 import extra_state  # noqa: E402

CUDA = torch.cuda.is_available()
RECIPES = (None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling())
HIDDEN, LENGTH, BATCH = 128, 32, 2
MODULES = {
    "Linear": lambda **k: te.Linear(HIDDEN, HIDDEN, **k),
    "Linear in parts": lambda **k: te.Linear(HIDDEN, HIDDEN, parameters_split=("a", "b"), **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(HIDDEN, HIDDEN, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **k),
    "TransformerLayer": lambda **k: te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0, **k),
    "TransformerLayer in parts": lambda **k: te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0,
                                                                 drop_path_rate=1e-9, **k),
}


def made(name):
    torch.manual_seed(3)
    return randomise(MODULES[name](params_dtype=torch.bfloat16, device="cuda"))


def make_input(seed):
    return randn(LENGTH, BATCH, HIDDEN, seed=seed).to("cuda", torch.bfloat16).requires_grad_()


def step(module, x, dy, recipe):
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(dy)
    return y


def states(module):
    """Returns FP8 scales and histories by name, because the serialised bytes in a state_dict differ from one call to the next."""
    found = {k: extra_state.read(v, k) for k, v in module.state_dict().items() if k.endswith("_extra_state")}
    return {f"{k}.{name}": t for k, state in found.items() for name, t in state.items() if isinstance(t, torch.Tensor)}


@unittest.skipUnless(CUDA, "CUDA graphs need a GPU")
class Captured(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)

    def same(self, got, want, text):
        self.assertEqual(len(got), len(want))
        for g, w in zip(got, want):
            self.assertTrue(torch.isfinite(w).all(), text)
            self.assertTrue(torch.equal(g, w), f"{text}: off by {float((g.float() - w.float()).abs().max())}")

    def test_torch_s_graph_holds_a_step(self):
        """Each replay of a captured step gives the results of an eager step on the current inputs and weights."""
        for name in MODULES:
            for recipe in RECIPES:
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    module, twin = made(name), made(name)
                    x, dy = make_input(0), randn(LENGTH, BATCH, HIDDEN, seed=9).to("cuda", torch.bfloat16)
                    side = torch.cuda.Stream()
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        for _ in range(2):
                            step(module, x, dy, recipe)
                    torch.cuda.current_stream().wait_stream(side)
                    for _ in range(2):
                        step(twin, x.detach().requires_grad_(), dy, recipe)
                    for p in (*module.parameters(), x):
                        p.grad = None
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        y = step(module, x, dy, recipe)
                    for seed in (11, 12, 13):
                        fresh = make_input(seed)
                        with torch.no_grad():
                            x.copy_(fresh)
                            for p, q in zip(module.parameters(), twin.parameters()):
                                p.mul_(1.01)
                                q.mul_(1.01)
                        graph.replay()
                        twin.zero_grad(set_to_none=True)
                        want = step(twin, fresh, dy, recipe)
                        self.same([y, x.grad], [want, fresh.grad], f"launch {seed}")
                        self.same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()], f"gradients {seed}")

    def test_dropout_draws_anew_in_each_launch(self):
        module = te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.3, attention_dropout=0.0, params_dtype=torch.bfloat16)
        x, dy = make_input(1), torch.ones(LENGTH, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(module, x, dy, None)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step(module, x, dy, None)
        outputs = []
        for _ in range(3):
            graph.replay()
            outputs.append(y.clone())
        self.assertFalse(torch.equal(outputs[0], outputs[1]))
        self.assertFalse(torch.equal(outputs[1], outputs[2]))

    def train(self, module, recipe, graphed, steps=4):
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        out = []
        for i in range(steps):
            x, dy = make_input(20 + i), randn(LENGTH, BATCH, HIDDEN, seed=40 + i).to("cuda", torch.bfloat16)
            optimizer.zero_grad(set_to_none=True)
            if graphed:
                y = module(x)
                y.backward(dy)
            else:
                y = step(module, x, dy, recipe)
            out += [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())]
            optimizer.step()
        return out

    def test_graphed_modules_train_as_eager_ones(self):
        for name in MODULES:
            for recipe in RECIPES:
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    module, twin = made(name), made(name)
                    te.make_graphed_callables(module, (make_input(0),), enabled=recipe is not None, recipe=recipe)
                    self.same(self.train(module, recipe, True), self.train(twin, recipe, False), name)
                    mine, theirs = states(module), states(twin)
                    self.assertEqual(mine.keys(), theirs.keys())
                    self.assertEqual(bool(mine), isinstance(recipe, DelayedScaling))
                    for key in mine:
                        self.assertTrue(torch.equal(mine[key], theirs[key]), key)

    def test_several_and_without_training(self):
        modules = (made("LayerNormLinear"), made("LayerNormMLP"))
        twins = (made("LayerNormLinear"), made("LayerNormMLP"))
        graphed = te.make_graphed_callables(modules, ((make_input(0),), (make_input(0),)), enabled=(True, False), recipe=Float8CurrentScaling())
        x, own = make_input(5), make_input(5)
        with te.autocast(recipe=Float8CurrentScaling()):
            first = twins[0](own)
        want = twins[1](first)
        got = graphed[1](graphed[0](x))
        got.sum().backward()
        want.sum().backward()
        self.same([got, x.grad], [want, own.grad], "two modules")
        for m in modules:
            m.eval()
        with torch.no_grad():
            self.assertTrue(torch.isfinite(modules[0](make_input(6)[:5])).all())  # another shape runs eagerly
        served = made("LayerNormMLP").eval()
        te.make_graphed_callables(served, (make_input(0).detach(),))
        twin = made("LayerNormMLP").eval()
        with torch.no_grad():
            self.same([served(make_input(7).detach())], [twin(make_input(7))], "eval")

    def test_weights_are_quantised_in_the_first_microbatch(self):
        module, recipe = made("Linear"), Float8CurrentScaling()
        te.make_graphed_callables(module, (make_input(0),), enabled=True, recipe=recipe, cache_quantized_params=True)
        x = make_input(3)
        first = module(x, is_first_microbatch=True).clone()
        with torch.no_grad():
            module.weight.mul_(2)
        kept = module(x, is_first_microbatch=False).clone()
        again = module(x, is_first_microbatch=True).clone()
        self.same([kept], [first], "the weight of before")
        self.assertFalse(torch.equal(again, first))
        with self.assertRaisesRegex(InvalidArgument, "is_first_microbatch is None"):
            module(x)

    def test_functions_keywords_and_hooks(self):
        seen = []
        layer = made("Linear")
        hooks = {"forward_pre_hooks": {0: lambda m: seen.append("before")}, "backward_hooks": {0: lambda m: seen.append("after")}}
        graphed = te.make_graphed_callables(lambda x, *, scale: (layer(x) * scale, x * 2), (make_input(0),),
                                            sample_kwargs={"scale": torch.full((1,), 1.0, device="cuda", dtype=torch.bfloat16)},
                                            num_warmup_iters=2, capture_time_hooks=[hooks], allow_unused_input=True,
                                            pre_warmup_hook=lambda: seen.append("warm"), post_warmup_hook=lambda: seen.append("warmed"))
        self.assertEqual(seen, ["warm"] + ["before", "after"] * 2 + ["warmed", "before", "after"])
        x = make_input(4)
        scaled, doubled = graphed(x, scale=torch.full((1,), 3.0, device="cuda", dtype=torch.bfloat16))
        self.same([scaled, doubled], [layer(x) * 3, x * 2], "two outputs")
        with self.assertRaisesRegex(TypeError, "keyword 'scale'"):
            graphed(x)
        graphed.reset()
        with self.assertRaisesRegex(FailedPrecondition, "were reset"):
            graphed(x, scale=torch.ones(1, device="cuda", dtype=torch.bfloat16))

    def test_what_would_compute_something_else_is_refused(self):
        module = made("Linear")
        te.make_graphed_callables(module, (make_input(0),))
        x = make_input(1)
        early = module(x)
        module(x)
        with self.assertRaisesRegex(FailedPrecondition, "activations of this forward are gone"):
            early.sum().backward()
        y = module(x)
        y.sum().backward(retain_graph=True)
        with self.assertRaisesRegex(FailedPrecondition, "activations of this forward are gone"):
            y.sum().backward()
        with self.assertRaisesRegex(InvalidArgument, r"its graph was made for .*\(32, 2, 128\)"):
            module(x[:1])
        with self.assertRaisesRegex(InvalidArgument, "torch.float32"):
            module(x.float())
        module.weight.data = module.weight.data.clone()
        with self.assertRaisesRegex(FailedPrecondition, "memory of a parameter"):
            module(x)


@unittest.skipUnless(CUDA, "streams need a GPU")
class Streams(unittest.TestCase):
    """te-fl's work, scale updates included, runs on PyTorch's current stream, behind a long kernel that was enqueued earlier."""

    def test_fp8_on_a_side_stream(self):
        recipe = DelayedScaling(amax_history_len=4)
        for name in ("Linear", "TransformerLayer"):
            module, twin = made(name), made(name)
            side = torch.cuda.Stream()
            for i in range(4):
                dy = randn(LENGTH, BATCH, HIDDEN, seed=60 + i).to("cuda", torch.bfloat16)
                x, own = make_input(50 + i), make_input(50 + i)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(20_000_000)
                    y = step(module, x, dy, recipe)
                torch.cuda.current_stream().wait_stream(side)
                want = step(twin, own, dy, recipe)
                self.assertTrue(torch.equal(y, want), (name, i))
                self.assertTrue(torch.equal(x.grad, own.grad), (name, i))
            self.assertTrue(states(module))
            for (key, mine), theirs in zip(states(module).items(), states(twin).values()):
                self.assertTrue(torch.equal(mine, theirs), key)

    def test_memory_is_pytorch_s_on_every_stream(self):
        module = te.Linear(1024, 1024, bias=False, params_dtype=torch.bfloat16)
        x = torch.zeros(2048, 1024, device="cuda", dtype=torch.bfloat16)
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream), torch.no_grad():
                module(x)
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                y = module(x)
                self.assertEqual(torch.cuda.memory_allocated() - before, y.nbytes)
                del y
                self.assertEqual(torch.cuda.memory_allocated(), before)


class Refused(unittest.TestCase):
    """Errors for unsupported captures are raised before anything is captured, with or without a GPU."""

    def module(self, **arguments):
        return te.Linear(16, 16, device="cuda" if CUDA else "cpu", **arguments)

    def test_what_a_graph_cannot_hold(self):
        x = torch.zeros(2, 16)
        hooked = self.module()
        hooked.register_forward_hook(lambda *operands: None)
        with te.quantized_model_init(recipe=Float8CurrentScaling()):
            codes = self.module()
        for kind, text, call in (
                (Unsupported, "_order", lambda: te.make_graphed_callables(self.module(), (x,), _order=[1, -1])),
                (FailedPrecondition, "has hooks", lambda: te.make_graphed_callables(hooked, (x,))),
                (Unsupported, "fuse_wgrad_accumulation", lambda: te.make_graphed_callables(self.module(fuse_wgrad_accumulation=True), (x,))),
                (Unsupported, "quantized_model_init", lambda: te.make_graphed_callables(codes, (x,))),
                (InvalidArgument, "one mode", lambda: te.make_graphed_callables((self.module(), self.module().eval()), ((x,), (x,)))),
                (InvalidArgument, "both given", lambda: te.make_graphed_callables(self.module(), (x,), fp8_enabled=True, enabled=True))):
            with self.subTest(text=text), self.assertRaisesRegex(kind, text):
                call()

    def test_no_gpu(self):
        expected = (InvalidArgument, "a tensor on cpu") if CUDA else (Unsupported, "there is no GPU here")
        with self.assertRaisesRegex(*expected):
            te.make_graphed_callables(self.module(), (torch.zeros(2, 16),))


if __name__ == "__main__":
    unittest.main()
