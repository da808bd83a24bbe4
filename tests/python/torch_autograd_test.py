"""Tests te_fl.pytorch's modules under autograd: gradients, in-place writes, autocast, functional calls, main_grad."""

import contextlib
import copy
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings
import weakref
from unittest import mock

import numpy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_cases import BF16, F32, MODULES, PRODUCTS, RECIPES, Each, each, gradients, make_input, scope  # noqa: E402
import torch_oracle as oracle  # noqa: E402
from torch_oracle import DEVICES, near, randn, randomise  # noqa: E402

import te_fl  # noqa: E402
from te_fl import _native, torch_tensors  # noqa: E402
from te_fl.pytorch.autograd import call  # noqa: E402
from te_fl.pytorch.modules import base, layers  # noqa: E402
import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402


class Gradients(Each):
    @each(recipes=RECIPES[:3])
    def test_frozen_parameters(self, module, device, recipe):
        x = make_input(device)
        with scope(recipe):
            module(x).sum().backward()
        want, of_x = {n: p.grad for n, p in module.named_parameters()}, x.grad
        for frozen in [[n] for n in want] + [list(want)]:
            other = randomise(MODULES[type(module).__name__](device=device))
            for n in frozen:
                other.get_parameter(n).requires_grad_(False)
            x = make_input(device)
            with scope(recipe):
                other(x).sum().backward()
            self.assertTrue(torch.equal(x.grad, of_x), frozen)
            for n, p in other.named_parameters():
                if n in frozen:
                    self.assertIsNone(p.grad, n)
                else:
                    near(self, p.grad, want[n], 1e-6, n, 1e-5)

    @each(recipes=RECIPES[:3])
    def test_input_without_gradient(self, module, device, recipe):
        x = make_input(device)
        with scope(recipe):
            module(x).sum().backward()
        want = gradients(module)
        other = randomise(MODULES[type(module).__name__](device=device))
        with scope(recipe):
            y = other(make_input(device).detach())
        y.sum().backward()
        self.same(gradients(other), want)

    @each()
    def test_nothing_wants_a_gradient(self, module, device, _):
        x = make_input(device)
        want = module(x).detach()
        self.assertTrue(module(x).requires_grad)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                y = module(x)
            self.assertFalse(y.requires_grad)
            near(self, y, want, 1e-6, "output")
        y = module.requires_grad_(False)(x.detach())
        self.assertFalse(y.requires_grad)

    @each(recipes=(None, Float8CurrentScaling()))
    def test_accumulation(self, module, device, recipe):
        one, other = make_input(device), make_input(device, seed=2)
        separate = []
        for x in (one, other):
            module.zero_grad()
            with scope(recipe):
                module(x).sum().backward()
            separate.append(gradients(module))
        module.zero_grad()
        for x in (one, other):
            with scope(recipe):
                module(x).sum().backward()
        for got, a, b in zip(gradients(module), *separate):
            near(self, got, a + b, 1e-6, "gradient", 1e-6)

    @each(recipes=(None, Float8CurrentScaling(), Float8BlockScaling()))
    def test_backward_twice(self, module, device, recipe):
        x = make_input(device)
        with scope(recipe):
            y = module(x)
        y.backward(torch.ones_like(y), retain_graph=True)
        first = gradients(module, x)
        module.zero_grad()
        x.grad = None
        y.backward(torch.ones_like(y))
        self.same(gradients(module, x), first)
        with self.assertRaises(RuntimeError) as caught:
            y.backward(torch.ones_like(y))
        self.assertIn("second time", str(caught.exception))

    @each()
    def test_double_backward_is_refused(self, module, device, _):
        x = make_input(device)
        y = module(x)
        with self.assertRaises(RuntimeError) as caught:
            (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            dx.square().sum().backward()
        self.assertRegex(str(caught.exception), "create_graph|twice|double|once_differentiable")

    @each()
    def test_a_gradient_penalty_does_not_drop_out(self, module, device, _):
        x = make_input(device)
        y = module(x)
        (dx,) = torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "no second derivative"):
            (y.sum() + (dx.norm() - 1) ** 2).backward()

    @each()
    def test_a_gradient_penalty_stays_in_requested_gradients(self, module, device, _):
        x = make_input(device)
        y = module(x)
        (dx,) = torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)
        penalised = y.sum() + (dx.norm() - 1) ** 2
        for wanted in (x, next(module.parameters())):
            with self.assertRaisesRegex(RuntimeError, "no second derivative"):
                torch.autograd.grad(penalised, wanted, retain_graph=True)
        with self.assertRaisesRegex(RuntimeError, "no second derivative"):
            torch.autograd.functional.hessian(lambda x: module(x).square().sum(), x.detach())

    def test_a_backward_that_raises_leaves_nothing(self):
        from te_fl.pytorch.autograd import call
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                raise ArithmeticError("on purpose")
        module, x = te.Linear(32, 32, device="cpu"), torch.randn(16, 32, requires_grad=True)
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            y = module(Fails.apply(x))
        with self.assertRaises(ArithmeticError):
            y.sum().backward()
        del y
        self.assertEqual(len(call._ending), 0)

    @each()
    def test_empty_inputs(self, module, device, _):
        for shape in ((0, 2, 32), (3, 0, 32)):
            x = torch.zeros(shape, device=device, requires_grad=True)
            y = module(x)
            self.assertEqual(y.shape, x.shape)
            y.sum().backward()
            self.assertEqual(x.grad.shape, x.shape)

    @each()
    def test_autograd_grad(self, module, device, _):
        x = make_input(device)
        module(x).sum().backward()
        want, of_x = gradients(module), x.grad
        parameters = list(module.parameters())
        got = torch.autograd.grad(module(x).sum(), [x, *parameters])
        self.same(got, [of_x, *want])
        (one,) = torch.autograd.grad(module(x).sum(), parameters[0])
        self.assertTrue(torch.equal(one, want[0]))

    @each()
    def test_gradients_that_are_not_contiguous(self, module, device, _):
        x = make_input(device)
        g = randn(32, 2, 8, device=device).permute(2, 1, 0)
        module(x).backward(g)
        got = gradients(module, x)
        module.zero_grad()
        x.grad = None
        module(x).backward(g.contiguous())
        self.same(got, gradients(module, x))

    @each()
    def test_expanded_input_and_gradient(self, module, device, _):
        x = randn(8, 1, 32, device=device).requires_grad_()
        y = module(x.expand(8, 2, 32))
        y.sum().backward()
        want = randn(8, 1, 32, device=device).repeat(1, 2, 1).requires_grad_()
        module.zero_grad()
        module(want).backward(torch.ones_like(y))
        near(self, x.grad[:, 0], want.grad.sum(1), 1e-6, "gradient of the input")

    def test_undefined_gradient_of_an_output(self):
        for device in DEVICES:
            module = randomise(te.LayerNormMLP(32, 64, return_layernorm_output=True, device=device))
            x = make_input(device)
            module(x)[0].sum().backward()
            self.assertIsNotNone(module.fc2_weight.grad)
            module.zero_grad()
            module(x)[1].sum().backward()
            self.assertIsNotNone(module.layer_norm_bias.grad)

    @each(recipes=RECIPES[:3])
    def test_in_another_thread(self, module, device, recipe):
        x = make_input(device)
        with scope(recipe):
            module(x).sum().backward()
        want = gradients(module, x)
        other, x = randomise(MODULES[type(module).__name__](device=device)), make_input(device)
        with scope(recipe):
            y = other(x)
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
        self.same(gradients(other, x), want)

    def test_threads_at_once(self):
        module = randomise(te.LayerNormMLP(32, 64, device="cpu")).requires_grad_(False)
        want, failures = {}, []
        for seed in range(4):
            x = make_input(seed=seed)
            module(x).sum().backward()
            want[seed] = x.grad

        def work(seed):
            for _ in range(10):
                x = make_input(seed=seed)
                module(x).sum().backward()
                if not torch.equal(x.grad, want[seed]):
                    failures.append(seed)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])

    def test_exceptions_of_a_backward_arrive(self):
        def fail(g):
            raise ValueError("of the hook")
        module, x = te.Linear(32, 32, device="cpu"), make_input()
        x.register_hook(fail)
        with self.assertRaisesRegex(ValueError, "of the hook"):
            module(x).sum().backward()
        module(make_input()).sum().backward()

    @each(recipes=(None, Float8CurrentScaling(), Float8BlockScaling()))
    def test_two_forwards_before_two_backwards(self, module, device, recipe):
        want = []
        for seed in (1, 2):
            module.zero_grad()
            x = make_input(device, seed)
            with scope(recipe):
                module(x).sum().backward()
            want.append(gradients(module, x))
        for order in ((0, 1), (1, 0)):
            xs = [make_input(device, seed) for seed in (1, 2)]
            with scope(recipe):
                ys = [module(x) for x in xs]
            for i in order:
                module.zero_grad()
                ys[i].sum().backward()
                self.same(gradients(module, xs[i]), want[i], order)

    @each(recipes=RECIPES)
    def test_a_forward_whose_backward_never_comes(self, module, device, recipe):
        x = make_input(device)
        with scope(recipe):
            for _ in range(3):
                module(x)
            module(x).sum().backward()
        self.assertTrue(torch.isfinite(x.grad).all())

    @each(["Linear", "LayerNormMLP", "TransformerLayer"])
    def test_the_same_module_twice_in_one_graph(self, module, device, _):
        x = make_input(device)
        module(module(x)).sum().backward()
        got = gradients(module, x)
        module.zero_grad()
        x.grad = None
        middle = module(x)
        cut = middle.detach().requires_grad_()
        module(cut).sum().backward()
        middle.backward(cut.grad)
        for a, b in zip(got, gradients(module, x)):
            near(self, a, b, 1e-6, "gradient", 1e-6)


