"""Tests that the autograd node in C++ does what the one in Python does: results and gradients bit for bit, and the same refusals. (If the C++ node is
built, all other tests of te_fl.pytorch use it too; CMakeLists.txt repeats some of them with the Python node.)"""

import copy
import gc
import os
import re
import subprocess
import sys
import threading
import unittest
import weakref
from unittest import mock

import torch

from forkserver import PYTHON
from torch_cases import MODULES, RECIPES, Each, each, gradients, make_input, scope
from torch_oracle import DEVICES, randn, randomise

import te_fl.pytorch as te
from te_fl import torch_node
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fl.pytorch.autograd import call
from te_fl.pytorch.modules import base, layers

if call.run is call.python_run:
    raise unittest.SkipTest(f"the node is not built for this PyTorch: {torch_node.COMMAND}")

NATIVE = call.run


def using(run):
    plain = call.plain if run is NATIVE else None
    stack = mock.patch.multiple(base, plain=plain), mock.patch.multiple(layers, run=run)

    class Both:
        def __enter__(self):
            for one in stack:
                one.__enter__()

        def __exit__(self, *error):
            for one in stack:
                one.__exit__(*error)
    return Both()


def python(program, **environment):
    return subprocess.run([*PYTHON, "-c", program], capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


class PlainTest(unittest.TestCase):
    """Tests call.plain(), the fast path of the forward of a Linear or an MLP: it runs plain calls directly and returns None for all others."""

    def setUp(self):
        self.module = te.Linear(16, 16, device="cpu")
        self.x = torch.randn(4, 16, requires_grad=True)
        self.module(self.x)

    def plain(self, x=None, first=None):
        return call.plain(self.module.__dict__, ("linear", None), self.x if x is None else x, first, -1)

    def test_runs(self):
        self.assertTrue(torch.equal(self.plain(), self.module(self.x)))
        with torch.no_grad():
            self.assertFalse(self.plain().requires_grad)
        self.module.weight = torch.nn.Parameter(torch.zeros(16, 16))  # the current parameters are used
        self.assertTrue(torch.equal(self.plain(), self.module.bias.expand(4, 16)))
        recipe = DelayedScaling()
        with te.autocast(recipe=recipe):
            self.assertIsNotNone(self.plain())  # the previous call was without FP8, which is the layer's to know
            self.assertIs(self.module._recipe, recipe)
            self.module._recipe = Float8CurrentScaling()
            self.assertIsNone(self.plain())  # returns None: _run() has to record the other recipe
            self.module._recipe = DelayedScaling()  # an equal recipe, as a program has that creates a recipe for each step
            self.assertIsNotNone(self.plain())
            self.assertIs(self.module._recipe, recipe)
            self.assertIsNone(self.plain(first=True))

    def test_an_mlp_runs(self):
        for options in ({}, {"bias": False, "normalization": "RMSNorm"}):
            module = te.LayerNormMLP(16, 32, device="cpu", **options)
            want = module(self.x)
            self.assertTrue(torch.equal(call.plain(module.__dict__, ("layernorm_mlp", None), self.x, None, -1), want))

    def test_a_norm_runs(self):
        for kind, name in ((te.LayerNorm, "layernorm"), (te.RMSNorm, "rmsnorm")):
            for shape, served in ((16, True), ((4, 16), False)):  # parameters of two dimensions are flattened on the general path
                module = kind(shape, device="cpu", dtype=torch.bfloat16)
                want = module(self.x)
                self.assertEqual(want.dtype, torch.bfloat16)
                self.assertIsNone(call.plain(module.__dict__, (name, None), self.x, None, -1))  # the output would have the input's dtype
                found = call.plain(module.__dict__, (name, None), self.x, None, 3)
                self.assertTrue(found is not None and torch.equal(found, want) if served else found is None)

    def test_leaves(self):
        self.assertIsNone(self.plain(self.x.double()))
        self.assertIsNone(self.plain(torch.randn(16, 4).T))
        self.assertIsNone(self.plain(self.x.to_sparse()))
        self.assertIsNone(self.plain(self.x.to("meta")))
        self.assertIsNone(self.plain(3))
        for around in (torch.profiler.profile(), torch.autocast("cpu", torch.bfloat16)):
            with around:
                self.assertIsNone(self.plain())
        with te.autocast():
            self.module(self.x)
            with torch.autograd.graph.save_on_cpu():
                self.assertIsNone(self.plain())
            inside = []
            torch.utils.checkpoint.checkpoint(lambda x: inside.append(self.plain(x)) or x * 1, self.x, use_reentrant=True)
            self.assertEqual(inside, [None])
        self.assertIsNone(self.plain())  # returns None: _run() has to record that this forward is not in FP8
        self.module(self.x)
        torch.nn.utils.parametrize.register_parametrization(self.module, "weight", torch.nn.Identity())
        self.assertIsNone(self.plain())

    def test_shapes_are_reported_as_before(self):
        with self.assertRaisesRegex(RuntimeError, "Linear"):
            self.module(torch.randn(4, 8))


class SameAsPythonTest(Each):
    @each(recipes=RECIPES)
    def test_steps(self, module, device, recipe):
        found = []
        for run in (NATIVE, call.python_run):
            own = copy.deepcopy(module)
            with using(run):
                for step in range(3):
                    x = make_input(device, seed=step)
                    with scope(recipe):
                        y = own(x)
                    made = y.grad_fn.next_functions[0][0] if y.grad_fn.name() == "ViewBackward0" else y.grad_fn
                    self.assertEqual(made.name(), "LayerFunctionBackward")
                    self.assertIs(isinstance(made, torch.autograd.function.BackwardCFunction), run is not NATIVE)
                    y.square().sum().backward()
                with scope(recipe), torch.no_grad():
                    served = [own(x), own.eval()(x)]
                found.append([y, *served, *gradients(own, x)])
        self.same(*found)

    @each([n for n in MODULES if n != "RMSNorm"])  # except RMSNorm, which has one parameter
    def test_what_needs_no_gradient_gets_none(self, module, device, _):
        found = []
        for run in (NATIVE, call.python_run):
            with using(run):
                for p in module.parameters():
                    p.grad = None
                frozen = next(module.parameters()).requires_grad_(False)
                module(make_input(device).detach()).sum().backward()
                self.assertIsNone(frozen.grad)
                frozen.requires_grad_()
                found.append([p.grad for p in module.parameters() if p.grad is not None])
        self.same(*found)

    def test_attention_saves_masks_and_its_output(self):
        for device in DEVICES:
            for run in (NATIVE, call.python_run):
                with self.subTest(device=device, run=run), using(run):
                    module = te.DotProductAttention(2, 16, attn_mask_type="arbitrary", qkv_format="bshd")
                    q, k, v = (randn(1, 8, 2, 16, seed=s, device=device).requires_grad_() for s in (1, 2, 3))
                    for write in ("mask", "output"):
                        mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool, device=device)
                        y = module(q, k, v, attention_mask=mask)
                        (mask if write == "mask" else y.detach()).zero_()
                        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                            y.backward(torch.ones_like(y))

    def test_gradients_as_they_come(self):
        """Covers gradients with gaps in memory, a gradient that autograd left undefined, and one of another memory layout."""
        class Nothing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return y.clone()

            @staticmethod
            def backward(ctx, grad):
                return None

        for device in DEVICES:
            module = randomise(te.Linear(32, 32, device=device))
            for use in (lambda y: y.sum().backward(), lambda y: Nothing.apply(y).sum().backward(),
                        lambda y: y.backward(randn(32, 2, 8, seed=4, device=device).permute(2, 1, 0))):
                found = []
                for run in (NATIVE, call.python_run):
                    module.zero_grad()
                    x = make_input(device)
                    with using(run):
                        use(module(x))
                    found.append([g for g in (x.grad, module.weight.grad, module.bias.grad) if g is not None])
                self.same(*found)


