"""Tests te_fl.pytorch's modules whose forward is recomputed in the backward."""

import copy
import functools
import os
import sys
import unittest
import unittest.mock

import torch
import torch.utils.checkpoint

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_cases import BF16, MODULES, PRODUCTS, RECIPES, Each, each, gradients, make_input, scope  # noqa: E402
from torch_oracle import DEVICES, near, randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from te_fl.pytorch.autograd import checkpoint as runs  # noqa: E402
from te_fl.pytorch.fp8 import extra_state  # noqa: E402


# PyTorch's checkpoint without te-fl's context_fn
PLAIN = tuple(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=r) for r in (False, True))


class Other(torch.autograd.Function):
    """A checkpoint implemented by an autograd.Function, as other libraries have."""

    @staticmethod
    def forward(ctx, function, *arguments):
        ctx.function, ctx.arguments = function, arguments
        return function(*arguments)

    @staticmethod
    def backward(ctx, grad):
        own = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in ctx.arguments]
        with torch.enable_grad():
            y = ctx.function(*own)
        torch.autograd.backward(y, grad)
        return (None, *(getattr(a, "grad", None) for a in own))


def other(function, *arguments):
    return Other.apply(function, *arguments)


class Unseen(torch.autograd.Function):
    """A checkpoint whose first run does not have the autograd node that the second run has."""

    @staticmethod
    def forward(function, x):
        return function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function, ctx.arguments = inputs[0], inputs[1:]

    backward = Other.backward