class Writes(Each):
    @each(recipes=(None,))
    def test_input_written_before_backward(self, module, device, recipe):
        x = make_input(device)
        own = x * 1
        y = module(own)
        with torch.no_grad():
            own.add_(1)
        with self.assertRaisesRegex(RuntimeError, "inplace|in place|in-place"):
            y.sum().backward()

    @each()
    def test_weight_written_before_backward(self, module, device, recipe):
        x = make_input(device)
        y = module(x)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1)
        with self.assertRaisesRegex(RuntimeError, "inplace|in place|in-place"):
            y.sum().backward()

    @each()
    def test_output_may_be_written(self, module, device, _):
        x = make_input(device)
        y = module(x)
        y.add_(1)
        y.sum().backward()
        want = x.grad.clone()
        x.grad = None
        module(x).sum().backward()
        self.assertTrue(torch.equal(x.grad, want))

    def writes(self, module):
        """Returns functions that write or replace the parameters in ways most of which PyTorch's version counters miss. Each multiplies the
        parameters by 1.25."""
        parameters = list(module.parameters())

        def each_one(write):
            for p in parameters:
                write(p)

        def storage(p):
            p.untyped_storage().copy_((p.detach() * 1.25).untyped_storage())

        def replaced(p):
            owner, name = next((m, n) for m in module.modules() for n, q in m._parameters.items() if q is p)
            value = p.detach() * 1.25
            delattr(owner, name)
            setattr(owner, name, torch.nn.Parameter(value))

        def shared(p):
            import numpy
            array = numpy.from_dlpack(p.detach())
            if array.flags.writeable:  # NumPy reads what an older PyTorch exports
                array *= 1.25
            else:
                p.detach().numpy().__imul__(1.25)

        yield "copy_", lambda: [p.detach().copy_(p * 1.25) for p in parameters]
        yield "data", lambda: each_one(lambda p: p.data.mul_(1.25))
        yield "another data", lambda: each_one(lambda p: setattr(p, "data", p.data * 1.25))
        yield "storage", lambda: each_one(storage)
        yield "NumPy", lambda: each_one(lambda p: p.detach().numpy().__imul__(1.25)) if parameters[0].is_cpu else each_one(lambda p: p.data.mul_(1.25))
        yield "DLPack", lambda: each_one(shared) if parameters[0].is_cpu else each_one(lambda p: p.data.mul_(1.25))
        for _ in range(4):  # the new tensor may have the address of the previous one
            yield "del", lambda: [replaced(p) for p in list(module.parameters())]

    @each(recipes=RECIPES)
    def test_serving_sees_every_write_to_weights(self, module, device, recipe):
        x = make_input(device).detach()
        with scope(recipe):
            module(make_input(device)).square().mean().backward()  # delayed scaling has scales only after one step
        module.eval()

        def served():
            with torch.no_grad(), scope(recipe):
                return module(x)

        for name, write in self.writes(module):
            before = served()
            write()
            other = MODULES[type(module).__name__](device=device).eval()
            other.load_state_dict(module.state_dict())
            with torch.no_grad(), scope(recipe):
                want = other(x)
            got = served()
            self.assertTrue(torch.equal(got, want), name)
            self.assertFalse(torch.equal(got, before), name)

    @each(PRODUCTS, recipes=(Float8CurrentScaling(), Float8BlockScaling()))
    def test_a_scope_quantises_weights_once(self, module, device, recipe):
        x = make_input(device).detach()
        module.eval()

        def quantised():
            return sum(row["calls"] for row in te_fl.usage() if "quantize" in row["op"])

        def served():
            before = quantised()
            with torch.no_grad(), scope(recipe):
                y = module(x)
            return y, quantised() - before

        want, each_call = served()
        cached = te.cache_quantized_weights()
        with cached:
            for _ in range(2):
                served()
            got, fewer = served()
            self.assertTrue(torch.equal(got, want))
            self.assertLess(fewer, each_call)
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(1.25)
            changed, _ = served()
            self.assertFalse(torch.equal(changed, got), "a write that PyTorch counts")
            found = []
            thread = threading.Thread(target=lambda: found.append(served()))
            thread.start()
            thread.join()
            self.assertTrue(torch.equal(found[0][0], changed))
            self.assertEqual(found[0][1], each_call, "another thread is not in the scope")
        for p in module.parameters():
            p.data.mul_(1.25)
        with cached:
            self.assertFalse(torch.equal(served()[0], changed), "the scope was entered again")
        for p in module.parameters():
            p.data.mul_(1.25)
        self.assertEqual(served()[1], each_call)
        with cached, scope(recipe):  # a forward with gradients caches nothing
            y = module(make_input(device))
        y.sum().backward()

    def test_weights_of_one_call(self):
        """Each call gets new parameters, as from functional_call(). Such a tensor may have the previous one's address and version, and must
        nevertheless count as a different tensor."""
        recipe, x, values = Float8CurrentScaling(), make_input("cpu").detach(), randn(5, 48, 32)
        wanted = [te.Linear(32, 48, bias=False, device="cpu") for _ in values]
        for first, around in ((False, contextlib.nullcontext), (None, te.cache_quantized_weights)):
            module, memory = te.Linear(32, 48, bias=False, device="cpu"), numpy.zeros((48, 32), dtype=numpy.float32)
            found = torch.empty(len(values), *x.shape[:-1], 48).unbind()

            def served():
                weight = torch.nn.Parameter(torch.from_numpy(memory))  # noqa: B023
                with scope(recipe), torch.set_grad_enabled(first is False):  # noqa: B023
                    return torch.func.functional_call(module, {"weight": weight}, (x,), {"is_first_microbatch": first}).detach()  # noqa: B023

            with around():
                for own, value in zip(found, values.numpy()):
                    memory[:] = value
                    own.copy_(served())
            for want, value, got in zip(wanted, values, found):
                want.load_state_dict({"weight": value}, strict=False)
                with self.subTest(first=first), torch.no_grad(), scope(recipe):
                    self.assertTrue(torch.equal(got, want(x)))