class RefusalTest(unittest.TestCase):
    def setUp(self):
        self.module, self.x = randomise(te.Linear(32, 32, device="cpu")), make_input()

    def both(self, use):
        """Checks that both nodes raise the same error; returns its text."""
        texts = []
        for run in (NATIVE, call.python_run):
            with using(run), self.assertRaises(Exception) as raised:
                use()
            text = re.sub(r"version [0-9]+", "version N", str(raised.exception))
            texts.append(f"{type(raised.exception).__name__}: {text}")
        self.assertEqual(*texts)
        return texts[0]

    def test_second_derivative(self):
        def use():
            (grad,) = torch.autograd.grad(self.module(self.x).square().sum(), self.x, create_graph=True)
            self.assertTrue(grad.requires_grad)
            grad.sum().backward()
        self.assertIn("no second derivative", self.both(use))

    def test_backward_twice(self):
        def use():
            y = self.module(self.x)
            y.sum().backward()
            y.sum().backward()
        self.assertIn("a second time", self.both(use))
        y = self.module(self.x)
        first = torch.autograd.grad(y.sum(), self.x, retain_graph=True)
        self.assertTrue(torch.equal(first[0], torch.autograd.grad(y.sum(), self.x)[0]))

    def test_written_before_the_backward(self):
        def use():
            weight = self.module.weight
            y = self.module(self.x)
            with torch.no_grad():
                weight.mul_(2)
            y.sum().backward()
        self.assertIn("modified by an inplace operation", self.both(use))

    def test_transforms_of_functions(self):
        weight = self.module.weight.detach()
        self.assertIn("inside torch.func", self.both(lambda: torch.func.grad(lambda x: self.module(x).sum())(self.x.detach())))

        def tangent():
            with torch.autograd.forward_ad.dual_level():
                self.module(torch.autograd.forward_ad.make_dual(self.x, torch.ones_like(self.x)))
        self.assertIn("jvp", self.both(tangent))
        with torch.no_grad():
            self.assertIn("would drop the tangent", self.both(tangent))
        self.assertTrue(torch.equal(weight, self.module.weight))

    def test_an_error_of_the_layer(self):
        self.assertIn("33", self.both(lambda: self.module(randn(4, 33).requires_grad_())))

    def test_arguments(self):
        self.module(self.x)
        last = next(iter(self.module._layers.values())).last
        for args in ((), (1, self.x), (last, "x"), (last._replace(inputs=2), self.x), (last._replace(extras=-1), self.x), (last, self.x)):
            with self.assertRaises(TypeError):
                NATIVE(*args)

    def test_compiled_autograd(self):
        with self.assertRaisesRegex(NotImplementedError, "TE_FL_TORCH_NODE=0"):
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                self.module(self.x).sum().backward()


