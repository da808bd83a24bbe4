"""Tests the lifetimes of graphs and modules, and inductor."""

import copy
import gc
import os
import shutil
import tempfile
import unittest
import weakref

import torch
import torch._dynamo
import torch._inductor.config
import torch.utils.checkpoint

from common import Compiled, DELAYED, DEVICE, copy_state
from torch_cases import MODULES, make_input, scope
from torch_oracle import near, randomise
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling
from te_fl.errors import FailedPrecondition
from te_fl.pytorch.runtime import registry


class Lives(Compiled):
    """Tests modules that are copied, wrapped, deleted or moved."""

    def test_instances_share_a_graph(self):
        modules = [randomise(MODULES["TransformerLayer"](device=DEVICE), seed) for seed in range(12)]
        x = make_input(DEVICE)
        for module in modules:
            self.close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), module(x), "output")
        self.assertEqual(self.graphs(), 1)

    def test_a_copy(self):
        module, x = randomise(te.LayerNormLinear(32, 32, device=DEVICE)), make_input(DEVICE)
        called = torch.compile(module, backend="aot_eager", fullgraph=True)
        with scope(DELAYED):
            called(x).sum().backward()
        other = copy.deepcopy(called)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(2)
        for name, t in copy_state(module).items():
            if "fp8" in name:
                self.close(copy_state(other._orig_mod)[name], t, name)
        before = copy_state(module)
        with scope(DELAYED):
            y = other(x)
            self.close(y, copy.deepcopy(other._orig_mod)(x), "output of the copy")
        for name, t in copy_state(module).items():
            self.close(t, before[name], name)

    def test_moved_and_loaded(self):
        def run(module, x):
            return module(x)
        base, found = randomise(te.LayerNormLinear(32, 32, device=DEVICE)), []
        for compiled in (False, True):
            module = copy.deepcopy(base)
            called = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
            outputs = []
            for step in range(4):
                with scope(DELAYED):
                    outputs.append(called(module, make_input(DEVICE, seed=step)))
                outputs[-1].sum().backward()
                if step == 1:
                    module.to(torch.float64).to(torch.float32)
                if step == 2:
                    module.load_state_dict(copy.deepcopy(module.state_dict()))
            found.append(outputs + list(copy_state(module).values()))
        for want, got in zip(*found):
            self.close(got, want, "value")

    def test_a_module_goes(self):
        from te_fl.pytorch.compile import compiled  # noqa: F401
        torch._dynamo.reset()  # graphs of earlier tests keep their modules alive
        gc.collect()
        known = len(registry._modules)
        module = te.TransformerLayer(32, 64, 4, device=DEVICE)
        self.assertGreater(len(registry._modules), known)
        called = torch.compile(module, backend="aot_eager", fullgraph=True)
        called(make_input(DEVICE)).sum().backward()
        watched = weakref.ref(module)
        del module, called
        torch._dynamo.reset()
        gc.collect()
        self.assertIsNone(watched())
        self.assertLessEqual(len(registry._modules), known)  # modules of earlier tests may have been freed as well

    def test_a_module_goes_before_its_backward(self):
        module, x = randomise(te.Linear(32, 32, device=DEVICE)), make_input(DEVICE)
        module(x).square().sum().backward()
        want, x.grad = x.grad, None
        y = torch.compile(module, backend="aot_eager", fullgraph=True)(x).square().sum()
        del module
        torch._dynamo.reset()
        gc.collect()
        y.backward()
        self.close(x.grad, want, "gradient")

    def test_a_number_that_names_nothing(self):
        from te_fl.pytorch.compile import compiled  # noqa: F401
        module = te.Linear(32, 32, device=DEVICE)
        called = torch.compile(module, backend="aot_eager", fullgraph=True)
        called(make_input(DEVICE))
        module._number.fill_(10 ** 9)
        with self.assertRaisesRegex(FailedPrecondition, "1000000000.*keep it"):
            called(make_input(DEVICE))

    def test_what_a_forward_kept_is_lost(self):
        module, x = te.Linear(32, 32, device=DEVICE), make_input(DEVICE)
        called = torch.compile(module, backend="aot_eager", fullgraph=True)
        called(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            y = called(x)
        with self.assertRaisesRegex(FailedPrecondition, "run the forward again"):
            y.sum().backward()
        again = torch.compile(lambda t: te.checkpoint(module, t), backend="aot_eager", fullgraph=True)
        again(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            y = again(x)
        with self.assertRaisesRegex(FailedPrecondition, "run the forward again"):
            y.sum().backward()

    def test_export_is_refused(self):
        for strict in (False, True):
            with self.subTest(strict=strict), self.assertRaisesRegex(Exception, "torch.export.*is not supported"):
                torch.export.export(te.Linear(32, 32, device=DEVICE), (make_input(DEVICE),), strict=strict)

    def test_data_parallel(self):
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        base = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0))
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
            try:
                found = []
                for wrap in (lambda m: m, lambda m: DistributedDataParallel(torch.compile(m, backend="aot_eager", fullgraph=True)),
                             lambda m: torch.compile(DistributedDataParallel(m), backend="aot_eager")):
                    module = copy.deepcopy(base)
                    called = wrap(module)
                    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
                    for step in range(3):
                        optimizer.zero_grad()
                        with scope(DELAYED):
                            y = called(make_input(DEVICE, seed=step))
                        y.square().mean().backward()
                        optimizer.step()
                    found.append([y, *copy_state(module).values()])
            finally:
                dist.destroy_process_group()
        for got in found[1:]:
            for want, value in zip(found[0], got):
                self.close(value, want, "value")


@unittest.skipUnless(DEVICE != "cpu" or shutil.which(os.environ.get("CXX", "g++")), "inductor needs a C++ compiler on the CPU")
class Inductor(Compiled):
    def test_training(self):
        """Inductor reuses a buffer once the graph no longer reads it. The reuse must not overwrite tensors that the layers' backward passes still
        read."""
        recipe = DelayedScaling(amax_history_len=3)

        def run(model, x):
            norm, attention, mlp = model
            with te.autocast(recipe=recipe):
                x = torch.sin(x)
                x = torch.cos(norm(x) * 2) + 1
                x = attention(x).mul(2).tanh()
                x = te.checkpoint(mlp, x)
                x = mlp(x).exp()
            return x * 2

        def make():
            return torch.nn.ModuleList([te.LayerNorm(32, device=DEVICE), MODULES["MultiheadAttention"](device=DEVICE),
                                        te.LayerNormMLP(32, 64, device=DEVICE)])
        base = randomise(make())
        found = []
        for called in (run, torch.compile(run, fullgraph=True)):
            model = copy.deepcopy(base)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            values = []
            for step in range(3):
                x = make_input(DEVICE, seed=step)
                optimizer.zero_grad()
                y = called(model, x)
                y.square().mean().backward()
                optimizer.step()
                values += [y.detach(), x.grad]
            found.append(values + list(copy_state(model).values()))
        for i, (want, got) in enumerate(zip(*found)):
            near(self, got, want, 2e-2 if i < 6 else 1e-2, f"value {i}", 1e-3)

    def test_dropout(self):
        with torch._inductor.config.patch(fallback_random=True):
            self.both(lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=0.3, attention_dropout=0.2, device=DEVICE),
                      lambda m, x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False) * 2, backend="inductor")
