"""Tests trouble on a device that te-fl makes from PyTorch's (far.py): no memory, a lost device, another index, tensors without memory, forks and exits."""

import gc
import itertools
import os
import pathlib
import subprocess
import sys
import unittest

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import far  # noqa: E402
from forkserver import PYTHON  # noqa: E402

import te_fl  # noqa: E402
import te_fl.pytorch as te  # noqa: E402
from te_fl.errors import InvalidArgument, OutOfMemory, Unsupported  # noqa: E402
from torch_cases import MODULES, RECIPES, gradients, make_input, scope  # noqa: E402
from torch_oracle import randn, randomise  # noqa: E402

BACKEND = far.start()
FAR = torch.device("far:0")
START = """
import os, sys, threading
sys.path[:0] = [%r, %r]
import torch, far
import te_fl, te_fl.pytorch as te
from te_fl.common.recipe import Float8CurrentScaling
backend = far.start()
""" % (str(far.HERE), str(far.HERE.parent))
LAYER = """
layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device="far:0")
def step():
    x = torch.ones(4, 2, 32, device="far:0", requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = layer(x)
    y.square().sum().backward()
    return x.grad.cpu()
"""


def run(program, **variables):
    """Returns the exit code and the output of a process with such a device; fails if it does not end."""
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(far.HERE.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*PYTHON, "-c", START + program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    return done.returncode, done.stdout


class Memory(unittest.TestCase):
    def test_none_is_left_at_each_allocation_of_a_step(self):
        """The failed step raises, leaves no memory behind, and the next one has the results of a step without trouble."""
        for recipe in (None, RECIPES[2]):
            layer = randomise(MODULES["TransformerLayer"](device=FAR))

            def step():
                layer.zero_grad(set_to_none=True)
                x = make_input().detach().to(FAR).requires_grad_()
                with scope(recipe):
                    y = layer(x)
                y.square().sum().backward()
                return [t.cpu() for t in (y, *gradients(layer, x))]

            want = step()
            step()
            alive = 0
            stride = 7  # each seventh allocation, since a step has hundreds
            for n in itertools.count(0, stride):
                layer.zero_grad(set_to_none=True)
                gc.collect()
                alive = alive or BACKEND.private_device_alive()
                self.assertLessEqual(BACKEND.private_device_alive(), alive + 2, f"allocation {n - stride} leaves memory behind")
                BACKEND.private_device_fail_allocation(n)
                try:
                    got = step()
                except (torch.OutOfMemoryError, OutOfMemory) as error:
                    self.assertRegex(str(error), "far:0")
                    got = None
                finally:
                    BACKEND.private_device_fail_allocation(-1)
                if got is not None:
                    self.assertGreater(n, 20)
                    break
                for a, b in zip(step(), want):
                    self.assertTrue(torch.equal(a, b), n)

    def test_none_is_left_in_an_optimizer(self):
        layer = randomise(te.Linear(32, 32, device=FAR))
        optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-2)
        layer(make_input().detach().to(FAR)).sum().backward()
        before = layer.weight.detach().cpu()
        BACKEND.private_device_fail_allocation(0)
        try:
            with self.assertRaisesRegex((torch.OutOfMemoryError, OutOfMemory), "far:0"):
                optimizer.step()
        finally:
            BACKEND.private_device_fail_allocation(-1)
        self.assertTrue(torch.equal(layer.weight.detach().cpu(), before))
        optimizer.step()
        self.assertFalse(torch.equal(layer.weight.detach().cpu(), before))