class LifeTest(unittest.TestCase):
    def test_a_graph_that_goes_takes_all_with_it(self):
        for device in DEVICES:
            module = randomise(te.LayerNormMLP(32, 64, device=device))
            for use in (lambda y: None, lambda y: y.sum().backward(), lambda y: y.sum().backward(retain_graph=True)):
                x = make_input(device) * 1
                gone = weakref.ref(x)
                y = module(x)
                about = next(iter(module._layers.values())).last
                before = sys.getrefcount(about)
                use(y)
                del x, y
                gc.collect()
                self.assertIsNone(gone())
                self.assertLessEqual(sys.getrefcount(about), before)

    @each(recipes=RECIPES[:2])
    def test_hooks_of_saved_tensors(self, module, device, recipe):
        counts = []
        for run in (NATIVE, call.python_run):
            packed, unpacked = [], []
            with using(run), torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: unpacked.append(1) or t):
                x = make_input(device)
                with scope(recipe):
                    y = module(x)
            y.sum().backward()
            counts.append((len(packed), len(unpacked)))
        self.assertEqual(*counts)

    def test_a_hook_that_runs_a_backward_of_the_same_graph(self):
        module, x, found = randomise(te.Linear(32, 32, device="cpu")), make_input(), []

        def unpack(t):
            if not found:
                found.append(None)
                found[0] = torch.autograd.grad(loss, x, retain_graph=True)[0]
            return t
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            loss = module(x).sum()
        loss.backward()
        self.assertTrue(torch.equal(found[0], x.grad))

    def test_gradients_that_are_added_elsewhere(self):
        for flag in (True, 1):
            found = []
            for run in (NATIVE, call.python_run):
                module = randomise(te.Linear(32, 32, device="cpu", fuse_wgrad_accumulation=flag))
                module.weight.main_grad = torch.ones_like(module.weight)
                with using(run):
                    module(make_input()).sum().backward()
                self.assertIsNone(module.weight.grad)
                found.append(module.weight.main_grad)
            self.assertTrue(torch.equal(*found))
            self.assertFalse(torch.equal(found[0], torch.ones_like(found[0])))

    def test_backwards_of_one_graph_in_threads(self):
        module, x = randomise(te.LayerNormMLP(32, 64, device="cpu")), make_input()
        y = module(x)
        (want,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        found, wrong = [], []

        def work():
            try:
                for _ in range(20):
                    found.append(torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
            except BaseException as error:
                wrong.append(error)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertFalse(any(t.is_alive() for t in threads))
        self.assertEqual(wrong, [])
        self.assertEqual(len(found), 80)
        self.assertTrue(all(torch.equal(g, want) for g in found))

    def test_the_interpreter_ends_with_a_graph(self):
        done = python("import torch, te_fl.pytorch as te\n"
                      "x = torch.ones(4, 16, requires_grad=True)\ny = te.Linear(16, 16, device='cpu')(x)\n"
                      "import builtins; builtins.kept = y; print(y.grad_fn.name())")
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "LayerFunctionBackward"), done.stderr)


