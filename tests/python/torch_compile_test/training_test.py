"""Tests training with graphs of torch.compile."""

import copy
import gc

import torch
import torch._dynamo
import torch._inductor.config
import torch.utils.checkpoint

from common import Compiled, DELAYED, DEVICE, call, copy_state
from torch_cases import MODULES, make_input, scope
from torch_oracle import near, randn, randomise
import te_fl
import te_fl.pytorch as te
from te_fl.common.recipe import Float8CurrentScaling


class Training(Compiled):
    def test_dropout(self):
        for arguments in ({}, {"drop_path_rate": 0.2}):  # the layer as one call, and part by part
            for recipe in (None, DELAYED):
                torch._dynamo.reset()
                found = self.both(lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=0.3, attention_dropout=0.2, device=DEVICE, **arguments),
                                  lambda m, x: m(x) + m(x), recipe)
                outputs = [t for name, t in found[1][0] if name.startswith("output")]
                self.assertFalse(torch.equal(outputs[0], outputs[1]))

    def test_dropout_from_streams(self):
        found = []
        base = randomise(te.DotProductAttention(4, 8, attention_dropout=0.5, qkv_format="bshd"))
        q = randn(2, 6, 4, 8, device=DEVICE).requires_grad_()
        for wrap in (lambda m: m, lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)):
            tracker = te.CudaRNGStatesTracker()
            tracker.add("model-parallel-rng", 3)
            module = copy.deepcopy(base)
            module.get_rng_state_tracker = lambda: tracker
            called = wrap(module)
            found.append([called(q, q, q) for _ in range(2)])
            found[-1].append(torch.autograd.grad(found[-1][0].square().sum(), q)[0])
        for want, got in zip(*found):
            self.close(got, want, "dropout")
        self.assertFalse(torch.equal(found[0][0], found[0][1]))

    def test_microbatches(self):
        """The weight that the first microbatch quantised is used for the others; a weight that changes is quantised again."""
        for name in ("Linear", "LayerNormMLP", "TransformerLayer"):
            for recipe in (DELAYED, Float8CurrentScaling()):
                torch._dynamo.reset()
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    base, found = randomise(MODULES[name](device=DEVICE)), []
                    for compiled in (False, True):
                        module = copy.deepcopy(base)
                        called = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
                        outputs = []
                        for first in (True, False, False, None, True, False):
                            with scope(recipe):
                                y = called(make_input(DEVICE), is_first_microbatch=first)
                            y.square().sum().backward()
                            outputs.append(y.detach())
                            if first is None:
                                with torch.no_grad():
                                    for p in module.parameters():
                                        p.mul_(1.25)
                        found.append(outputs + list(copy_state(module).values()) + [p.grad for p in module.parameters()])
                    for want, got in zip(*found):
                        self.close(got, want, "microbatch")

    def test_a_microbatch_given_by_a_tensor(self):
        """Passing a tensor as is_first_microbatch causes a graph break; the tensor's value is used."""
        module, x = randomise(te.Linear(32, 32, device=DEVICE)), make_input(DEVICE)
        called = torch.compile(module, backend="aot_eager")
        for first in (torch.tensor(True), torch.ones(1), torch.tensor(False)):
            with scope(Float8CurrentScaling()):
                module(x, is_first_microbatch=True)
                module.weight.data.mul_(2)  # a write that PyTorch's version counter misses
                y, want = called(x, is_first_microbatch=first), copy.deepcopy(module)(x)
            self.assertEqual(torch.equal(y, want), bool(first))

    def test_serving(self):
        for name, recipes in (("LayerNormLinear", (None, DELAYED, Float8CurrentScaling())), ("TransformerLayer", (DELAYED,))):
            for recipe in recipes:
                torch._dynamo.reset()
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    base, found = randomise(MODULES[name](device=DEVICE)), []
                    for compiled in (False, True):
                        module, outputs = copy.deepcopy(base), []
                        with scope(recipe):
                            module(make_input(DEVICE)).sum().backward()
                        called = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
                        for mode in (True, False):
                            module.train(mode)
                            with scope(recipe):
                                for guard in (torch.no_grad, torch.inference_mode):
                                    with guard():
                                        outputs.append(called(make_input(DEVICE).detach()).clone())
                                with torch.no_grad():
                                    for p in module.parameters():
                                        p.mul_(1.5)
                                    outputs.append(called(make_input(DEVICE).detach()))
                                outputs.append(called(make_input(DEVICE)).detach())
                        found.append(outputs)
                    for want, got in zip(*found):
                        self.close(got, want, "output")

    def test_a_scope_quantises_weights_once(self):
        """When a compiled graph runs inside te.cache_quantized_weights(), its layers use that scope, even if the graph was compiled outside of it."""
        module, x = randomise(te.Linear(32, 32, device=DEVICE)), make_input(DEVICE).detach()
        called, cached = torch.compile(module, backend="aot_eager", fullgraph=True), te.cache_quantized_weights()

        def served(function=called):
            before = sum(row["calls"] for row in te_fl.usage() if "quantize" in row["op"])
            with torch.no_grad(), scope(Float8CurrentScaling()):
                y = function(x)
            return y, sum(row["calls"] for row in te_fl.usage() if "quantize" in row["op"]) - before

        def want():
            return served(copy.deepcopy(module))[0]  # a copy, because a call of the module itself would quantise its weight for the graph too

        each_call = served()[1]
        for _ in range(2):  # a write that PyTorch's version counter misses is seen outside of a scope, and by the next scope
            for _ in range(3):
                module.weight.data.mul_(1.25)
                got, quantised = served()
                self.close(got, want(), "outside of a scope")
                self.assertEqual(quantised, each_call)
            module.weight.data.mul_(1.25)
            with cached:
                for _ in range(3):
                    got, fewer = served()
                    self.close(got, want(), "in a scope")
                self.assertLess(fewer, each_call)
                with torch.no_grad():
                    module.weight.mul_(1.25)
                self.close(served()[0], want(), "a write that PyTorch counts")

    def test_shapes(self):
        def give(device, seed):
            return randn(4 + seed, 2, 32, seed=seed, device=device).requires_grad_()
        for name in ("LayerNorm", "LayerNormLinear", "MultiheadAttention", "TransformerLayer"):
            for dynamic in (None, True):
                with self.subTest(module=name, dynamic=dynamic):
                    self.setUp()
                    self.both(lambda: MODULES[name](device=DEVICE), call, DELAYED, steps=4, give=give, dynamic=dynamic)
                    self.assertLessEqual(self.graphs(), 1 if dynamic else 2)

    def test_backward_twice(self):
        for name in MODULES:
            with self.subTest(module=name):
                torch._dynamo.reset()
                module, x = randomise(MODULES[name](device=DEVICE)), make_input(DEVICE)
                with torch._functorch.config.patch(donated_buffer=False):
                    y = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
                    y.square().sum().backward(retain_graph=True)
                    once = [t.grad.clone() for t in (x, *module.parameters())]
                    y.square().sum().backward()
                for t, want in zip((x, *module.parameters()), once):
                    self.close(t.grad, 2 * want, "gradient")
                with self.assertRaisesRegex(RuntimeError, "second time"):
                    y.square().sum().backward()

    def test_no_second_derivative(self):
        for backend, text in (("eager", "second derivative"), ("aot_eager", "double backward")):
            torch._dynamo.reset()
            module, x = te.Linear(32, 32, device=DEVICE), make_input(DEVICE)
            y = torch.compile(module, backend=backend)(x)
            with self.assertRaisesRegex(RuntimeError, text):
                grad, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                grad.sum().backward()

    def test_inputs_and_outputs_are_written(self):
        def run(module, x):
            x = x * 2
            y = module(x)
            x.mul_(3)
            y.mul_(0.5)
            return y.relu_() + x.sin_()

        def eager(module, x):
            return torch.relu(module(x * 2) * 0.5) + (x * 6).sin()
        for name in MODULES:
            with self.subTest(module=name):
                torch._dynamo.reset()
                base, found = randomise(MODULES[name](device=DEVICE)), []
                for called in (eager, torch.compile(run, backend="aot_eager", fullgraph=True)):
                    module, x = copy.deepcopy(base), make_input(DEVICE)
                    y = called(module, x)
                    y.sum().backward()
                    found.append((y.detach(), x.grad))
                for want, got in zip(*found):
                    near(self, got, want, 1e-5, "value")

    def test_an_output_is_written_outside(self):
        """The backward of attention reads the tensor that the forward wrote, and not the one that the program got and may write to."""
        module, found = te.DotProductAttention(4, 8, attn_mask_type="no_mask", qkv_format="bshd"), []
        for called, write in ((module, lambda y: y * 2), (torch.compile(module, backend="aot_eager", fullgraph=True), lambda y: y.mul_(2))):
            q = randn(2, 6, 4, 8, device=DEVICE).requires_grad_()
            write(called(q, q, q)).sum().backward()
            found.append(q.grad)
        self.close(found[1], found[0], "gradient")

    def test_checkpoint(self):
        def piece(module, x):
            return torch.relu(module(torch.relu(module(x))))

        for make in (lambda: te.LayerNormMLP(32, 64, device=DEVICE), lambda: te.LayerNormMLP(32, 64, checkpoint=True, device=DEVICE),
                     lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=0.3, attention_dropout=0.2, device=DEVICE)):
            for recipe, backends in ((None, ("aot_eager",)), (DELAYED, ("eager", "aot_eager"))):
                for backend in backends:
                    torch._dynamo.reset()
                    with self.subTest(recipe=type(recipe).__name__, backend=backend):
                        self.both(make, lambda m, x: te.checkpoint(piece, m, x, preserve_rng_state=True) * 2, recipe, backend=backend)
        from te_fl.pytorch.compile import compiled
        gc.collect()
        self.assertFalse(compiled._again, "a forward that nobody repeats any more is kept")

    def test_checkpoint_keeps_less(self):
        """A checkpointed layer keeps none of the tensors that its backward reads; the backward recomputes them."""
        import te_fl
        module, x = te.LayerNormMLP(32, 64, device=DEVICE), make_input(DEVICE)
        calls = []
        for run in (lambda x: module(x), lambda x: te.checkpoint(module, x)):
            y = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
            te_fl.reset_usage()
            y.sum().backward()
            calls.append(sum(row["calls"] for row in te_fl.usage()))
        self.assertGreater(calls[1], calls[0])

    def test_checkpoint_of_pytorch(self):
        def run(module, x):
            return torch.utils.checkpoint.checkpoint(lambda t: torch.relu(module(torch.relu(module(t)))), x, use_reentrant=False) * 2
        self.both(lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=0.3, attention_dropout=0.2, device=DEVICE), run)

        def eager(module, x):
            return torch.relu(module(torch.relu(module(x)))) * 2
        base, found = randomise(te.Linear(32, 32, device=DEVICE)), []
        for called in (eager, torch.compile(run, backend="aot_eager", fullgraph=True)):
            module, x = copy.deepcopy(base), make_input(DEVICE)
            for _ in range(2):
                with scope(DELAYED):
                    y = called(module, x)
                y.square().mean().backward()
            found.append((y, x.grad, *copy_state(module).values()))
        for want, got in zip(*found):
            self.close(got, want, "in FP8")

    def test_checkpoint_around_a_graph(self):
        base, found = randomise(te.LayerNormMLP(32, 64, device=DEVICE)), []
        for compiled in (False, True):
            module, x = copy.deepcopy(base), make_input(DEVICE)
            called = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
            for _ in range(2):
                with scope(DELAYED):
                    y = te.checkpoint(called, x)
                y.square().mean().backward()
            found.append((y, x.grad, *copy_state(module).values()))
        for want, got in zip(*found):
            self.close(got, want, "checkpoint")

    def test_compiled_autograd(self):
        """Compiled autograd runs the backward's callbacks at another time, so te-fl refuses delayed scaling under it, and only that."""
        def step(module, x):
            module(x).square().sum().backward()
        module, x = randomise(te.Linear(32, 32, device=DEVICE)), make_input(DEVICE)
        with torch._dynamo.config.patch(compiled_autograd=True):
            called = torch.compile(step, backend="aot_eager")
            with scope(Float8CurrentScaling()):
                called(module, x)
            with self.assertRaisesRegex(Exception, "compiled_autograd = True"), scope(DELAYED):
                called(module, make_input(DEVICE))
        want, x.grad = x.grad, None
        with scope(Float8CurrentScaling()):
            step(module, x)
        self.close(x.grad, want, "gradient")

    def test_gradients_that_go_elsewhere(self):
        """fuse_wgrad_accumulation and delay_wgrad_compute cause a graph break; the module then runs as without compilation."""
        for argument in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
            with self.subTest(argument=argument):
                torch._dynamo.reset()
                base, found = randomise(te.LayerNormLinear(32, 32, device=DEVICE, **{argument: True})), []
                with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, f"{argument}|Observed exception"):
                    torch.compile(base, backend="aot_eager", fullgraph=True)(make_input(DEVICE))
                torch._dynamo.reset()
                for wrap in (lambda m: m, lambda m: torch.compile(m, backend="aot_eager")):
                    module, x = copy.deepcopy(base), make_input(DEVICE)
                    module.weight.main_grad = torch.zeros_like(module.weight)
                    wrap(module)(x).sum().backward()
                    module.backward_dw()
                    found.append((x.grad, module.weight.main_grad, *(p.grad for p in module.parameters() if p.grad is not None)))
                for want, got in zip(*found):
                    self.close(got, want, "gradient")