class Inputs(unittest.TestCase):
    """Inputs that are on another device, or that have no memory."""

    def setUp(self):
        self.layers = [randomise(MODULES[name](device=FAR)) for name in ("Linear", "TransformerLayer")]
        self.x = make_input().detach().to(FAR)

    def test_of_another_index(self):
        other = self.x.cpu().to("far:1")
        for layer in self.layers:
            for recipe in RECIPES:
                for x in (other, self.x.cpu()):
                    with scope(recipe), self.assertRaisesRegex(InvalidArgument, f"the input is on {x.device} and the parameter .* on far:0; give the input as"):
                        layer(x)
            layer(self.x)
        for x in (other, self.x.cpu()):
            with self.assertRaisesRegex(InvalidArgument, "'output' is on .*, must be on ext:far:0 as 'input' is; copy it there first"):
                te_fl.ops.relu(input=self.x, output=torch.empty_like(x))

    def test_of_a_subclass(self):
        class Plain(torch.Tensor):
            pass

        class Wrapper(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
                made.inner = inner
                return made

            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                def inner(value):
                    return value.inner if isinstance(value, Wrapper) else value
                return function(*torch.utils._pytree.tree_map(inner, args), **torch.utils._pytree.tree_map(inner, kwargs or {}))

        for layer in self.layers:
            for recipe in RECIPES:
                with scope(recipe):
                    self.assertTrue(torch.equal(layer(self.x.as_subclass(Plain)).cpu(), layer(self.x).cpu()))
                    with self.assertRaisesRegex(Unsupported, "the input is a Wrapper, which has no memory of its own; give a dense torch.Tensor"):
                        layer(Wrapper(self.x))
        for arguments in ({"input": Wrapper(self.x), "output": self.x}, {"input": self.x, "output": Wrapper(self.x)}):
            with self.assertRaisesRegex(InvalidArgument, "with a NULL data pointer, must point to its elements"):
                te_fl.ops.relu(**arguments)

    def test_fake_and_meta(self):
        fake = FakeTensorMode().from_tensor(self.x)
        meta = torch.empty(8, 2, 32, device="meta")
        for layer in self.layers:
            with self.assertRaisesRegex(Unsupported, "the input is a FakeTensor, which has no memory"):
                layer(fake)
            with self.assertRaisesRegex((Unsupported, TypeError), "a tensor .*on meta"):
                layer(meta)
        with self.assertRaisesRegex(InvalidArgument, "with a NULL data pointer"):
            te_fl.ops.relu(input=fake, output=torch.empty_like(self.x))
        with self.assertRaisesRegex(RuntimeError, "'input' has no memory that te-fl can read"):
            te_fl.ops.relu(input=meta, output=meta)

    def test_views(self):
        for layer in self.layers:
            for view in (self.x.transpose(0, 1), self.x[:1].expand(8, 2, 32), self.x[::2], self.x.flip(0)):
                self.assertTrue(torch.equal(layer(view).cpu(), layer(view.clone(memory_format=torch.contiguous_format)).cpu()))
        self.assertEqual(self.layers[0](self.x[:0]).shape, (0, 2, 32))


class Processes(unittest.TestCase):
    def test_a_lost_device(self):
        """Each call raises with the device's own text, on any thread, and the process ends."""
        code, output = run(LAYER + """
step()
x = torch.ones(4, 2, 32, device="far:0", requires_grad=True)
y = layer(x).sum()
optimizer = te.optimizers.FusedAdam(layer.parameters())
one = torch.ones(4, device="far:1")
backend.private_device_lose(0, 1)
def lost(call):
    try:
        call()
    except RuntimeError as error:
        assert "far:0 has fallen off the bus" in str(error), error
    else:
        raise AssertionError(call)
calls = (step, y.backward, optimizer.step, lambda: layer(x), x.detach().cpu, lambda: te_fl.ops.relu(input=x.detach(), output=x.detach()),
         lambda: te_fl.ops.gelu(input=x.detach(), output=x.detach()))
for call in calls * 2:
    lost(call)
thread = threading.Thread(target=lambda: [lost(call) for call in calls])
thread.start()
thread.join()
te_fl.ops.relu(input=one, output=one)  # the other device works
assert one.cpu().tolist() == [1] * 4
assert te_fl.info()["devices"]
print("the end")
""")
        self.assertEqual((code, output.splitlines()[-1]), (0, "the end"), output)

    def test_a_device_that_comes_back(self):
        code, output = run(LAYER + """
want = step()
for p in layer.parameters(): p.grad = None
backend.private_device_lose(0, 1)
try:
    step()
except RuntimeError as error:
    assert "bus" in str(error)
backend.private_device_lose(0, 0)
for p in layer.parameters(): p.grad = None
assert torch.equal(step(), want)
print("the end")
""")
        self.assertEqual((code, output.splitlines()[-1]), (0, "the end"), output)

    def test_one_that_is_absent_in_this_process(self):
        """PyTorch knows the name of the backend, and none of its devices is there."""
        code, output = run("""
assert te.Linear(4, 4).weight.device.type == "cpu"
for call in (lambda: te.Linear(4, 4, device="far:0"), lambda: te_fl.torch_device.native_name(torch.device("far:0"))):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
    else:
        raise AssertionError(call)
y = torch.empty(4)
te_fl.ops.relu(input=torch.ones(4), output=y)
print("the end")
""", FAR_ABSENT="1")
        self.assertEqual((code, output.splitlines()[-1]), (0, "the end"), output)
        self.assertIn("PyTorch has no far:0: it has 0 devices far", output)

    def test_children_of_a_fork_and_exits(self):
        """A child neither hangs nor crashes, whether it uses the device or not, and whether threads of the parent are in calls."""
        code, output = run(LAYER + """
want = step()
stop = threading.Event()
def work():
    while not stop.is_set():
        with torch.no_grad():
            layer(torch.ones(4, 2, 32, device="far:0"))
threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
for thread in threads: thread.start()
for i in range(6):
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(60)
        try:
            x = torch.ones(4, 4)
            te.Linear(4, 4, device="cpu")(x)  # the host works
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a child hangs or crashes"
stop.set()
for thread in threads: thread.join()
with torch.no_grad():
    want = layer(torch.ones(4, 2, 32, device="far:0")).cpu()
child = os.fork()
if child == 0:  # PyTorch itself refuses a backward here
    import signal
    signal.alarm(60)
    code = 1
    try:
        with torch.no_grad():
            code = 0 if torch.equal(layer(torch.ones(4, 2, 32, device="far:0")).cpu(), want) else 3
    finally:
        os._exit(code)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def in_a_call():  # while the process ends
    while True:
        with torch.no_grad():
            layer(torch.ones(4, 2, 32, device="far:0"))
threading.Thread(target=in_a_call, daemon=True).start()
step()
print("the end", flush=True)
""")
        self.assertIn("the end", output)
        self.assertEqual(code, 0, output)
        self.assertIn("child 0", output)


if __name__ == "__main__":
    unittest.main()