class BuildTest(unittest.TestCase):
    TELL = "from te_fl.pytorch.autograd import call; print(call.run is call.python_run)"

    def test_switched_off(self):
        self.assertEqual(python(self.TELL, TE_FL_TORCH_NODE="0").stdout.strip(), "True")
        self.assertEqual(python(self.TELL, TE_FL_TORCH_NODE="1").stdout.strip(), "False")

    def test_a_file_that_cannot_be_loaded(self):
        done = python("import tempfile; from te_fl import torch_node\n"
                      "file = tempfile.NamedTemporaryFile(suffix='.so'); torch_node.path = lambda version: file.name\n" + self.TELL)
        self.assertEqual(done.stdout.strip(), "True", done.stderr)
        self.assertIn("cannot be loaded", done.stderr)
        self.assertIn("build-node", done.stderr)

    def test_it_is_of_this_pytorch(self):
        self.assertEqual(torch_node.installed()[1], torch.__version__)
        self.assertIn(f"torch{torch.__version__}", torch_node.path(torch.__version__))

    def test_builds_that_fail(self):
        file = torch_node.path(torch.__version__)
        before = os.stat(file).st_mtime_ns
        for compiler, text in (("/no/such/compiler", "name yours in CXX"), ("false", "failed")):
            done = subprocess.run([sys.executable, "-m", "te_fl", "build-node"], capture_output=True, text=True, timeout=120,
                                  env={**os.environ, "CXX": compiler})
            self.assertEqual(done.returncode, 1)
            self.assertIn(text, done.stderr)
        self.assertEqual(os.stat(file).st_mtime_ns, before)

    def test_another_order_of_arguments_is_refused(self):
        done = python("from te_fl import _native\n_native.LAYER_CALL = _native.LAYER_CALL[::-1]\nimport te_fl.pytorch")
        self.assertIn("of LayerCall, which has", done.stderr)

    def test_doctor_reports(self):
        done = subprocess.run([sys.executable, "-m", "te_fl", "doctor"], capture_output=True, text=True, timeout=120)
        self.assertIn("autograd node in C++: built for PyTorch", done.stdout)


if __name__ == "__main__":
    unittest.main()