class Storages(Each):
    """Outputs and gradients are in memory of PyTorch's own allocator, so record_stream() works for them."""

    @each(recipes=RECIPES)
    def test_pytorch_allocates(self, module, device, recipe):
        for run in (call.run, call.python_run):
            plain = call.plain if run is call.run else None
            with mock.patch.object(base, "plain", plain), mock.patch.object(layers, "run", run):
                module.zero_grad()
                x = make_input(device)
                with scope(recipe):
                    y = module(x)
                y.square().sum().backward()
                with scope(recipe), torch.no_grad():
                    served = module(x)
                for name, t in (("output", y), ("output without gradients", served), ("x", x.grad),
                                *((n, p.grad) for n, p in module.named_parameters())):
                    self.assertTrue(t.untyped_storage().resizable(), name)

    def test_attention_and_compiled_graphs(self):
        attention, found = te.DotProductAttention(4, 16, qkv_format="bshd"), []
        q, k, v = (randn(2, 6, 4, 16).requires_grad_() for _ in range(3))
        bias = randn(1, 4, 6, 6).requires_grad_()
        y = attention(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
        known = weakref.ref(y)
        y.sum().backward()
        found += [y, q.grad, k.grad, v.grad, bias.grad]
        module, x = randomise(te.LayerNormMLP(32, 64, device="cpu")), make_input()
        y = torch.compile(module, backend="aot_eager")(x)
        y.sum().backward()
        found += [y, *gradients(module, x)]
        for i, t in enumerate(found):
            self.assertTrue(t.untyped_storage().resizable(), i)
        del y, t, found
        y = attention(q, k, v)  # the backward reads attention's output
        known = weakref.ref(y)
        del y
        gc.collect()
        self.assertIsNone(known())

    def test_memory_that_pytorch_does_not_have(self):
        class Full(torch.OutOfMemoryError):
            pass

        def full(like, shape, dtype):
            raise Full("CUDA out of memory. Tried to allocate 1 GiB")

        module, x = te.Linear(32, 32, device="cpu"), make_input()
        y = module(x)
        try:
            _native.set_empty(full)
            for fails in (lambda: module(x), lambda: y.sum().backward()):
                with self.assertRaises(Full) as caught:
                    fails()
                self.assertEqual(caught.exception.args, ("CUDA out of memory. Tried to allocate 1 GiB",))
        finally:
            _native.set_empty(torch_tensors.empty if call._node is None else call._node.empty)
        module(x).sum().backward()
        self.assertTrue(x.grad.isfinite().all())

    def test_the_log_level_that_keeps_pytorch_s_c_functions_quiet(self):
        """quiet_out_of_memory sets PyTorch's log-level variable only while a direct allocation fails. The variable belongs to PyTorch and may
        disappear."""
        code = f"""import ctypes, os, sys, torch
from te_fl import _native
library = {os.path.join(os.path.dirname(torch.__file__), "lib")!r}
level = ctypes.c_int.in_dll(ctypes.CDLL(os.path.join(library, "libc10.so")), "FLAGS_caffe2_log_level")
allocate = ctypes.CDLL(os.path.join(library, "libtorch_cuda.so")).aoti_torch_cuda_caching_allocator_raw_alloc
before = level.value
_native.quiet_out_of_memory(0, 1, 2, 3)
assert level.value == before < 3
for level.value in (before, 3):
    assert allocate(ctypes.c_uint64(1 << 60), ctypes.byref(ctypes.c_void_p())) != 0
    print("tried", file=sys.stderr, flush=True)
"""
        if not os.path.exists(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")):
            self.skipTest("PyTorch has no CUDA")
        if "NVIDIA_STAND_INS" in os.environ:  # tools/torch_versions.py
            self.skipTest("NVIDIA's libraries are empty here")
        if not hasattr(ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")), "aoti_torch_cuda_caching_allocator_raw_alloc"):
            self.skipTest("this PyTorch has no such function: allocations go through Python")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        loud, quiet, _ = done.stderr.split("tried\n")
        self.assertIn("Exception in aoti_torch", loud)
        self.assertEqual(quiet, "")

    @unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
    def test_memory_that_a_gpu_does_not_have_is_said_once(self):
        code = """import torch
import te_fl.pytorch as te
layer = te.LayerNormMLP(512, 8192, device="cuda")
layer(torch.ones(128, 512, device="cuda", requires_grad=True)).sum().backward()  # what te-fl and its libraries load
x = torch.ones(16384, 512, device="cuda", requires_grad=True)
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
for _ in range(2):
    try:
        layer(x)
        raise SystemExit("there was memory")
    except torch.OutOfMemoryError as error:
        print(str(error).count("Tried to allocate"), "Exception raised from" in str(error))
torch.cuda.set_per_process_memory_fraction(1.0)
layer(x).sum().backward()
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "1 False\n" * 2), done.stderr)
        self.assertNotIn("Exception", done.stderr)
        self.assertNotIn("frame #", done.stderr)

    @unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
    def test_record_stream(self):
        """Memory that is freed while a side stream still uses it is not given to other allocations."""
        side = torch.cuda.Stream()
        for name in ("Linear", "LayerNormMLP", "TransformerLayer"):
            module = randomise(MODULES[name](device="cuda"))
            for _ in range(10):
                x = make_input("cuda")
                y = module(x)
                y.square().sum().backward()
                for t in (y.detach(), x.grad, *(p.grad for p in module.parameters())):
                    want = t.clone()
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        torch.cuda._sleep(20_000_000)
                        late = t.clone()
                    t.record_stream(side)
                    shape, dtype = t.shape, t.dtype
                    x.grad = None
                    del t
                    for p in module.parameters():
                        p.grad = None
                    others = [torch.full(shape, 7.0, dtype=dtype, device="cuda") for _ in range(8)]
                    torch.cuda.synchronize()
                    self.assertTrue(torch.equal(late, want), name)
                    del others
                    y = None


class Saved(Each):
    """Saved-tensor hooks that give the backward copies."""

    @each(recipes=RECIPES[:2])
    def test_copies(self, module, device, recipe):
        with tempfile.TemporaryDirectory() as folder:
            def to_disk(t):
                path = os.path.join(folder, str(len(os.listdir(folder))))
                torch.save(t, path)
                return path

            hooks = torch.autograd.graph.saved_tensors_hooks
            ways = {"none": contextlib.nullcontext(), "clone": hooks(lambda t: t.detach().clone(), lambda t: t),
                    "disk": hooks(to_disk, torch.load), "save_on_cpu": torch.autograd.graph.save_on_cpu(),
                    "pinned": torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())}
            found = {}
            for name, way in ways.items():
                own = copy.deepcopy(module)
                x = make_input(device)
                with way, scope(recipe):
                    y = own(x)
                loss = y.square().sum()
                loss.backward(retain_graph=True)
                x.grad = None
                own.zero_grad()
                loss.backward()
                found[name] = gradients(own, x)
                with self.assertRaisesRegex(RuntimeError, "second time"):
                    loss.backward()
            for name, got in found.items():
                for a, b in zip(got, found["none"]):
                    self.assertTrue(torch.equal(a, b), name)

    def test_what_a_forward_kept_goes_with_its_backward(self):
        """Memory that a forward keeps is freed by its backward, also if hooks made copies; without a backward it is freed with the graph."""
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        for backward in (True, False):
            module = randomise(te.Linear(32, 32, device="cpu"))
            with hooks:
                x = make_input()
                inside = x * 1  # only te-fl keeps this tensor, for the backward
                known = weakref.ref(inside.untyped_storage())
                y = module(inside)
            del inside
            loss = y.sum()
            self.assertIsNotNone(known())
            if backward:
                loss.backward()
            else:
                del loss, y
            gc.collect()
            self.assertIsNone(known())


class Precision(Each):
    @each(PRODUCTS, recipes=(None, Float8CurrentScaling()))
    def test_inside_autocast(self, module, device, recipe):
        x = make_input(device)
        with torch.autocast(device, dtype=BF16), scope(recipe):
            y = module(x)
        self.assertEqual(y.dtype, BF16)
        y.sum().backward()
        self.assertEqual({p.grad.dtype for p in module.parameters()} | {x.grad.dtype}, {F32})
        got = gradients(module, x)
        module.zero_grad()
        x.grad = None
        with scope(recipe):
            z = module(x)
        z.sum().backward()
        oracle.near_by_norm(self, y, z, 0.08, "output")
        least = 0.1 * max(g.abs().max().item() for g in got)
        for a, b in zip(got, gradients(module, x)):
            oracle.near_by_norm(self, a, b, 0.12, "gradient", least)

    @each(PRODUCTS)
    def test_autocast_detects_changes_of_weights(self, module, device, _):
        x = make_input(device).detach()
        module.eval()
        with torch.no_grad(), torch.autocast(device, dtype=BF16):
            module(x)
            for p in module.parameters():
                p.mul_(1.5)
            got = module(x)
            other = MODULES[type(module).__name__](device=device).eval()
            other.load_state_dict(module.state_dict())
            self.assertTrue(torch.equal(got, other(x)))

    def test_grad_scaler(self):
        module, x = randomise(te.Linear(32, 32, device=DEVICES[-1])), make_input(DEVICES[-1])
        scaler = torch.amp.GradScaler(DEVICES[-1], init_scale=256.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(x).sum().backward()
        want = [p - 0.1 * p.grad for p in module.parameters()]
        module.zero_grad()
        scaler.scale(module(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        for p, w in zip(module.parameters(), want):
            near(self, p, w, 1e-6, "parameter")


class Functional(Each):
    @each(recipes=(None, Float8CurrentScaling()))
    def test_functional_call(self, module, device, recipe):
        x = make_input(device)
        other = randomise(MODULES[type(module).__name__](device=device), seed=99)
        arguments = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
        for _ in range(2):
            with scope(recipe):
                module(x)
                y = torch.func.functional_call(module, arguments, (x,))
                z = module(x)
            with scope(recipe):
                w = other(x)
        self.assertTrue(torch.equal(y, w))
        self.assertFalse(torch.equal(y, z))
        y.sum().backward()
        w.sum().backward()
        for n, p in other.named_parameters():
            self.assertTrue(torch.equal(arguments[n].grad, p.grad), n)
        self.assertTrue(all(p.grad is None for p in module.parameters()))

    @each()
    def test_func_grad_is_right_or_refused(self, module, device, _):
        x = make_input(device)
        module(x).sum().backward()
        arguments = {n: p.detach() for n, p in module.named_parameters()}
        try:
            got = torch.func.grad(lambda g: torch.func.functional_call(module, g, (x.detach(),)).sum())(arguments)
        except RuntimeError as error:
            self.assertRegex(str(error), "te_fl.pytorch's layers do not run inside torch.func")
            return
        for n, p in module.named_parameters():
            near(self, got[n], p.grad, 1e-6, n)

    @each(["Linear", "LayerNorm"])
    def test_traces_are_right_or_refused(self, module, device, _):
        x, other = (make_input(device).detach() * factor for factor in (1, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(module, x, check_trace=False)
            near(self, traced(other), module(other), 1e-6, "output")
            with torch.no_grad(), self.assertRaisesRegex(RuntimeError, "torch.jit.trace records"):
                torch.jit.trace(module, x, check_trace=False)
        for wanted in (x, x.clone().requires_grad_()):
            with torch.set_grad_enabled(wanted.requires_grad), self.assertRaisesRegex(RuntimeError, "make_fx records"):
                make_fx(module)(wanted)
        near(self, module(x), traced(x), 1e-6, "output")

    @each(["Linear", "LayerNorm"])
    def test_forward_mode_is_refused(self, module, device, _):
        x, ahead = make_input(device).detach(), torch.autograd.forward_ad
        with ahead.dual_level():
            self.assertRaisesRegex(NotImplementedError, "jvp", module, ahead.make_dual(x, x))
            with torch.no_grad():
                self.assertRaisesRegex(RuntimeError, "would drop the tangent", module, ahead.make_dual(x, x))
                module(x)

    @each(["Linear", "LayerNorm"])
    def test_vmap_is_right_or_refused(self, module, device, _):
        x = make_input(device).detach()
        try:
            got = torch.func.vmap(module)(x)
        except RuntimeError as error:
            self.assertRegex(str(error), "vmap|functorch|torch.func")
            return
        near(self, got, module(x), 1e-6, "output")


class Batched(Each):
    """PyTorch computes gradients of several outputs in one backward by vmap: te-fl's layers and functions refuse that with a clear message, for every
    node. A loop over the outputs, and a backward after the refusal, are right."""

    CALLS = {"Linear": te.Linear(8, 8, device="cpu"), "LayerNormMLP": te.LayerNormMLP(8, 8, device="cpu"),
             "accumulates": te.Linear(8, 8, device="cpu", fuse_wgrad_accumulation=True),
             "delays": te.Linear(8, 8, device="cpu", delay_wgrad_compute=True), "LayerNorm": te.LayerNorm(8, device="cpu"),
             "operations": te.ops.Sequential(te.ops.Linear(8, 8, device="cpu"), te.ops.GELU()),
             "GroupedLinear": lambda x, grouped=te.GroupedLinear(2, 8, 8, device="cpu"): grouped(x, [1, 3]),
             "cross_entropy": lambda x: te.parallel_cross_entropy(x.unsqueeze(0), torch.zeros(1, 4, dtype=torch.int64))}

    def test_refusals(self):
        for name, call in self.CALLS.items():
            if name == "accumulates":
                call.weight.main_grad = torch.zeros(8, 8)
            for transform in ("is_grads_batched", "jacobian", "hessian"):
                with self.subTest(name, transform=transform):
                    x = randn(4, 8).requires_grad_()
                    with self.assertRaises(RuntimeError) as caught:
                        if transform == "is_grads_batched":
                            y = call(x)
                            torch.autograd.grad(y, x, torch.stack([torch.ones_like(y), torch.zeros_like(y)]), is_grads_batched=True)
                        elif transform == "jacobian":
                            torch.autograd.functional.jacobian(call, x, vectorize=True)
                        else:
                            torch.autograd.functional.hessian(lambda t: call(t).sum(), x, vectorize=True)
                    text = str(caught.exception)
                    self.assertRegex(text, "stands for several tensors|have no second derivative")
                    self.assertNotRegex(text, r"Exception raised from|frame #|\.cpp:\d")
                    self.assertTrue(torch.isfinite(torch.autograd.functional.jacobian(call, x)).all())


class MainGrad(Each):
    def test_weights_add_to_main_grad(self):
        for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"):
            for device in DEVICES:
                for dtype in (F32, BF16):
                    for recipe in (None, Float8CurrentScaling()):
                        with self.subTest(module=name, device=device, dtype=dtype, recipe=type(recipe).__name__):
                            fused_qkv = {"fuse_qkv_params": True} if name == "TransformerLayer" else {}
                            plain = randomise(MODULES[name](device=device, params_dtype=dtype, **fused_qkv))
                            x = make_input(device, dtype=dtype)
                            with scope(recipe):
                                plain(x).sum().backward()
                            module = randomise(MODULES[name](device=device, params_dtype=dtype, fuse_wgrad_accumulation=True, **fused_qkv))
                            for p in module.parameters():
                                p.main_grad = torch.full_like(p, 3.0, dtype=F32)
                            for _ in range(2):
                                with scope(recipe):
                                    module(x).sum().backward()
                            fused = 0
                            for (n, p), q in zip(module.named_parameters(), plain.parameters()):
                                if torch.equal(p.main_grad, torch.full_like(p.main_grad, 3.0)):
                                    self.assertLess(p.dim(), 2, f"{n}: main_grad is as it was")
                                    oracle.near_by_norm(self, p.grad, 2 * q.grad, 0.1, n, 1e-2)
                                else:
                                    fused += 1
                                    oracle.near_by_norm(self, p.main_grad - 3, 2 * q.grad.float(), 0.1, n, 1e-2)
                            self.assertGreater(fused, 0)

    def test_main_grad_of_parameters_that_are_swapped(self):
        """torch.__future__.set_swap_module_params_on_conversion replaces parameters by swapping tensors. A pending request to overwrite main_grad is
        kept after the swap."""
        torch.__future__.set_swap_module_params_on_conversion(True)
        self.addCleanup(torch.__future__.set_swap_module_params_on_conversion, False)
        module, plain = randomise(te.Linear(32, 32, device="cpu", fuse_wgrad_accumulation=True)), randomise(te.Linear(32, 32, device="cpu"))
        plain(make_input()).sum().backward()
        for change in (lambda: module.to(BF16).to(F32), lambda: module.load_state_dict(plain.state_dict())):
            module.weight.main_grad = torch.full((32, 32), 3.0)
            with torch.no_grad():
                module(make_input(), is_first_microbatch=True)
            change()
            module.weight.main_grad = torch.full((32, 32), 3.0)
            module(make_input()).sum().backward()
            near(self, module.weight.main_grad, plain.weight.grad, 1e-5, "main_grad")

    def test_main_grad_that_parts_ask_for_later(self):
        for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"):
            for device in DEVICES:
                with self.subTest(module=name, device=device):
                    module = randomise(MODULES[name](device=device))
                    module(make_input(device)).square().sum().backward()
                    want = gradients(module)
                    for part in module.modules():
                        if hasattr(part, "fuse_wgrad_accumulation"):
                            part.fuse_wgrad_accumulation = True
                    weights = [p for p in module.parameters() if p.dim() == 2]
                    for p in weights:
                        p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
                    module.zero_grad()
                    module(make_input(device)).square().sum().backward()
                    self.assertTrue(all(p.grad_added_to_main_grad for p in weights))
                    for p, q in zip(module.parameters(), want):
                        near(self, p.main_grad if p.dim() == 2 else p.grad, q, 1e-5, name, 1e-2)

    def test_who_overwrites_main_grad(self):
        for delays in (False, True):
            for flag, first in ((False, None), (True, None), (False, True), (False, False)):
                with self.subTest(delays=delays, overwrite_main_grad=flag, is_first_microbatch=first):
                    module = randomise(te.Linear(32, 32, device="cpu", fuse_wgrad_accumulation=True, delay_wgrad_compute=delays))
                    plain = randomise(te.Linear(32, 32, device="cpu"))
                    plain(make_input()).square().sum().backward()
                    module.weight.main_grad = torch.full((32, 32), 3.0)
                    if flag:
                        module.weight.overwrite_main_grad = True
                    module(make_input(), is_first_microbatch=first).square().sum().backward()
                    module.backward_dw()
                    before = 0.0 if flag or first else 3.0
                    near(self, module.weight.main_grad - before, plain.weight.grad, 1e-5, "main_grad", 1e-5)

    def test_the_first_backward_overwrites_main_grad(self):
        """If a layer is used several times, its backward passes overwrite the old main_grad with the sum of their gradients. Covers
        is_first_microbatch of the uses in all orders, overwrite_main_grad, one loss and separate losses, and checkpoints."""
        reentrant = lambda m, x, first: torch.utils.checkpoint.checkpoint(m, x, first, use_reentrant=True)  # noqa: E731
        other = lambda m, x, first: torch.utils.checkpoint.checkpoint(m, x, first, use_reentrant=False)  # noqa: E731
        ways = {"plain": lambda m, x, first: m(x, is_first_microbatch=first), "reentrant": reentrant, "checkpoint": other,
                "te.checkpoint": lambda m, x, first: te.checkpoint(m, x, first)}
        kinds = {"Linear": te.Linear, "LayerNormLinear": te.LayerNormLinear, "LayerNormMLP": te.LayerNormMLP,
                 "parts": lambda *sizes, **more: te.Linear(*sizes, parameters_split=("a_", "b_"), **more)}
        for name, make in kinds.items():
            for way, call in ways.items() if name == "Linear" else [("plain", ways["plain"])]:
                for firsts in ((True, False), (True, True), (True, False, False), None):  # None: uses overwrite_main_grad instead
                    for backwards in ("one loss", "in order", "last first", "twice over one graph"):
                        for delays in (False, True):
                            if firsts is None and (backwards != "one loss" or way == "reentrant") or way != "plain" and backwards == "twice over one graph":
                                continue  # overwrite_main_grad applies to each backward, and a re-entrant checkpoint runs a backward of its own
                            with self.subTest(module=name, way=way, firsts=firsts, backwards=backwards, delays=delays):
                                module = randomise(make(32, 32, device="cpu", fuse_wgrad_accumulation=True, delay_wgrad_compute=delays))
                                plain = randomise(make(32, 32, device="cpu"))
                                weights = [p for p in module.parameters() if p.dim() == 2]
                                for p in weights:
                                    p.main_grad = torch.full_like(p, float("nan"))
                                    p.overwrite_main_grad = firsts is None
                                for step in range(2):
                                    flags = (None, None) if firsts is None else firsts
                                    losses = [call(module, make_input(seed=i), first).square().sum() for i, first in enumerate(flags)]
                                    runs = len(losses)
                                    plain.zero_grad()
                                    for i in range(runs):
                                        plain(make_input(seed=i)).square().sum().backward()
                                    if backwards == "one loss":
                                        sum(losses).backward()
                                    elif backwards == "twice over one graph":
                                        losses[0].backward(retain_graph=True)
                                        for loss in losses:
                                            loss.backward()
                                        plain(make_input(seed=0)).square().sum().backward()
                                        runs += 1
                                    else:
                                        for loss in losses if backwards == "in order" else losses[::-1]:
                                            loss.backward()
                                    for _ in range(runs if delays else 0):
                                        module.backward_dw()
                                    for p, q in zip(weights, [q for q in plain.parameters() if q.dim() == 2]):
                                        near(self, p.main_grad, q.grad, 1e-5, f"main_grad in step {step}", 1e-5)

    def test_who_asks_to_overwrite_main_grad(self):
        """Cases: weights shared by two modules, a run without gradients, one in inference mode, a failed backward."""
        a, b = (randomise(te.Linear(32, 32, bias=False, device="cpu", fuse_wgrad_accumulation=True)) for _ in range(2))
        b.weight = a.weight
        a.weight.main_grad = torch.full((32, 32), float("nan"))
        plain = randomise(te.Linear(32, 32, bias=False, device="cpu"))
        plain(plain(make_input())).sum().backward()
        b(a(make_input(), is_first_microbatch=True), is_first_microbatch=True).sum().backward()
        near(self, a.weight.main_grad, plain.weight.grad, 1e-5, "shared", 1e-5)
        for mode in (torch.inference_mode(), torch.no_grad()):
            with mode:
                a.eval()(make_input(), is_first_microbatch=True)
        a.train()(b(make_input(), is_first_microbatch=False), is_first_microbatch=False).sum().backward()
        near(self, a.weight.main_grad, 2 * plain.weight.grad, 1e-5, "added", 1e-5)
        y = a(b(make_input(), is_first_microbatch=True), is_first_microbatch=False)
        with self.assertRaises(RuntimeError):
            y.backward(torch.ones(3, 3))
        y.sum().backward()
        near(self, a.weight.main_grad, plain.weight.grad, 1e-5, "after an error", 1e-5)
        self.assertFalse([n for n in vars(a.weight) if n.startswith("_te")])  # a pickle would contain such attributes

    def test_the_gradient_beside_main_grad(self):
        module = randomise(te.Linear(512, 512, device="cpu", fuse_wgrad_accumulation=True))
        weight = module.weight
        weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros(512, 512), False, True
        used = [torch.full((512, 512), 7.0) for _ in range(4)]  # new memory may contain these values afterwards
        del used
        module(torch.ones(2, 512)).sum().backward()
        self.assertIs(weight.grad_added_to_main_grad, True)
        self.assertTrue(torch.equal(weight.grad, torch.zeros(512, 512)))

    def test_main_grad_that_is_made_on_request(self):
        module, plain = randomise(te.Linear(32, 32, device="cpu", fuse_wgrad_accumulation=True)), randomise(te.Linear(32, 32, device="cpu"))
        module.weight.__fsdp_param__ = True
        module.weight.get_main_grad = lambda: torch.zeros(32, 32)
        for m in (module, plain):
            m(make_input()).sum().backward()
        near(self, module.weight.main_grad, plain.weight.grad, 1e-6, "main_grad", 1e-6)

    def test_main_grad_under_hooks_and_recomputation(self):
        class Copies(torch.autograd.graph.saved_tensors_hooks):
            def __init__(self):
                super().__init__(lambda t: t.detach().clone(), lambda t: t)

        checkpoint = torch.utils.checkpoint.checkpoint
        ways = {"save_on_cpu": lambda m, x: self.inside(torch.autograd.graph.save_on_cpu(), m, x),
                "copies": lambda m, x: self.inside(Copies(), m, x), "te.checkpoint": lambda m, x: te.checkpoint(m, x),
                "checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),
                "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True)}
        for name, call in ways.items():
            for delays in (False, True):
                with self.subTest(name, delays=delays):
                    module = randomise(te.LayerNormLinear(32, 32, device="cpu", fuse_wgrad_accumulation=True, delay_wgrad_compute=delays))
                    plain, x, own = randomise(te.LayerNormLinear(32, 32, device="cpu")), make_input(), make_input()
                    module.weight.main_grad = torch.zeros(32, 32)
                    call(module, x).square().sum().backward()
                    module.backward_dw()
                    plain(own).square().sum().backward()
                    for got, want in ((module.weight.main_grad, plain.weight.grad), (x.grad, own.grad),
                                      (module.layer_norm_weight.grad, plain.layer_norm_weight.grad)):
                        near(self, got, want, 1e-6, name, 1e-6)

    @staticmethod
    def inside(scope, module, x):
        with scope:
            return module(x)

    def test_without_main_grad(self):
        """Without main_grad the gradient is not lost: te-fl raises an error, or the gradient is in grad."""
        plain, module = (randomise(te.Linear(32, 32, device="cpu", fuse_wgrad_accumulation=fused)) for fused in (False, True))
        plain(make_input()).sum().backward()
        try:
            module(make_input()).sum().backward()
        except Exception as error:
            self.assertIn("main_grad", str(error))
            return
        self.assertTrue(torch.equal(module.weight.grad, plain.weight.grad))


if __name__ == "__main__":
    unittest.main()