class Recomputation(Each):
    @each()
    def test_torch_checkpoint(self, module, device, _):
        for reentrant in (False, True):
            x = make_input(device)
            module.zero_grad()
            module(x).sum().backward()
            want = gradients(module, x)
            module.zero_grad()
            x.grad = None
            torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum().backward()
            self.same(gradients(module, x), want)

    def test_torch_checkpoint_where_the_first_run_is_not_known(self):
        """The recomputation runs outside of the autocast. If the first run can have had only one recipe, it is repeated bit for bit. It is refused
        with several candidate recipes, and with delayed scaling, whose scales have been updated, because it would compute another function. Forwards
        without FP8 are recomputed."""
        def rerun(module, *recipes):
            inputs = [randn(4, 2, 4, 8, seed=i).requires_grad_() if isinstance(module, te.DotProductAttention) else make_input(seed=i) for i in range(len(recipes))]
            module.zero_grad()
            outputs = []
            for x, recipe in zip(inputs, recipes):
                with scope(recipe):
                    outputs.append(Unseen.apply(lambda t: module(t, t, t) if isinstance(module, te.DotProductAttention) else module(t), x))
            for y in outputs:
                y.sum().backward()
            return [x.grad for x in inputs]

        def plain(module, recipe):
            x = randn(4, 2, 4, 8, seed=0).requires_grad_() if isinstance(module, te.DotProductAttention) else make_input(seed=0)
            module.zero_grad()
            with scope(recipe):
                y = module(x, x, x) if isinstance(module, te.DotProductAttention) else module(x)
            y.sum().backward()
            return [x.grad, *(p.grad for p in module.parameters())]

        products = [lambda: te.Linear(32, 32, device="cpu"), lambda: te.LayerNormMLP(32, 64, device="cpu"),
                    lambda: te.MultiheadAttention(32, 4, attention_dropout=0, device="cpu"),
                    lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu")]
        others = [lambda: te.DotProductAttention(4, 8, attention_dropout=0), lambda: te.RMSNorm(32, device="cpu"), lambda: te.LayerNorm(32, device="cpu")]
        current, delayed = Float8CurrentScaling(), DelayedScaling()
        for make in products:
            module = randomise(make())
            with self.subTest(type(module).__name__):
                want = plain(module, current)
                for _ in range(2):  # the second forward uses the fast path of a call
                    got = rerun(module, current) + [p.grad for p in module.parameters()]
                    self.same(got, want)
                self.same(rerun(module, None), plain(module, None)[:1])
                with self.assertRaisesRegex(RuntimeError, "outside of its autocast.*updated.*recompute_contexts"):
                    rerun(randomise(make()), delayed)
                with self.assertRaisesRegex(RuntimeError, "outside of its autocast.*several recipes.*recompute_contexts"):
                    rerun(randomise(make()), current, Float8CurrentScaling(use_power_2_scales=True))
        for make in others:
            module = randomise(make())
            for recipe in (current, delayed, None):
                with self.subTest(type(module).__name__, recipe=recipe):
                    want = plain(module, None)[:1]
                    self.same(rerun(module, recipe), want)
        with self.assertRaisesRegex(RuntimeError, "outside of its autocast.*updated"):
            rerun(te.DotProductAttention(4, 8, attention_dropout=0), DelayedScaling(fp8_dpa=True))

    def test_checkpoints_of_other_libraries(self):
        """The recomputation, outside of the autocast, repeats the first run."""
        for recipe in RECIPES[1:]:
            for name in PRODUCTS:
                with self.subTest(recipe=type(recipe).__name__, module=name):
                    want = self.steps(name, "cpu", recipe, lambda m, x: m(x))
                    self.same(self.steps(name, "cpu", recipe, other), want)
            dropout = dict(hidden_dropout=0.2, attention_dropout=0.3)

            def drawn(module, x):
                state = torch.get_rng_state()
                return other(lambda t: (torch.set_rng_state(state), module(t))[1], x)
            self.same(self.steps("", "cpu", recipe, drawn, **dropout), self.steps("", "cpu", recipe, lambda m, x: m(x), **dropout))

    def test_checkpoints_of_other_libraries_inside_of_others(self):
        """Nests checkpoints of other libraries inside others, and around them."""
        own = (lambda f, *a: f(*a), te.checkpoint, *PLAIN, other)
        for recipe in RECIPES[1:]:
            want = self.steps("LayerNormMLP", "cpu", recipe, lambda m, x: m(torch.relu(x)) + x)
            for one in own:
                for outer, inner in ((one, other), (other, one)):
                    with self.subTest(recipe=type(recipe).__name__, number=own.index(one), first=outer is one):
                        got = self.steps("LayerNormMLP", "cpu", recipe, lambda m, x: outer(lambda t: inner(m, torch.relu(t)) + t, x))
                        self.same(got, want)

    def test_microbatches_of_checkpoints_of_other_libraries(self):
        """Backward passes of microbatches run in any order, after the scales were updated, and after an evaluation outside of the autocast."""
        for recipes in ((Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True)), (DelayedScaling(amax_history_len=3),) * 3):
            results = []
            for way in (lambda f, x: f(x), other):
                module, outputs = randomise(te.LayerNormMLP(32, 64, device="cpu")), []
                for seed, recipe in enumerate(recipes):
                    x = make_input(seed=seed)
                    with scope(recipe):
                        outputs.append((x, way(module, x)))
                    with torch.no_grad():
                        module(x)
                found = []
                for x, y in outputs[::-1]:
                    module.zero_grad()
                    y.square().sum().backward()
                    found += [y.detach(), *gradients(module, x)]
                results.append(found + [t for _, t in module._fp8_state()])
            self.same(*results)

    def test_inferences_without_gradients_keep_no_record(self):
        """Tests an autograd.Function whose backward never runs, and functions of te-fl's and PyTorch's own."""
        from te_fl.pytorch.autograd import torch_checkpoint
        module, x = te.Linear(32, 32, device="cpu"), make_input()
        seen = []
        with unittest.mock.patch.object(torch_checkpoint, "_add", side_effect=lambda owners, forward: seen.append(owners)):
            with scope(Float8CurrentScaling()), torch.no_grad():
                for training in (True, False):
                    module.train(training)(x)
                    with torch.inference_mode():
                        module(x)
            self.assertEqual(seen, [])
            with scope(Float8CurrentScaling()):
                other(module.train(), x)
            self.assertEqual(len(seen), 1)

    def test_a_checkpoint_of_the_programs_own(self):
        """A program with a checkpoint of its own enters activation_recompute_forward() around both runs; two microbatches are in flight."""
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx, function, recipe, x):
                ctx.function, ctx.recipe = function, recipe
                ctx.save_for_backward(x)
                with runs.activation_recompute_forward(activation_recompute=True, recompute_phase=False):
                    self.assertEqual(runs.in_fp8_activation_recompute_phase(), False)
                    self.assertEqual(runs.is_fp8_activation_recompute_enabled(), recipe is not None)
                    return function(x)

            @staticmethod
            def backward(ctx, grad):
                x = ctx.saved_tensors[0].detach().requires_grad_()
                with torch.enable_grad(), scope(ctx.recipe), runs.activation_recompute_forward(True, recompute_phase=True):
                    self.assertTrue(runs.in_fp8_activation_recompute_phase())
                    y = ctx.function(x)
                torch.autograd.backward(y, grad)
                return None, None, x.grad

        def train(own, recipe):
            torch.manual_seed(3)
            modules = [randomise(te.Linear(32, 32, device="cpu")), randomise(te.LayerNormMLP(32, 64, device="cpu"))]
            seen = []
            for _ in range(3):
                inputs, results = [], []
                for m in range(2):
                    x = make_input(seed=m)
                    with scope(recipe):
                        y = x
                        for module in modules:
                            y = Own.apply(module, recipe, y) if own else module(y)
                    inputs.append(x)
                    results.append(y)
                for y in results:
                    y.square().sum().backward()
                seen += [*(x.grad for x in inputs), *(p.grad.clone() for m in modules for p in m.parameters()),
                         *(t for m in modules for _, t in m._fp8_state())]
            return seen

        for recipe in RECIPES:
            with self.subTest(recipe=type(recipe).__name__):
                self.same(train(True, recipe), train(False, recipe))
        layer = te.Linear(32, 32, device="cpu")
        with scope(Float8CurrentScaling()):
            with runs.activation_recompute_forward(True, False):
                layer.eval()(make_input())  # no recomputation of this call follows
            with runs.activation_recompute_forward(True, True), self.assertRaisesRegex(RuntimeError, "no forward of this module to repeat"):
                layer(make_input())
            with runs.activation_recompute_forward():
                layer(make_input())

    def test_torch_checkpoint_in_eval(self):
        """Modules are in eval(), as when adapters are trained on a frozen model."""
        dropout = dict(hidden_dropout=0.2, attention_dropout=0.3)
        for recipe in RECIPES[1:]:
            with self.subTest(recipe=type(recipe).__name__):
                want = self.steps("", "cpu", recipe, lambda m, x: m.eval()(x), **dropout)
                for run in PLAIN:
                    self.same(self.steps("", "cpu", recipe, lambda m, x: run(m.eval(), x), **dropout), want)

    def test_torch_checkpoint_of_checkpoints(self):
        """The inner checkpoint's first run in the backward is the outer one's second run; the inner function runs a third time."""
        for recipe in RECIPES[1:]:
            for name in ("LayerNormMLP", "TransformerLayer"):
                want = self.steps(name, "cpu", recipe, lambda m, x: m(torch.relu(x)) + x)
                for outer in PLAIN:
                    for inner in PLAIN:
                        with self.subTest(recipe=type(recipe).__name__, module=name, outer=outer.keywords, inner=inner.keywords):
                            got = self.steps(name, "cpu", recipe, lambda m, x: outer(lambda t: inner(m, torch.relu(t)) + t, x))
                            self.same(got, want)

    def test_te_fls_checkpoint_and_pytorchs_inside_of_each_other(self):
        """Nests checkpoints of several modules, also twice; each recomputation must find its own module's record."""
        def told(f, *a):
            return torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False, context_fn=te.recompute_contexts)

        nests = [(outer, inner) for plain in PLAIN for own in (te.checkpoint, told) for outer, inner in ((plain, own), (own, plain))]
        for recipe in (DelayedScaling(amax_history_len=4), Float8CurrentScaling()):
            def results(outer, inner):
                one, two, last = (randomise(m, seed) for seed, m in enumerate((te.TransformerLayer(32, 64, 2, hidden_dropout=0.1, device="cpu"),
                                                                              te.LayerNormMLP(32, 64, device="cpu"), te.Linear(32, 32, device="cpu"))))
                found = []
                for seed in (1, 2):
                    for m in (one, two, last):
                        m.zero_grad()
                    x = make_input(seed=seed).view(-1, 2, 32).detach().requires_grad_()
                    torch.manual_seed(seed)
                    with scope(recipe):
                        y = outer(lambda t: inner(lambda u: outer(two, u), last(inner(one, t))), x)
                    y.sum().backward()
                    found += [y.detach(), x.grad.clone(), *(p.grad.clone() for m in (one, two, last) for p in m.parameters())]
                return found
            want = results(lambda f, x: f(x), lambda f, x: f(x))
            for number, (outer, inner) in enumerate(nests):
                with self.subTest(recipe=type(recipe).__name__, nest=number):
                    self.same(results(outer, inner), want)

    def test_hooks_of_the_program_inside_of_what_is_checkpointed(self):
        def step(module, x):
            with torch.autograd.graph.save_on_cpu():
                return module(x)
        for recipe in RECIPES[1:]:
            want = self.steps("LayerNormMLP", "cpu", recipe, lambda m, x: m(x))
            for run in PLAIN:
                self.same(self.steps("LayerNormMLP", "cpu", recipe, lambda m, x: run(step, m, x)), want)

    def test_torch_checkpoint_and_an_evaluation_before_the_backward(self):
        for run in PLAIN:
            module, results = randomise(te.LayerNormMLP(32, 64, device="cpu")), []
            for call in (lambda m, x: m(x), run):
                module.zero_grad()
                x = make_input()
                with scope(Float8CurrentScaling()):
                    y = call(module, x)
                with torch.no_grad():
                    module(x)  # outside of the autocast
                y.square().sum().backward()
                results.append([y.detach(), *gradients(module, x)])
            self.same(*results)

    def test_an_autocast_inside_of_what_is_checkpointed(self):
        """The recomputation enters the inner autocast again; it neither uses newer scales nor records amaxes twice."""
        def step(module, x, recipe):
            with scope(recipe):
                return module(x)
        for recipe in RECIPES[1:]:
            want = self.steps("LayerNormMLP", "cpu", None, lambda m, x: step(m, x, recipe))
            for run in PLAIN:
                with self.subTest(recipe=type(recipe).__name__, **run.keywords):
                    self.same(self.steps("LayerNormMLP", "cpu", None, lambda m, x: run(step, m, x, recipe)), want)

    def test_torch_checkpoint_repeats_the_forward_that_it_belongs_to(self):
        """Runs several autocasts before one backward, with evaluations between them and other scales in each. Re-entrant backward passes end one by
        one, each updating the gradients' scales, so with delayed scaling their gradients differ."""
        for recipe in RECIPES[1:]:
            results = []
            for run in (lambda f, *a: f(*a), *PLAIN[:1 if isinstance(recipe, DelayedScaling) else 2]):
                module = randomise(te.LayerNormMLP(32, 64, device="cpu"))
                x, losses = make_input(), []
                for factor in (1.0, 3.0, 0.1):
                    with scope(recipe):
                        losses.append(run(lambda t, factor: module(module(t) * factor), x, factor).square().sum())
                    with torch.no_grad(), scope(Float8CurrentScaling()):
                        module(x * 5)
                sum(losses).backward()
                results.append([*losses, *gradients(module, x)])
            for got in results[1:]:
                for a, b in zip(got, results[0]):  # the gradients' summands are added in another order
                    self.assertLess(float((a - b).detach().norm()), 1e-5 * float(b.detach().norm()), type(recipe).__name__)

    def steps(self, name, device, recipe, call, **arguments):
        """Returns outputs, gradients and FP8 state of two steps whose forward is call(module, x)."""
        torch.manual_seed(2)
        module = randomise(MODULES[name](device=device)) if not arguments else randomise(
            te.TransformerLayer(32, 64, 4, device=device, **arguments))
        torch.manual_seed(3)
        results = []
        for seed in (1, 2, 3):
            x = make_input(device, seed)
            module.zero_grad()
            with scope(recipe):
                y = call(module, x)
            y.square().sum().backward()
            results += [y.detach(), *gradients(module, x)]
        for key, state in module.state_dict().items():
            if key.endswith("_extra_state"):
                results += [t for _, t in sorted(extra_state.read(state, key).items()) if isinstance(t, torch.Tensor)]
        return results

    def test_checkpoint_is_bit_for_bit(self):
        for device in DEVICES:
            for recipe in RECIPES:
                for name in PRODUCTS:
                    with self.subTest(device=device, recipe=type(recipe).__name__, module=name):
                        want = self.steps(name, device, recipe, lambda m, x: m(x))
                        self.same(self.steps(name, device, recipe, lambda m, x: te.checkpoint(m, x)), want)
                        self.same(self.steps(name, device, recipe, lambda m, x: te.checkpoint(m, x, use_reentrant=False)), want)
                        self.same(self.steps(name, device, recipe, lambda m, x: torch.utils.checkpoint.checkpoint(
                            m, x, use_reentrant=False, context_fn=te.recompute_contexts)), want)
                        for reentrant in (False, True):
                            self.same(self.steps(name, device, recipe, lambda m, x: torch.utils.checkpoint.checkpoint(
                                m, x, use_reentrant=reentrant)), want, f"reentrant {reentrant}")

    def test_checkpoint_with_dropout(self):
        for device in DEVICES:
            for recipe in RECIPES:
                for dropout in (dict(hidden_dropout=0.2, attention_dropout=0.3), dict(hidden_dropout=0.2, attention_dropout=0.3,
                                                                                     drop_path_rate=0.1)):
                    with self.subTest(device=device, recipe=type(recipe).__name__, **dropout):
                        want = self.steps("", device, recipe, lambda m, x: m(x), **dropout)
                        self.assertFalse(torch.equal(want[0], self.steps("", device, recipe, lambda m, x: m.eval()(x), **dropout)[0]))
                        self.same(self.steps("", device, recipe, lambda m, x: te.checkpoint(m, x), **dropout), want)
                    for reentrant in (False, True):
                        self.same(self.steps("", device, recipe, lambda m, x: torch.utils.checkpoint.checkpoint(
                            m, x, use_reentrant=reentrant), **dropout), want)

    def test_checkpoint_of_microbatches(self):
        """The recomputation of the first microbatch leaves its quantised weight for the other microbatches."""
        for recipe in RECIPES:
            for run in (te.checkpoint, *PLAIN[1:]):
                base, results = randomise(te.Linear(32, 48, device="cpu")), []
                for way in (lambda f, *a, **k: f(*a, **k), run):
                    module, found = copy.deepcopy(base), []
                    for first in (True, False, False):
                        x = make_input()
                        with scope(recipe):
                            y = way(functools.partial(module, is_first_microbatch=first), x)
                        y.square().sum().backward()
                        found += [y.detach(), *gradients(module, x), *(t for _, t in module._fp8_state())]
                    results.append(found)
                with self.subTest(recipe=type(recipe).__name__):
                    self.same(*results)

    def test_checkpoint_of_several_modules(self):
        for device in DEVICES:
            for recipe in RECIPES:
                with self.subTest(device=device, recipe=type(recipe).__name__):
                    results = []
                    for run in (lambda f, *a: f(*a), te.checkpoint, *PLAIN):
                        torch.manual_seed(1)
                        one, two = (randomise(te.LayerNormMLP(32, 64, device=device), seed) for seed in (1, 2))
                        x = make_input(device)
                        with scope(recipe):
                            y = run(lambda t: two(torch.relu(one(t))) + one(t), x)
                        y.sum().backward()
                        results.append([y.detach(), *gradients(one, x), *gradients(two)])
                    for got in results[1:]:
                        self.same(got, results[0])

    def test_checkpoint_of_checkpoints(self):
        for recipe in RECIPES:
            with self.subTest(recipe=type(recipe).__name__):
                results = []
                for run in (lambda f, *a: f(*a), te.checkpoint):
                    one, two = (randomise(te.LayerNormMLP(32, 64, device="cpu"), seed) for seed in (1, 2))
                    for seed in (1, 2):
                        one.zero_grad(), two.zero_grad()
                        x = make_input(seed=seed)
                        with scope(recipe):
                            y = run(lambda t: run(two, run(one, t)), x)
                        y.sum().backward()
                    results.append([y.detach(), *gradients(one, x), *gradients(two)])
                self.same(*results)

    def test_what_checkpoint_passes_on(self):
        module, x = randomise(te.LayerNormMLP(32, 64, device="cpu")), make_input().detach()

        def function(t, factor, *, shift=None, names=()):
            self.assertEqual(names, ("a",))
            return module(t) * factor + shift, factor
        shift = torch.ones(32, requires_grad=True)
        y, factor = te.checkpoint(function, x, 2.0, shift=shift, names=("a",))
        self.assertEqual(factor, 2.0)
        y.sum().backward()
        self.assertTrue((shift.grad == 16).all())
        got = gradients(module)
        module.zero_grad()
        (module(x) * 2.0 + shift).sum().backward()
        self.same(gradients(module), got)

    def test_checkpoint_within_contexts_of_the_program(self):
        seen = []

        class Noted:
            def __init__(self, name):
                self.name = name

            __enter__ = lambda self: seen.append(f"into {self.name}")
            __exit__ = lambda self, *error: seen.append(f"out of {self.name}")

        contexts = lambda: (Noted("first"), Noted("second"))
        for recipe in RECIPES:
            want = self.steps("LayerNormMLP", "cpu", recipe, lambda m, x: m(x))
            seen.clear()
            self.same(self.steps("LayerNormMLP", "cpu", recipe, lambda m, x: te.checkpoint(m, x, context_fn=contexts)), want)
            self.assertEqual(seen[:4], ["into first", "out of first", "into second", "out of second"])
            self.same(self.steps("LayerNormMLP", "cpu", recipe, lambda m, x: te.checkpoint(m, x, debug=True)), want)

    def test_checkpoint_inside_torchs_autocast(self):
        for recipe in RECIPES:
            with self.subTest(recipe=type(recipe).__name__):
                results = []
                for run in (lambda f, *a: f(*a), te.checkpoint):
                    module = randomise(te.LayerNormMLP(32, 64, device="cpu"))
                    for seed in (1, 2):
                        module.zero_grad()
                        x = make_input(seed=seed)
                        with torch.autocast("cpu", dtype=BF16), scope(recipe):
                            y = run(module, x)
                        y.sum().backward()
                    results.append([y.detach(), *gradients(module, x)])
                self.assertEqual(y.dtype, BF16)
                self.same(*results)

    def test_checkpoint_refuses_several_ranks(self):
        with self.assertRaisesRegex(Exception, "distribute_saved_activations"):
            te.checkpoint(te.Linear(32, 32, device="cpu"), make_input(), distribute_saved_activations=True)

    @each(["MultiheadAttention", "TransformerLayer"])
    def test_core_attention(self, module, device, _):
        x = make_input(device)
        module(x).sum().backward()
        want = gradients(module, x)
        module.zero_grad()
        x.grad = None
        module(x, checkpoint_core_attention=True).sum().backward()
        for a, b in zip(gradients(module, x), want):
            # The keys' bias has no effect, so its gradient consists of rounding errors.
            near(self, a, b, 1e-5, "gradient", 1.0)


if __name__ == "__main__":
    unittest.main()
